"""One GPU or MIG instance as operators see it, and how many of each there are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from extender.observe.seen import OfPod


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One device as operators see it; `None` is unknown.

    `health` says what speaks against its health and what that means, "" where nothing does.
    `signals` says of activity, of memory and of what speaks against its health (where a reading
    shows that) who told it, and how old it is; `source` and `age_seconds` are those of what was
    measured last.
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
    """Return how many GPUs and MIG instances there are: a GPU is a card, in instances or not.

    One in instances is idle where all of them are.
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
