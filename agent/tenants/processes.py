"""Find the pods of processes by the host pids that the driver reports.

A container without hostPID has its own pid numbers: a host pid would match no process, or the wrong
one. The agent then treats the pods of all processes as unknown.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.report.contract import MAX_NAME
from agent.tenants.cgroup import (
    UNKNOWN_LOCATION,
    ProcessLocation,
    is_private_namespace,
    parse_cgroup,
)
from extender.runtime.terminal_escapes import plain_text
from worker_device.process_stat import PROC, process_stat, small_file

_KTHREADD: Final = "Name:\tkthreadd"
_NO_PARENT: Final = "PPid:\t0"
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Identity and location of one process of the host.

    Attributes:
        started_ticks: start time in clock ticks since boot; distinguishes the process from a later
            process with the same pid.
        name: the command, at most 15 characters.
        location: the pod or host service that the process runs in.
        first_seen: time of the first look-up, by the caller's clock.
        started_at: start, whole seconds since the epoch; None if unknown.
    """

    started_ticks: int
    name: str
    location: ProcessLocation
    first_seen: float
    started_at: float | None = None


class ProcessTable:
    """Looks up processes in `/proc`, and caches them while the driver lists them.

    Use it from one thread at a time.

    Args:
        proc: mount point of the host's `/proc`.
        clock: time in seconds for `ProcessFacts.first_seen`.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        proc: Path = PROC,
        *,
        clock: Callable[[], float],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._proc = proc
        self._clock = clock
        self._now = now
        self._known: dict[int, ProcessFacts] = {}
        self._has_private_namespace = is_private_namespace(small_file(f"{proc}/self/cgroup") or "")

    def sees_host(self) -> bool:
        """Return whether this `/proc` shows the host's processes (hostPID, or not in a container).

        Process 2 of a host is the kernel's `kthreadd`; no container has it. A `/proc` mounted with
        `hidepid` does not show it either.
        """
        status = small_file(f"{self._proc}/2/status")
        if status is None:
            return False
        lines = status.splitlines()
        return _KTHREADD in lines and _NO_PARENT in lines

    def look_up(self, pids: Iterable[int]) -> dict[int, ProcessFacts] | None:
        """Return the running processes among `pids`; None if `/proc` does not show the host's.

        The cache drops processes that are not in `pids`. A pid that the kernel has reused is looked
        up again.
        """
        if not self.sees_host():
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
            return None  # the process ended, or its pid was reused, between the reads
        return ProcessFacts(
            started_ticks=before.started_ticks,
            name=plain_text(before.name, MAX_NAME),
            location=parse_cgroup(text, has_private_namespace=self._has_private_namespace)
            if text
            else UNKNOWN_LOCATION,
            first_seen=self._clock(),
            started_at=self._started_at(before.started_ticks),
        )

    def _started_at(self, ticks: int) -> float | None:
        """Return the time of a number of clock ticks after boot, None if the boot is unknown."""
        # Not btime of /proc/stat: on large machines it follows 64 KiB of interrupt counts.
        uptime = (small_file(f"{self._proc}/uptime") or "").partition(" ")[0]
        try:
            seconds = float(uptime) - ticks / _TICKS_PER_SECOND
            return float(round(self._now() - max(seconds, 0.0)))
        except (ValueError, OverflowError):  # a faked file may be empty, or no finite number
            return None
