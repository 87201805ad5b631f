"""Judges what is used of a device that no pod accounts for. Pure: values in, values out."""

from dataclasses import dataclass
from enum import Enum, auto

from agent.report import Foreign, Process


class Blame(Enum):
    """Whose a process is, as far as its device is concerned."""

    ACCOUNTED = auto()
    """Of a pod that holds the device, or of the system that serves everybody."""
    FOREIGN = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """From where on use is worth the name: a context that does nothing takes memory, too.

    Attributes:
        memory_bytes: more memory than this in use on a device that nobody holds is foreign use.
        utilization: so is more activity than this, 0 to 1.
    """

    memory_bytes: int = 1 << 30
    utilization: float = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of the use of one device.

    Attributes:
        memory_used_bytes: without what the driver reserves; None where unknown.
        utilization_ratio: 0 to 1, None where unknown.
        is_held: by a pod; None where it is not known.
        is_settled: the kubelet was asked since the use began, and the last tenant has been gone
            for a while: what is in use without a holder then is nobody's.
        processes: those that use it, and whose they are; None where they are not listed.
    """

    memory_used_bytes: int | None
    utilization_ratio: float | None
    is_held: bool | None
    is_settled: bool
    processes: tuple[tuple[Process, Blame], ...] | None


def foreign_use(evidence: Evidence, threshold: Threshold) -> Foreign | None:
    """Return what is used that no pod accounts for; None where that cannot be told.

    A process that is known to be foreign is, however little it uses. Without one, a device that
    nobody holds is judged by what is in use of it, and one that is held by whether all its
    processes are known to be its holders'.
    """
    processes = evidence.processes or ()
    foreign = tuple(process for process, blame in processes if blame is Blame.FOREIGN)
    used = _memory_not_accounted(evidence)
    shows_use = used is None or shows(used, evidence.utilization_ratio, threshold)
    if evidence.is_held is False and shows_use and used is not None and evidence.is_settled:
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
        and all(blame is Blame.ACCOUNTED for _, blame in evidence.processes)
    )
    return Foreign() if is_explained or not shows_use else None


def shows(memory_bytes: int, utilization_ratio: float | None, threshold: Threshold) -> bool:
    """Say whether a device is used at all; unknown activity says nothing."""
    return memory_bytes > threshold.memory_bytes or (
        utilization_ratio is not None and utilization_ratio > threshold.utilization
    )


def _memory_not_accounted(evidence: Evidence) -> int | None:
    if evidence.memory_used_bytes is None:
        return None
    accounted = (one for one, blame in evidence.processes or () if blame is Blame.ACCOUNTED)
    return max(0, evidence.memory_used_bytes - _memory(tuple(accounted)))


def _memory(processes: tuple[Process, ...]) -> int:
    return sum(process.memory_bytes or 0 for process in processes)


def _utilization(processes: tuple[Process, ...]) -> float | None:
    known = [one.utilization_ratio for one in processes if one.utilization_ratio is not None]
    return min(1.0, sum(known)) if len(known) == len(processes) else None
