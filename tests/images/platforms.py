"""The platforms that images are for, and the Python that runs what they hold.

`IMAGES_PLATFORM=arm64` has the tests of the images run everything in an emulator (`make arm64`);
otherwise this machine's own Python runs it.
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
    """A platform, and what of it there is here.

    Attributes:
        machine: what `platform.machine()` says there.
        builder: a Python with pip.
        python: one that runs what was built; what it starts finds no packages of this machine, too.
        compiler: the command of a C compiler for it; empty is this machine's own, if there is one.
    """

    machine: str
    builder: str
    python: str
    compiler: tuple[str, ...]


def native(folder: Path) -> Platform:
    """Return this machine's own platform, with a Python of its own in the folder."""
    # The virtual environment of the tests has their packages, and what that is made from may have
    # others.
    base = str(getattr(sys, "_base_executable", sys.executable))
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    return Platform(
        machine=platform.machine(),
        builder=sys.executable,
        python=str(folder / "bin" / "python"),
        compiler=(),
    )


def chosen(folder: Path) -> Platform:
    """Return the platform that the tests are to run for.

    Args:
        folder: an empty one, for a Python of this machine.

    Raises:
        ValueError: the variable names none that we know.
        arm64.FetchError: what runs programs of arm64 is not there.
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
