"""Detect foreign use: memory or activity on a device that no pod accounts for. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from agent.report.contract import Foreign, Process


class Attribution(Enum):
    """Whether a pod that holds the device accounts for a process on it."""

    ACCOUNTED = auto()
    """The process belongs to a pod that holds the device, or is a system program."""
    FOREIGN = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Limits above which unexplained use is foreign use; an idle CUDA context also takes memory.

    Attributes:
        memory_bytes: limit of memory in use on a free device, or beyond that of the processes on a
            held device.
        utilization: limit of activity, 0 to 1.
    """

    memory_bytes: int = 1 << 30
    utilization: float = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts about the use of one device.

    Attributes:
        memory_used_bytes: memory in use without the driver's reserved memory; None if unknown.
        utilization_ratio: 0 to 1, None if unknown.
        agreed_ratio: activity that two signals agree on, None without two: one alone proves no use.
        is_held: whether a pod holds the device; None if unknown.
        is_settled: the kubelet has answered since the use began, and the last holder ended a while
            ago; use of a free device is then foreign.
        is_listed: the driver has listed its processes since the unexplained memory appeared.
        processes: processes on the device with their attribution; None if they are not listed.
    """

    memory_used_bytes: int | None
    utilization_ratio: float | None
    agreed_ratio: float | None
    is_held: bool | None
    is_settled: bool
    is_listed: bool
    processes: tuple[tuple[Process, Attribution], ...] | None


def foreign_use(evidence: Evidence, threshold: Threshold) -> Foreign | None:
    """Return the use of a device that no pod accounts for; None if it cannot be determined.

    A process known to be foreign counts, however little it uses. Without such a process, use of a
    free device above the threshold is foreign: memory, or activity that two signals agree on. On a
    held device, memory is foreign if all processes are accounted for and leave more memory than the
    threshold unexplained.

    Args:
        threshold: limits below which use is ignored.
    """
    processes = evidence.processes or ()
    foreign = tuple(
        process for process, attribution in processes if attribution is Attribution.FOREIGN
    )
    used = unaccounted_memory_bytes(evidence.memory_used_bytes, processes)
    exceeds_threshold = used is None or exceeds(used, evidence.agreed_ratio, threshold)
    if evidence.is_held is False and exceeds_threshold and used is not None and evidence.is_settled:
        return Foreign(
            memory_bytes=max(used, _memory(foreign)),
            utilization_ratio=evidence.utilization_ratio,
            pids=tuple(process.pid for process in foreign),
        )
    if foreign:
        return Foreign(
            memory_bytes=_memory(foreign),
            utilization_ratio=evidence.utilization_ratio
            if evidence.is_held is False
            else _utilization(foreign),
            pids=tuple(process.pid for process in foreign),
        )
    is_explained = (
        evidence.is_held is True
        and evidence.processes is not None
        and all(attribution is Attribution.ACCOUNTED for _, attribution in evidence.processes)
    )
    if is_explained and used is not None and used > threshold.memory_bytes:
        return _unlisted(evidence, used)
    return Foreign() if is_explained or not exceeds_threshold else None


def _unlisted(evidence: Evidence, used: int) -> Foreign | None:
    """Return the memory that the holders' processes leave unexplained.

    None if a process may be missing from the driver's list.
    """
    known = [process.memory_bytes is not None for process, _ in evidence.processes or ()]
    is_foreign = bool(known) and all(known) and evidence.is_settled and evidence.is_listed
    return Foreign(memory_bytes=used) if is_foreign else None


def exceeds(memory_bytes: int, utilization_ratio: float | None, threshold: Threshold) -> bool:
    """Return whether memory or activity exceeds the threshold; unknown activity does not."""
    return memory_bytes > threshold.memory_bytes or (
        utilization_ratio is not None and utilization_ratio > threshold.utilization
    )


def unaccounted_memory_bytes(
    memory_used_bytes: int | None, processes: Sequence[tuple[Process, Attribution]]
) -> int | None:
    """Return memory in use beyond that of accounted processes; None if memory in use is unknown."""
    if memory_used_bytes is None:
        return None
    accounted = (one for one, attribution in processes if attribution is Attribution.ACCOUNTED)
    return max(0, memory_used_bytes - _memory(tuple(accounted)))


def _memory(processes: tuple[Process, ...]) -> int:
    return sum(process.memory_bytes or 0 for process in processes)


def _utilization(processes: tuple[Process, ...]) -> float | None:
    known = [one.utilization_ratio for one in processes if one.utilization_ratio is not None]
    return min(1.0, sum(known)) if len(known) == len(processes) else None
