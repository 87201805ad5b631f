"""Explain a node's rank in one line, in the words of docs/decision.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from extender.core.decision.device_sets import JOINED, NEAR
from extender.core.decision.landing import Band
from extender.core.decision.scoring import EARLY_FAILURES, ILL_HEALTH, MODEL
from extender.core.policy import Strategy

_LEAST_PRESUMED: Final = 0.95
"""Idle probability of a device that is presumed idle."""
_HAS_ROOM: Final = "room for such a pod's memory on"
MAY_GET: Final = -1
"""Place of a node with several models if the pod's list has only some of them."""
_IN_WORDS: Final = {JOINED: "joined by NVLink", NEAR: "on one NUMA node"}
NOMINATED: Final = "nominated: it has room once deleted pods are gone"
"""Reason of a nominated node that passes only after deleted pods have left it."""
BETWEEN: Final = "; "
"""Separator between the clauses of a reason: certainty of idle GPUs, further factors, fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """Inputs of a node's reason.

    Attributes:
        band: likelihood of landing on good devices.
        chance: probability that all devices of the pod are good.
        least: lowest probability among the devices that the pod may get.
        is_sure: all devices that the pod may get are known to be idle.
        is_freed: some of them were just freed, and no reading since then counts.
        is_unknown: none of the devices that the pod may get has data.
        needed: number of distinct devices that the pod gets.
        room: share of working devices with enough memory for the pod.
        unhealthy: share of the certainty that ill health costs.
        suspicion: share of the certainty that early failures cost.
        price: price of a GPU-hour, None if it does not count for the pod.
        group: nearness of the node to the pod's group, "" without a group.
        place: rank in the pod's list of models, from 1; 0 if unlisted, `MAY_GET` if some of
            several models are listed, None without a list.
        is_shared: the resource counts replicas.
        allocatable: devices or replicas that the kubelet offers.
        left: usable devices or replicas that stay free once the pod is placed.
        idle: number of idle landing devices.
        utilization: mean utilization of the landing devices.
        next_hour: mean expected utilization of the landing devices in the next hour.
        memory_used: mean ratio of memory in use on the landing devices.
        together: result of `device_sets.side_by_side`.
        stranded: free devices that become useless for the requests seen so far; negative if the pod
            takes such devices, None if that does not count.
    """

    band: Band
    chance: float
    least: float
    is_sure: bool
    is_freed: bool
    is_unknown: bool
    needed: int
    room: float
    unhealthy: float
    suspicion: float
    place: int | None
    price: float | None = None
    group: str = ""
    strategy: Strategy
    is_shared: bool
    allocatable: int
    left: int
    idle: int
    utilization: float
    next_hour: float
    memory_used: float
    together: float
    stranded: float | None = None


def reason(grounds: Grounds) -> str:
    """Return the reason for the rank of a node that passes, in one line.

    Example:
        >>> reason(Grounds(band=Band.LIKELY, chance=1.0, least=1.0, is_sure=True, is_freed=False,
        ...     is_unknown=False, needed=1, room=1.0, unhealthy=0.0, suspicion=0.0, place=None,
        ...     strategy=Strategy.AUTO, is_shared=False, allocatable=8, left=4, idle=5,
        ...     utilization=0.0, next_hour=0.0, memory_used=0.0, together=0.0))
        'certain to get an idle GPU; leaves 4 of 8 usable'
    """
    return BETWEEN.join([_landing(grounds), *_doubts(grounds), _fit(grounds)])


def _landing(grounds: Grounds) -> str:
    """Return the clause about the certainty of idle GPUs."""
    gpus = "an idle GPU" if grounds.needed == 1 else f"{grounds.needed} idle GPUs"
    if grounds.is_sure:
        return f"certain to get {gpus}"
    if grounds.is_freed and grounds.least >= _LEAST_PRESUMED:
        return f"presumed to get {gpus}, just freed"
    if grounds.is_unknown:
        return "nothing is known of its GPUs"
    if not grounds.chance:
        return f"certain not to get {gpus}"
    words = {Band.LIKELY: "likely to", Band.UNKNOWN: "may", Band.UNLIKELY: "unlikely to"}
    return f"{words[grounds.band]} get {gpus} ({_percent(grounds.chance)})"


def _doubts(grounds: Grounds) -> Iterator[str]:
    """Yield the clauses about model, price, memory, health, failures and the devices' topology."""
    if grounds.place is not None:
        places = {0: f"no {MODEL}", MAY_GET: f"perhaps a {MODEL}"}
        yield places.get(grounds.place, f"{MODEL} {grounds.place}")
    if grounds.price is not None:
        yield f"{grounds.price:g} per GPU-hour"
    if grounds.room < 1:
        yield f"{_HAS_ROOM} {_percent(grounds.room)} of its GPUs"
    if grounds.unhealthy:
        yield f"{ILL_HEALTH} costs {_percent(grounds.unhealthy)}"
    if grounds.suspicion:
        yield f"{EARLY_FAILURES} cost {_percent(grounds.suspicion)}"
    if grounds.together:
        yield _IN_WORDS[grounds.together]
    if grounds.group:
        yield grounds.group


def _fit(grounds: Grounds) -> str:
    """Return the clause about the strategy's criterion."""
    if grounds.strategy is Strategy.SPREAD and not grounds.is_shared:
        return f"{grounds.idle} idle of {grounds.allocatable}"
    if grounds.is_shared and grounds.strategy is not Strategy.PACK:
        busy, used = _percent(grounds.utilization), _percent(grounds.memory_used)
        ahead = _percent(grounds.next_hour)
        expected = "" if ahead == busy else f", {ahead} expected in the next hour"
        return f"{busy} active{expected}, {used} of memory in use"
    of_all = f"of {grounds.allocatable}{' replicas' if grounds.is_shared else ''}"
    return f"leaves {grounds.left or 'none'} {of_all} usable{_strands(grounds.stranded)}"


def _strands(gpus: float | None) -> str:
    """Return the words about devices that no other pod can use."""
    if not gpus:
        return ""
    if gpus < 0:
        return f", takes {-gpus:.3g} that recent requests could not use"
    return f", makes {gpus:.3g} useless for recent requests"


def _percent(ratio: float) -> str:
    return f"{ratio * 100:.3g} %"
