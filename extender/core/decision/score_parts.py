"""Explain a node's score: the contribution of each digit of `scoring`, and its rank in one line.

score = sum of all `ScorePart.adds`
certainty = product of all `Factor.keeps`, in sixteenths
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.decision.assessment import Assessment
from extender.core.decision.device_sets import JOINED, NEAR, side_by_side
from extender.core.decision.group_fit import Nearness
from extender.core.decision.landing import STEPS, Band, bands, steps_of
from extender.core.decision.scoring import (
    FIT,
    KINDS,
    LOAD,
    MOST_FIT,
    PLACES,
    PRICE,
    SHARED,
    UNITS,
    calm,
    calm_terms,
    fit,
    mean,
    penalty,
    sure,
)
from extender.core.nodes.snapshot import Batch, Ratios, Rows
from extender.core.policy import Strategy, Weights

BAND: Final = "likely to get idle GPUs"
MODEL: Final = "preferred model"
ROOM: Final = "GPUs with room for its memory"
CERTAINTY: Final = "certainty and health"
NEAR_GROUP: Final = "near its group"
_CHEAP: Final = "low price"
_TOGETHER: Final = "GPUs side by side"
_FULLNESS: Final = "few GPUs left over"
_NUMBER: Final = "many idle GPUs"
_CALM: Final = {
    "utilization": "low activity",
    "headroom": "free memory",
    "sharing": "few tenants",
    "bursts": "low and even activity",
    "stress": "cool and unthrottled",
}
"""Names of the terms of `calm`."""

_DOUBT: Final = "GPUs that may not be idle"
ILL_HEALTH: Final = "ill health"
EARLY_FAILURES: Final = "early failures of pods"

_CERTAINTY: Final = FIT
_ROOM: Final = _CERTAINTY * (STEPS + 1)
_MODEL: Final = _ROOM * (STEPS + 1)
_BAND: Final = _MODEL * (PLACES + 1)
"""Units of one step of each digit."""

_LEAST_PRESUMED: Final = 0.95
"""Idle probability of a device that is presumed idle."""
_HAS_ROOM: Final = "room for such a pod's memory on"
COSTS_HEALTH: Final = "ill health costs"
COSTS_FAILURES: Final = "early failures of pods cost"
PREFERRED: Final = "preferred model"
MAY_GET: Final = -1
"""Place of a node with several models if the pod's list has only some of them."""
_IN_WORDS: Final = {JOINED: "joined by NVLink", NEAR: "on one NUMA node"}
NOMINATED: Final = "nominated: it has room once deleted pods are gone"
"""Reason of a nominated node that passes only after deleted pods have left it."""
BETWEEN: Final = "; "
"""Separator between the clauses of a reason: certainty of idle GPUs, further factors, fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """One digit of a score, or one term of its last digit.

    Attributes:
        name: the rewarded property.
        share: maximum contribution to the score.
        value: share of the maximum that the node earns, 0 to 1.
        adds: contribution to the score: share times value.
    """

    name: str
    share: float
    value: float
    adds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One reduction of the certainty.

    Attributes:
        name: the reason.
        value: size of the reduction, 0 to 1.
        keeps: share of the certainty that is left: 1 less the value.
    """

    name: str
    value: float
    keeps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Parts of one node's score.

    Attributes:
        parts: summands of the score, the largest weight first.
        factors: reductions of the certainty.
    """

    parts: tuple[ScorePart, ...]
    factors: tuple[Factor, ...]

    @property
    def score(self) -> float:
        """Sum of the parts."""
        return sum(part.adds for part in self.parts)


def break_down(
    batch: Batch,
    assessment: Assessment,
    model: Rows | None,
    spare: Ratios,
    *,
    strategy: Strategy,
    weights: Weights,
    cheapness: Ratios | None,
    nearness: Sequence[Nearness] | None,
    stranded: Ratios | None,
) -> tuple[Breakdown, ...]:
    """Break down the score of each node of a batch.

    Args:
        batch: the nodes.
        assessment: the nodes' devices, assessed for the pod.
        model: rank of each node's model in the pod's list, None without a list.
        spare: number of further devices that each node's CPU, memory and storage allow.
        strategy: the pod's strategy.
        weights: weights of the terms of `calm`.
        cheapness: as in `scoring.score`, None if prices do not count.
        nearness: nearness of each node to the pod's group, None without a group.
        stranded: as in `scoring.score`.
    """
    landing = assessment.landing
    band = bands(assessment.band_chance, landing.needed)
    quiet = calm(batch, assessment, weights)
    kind = np.array([KINDS[strategy]])
    unfit = penalty(batch, assessment)
    certain = sure(batch, assessment, band)
    columns = _Columns(
        band=band,
        model=model,
        room=steps_of(assessment.room),
        steps=steps_of(certain * ((1.0 - unfit) * (1.0 - batch.suspicion))),
        fit=fit(batch, assessment, kind, spare, quiet, stranded)
        - _load_units(batch, strategy) * quiet,
        most_fit=MOST_FIT if stranded is None else FIT / 2,
        cheapness=cheapness,
        together=side_by_side(batch, assessment),
        nearness=nearness,
        load=_load_units(batch, strategy),
        calm={
            name: mean(value, assessment.works, assessment.working)
            for name, value in calm_terms(batch, assessment).items()
        },
        shares=dict(weights.shares),
        fit_name=_NUMBER if strategy is Strategy.SPREAD else _FULLNESS,
    )
    return tuple(
        Breakdown(
            parts=tuple(_parts(columns, at)),
            factors=(
                _factor(_DOUBT, 1.0 - float(certain[at])),
                _factor(ILL_HEALTH, float(unfit[at])),
                _factor(EARLY_FAILURES, float(batch.suspicion[at])),
            ),
        )
        for at in range(len(batch))
    )


def _load_units(batch: Batch, strategy: Strategy) -> Ratios:
    is_fit = batch.is_shared & (strategy is not Strategy.PACK)
    return np.where(is_fit, SHARED, LOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Inputs of the breakdown; one row per node."""

    band: Rows
    model: Rows | None
    room: Ratios
    steps: Ratios
    fit: Ratios
    most_fit: float
    cheapness: Ratios | None
    together: Ratios
    nearness: Sequence[Nearness] | None
    load: Ratios
    calm: dict[str, Ratios]
    shares: dict[str, float]
    fit_name: str


def _parts(columns: _Columns, at: int) -> Iterator[ScorePart]:
    """Yield the parts of one node's score."""
    yield _part(BAND, _BAND * Band.LIKELY, float(columns.band[at]) / Band.LIKELY)
    place = PLACES if columns.model is None else int(columns.model[at])
    yield _part(MODEL, _MODEL * PLACES, place / PLACES)
    yield _part(ROOM, _ROOM * STEPS, float(columns.room[at]) / STEPS)
    yield _part(CERTAINTY, _CERTAINTY * STEPS, float(columns.steps[at]) / STEPS)
    if columns.nearness is not None:
        near = columns.nearness[at]
        yield _part(NEAR_GROUP, near.most, near.units / near.most if near.most else 0.0)
    if columns.cheapness is not None:
        yield _part(_CHEAP, PRICE, float(columns.cheapness[at]))
    load = float(columns.load[at])
    if load < 1:
        most = columns.most_fit
        yield _part(columns.fit_name, most, float(columns.fit[at]) / most)
    if columns.together.any():
        yield _part(_TOGETHER, JOINED, float(columns.together[at]) / JOINED)
    for name, value in columns.calm.items():
        yield _part(_CALM[name], load * columns.shares[name], float(value[at]))


def _part(name: str, units: float, value: float) -> ScorePart:
    share = units / UNITS
    return ScorePart(name=name, share=share, value=value, adds=share * value)


def _factor(name: str, value: float) -> Factor:
    return Factor(name=name, value=value, keeps=1 - value)


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
        strategy: the pod's strategy.
        is_shared: the resource counts replicas.
        allocatable: devices or replicas that the kubelet offers.
        left: usable devices or replicas that stay free once the pod is placed.
        idle: number of idle landing devices.
        utilization: mean utilization of the landing devices.
        memory_used: mean ratio of memory in use on the landing devices.
        together: result of `device_sets.side_by_side`.
        stranded: free devices that become useless for the requests seen so far; negative if the pod
            takes such devices, None if that does not count.
    """

    band: Band
    chance: float
    least: float
    is_sure: bool
    is_freed: bool = False
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
    memory_used: float
    together: float = 0.0
    stranded: float | None = None


def reason(grounds: Grounds) -> str:
    """Return the reason for the rank of a node that passes, in one line.

    Example:
        >>> reason(Grounds(band=Band.LIKELY, chance=1.0, least=1.0, is_sure=True, is_unknown=False,
        ...     needed=1, room=1.0, unhealthy=0.0, suspicion=0.0, place=None,
        ...     strategy=Strategy.AUTO, is_shared=False, allocatable=8, left=4, idle=5,
        ...     utilization=0.0, memory_used=0.0))
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
        places = {0: f"no {PREFERRED}", MAY_GET: f"perhaps a {PREFERRED}"}
        yield places.get(grounds.place, f"{PREFERRED} {grounds.place}")
    if grounds.price is not None:
        yield f"{grounds.price:g} per GPU-hour"
    if grounds.room < 1:
        yield f"{_HAS_ROOM} {_percent(grounds.room)} of its GPUs"
    if grounds.unhealthy:
        yield f"{COSTS_HEALTH} {_percent(grounds.unhealthy)}"
    if grounds.suspicion:
        yield f"{COSTS_FAILURES} {_percent(grounds.suspicion)}"
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
        return f"{busy} active, {used} of memory in use"
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
