"""Fetch an emulator and Debian's Python for arm64, to run arm64 programs on another machine.

`python -m tests.images.arm64` fetches both into the cache, once. They come from apt's sources of
this machine and are unpacked into a folder; nothing is installed.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testkit.controlplane.gobuild import say
from testkit.controlplane.tools import cache_folder

IMAGE_PACKAGES: Final = ("apt", "ca-certificates", "netbase", "tzdata", "python3.11")
"""Packages of Debian's slim image (apt brings libstdc++), and of the Python of the Dockerfiles."""
BUILD_PACKAGES: Final = ("python3-pip-whl",)
COMPILER_PACKAGES: Final = ("tcc", "libc6-dev")
"""Packages for compiling a fake driver. tcc compiles and links in one process; cc starts others."""
EMULATOR_PACKAGE: Final = "qemu-user-static"
EMULATORS: Final = ("qemu-aarch64-static", "qemu-aarch64")
TIMEOUT_SECONDS: Final = 600
WRAPPER: Final = """#!/bin/sh
# Python of arm64. It gets this file's name as its own, so that child processes are emulated, too.
here=$(cd "$(dirname "$0")" && pwd)
root=${here%/usr/bin}
exec "$root/../emulator" -L "$root" -0 "$0" "$here/python3.11" "$@"
"""


class FetchError(RuntimeError):
    """Error if the emulator cannot be fetched; the message names the missing part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Fetched emulator and packages.

    Attributes:
        folder: their folder.
    """

    folder: Path

    @property
    def python(self) -> Path:
        """Path of a Python for arm64, which runs like any other program."""
        return self.folder / "image" / "usr" / "bin" / "python"

    @property
    def compiler(self) -> tuple[str, ...]:
        """Command of a C compiler that runs on arm64, for arm64."""
        root = self.folder / "compiler"
        usr, triple = root / "usr", "aarch64-linux-gnu"
        return (
            *(str(self.folder / "emulator"), "-L", str(root), str(usr / "bin" / "tcc")),
            f"-B{usr / 'lib' / triple / 'tcc'}",
            *(f"-I{usr / 'include'}", f"-I{usr / 'include' / triple}"),
            f"-L{usr / 'lib' / triple}",
        )


def fetched() -> Machine:
    """Return the machine in the cache.

    Raises:
        FetchError: the cache has none.
    """
    machine = _cached()
    if not machine.folder.exists():
        raise FetchError("this machine cannot run arm64 programs: `make arm64` fetches an emulator")
    return machine


def fetch() -> Machine:
    """Fetch the machine if it is not in the cache.

    Raises:
        FetchError: a program or package is missing.
    """
    machine = _cached()
    if machine.folder.exists():
        return machine
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise FetchError(
                f"{program}: not on this machine: Python for arm64 is taken from packages of "
                "Debian 12, with apt"
            )
    cache_folder().mkdir(parents=True, exist_ok=True)
    say(f"fetching an emulator and Debian's Python for arm64 into {machine.folder}")
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="arm64-") as scratch:
        made = Path(scratch) / "made"
        _make(made, _Apt(Path(scratch) / "apt"))
        made.rename(machine.folder)
    return machine


class _Apt:
    """apt with its own folders, independent of the machine's installed packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        options = {
            "APT::Architecture": "arm64",
            "APT::Architectures::": "arm64",
            "APT::Sandbox::User": "root",  # folders that only this user may read
            "Dir::State": str(folder / "state"),
            "Dir::State::status": str(folder / "status"),
            "Dir::Cache": str(folder / "cache"),
        }
        self._command = ["apt-get", "--quiet=2"]
        for name, value in options.items():
            self._command += ["--option", f"{name}={value}"]
        # A failed update matters only if a package is missing, which is then reported.
        self._updated = _call([*self._command, "update"])

    def unpack(self, packages: Sequence[str], folder: Path) -> None:
        """Unpack arm64 packages with all their dependencies."""
        folder.mkdir(parents=True)
        archives = self._folder / "cache" / "archives"
        command = [*self._command, "install", "--yes", "--no-install-recommends"]
        result = _call([*command, "--download-only", *packages])
        if result.returncode != 0:
            raise FetchError(
                f"apt has no {' '.join(packages)} for arm64: its sources must be those of "
                f"Debian 12 (bookworm), as the images': {self._updated.stderr}{result.stderr}"
            )
        for archive in sorted(archives.glob("*.deb")):
            _unpack(archive, folder)
            archive.unlink()

    def unpack_native(self, package: str, folder: Path) -> None:
        """Unpack one package of this machine's platform, without its dependencies."""
        folder.mkdir(parents=True)
        # With the machine's own package lists: those in this folder are for arm64.
        result = _call(["apt-get", "--quiet=2", "download", package], folder)
        if result.returncode != 0:
            raise FetchError(
                f"{' or '.join(EMULATORS)}: neither on this machine nor can apt download the "
                f"package {package} (apt-get update?): {result.stderr}"
            )
        for archive in folder.glob("*.deb"):
            _unpack(archive, folder)


def _cached() -> Machine:
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return Machine(folder=cache_folder() / f"arm64-{digest}")


def _make(folder: Path, apt: _Apt) -> None:
    """Fetch all parts into a new folder."""
    image = folder / "image"
    apt.unpack([*IMAGE_PACKAGES, *BUILD_PACKAGES], image)
    apt.unpack(COMPILER_PACKAGES, folder / "compiler")
    (pip,) = (image / "usr" / "share" / "python-wheels").glob("pip-*.whl")
    with zipfile.ZipFile(pip) as wheel:
        wheel.extractall(image / "usr" / "lib" / "python3" / "dist-packages")
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None:
        unpacked = folder / "unpacked"
        apt.unpack_native(EMULATOR_PACKAGE, unpacked)
        (unpacked / "usr" / "bin" / EMULATORS[0]).rename(folder / "emulator")
        shutil.rmtree(unpacked)
    else:
        (folder / "emulator").symlink_to(emulator)
    python = Machine(folder=folder).python
    python.write_text(WRAPPER)
    python.chmod(0o755)
    called = _call([str(python), "-c", "import platform; print(platform.machine())"])
    if called.stdout.strip() != "aarch64":
        raise FetchError(
            f"the emulator does not run Python of arm64: {called.stdout}{called.stderr}"
        )


def _unpack(archive: Path, folder: Path) -> None:
    result = _call(["dpkg-deb", "--extract", str(archive), str(folder)])
    if result.returncode != 0:
        raise FetchError(f"cannot unpack {archive.name}: {result.stderr}")


def _call(words: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
    )


def main() -> int:
    """Fetch the machine, and print its folder."""
    try:
        machine = fetch()
    except FetchError as error:
        say(str(error))
        return 1
    say(f"Python of arm64: {machine.python}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
