"""State of one GPU or MIG instance as the API returns it, and counts over several."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from extender.server.redaction import OfPod


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of one device; `None` means unknown.

    `health` names each problem of the device and its effect, "" if it is healthy. `signals` has
    source and age of its activity, its memory and, if a reading shows it, its health. `source` and
    `age_seconds` are those of the newest reading.
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


def counts(states: Iterable[GpuState]) -> dict[str, int]:
    """Count GPUs and MIG instances; a partitioned GPU counts as one card.

    A partitioned card is idle if all its instances are.
    """
    cards: dict[object, bool] = {}
    instances = instances_idle = 0
    for number, state in enumerate(states):
        is_idle, card = state.state == "idle", state.uuid or number
        cards[card] = is_idle and cards.get(card, True)
        if state.mig_profile:
            instances, instances_idle = instances + 1, instances_idle + is_idle
    return {
        "gpus_total": len(cards),
        "gpus_idle": sum(cards.values()),
        "mig_instances_total": instances,
        "mig_instances_idle": instances_idle,
    }
