"""Find the pods of processes by the host pids that the driver reports.

A container without hostPID has its own pid numbers: a host pid would match no process, or the wrong
one. The agent then treats the pods of all processes as unknown.
"""

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.report.contract import MAX_NAME, Place
from extender.runtime.terminal_escapes import plain_text
from worker_device.process_stat import PROC, process_stat, small_file

_UID: Final = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
_STATIC_UID: Final = r"[0-9a-f]{32}"  # a static pod's UID is the hash of its manifest

_POD: Final = re.compile(
    rf"(?:^|[/-])pod({_UID}|{_STATIC_UID})(?:\.slice)?(?=[/:]|$)", re.IGNORECASE
)
"""Matches `pod<uid>` (cgroupfs) and `…-pod<uid>.slice` (systemd); with `:` if containerd writes a
systemd path for a cgroupfs runtime. Does not match podman's `libpod-…`."""

_OF_USER: Final = re.compile(r"/user@[0-9]+\.service/")
"""Matches the path of a user's session, in which systemd lets the user create cgroups of any name.
"""

_CONTAINER: Final = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])", re.IGNORECASE)

_OWN_POD: Final = re.compile(r"/|(?:/\.\.)?(?:/(?!\.\.$)[^/]+)?")
"""Paths inside the reader's own pod, seen from a private cgroup namespace: `/` is the reader's
container, `/../x` a sibling container. Other paths start with more `..` and name their pod."""

_KTHREADD: Final = "Name:\tkthreadd"
_NO_PARENT: Final = "PPid:\t0"
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLocation:
    """The pod or host service that a process runs in.

    Attributes:
        place: `UNKNOWN` if the path shows neither pod nor host.
        pod_uid: UID in the API server's format, "" outside pods.
        container_id: 64 hexadecimal digits, "" if the path has none.
        unit: last component of the path for display, such as `docker-….scope`.
    """

    place: Place
    pod_uid: str = ""
    container_id: str = ""
    unit: str = ""


_UNKNOWN_LOCATION: Final = ProcessLocation(place=Place.UNKNOWN)


def parse_cgroup(text: str, *, has_private_namespace: bool = False) -> ProcessLocation:
    """Parse a `/proc/<pid>/cgroup` file to the location of its process.

    The outermost pod counts: a nested container (Docker or kind in a pod) belongs to that pod. A
    pod's name inside a user's session is the user's invention: the process is the host's.

    Args:
        text: content of the file: one line for each hierarchy (v1), one line (v2), or both
            (hybrid).
        has_private_namespace: the reader sees paths relative to its own container, so a path may
            hide the reader's own pod.

    Example:
        >>> location = parse_cgroup(
        ...     "0::/kubepods.slice/kubepods-pod0f6b1c2d_0000_4000_8000_00000000000a.slice/x.scope"
        ... )
        >>> location.place.value, location.pod_uid
        ('pod', '0f6b1c2d-0000-4000-8000-00000000000a')
    """
    paths = _paths(text)
    for path in paths:
        found = _POD.search(path)
        if found is not None and not _OF_USER.search(path, 0, found.end()):
            container = _CONTAINER.search(path, found.end())
            return ProcessLocation(
                place=Place.POD,
                pod_uid=found[1].replace("_", "-").lower(),
                container_id=container[1].lower() if container and "conmon" not in path else "",
                unit=_unit(path),
            )
    if not paths:
        return _UNKNOWN_LOCATION
    path = max(paths, key=len)  # in hybrid mode, unused hierarchies have the path "/"
    if has_private_namespace and all(_OWN_POD.fullmatch(one) for one in paths):
        return _UNKNOWN_LOCATION
    return ProcessLocation(place=Place.HOST, unit=_unit(path))


def _is_private_namespace(own: str) -> bool:
    """Return whether `/proc/self/cgroup` shows the reader's own container as the root.

    A process in the real root cgroup looks the same. Its paths cannot be distinguished from those
    of its own pod, so ambiguous paths count as unknown.
    """
    paths = _paths(own)
    return bool(paths) and all(path == "/" for path in paths)


def _paths(text: str) -> list[str]:
    # The kernel refuses newlines in names, but no other character that ends a line in Python.
    return [path for line in text.split("\n") if (path := _path(line))]


def _path(line: str) -> str:
    """Return the path of a line `hierarchy:controllers:path`; the path may contain colons."""
    parts = line.split(":", 2)
    return parts[2] if len(parts) == 3 else ""  # noqa: PLR2004 - the format's three fields


def _unit(path: str) -> str:
    """Return the last component: its characters are free, and it is shown and is a label."""
    return plain_text(path.rpartition("/")[2], MAX_NAME)


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
        self, proc: Path = PROC, *, clock: Callable[[], float], now: Callable[[], float] = time.time
    ) -> None:
        self._proc = proc
        self._clock = clock
        self._now = now
        self._known: dict[int, ProcessFacts] = {}
        self._has_private_namespace = _is_private_namespace(small_file(f"{proc}/self/cgroup") or "")

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
            else _UNKNOWN_LOCATION,
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
