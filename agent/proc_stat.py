"""Reads `/proc/<pid>/stat`: who a process is, and whether it still runs. Standard library only."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")

_LARGEST_BYTES: Final = 1 << 16
_PARENT_FIELD: Final = 1
_START_TIME_FIELD: Final = 19
"""`starttime`, field 22 of the file, counted after the command (field 2), as all here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """What the kernel says of a running process.

    Attributes:
        name: its command, at most 15 characters.
        parent: number of its parent, 0 where that is outside of this process namespace.
        started_ticks: its start, in clock ticks since the machine's; tells it from a later process
            of the same number, and stays when it executes another program.
    """

    name: str
    parent: int
    started_ticks: int


def small_file(path: str) -> str | None:
    """Return a file of at most 64 KiB; None where it cannot be read: gone, hidden, or no Linux.

    By the bare system calls: it is done for every process of every device each second, and takes
    a third of the time that way.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _LARGEST_BYTES).decode(errors="replace")
    except OSError:  # the process ended after it was opened
        return None
    finally:
        os.close(descriptor)


def process_stat(pid: int, proc: Path = PROC) -> ProcessStat | None:
    """Return what is known of a process; None where it has ended, or there is no `/proc`.

    A zombie has ended: it runs no more, and holds nothing.
    """
    stat = small_file(f"{proc}/{pid}/stat")
    if stat is None:
        return None
    command, _, rest = stat.rpartition(")")  # a command may itself hold parentheses and spaces
    fields = rest.split()
    if len(fields) <= _START_TIME_FIELD or fields[0] in "ZX":
        return None
    return ProcessStat(
        name=command.partition("(")[2],
        parent=int(fields[_PARENT_FIELD]),
        started_ticks=int(fields[_START_TIME_FIELD]),
    )
