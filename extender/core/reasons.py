"""Why a node ranks where it does, in the words of docs/decision.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from extender.core.certainty import Band
from extender.core.policy import Strategy

LEAST_PRESUMED: Final = 0.95
"""Chance of a device that is presumed idle."""


ROOM: Final = "room for such a pod's memory on"
ILL_HEALTH: Final = "ill health costs"
EARLY_FAILURES: Final = "early failures of pods cost"
PREFERRED: Final = "preferred model"
NOMINATED: Final = "nominated: pods that are being deleted make it do"
"""Why a node passes that would not without them."""
BETWEEN: Final = "; "
"""Between the clauses of a reason: how certain idle GPUs are, what else speaks for or against the
node, and how well the pod fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """What the rank of a node rests on.

    Attributes:
        band: whether the pod will land on good devices.
        chance: that all devices which the pod gets are good.
        least: the least chance of a device that the pod may get.
        is_sure: all that the pod may get are known to be idle.
        is_unknown: nothing is known of any that the pod may get.
        needed: distinct devices that the pod gets.
        room: share of its working devices with room for what the pod will take.
        unhealthy: share of the certainty that ill health costs.
        suspicion: share of it that early failures cost.
        place: in the pod's order of models, from 1; 0 where it does not name the model, None where
            it names none at all.
        strategy: the pod's.
        is_shared: the devices are sold in replicas.
        allocatable: devices or replicas that the kubelet offers.
        left: so many stay free, and usable, beside the pod's own.
        idle: devices that the pod could land on and that are idle.
        utilization: mean ratio of the devices that the pod could land on.
        memory_used: likewise, of memory.
    """

    band: Band
    chance: float
    least: float
    is_sure: bool
    is_unknown: bool
    needed: int
    room: float
    unhealthy: float
    suspicion: float
    place: int | None
    strategy: Strategy
    is_shared: bool
    allocatable: int
    left: int
    idle: int
    utilization: float
    memory_used: float


def reason(grounds: Grounds) -> str:
    """Return in one line why a node that passes ranks where it does.

    Example:
        >>> reason(Grounds(band=Band.LIKELY, chance=1.0, least=1.0, is_sure=True, is_unknown=False,
        ...     needed=1, room=1.0, unhealthy=0.0, suspicion=0.0, place=None,
        ...     strategy=Strategy.AUTO, is_shared=False, allocatable=8, left=4, idle=5,
        ...     utilization=0.0, memory_used=0.0))
        'certain to land on an idle GPU; leaves 4 of 8 together'
    """
    return BETWEEN.join([_landing(grounds), *_doubts(grounds), _fit(grounds)])


def _landing(grounds: Grounds) -> str:
    """Return how certain good devices are."""
    gpus = "an idle GPU" if grounds.needed == 1 else f"{grounds.needed} idle GPUs"
    if grounds.is_sure:
        return f"certain to land on {gpus}"
    if grounds.least >= LEAST_PRESUMED:
        return f"presumed to land on {gpus}, just freed"
    if grounds.is_unknown:
        return "nothing is known of its GPUs"
    if not grounds.chance:
        return f"certain not to land on {gpus}"
    words = {Band.LIKELY: "likely to", Band.UNKNOWN: "may", Band.UNLIKELY: "unlikely to"}
    return f"{words[grounds.band]} land on {gpus} ({_percent(grounds.chance)})"


def _doubts(grounds: Grounds) -> Iterator[str]:
    """Yield what else speaks for or against the node, before its fit."""
    if grounds.place is not None:
        yield f"{PREFERRED} {grounds.place}" if grounds.place else f"no {PREFERRED}"
    if grounds.room < 1:
        yield f"{ROOM} {_percent(grounds.room)} of its GPUs"
    if grounds.unhealthy:
        yield f"{ILL_HEALTH} {_percent(grounds.unhealthy)}"
    if grounds.suspicion:
        yield f"{EARLY_FAILURES} {_percent(grounds.suspicion)}"


def _fit(grounds: Grounds) -> str:
    """Return what the strategy goes by."""
    if grounds.strategy is Strategy.SPREAD and not grounds.is_shared:
        return f"{grounds.idle} idle of {grounds.allocatable}"
    if grounds.is_shared and grounds.strategy is not Strategy.PACK:
        busy, used = _percent(grounds.utilization), _percent(grounds.memory_used)
        return f"{busy} active, {used} of memory in use"
    of_all = f"of {grounds.allocatable}{' replicas' if grounds.is_shared else ''}"
    return f"leaves {grounds.left} {of_all} together" if grounds.left else f"leaves none {of_all}"


def _percent(ratio: float) -> str:
    return f"{ratio * 100:.3g} %"
