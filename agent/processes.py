"""Finds the pods of processes by the process numbers that the driver gives.

The driver counts processes as the machine does. So a container without hostPID cannot look them
up, or worse, finds others that have the same number: then nothing is known of any.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.cgroup import UNKNOWN_HOME, Home, is_private_namespace, parse_cgroup
from agent.proc_stat import PROC, process_stat, small_file

_KTHREADD: Final = "Name:\tkthreadd"
_NO_PARENT: Final = "PPid:\t0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process of the machine.

    Attributes:
        pid: its number on the machine.
        started_ticks: its start, in clock ticks since the machine's; tells it from a later process
            of the same number.
        name: its command, at most 15 characters.
        home: where it runs.
        first_seen: when it was first looked up, by the caller's clock.
    """

    pid: int
    started_ticks: int
    name: str
    home: Home
    first_seen: float


class ProcessTable:
    """Looks processes up, and remembers them while the driver names them.

    One thread at a time may use it.
    """

    def __init__(self, proc: Path = PROC, *, clock: Callable[[], float]) -> None:
        self._proc = proc
        self._clock = clock
        self._known: dict[int, ProcessFacts] = {}
        self._has_private_namespace = is_private_namespace(small_file(f"{proc}/self/cgroup") or "")

    def sees_machine(self) -> bool:
        """Say whether this `/proc` shows the machine's own processes (hostPID, or no container).

        Process 2 of a machine is the kernel's `kthreadd`; no container has one. It also is not
        seen where `/proc` hides the processes of others (`hidepid`).
        """
        status = small_file(f"{self._proc}/2/status")
        if status is None:
            return False
        lines = status.splitlines()
        return _KTHREADD in lines and _NO_PARENT in lines

    def look_up(self, pids: Iterable[int]) -> dict[int, ProcessFacts] | None:
        """Return what is known of these processes; those that have ended are left out.

        None where this `/proc` does not show the machine's own.

        What is not asked for any more is forgotten. A number that the kernel gave to another
        process meanwhile is looked up anew.
        """
        if not self.sees_machine():
            self._known = {}
            return None
        self._known = {pid: facts for pid in set(pids) if (facts := self._facts(pid)) is not None}
        return dict(self._known)

    def _facts(self, pid: int) -> ProcessFacts | None:
        before = process_stat(pid, self._proc)
        if before is None:
            return None
        known = self._known.get(pid)
        if known is not None and known.started_ticks == before.started_ticks:
            return known
        text = small_file(f"{self._proc}/{pid}/cgroup")
        after = process_stat(pid, self._proc)
        if text is None or after is None or after.started_ticks != before.started_ticks:
            return None  # it ended, or another took its number, while it was read
        return ProcessFacts(
            pid=pid,
            started_ticks=before.started_ticks,
            name=before.name,
            home=parse_cgroup(text, has_private_namespace=self._has_private_namespace)
            if text
            else UNKNOWN_HOME,
            first_seen=self._clock(),
        )
