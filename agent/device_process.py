"""Tells a container's processes apart: which one asks, which still run, which belong together."""

import contextlib
import os
from pathlib import Path
from typing import Final

from agent.device_leases import Holder
from agent.proc_stat import PROC, process_stat

_MOST_ANCESTORS: Final = 64


def holder_of(pid: int, proc: Path = PROC) -> Holder:
    """Return who a process is; one that has ended is still told from those after it."""
    stat = process_stat(pid, proc)
    return Holder(
        pid=pid,
        started=0 if stat is None else stat.started_ticks,
        namespace=process_namespace(proc),
    )


def process_namespace(proc: Path = PROC) -> int:
    """Return the number of our process namespace, 0 where there are none."""
    with contextlib.suppress(OSError):
        return os.stat(proc / "self" / "ns" / "pid").st_ino  # noqa: PTH116 - follows the magic link
    return 0


def is_alive(holder: Holder, *, namespace: int, proc: Path = PROC) -> bool:
    """Say whether a process still runs; one of another namespace cannot be seen, and does not."""
    if holder.namespace != namespace:
        return False
    stat = process_stat(holder.pid, proc)
    return stat is not None and stat.started_ticks == holder.started


def is_kin(one: Holder, other: Holder, proc: Path = PROC) -> bool:
    """Say whether two running processes are the same, or one started the other."""
    return one.pid in _line(other.pid, proc) or other.pid in _line(one.pid, proc)


def _line(pid: int, proc: Path) -> set[int]:
    """Return a process and its ancestors."""
    line: set[int] = set()
    for _ in range(_MOST_ANCESTORS):
        stat = process_stat(pid, proc)
        if stat is None:
            break
        line.add(pid)
        pid = stat.parent
    return line
