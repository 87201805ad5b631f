"""State of a GPU or MIG instance in words, and counts over several."""

from collections.abc import Iterable, Sequence

from extender.answers.fleet import ForeignProcessAnswer, Gpu, StateCounts
from extender.core.devices.readings import ForeignProcess
from extender.server.json_answers import moment
from extender.server.redaction import NO_NAMESPACE, redactable


def foreign_view(processes: Sequence[ForeignProcess]) -> list[ForeignProcessAnswer]:
    """Return processes for an answer, redacted: a process outside Kubernetes is in no namespace."""
    views = [
        ForeignProcessAnswer(
            pid=one.pid,
            name=one.name,
            memory_bytes=one.memory_bytes,
            started_at=None if one.started_at is None else moment(one.started_at),
            pod=one.pod,
            container=one.container,
        )
        for one in processes
    ]
    return redactable(NO_NAMESPACE, views, []) if views else views


def shown_state(state: str, freshness: str, assumed: int) -> str:
    """Return a device's state for people: stale or unknown without a fresh reading.

    Args:
        state: its state in decisions.
        freshness: freshness of its readings: fresh, stale or missing.
        assumed: number of pods placed on it that readings do not show yet.

    Example:
        >>> shown_state("busy", "stale", 0), shown_state("busy", "stale", 1)
        ('stale', 'busy')
    """
    is_busy_by_reading = state == "busy" and not assumed
    if freshness == "fresh" or not (state == "unknown" or is_busy_by_reading):
        return state
    return "stale" if freshness == "stale" else "unknown"


def counts(gpus: Iterable[Gpu]) -> tuple[StateCounts, StateCounts]:
    """Count GPUs, and MIG instances, by state: each device once. A stale device is unknown."""
    whole, instances = StateCounts(), StateCounts()
    for gpu in gpus:
        kind = "unknown" if gpu.state == "stale" else gpu.state
        if kind == "idle" and gpu.replicas_used:
            kind = "held_idle"
        found = instances if gpu.mig_profile else whole
        setattr(found, kind, getattr(found, kind) + 1)
    return whole, instances
