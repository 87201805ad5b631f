"""Judges what is used of a device that no pod accounts for. Pure: values in, values out."""

from collections.abc import Sequence
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
        memory_bytes: more memory than this in use on a device that nobody holds is foreign use, or
            beyond that of the processes on one that is held.
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
        is_listed: the processes have been listed since the memory that none of them accounts for
            came to be in use.
        processes: those that use it, and whose they are; None where they are not listed.
    """

    memory_used_bytes: int | None
    utilization_ratio: float | None
    is_held: bool | None
    is_settled: bool
    is_listed: bool
    processes: tuple[tuple[Process, Blame], ...] | None


def foreign_use(evidence: Evidence, threshold: Threshold) -> Foreign | None:
    """Return what is used that no pod accounts for; None where that cannot be told.

    A process that is known to be foreign is, however little it uses. Without one, a device that
    nobody holds is judged by what is in use of it, and one that is held by whether all its
    processes are known to be its holders', and by the memory that these leave unexplained.
    """
    processes = evidence.processes or ()
    foreign = tuple(process for process, blame in processes if blame is Blame.FOREIGN)
    used = memory_not_accounted(evidence.memory_used_bytes, processes)
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
    if is_explained and used is not None and used > threshold.memory_bytes:
        return _unlisted(evidence, used)
    return Foreign() if is_explained or not shows_use else None


def _unlisted(evidence: Evidence, used: int) -> Foreign | None:
    """Return what the holders' processes do not explain; None where more than they may use it."""
    known = [process.memory_bytes is not None for process, _ in evidence.processes or ()]
    is_foreign = bool(known) and all(known) and evidence.is_settled and evidence.is_listed
    return Foreign(memory_bytes=used) if is_foreign else None


def shows(memory_bytes: int, utilization_ratio: float | None, threshold: Threshold) -> bool:
    """Say whether a device is used at all; unknown activity says nothing."""
    return memory_bytes > threshold.memory_bytes or (
        utilization_ratio is not None and utilization_ratio > threshold.utilization
    )


def memory_not_accounted(
    memory_used_bytes: int | None, processes: Sequence[tuple[Process, Blame]]
) -> int | None:
    """Return memory in use beyond that of accounted processes, None where use is unknown."""
    if memory_used_bytes is None:
        return None
    accounted = (one for one, blame in processes if blame is Blame.ACCOUNTED)
    return max(0, memory_used_bytes - _memory(tuple(accounted)))


def _memory(processes: tuple[Process, ...]) -> int:
    return sum(process.memory_bytes or 0 for process in processes)


def _utilization(processes: tuple[Process, ...]) -> float | None:
    known = [one.utilization_ratio for one in processes if one.utilization_ratio is not None]
    return min(1.0, sum(known)) if len(known) == len(processes) else None
