"""Platforms of the images, and the Python that runs their contents.

With `IMAGES_PLATFORM=arm64` the tests of the images run everything in an emulator (`make arm64`);
otherwise with this machine's Python.
"""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.images import arm64

VARIABLE: Final = "IMAGES_PLATFORM"
ARM64_MACHINES: Final = {"aarch64", "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Platform, and the local programs for it.

    Attributes:
        machine: value of `platform.machine()` there.
        builder: a Python with pip.
        python: Python that runs the built files; its child processes find no packages of this
            machine either.
        compiler: command of a C compiler for it; () for this machine's compiler, if there is one.
    """

    machine: str
    builder: str
    python: str
    compiler: tuple[str, ...]


def native(folder: Path) -> Platform:
    """Return this machine's platform, with a new virtual environment in the folder."""
    # The tests' virtual environment has their packages, and its base may have others.
    base = str(getattr(sys, "_base_executable", sys.executable))
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    return Platform(
        machine=platform.machine(),
        builder=sys.executable,
        python=str(folder / "bin" / "python"),
        compiler=(),
    )


def chosen(folder: Path) -> Platform:
    """Return the platform that `IMAGES_PLATFORM` selects.

    Args:
        folder: empty folder, for a Python of this machine.

    Raises:
        ValueError: the variable names an unknown platform.
        arm64.FetchError: the emulator was not fetched.
    """
    name = os.environ.get(VARIABLE, "")
    if name not in {"", "arm64"}:
        raise ValueError(f"{VARIABLE}={name}: must be arm64, or nothing for this machine's own")
    if not name or platform.machine() in ARM64_MACHINES:
        return native(folder)
    machine = arm64.fetched()
    return Platform(
        machine="aarch64",
        builder=str(machine.python),
        python=str(machine.python),
        compiler=machine.compiler,
    )
