"""Read name, parent and start time of a process from `/proc/<pid>/stat`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")

_MAX_BYTES: Final = 1 << 16
_PARENT_FIELD: Final = 1
_START_TIME_FIELD: Final = 19
"""Index of `starttime` (field 22 of the file) after the command, which is field 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessStat:
    """Properties of a running process.

    Attributes:
        name: the command, at most 15 characters.
        parent: pid of the parent; 0 if the parent is outside this pid namespace.
        started_ticks: start time in clock ticks since boot. It differs for a later process with the
            same pid; `exec` does not change it.
    """

    name: str
    parent: int
    started_ticks: int


def small_file(path: str) -> str | None:
    """Return the first 64 KiB of a file as text; None if it cannot be read.

    Never waits: a path may name a pipe, as `--config /dev/fd/63` does.

    Bare system calls take a third of the time of `open`. The agent reads such files every second
    for every process on every GPU.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(descriptor, _MAX_BYTES).decode(errors="replace")
    except OSError:  # the process ended after the file was opened, or an empty pipe
        return None
    finally:
        os.close(descriptor)


def process_stat(pid: int, proc: Path = PROC) -> _ProcessStat | None:
    """Read the properties of a process; None if it has ended or `/proc` is missing.

    A zombie counts as ended: it holds no GPU.
    """
    stat = small_file(f"{proc}/{pid}/stat")
    if stat is None:
        return None
    command, _, rest = stat.rpartition(")")  # a command may contain parentheses and spaces
    fields = rest.split()
    if len(fields) <= _START_TIME_FIELD or fields[0] in "ZX":
        return None
    try:
        return _ProcessStat(
            name=command.partition("(")[2],
            parent=int(fields[_PARENT_FIELD]),
            started_ticks=int(fields[_START_TIME_FIELD]),
        )
    except ValueError:  # not the kernel's file, for example in a fake /proc
        return None
