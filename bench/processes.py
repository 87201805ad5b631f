"""CPU and memory use of a process and its children, from /proc."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
TICKS: Final = os.sysconf("SC_CLK_TCK")
MIB: Final = 1 << 20
SAMPLE_SECONDS: Final = 0.05
PSS_SAMPLES: Final = 5
"""Samples between two of the proportional set sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a process and its children, in MiB.

    Attributes:
        rss_mib: sum of the processes' resident memory; shared pages count once for each.
        pss_mib: sum of the proportional set sizes; shared pages count once, pages shared with other
            programs in part.
        processes: resident memory of each, the main process first.
    """

    rss_mib: float
    pss_mib: float
    processes: tuple[float, ...]


def tree_of(pid: int) -> list[int]:
    """Return the PIDs of a process and all its descendants."""
    found = [pid]
    for one in found:
        found.extend(_children(one))
    return found


def _children(pid: int) -> list[int]:
    try:
        lists = [task / "children" for task in (PROC / str(pid) / "task").iterdir()]
        return [int(child) for one in lists for child in one.read_text().split()]
    except OSError:
        return []


def memory_of(pid: int) -> Memory:
    """Return the memory of a process and its descendants."""
    rss: list[float] = []
    pss = 0.0
    for one in tree_of(pid):
        try:
            rollup = (PROC / str(one) / "smaps_rollup").read_text()
        except OSError:
            continue  # the process has just ended
        kib = {line.split(":")[0]: line.split()[1] for line in rollup.splitlines()[1:]}
        rss.append(int(kib["Rss"]) / 1024)
        pss += int(kib["Pss"]) / 1024
    return Memory(rss_mib=sum(rss), pss_mib=pss, processes=tuple(rss))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its living descendants have used so far."""
    total = 0
    for one in tree_of(pid):
        try:
            fields = (PROC / str(one) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])  # utime and stime of /proc/PID/stat
    return total / TICKS


@dataclass(slots=True)
class Peak:
    """Peak memory of a process tree during an observation.

    Attributes:
        rss_mib: resident memory of all its processes together.
        pss_mib: sum of their proportional set sizes, only if asked for.
        samples: number of samples.
    """

    rss_mib: float = 0.0
    pss_mib: float = 0.0
    samples: int = 0
    series: list[tuple[float, float]] = field(default_factory=list)


@contextmanager
def watching_memory(pid: Callable[[], int], *, has_pss: bool = False) -> Iterator[Peak]:
    """Sample the resident memory of a process tree while the context is open.

    Args:
        pid: returns the PID of the main process, which may start later than the context.
        has_pss: also sample the proportional set sizes; reading them delays the processes.
    """
    peak = Peak()
    is_over = threading.Event()
    began = time.perf_counter()

    def watch() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            try:
                rss = sum(map(_rss_bytes, _started(tree_of(pid())))) / MIB
            except (OSError, RuntimeError):
                continue  # the process has not started or has ended
            peak.rss_mib = max(peak.rss_mib, rss)
            if has_pss and peak.samples % PSS_SAMPLES == 0:
                peak.pss_mib = max(peak.pss_mib, memory_of(pid()).pss_mib)
            peak.samples += 1
            peak.series.append((time.perf_counter() - began, rss))

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def _started(pids: list[int]) -> list[int]:
    """Leave out forks of the main process that do not run their own program yet.

    They share nearly all pages with it, so the memory of the main process would count twice.
    """
    main, *others = pids
    command = _command(main)
    return [main, *(pid for pid in others if _command(pid) != command)]


def _command(pid: int) -> bytes:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def _rss_bytes(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
