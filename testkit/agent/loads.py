"""Loads with a known utilization on a real GPU."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from agent.gpu.backend import NvmlError
from agent.gpu.nvml import Nvml

CGROUPS: Final = Path("/sys/fs/cgroup")
CONTAINER_ID: Final = "5f" * 32


def uuids() -> list[str]:
    """Return the UUIDs of the GPUs of this machine.

    Raises:
        NvmlError: there is no driver.
    """
    nvml = Nvml()
    nvml.start()
    found = [nvml.card(index).uuid for index in range(nvml.count())]
    nvml.stop()
    return found


def why_no_gpu() -> str:
    """Return the reason why GPU tests cannot run, "" if they can."""
    try:
        return "" if uuids() else "no NVIDIA GPU: the driver lists none"
    except NvmlError as error:
        return f"no NVIDIA GPU: {error}"


@contextlib.contextmanager
def load(duty: float, gib: float = 0.0) -> Iterator[int]:
    """Keep the first GPU busy for a share of time; yield the PID of the load."""
    command = [
        sys.executable,
        "-m",
        "testkit.agent.gpu_load",
        "--duty",
        str(duty),
        "--gib",
        str(gib),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"running\n", "the load did not start"
            yield process.pid
        finally:
            process.terminate()


@contextlib.contextmanager
def pod_cgroup(uid: str) -> Iterator[Callable[[int], None]]:
    """Create a pod's cgroup as containerd does; yield a function that moves a process into it.

    The process must end before the context does. Skips the test if cgroups cannot be created.
    """
    best_effort = "kubepods-besteffort"
    folders = [CGROUPS / "kubepods.slice"]
    folders.append(folders[-1] / f"{best_effort}.slice")
    folders.append(folders[-1] / f"{best_effort}-pod{uid.replace('-', '_')}.slice")
    folders.append(folders[-1] / f"cri-containerd-{CONTAINER_ID}.scope")
    made: list[Path] = []
    try:
        for folder in folders:
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield lambda pid: _enter(folders[-1], pid)
    finally:
        for folder in reversed(made):
            folder.rmdir()


def _enter(folder: Path, pid: int) -> None:
    (folder / "cgroup.procs").write_text(str(pid))
