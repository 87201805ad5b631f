"""State of one GPU or MIG instance as the API returns it, and counts over several."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from extender.core.devices.readings import ForeignProcess
from extender.server.json_answers import moment
from extender.server.redaction import NO_NAMESPACE, OfPod

_NO_PROCESSES: Final = OfPod(NO_NAMESPACE, (), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of one device; `None` means unknown.

    `health` names each problem of the device and its effect, "" if it is healthy. `signals` has
    source and age of its activity, its memory and, if a reading shows it, its health. `source` and
    `age_seconds` are those of the newest reading. `foreign_processes` use the device without
    holding it; only callers who may read all pods see them.
    """

    node: str
    resource: str
    index: int | None
    uuid: str
    gpu_instance_id: str
    mig_profile: str
    model: str
    state: str
    why: str
    health: str
    utilization_ratio: float | None
    utilization_latest_ratio: float | None
    utilization_spread_ratio: float | None
    memory_used_ratio: float | None
    memory_free_bytes: int | None
    memory_total_bytes: int | None
    temperature_celsius: float | None
    power_watts: float | None
    xid: int | None
    freshness: str
    age_seconds: float | None
    source: str
    replicas: int
    replicas_used: int
    assumed: int
    tenants: tuple[OfPod, ...]
    signals: Mapping[str, Mapping[str, object]]
    foreign_processes: OfPod = _NO_PROCESSES


def foreign_view(processes: Sequence[ForeignProcess]) -> OfPod:
    """Return processes for an answer, redacted: a process outside Kubernetes is in no namespace."""
    if not processes:
        return _NO_PROCESSES
    views = [asdict(one) | {"started_at": moment(one.started_at)} for one in processes]
    return OfPod(NO_NAMESPACE, views, ())


KINDS: Final = ("idle", "held_idle", "busy", "foreign", "unhealthy", "unknown")
"""States that counts distinguish. A device that a pod holds is `held_idle`, not `idle`; one without
fresh readings is `unknown`."""


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


def counts(states: Iterable[GpuState]) -> dict[str, dict[str, int]]:
    """Count whole GPUs and MIG instances by kind, apart: each device counts once."""
    whole, instances = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for state in states:
        kind = "unknown" if state.state == "stale" else state.state
        if kind == "idle" and state.replicas_used:
            kind = "held_idle"
        (instances if state.mig_profile else whole)[kind] += 1
    return {"gpu_states": whole, "mig_states": instances}
