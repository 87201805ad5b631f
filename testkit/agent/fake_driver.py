"""Fake NVML and CUDA libraries, compiled from the C sources in this directory."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

SOURCES = Path(__file__).parent
GIB = 1 << 30


@cache
def libraries(compiler: tuple[str, ...] = ()) -> Path:
    """Compile the libraries and return their directory; skip the test if there is no C compiler.

    Args:
        compiler: compiler command; () for this machine's C compiler.
    """
    native = shutil.which("cc") or shutil.which("gcc")
    words = compiler or ((native,) if native else ())
    if not words:
        pytest.skip("needs a C compiler")
    folder = Path(mkdtemp(prefix="idlegpu-driver-"))
    for source, name in (("fake_nvml.c", "libnvidia-ml.so.1"), ("fake_cuda.c", "libcuda.so.1")):
        subprocess.run(
            [*words, "-shared", "-fPIC", "-Wall", "-Werror", "-o", folder / name, SOURCES / source],
            check=True,
        )
    return folder


def uuid(number: int, kind: str = "GPU") -> str:
    return f"{kind}-{number:08x}-7a41-4c0e-9d53-5e0b8c110000"


def card(
    number: int, *, busy: int = 0, used: int = 0, total: int = 80 * GIB, model: str = "NVIDIA H100"
) -> str:
    """Return the layout line of card `number`, which is `/dev/nvidia<number>`."""
    return f"card {uuid(number)} {number} {busy} {used} {total} {model}\n"


def instance(number: int, *, used: int = 0) -> str:
    """Return the layout line of a MIG instance on the preceding card."""
    return f"mig {uuid(number, 'MIG')} {number} 0 {used} {10 * GIB}\n"


class FakeDriver:
    """The fake libraries with a layout of cards; `environment` makes a program load them.

    Args:
        directory: where to write the layout.
        compiler: compiler command for another platform, () for this one.
    """

    def __init__(self, directory: Path, compiler: tuple[str, ...] = ()) -> None:
        self.library = libraries(compiler) / "libnvidia-ml.so.1"
        self._layout = directory / "layout"

    def has(self, *lines: str) -> None:
        self._layout.write_text("".join(lines))

    @property
    def environment(self) -> dict[str, str]:
        cleared = ("CUDA_", "NVIDIA_", "IDLEGPU_", "NODE_NAME")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(cleared)}
        return kept | {"FAKE_NVML": str(self._layout), "LD_LIBRARY_PATH": str(self.library.parent)}
