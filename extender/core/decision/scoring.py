"""Score nodes for a pod: one number from 0 to 1 per node, higher is better.

docs/decision.md explains the order of the criteria:

    (band, model, room, certainty x health, fit, load)

The score encodes them as one number in mixed radix, so that comparing scores compares the criteria
from left to right:

    score = ((((band x 17 + model) x 17 + room) x 17 + certainty) x 320 + fit) / 4,716,480

`band` is 0 to 2; `model`, `room` and `certainty` are 0 to 16; `fit` includes the load and stays
at most `FIT` / 2. With prices it is up to `PRICE` higher on cheap nodes, and for several devices
up to `device_sets.JOINED` higher on nodes that have them side by side. No digit overflows into
the next, and nodes of different certainty stay apart, also after rounding for kube-scheduler.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.decision.assessment import Assessment
from extender.core.decision.device_sets import JOINED, side_by_side
from extender.core.decision.landing import LEAST, STEPS, Band, bands, certainty, steps_of
from extender.core.nodes.snapshot import Batch, Flags, Ratios, Rows
from extender.core.policy import Strategy, Weights

PLACES: Final = 16
"""Ranks in a pod's list of preferred models: the maximum length of the list."""

PERHAPS: Final = 1
"""Rank of a node with several models if the pod prefers only some: the kubelet chooses."""

FIT: Final = 320
"""Units between two steps of certainty."""

UNITS: Final = len(Band) * (PLACES + 1) * (STEPS + 1) * (STEPS + 1) * FIT
"""Total units of a score."""

GPU: Final = 4
"""Units of fit per whole device, up to `_MANY` devices."""

_MANY: Final = 16
"""Number of devices that count fully for the fit; each further one counts less."""

_MOST_FIT: Final = GPU * (_MANY + 4)

_LOAD: Final = 0.003
"""Units of the load on whole devices: less than the smallest difference of fit."""

SHARED: Final = 160
"""Units of the load on shared devices, where the load is the fit."""

_STRANDED: Final = 16
"""Units of each device that a placement strands for the requests seen so far."""

_MOST_STRANDED: Final = 2.5
"""Largest number of stranded (or freed) whole devices that counts."""

_MOST_SHARED_STRANDED: Final = 4.5
"""Largest number of stranded (or freed) parts of shared devices that counts."""

_SHARED_FULLNESS: Final = 0.08
"""Part of the fit by the number of free devices that counts beside stranded shared ones: with more
of it, more of a public trace stays unallocated. Whole devices need all of it, so that nodes drain
for large jobs when pods end (`bench.churn`)."""

PRICE: Final = 120
"""Difference in units between a node that costs nothing and one with the highest listed price."""

_SHARED_CERTAINTY: Final = dict(
    zip(LEAST, (steps_of(np.array([*LEAST.values()])) / STEPS).tolist(), strict=True)
)
"""Certainty of shared devices by band: the band's lower bound, rounded to whole steps."""

_QUARTERS: Final = 4
"""Idle devices are counted in quarters: an unknown device counts half."""

_WEIGHTS: Final = Weights()
"""Default weights of the terms of `_calm`."""

_DECIMALS: Final = 12
"""Means are rounded to this many decimals, so that the order of additions cannot separate equal
nodes."""

_ABOUT: Final = 1e-6
"""Rounding error of a score, in steps of certainty."""

KINDS: Final = {strategy: kind for kind, strategy in enumerate(Strategy)}
"""Number of each strategy, for columns."""

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
    "bursts": "low load in the next hour",
    "stress": "cool and unthrottled",
}
"""Names of the terms of `_calm`, for people."""

_DOUBT: Final = "GPUs that may not be idle"
ILL_HEALTH: Final = "ill health"
EARLY_FAILURES: Final = "early failures of pods"

_CERTAINTY: Final = FIT
_ROOM: Final = _CERTAINTY * (STEPS + 1)
_MODEL: Final = _ROOM * (STEPS + 1)
_BAND: Final = _MODEL * (PLACES + 1)
"""Units of one step of each digit."""


@dataclass(frozen=True, slots=True)
class Nearness:
    """Nearness of one node to a pod's group.

    Attributes:
        units: score units that the nearness adds.
        words: the nearness in words, "" if unknown.
        most: score units of the nearest candidate.
    """

    units: float = 0.0
    words: str = ""
    most: float = 0.0


NOT_NEAR: Final = Nearness()


def score(
    batch: Batch,
    assessment: Assessment,
    strategy: Rows,
    model: Rows,
    spare: Ratios,
    weights: Weights = _WEIGHTS,
    *,
    cheapness: Ratios | float = 0.0,
    stranded: Ratios | None = None,
) -> tuple[Ratios, Rows]:
    """Score each node of the batch.

    More load on any landing device never raises a node's score.

    Args:
        assessment: the nodes' devices, assessed for the pod.
        strategy: the pod's strategy as a number of `KINDS`; one per node, or one for all.
        model: rank of the node's model in the pod's list, `PLACES` for the first; one per node, or
            one for all.
        spare: number of further devices that the node's CPU, memory and storage allow once it
            runs the pod.
        weights: weights of the terms of `_calm`.
        cheapness: 0 for the highest price to 1 for nothing; 0 if prices do not count.
        stranded: devices that the pod strands for the requests seen so far; None if that does not
            count.

    Returns:
        Scores from 0 to 1, and bands; one per node.
    """
    needed = assessment.landing.needed
    band = bands(assessment.band_chance, needed)
    certain = _sure(batch, assessment, band) * _health(batch, assessment)
    # The same for all requests with the same grounds, hence cached.
    quiet = batch.shared_results.get(
        assessment.grounds and ("calm", weights, assessment.grounds),
        lambda: _calm(batch, assessment, weights),
    )
    digits = (band * (PLACES + 1) + model) * (STEPS + 1) + steps_of(assessment.room)
    digits = digits * (STEPS + 1) + steps_of(certain)
    fitting = _fit(batch, assessment, strategy, spare, quiet, stranded) + PRICE * cheapness
    fitting += side_by_side(batch, assessment)
    return (digits * FIT + fitting) / UNITS, band


def unknown_score(model: int) -> float:
    """Return the score of a node without any data.

    Args:
        model: rank of the node's model in the pod's list.
    """
    digits = (Band.UNKNOWN * (PLACES + 1) + model) * (STEPS + 1) + STEPS
    return (digits * (STEPS + 1) + STEPS // 2) * FIT / UNITS


def is_roomy(scores: Ratios) -> Flags:
    """Return whether all landing devices of a node have the memory that the pod will likely use."""
    steps = np.floor(scores * UNITS / FIT + _ABOUT).astype(np.intp) // (STEPS + 1)
    is_full: Flags = steps % (STEPS + 1) == STEPS
    return is_full


def _sure(batch: Batch, assessment: Assessment, band: Rows) -> Ratios:
    """Return the certainty of each node before health is applied, 0 to 1.

    For shared devices only the band counts here, and the load goes to `fit`: a finer certainty
    would stack pods on the device with the smallest lead. A whole device that is as likely idle
    ranks before shared ones. Broken shared devices look idle because pods die there at once, so
    they cost their share of the certainty, at least one step.
    """
    certain = certainty(assessment.chance, band, assessment.landing.needed)
    shared = np.where(
        band == Band.LIKELY, _SHARED_CERTAINTY[Band.LIKELY], _SHARED_CERTAINTY[Band.UNKNOWN]
    )
    at = np.flatnonzero(assessment.working < assessment.offered)
    if at.size:
        working = assessment.working[at] / assessment.offered[at]
        shared[at] = np.minimum(shared[at] * working, shared[at] - 1 / STEPS)
    return np.where(batch.is_shared, shared, certain)


def _health(batch: Batch, assessment: Assessment) -> Ratios:
    """Return the share of certainty that ill health and early failures leave, 0 to 1."""
    return (1.0 - penalty(batch, assessment)) * (1.0 - batch.suspicion)


def penalty(batch: Batch, assessment: Assessment) -> Ratios:
    """Return the mean health penalty of each node's landing devices, 0 to 1."""
    landing, results, grounds = assessment.landing, batch.shared_results, assessment.grounds
    return results.get(
        grounds and ("penalty", grounds[2]),
        lambda: mean(batch.telemetry.penalty, landing.devices, landing.size),
    )


def weighs_stranded(batch: Batch, strategy: Rows) -> bool:
    """Return whether stranded devices count for any node of a batch."""
    if not batch.is_shared.any():
        return bool((strategy != KINDS[Strategy.SPREAD]).any())
    is_auto = strategy == KINDS[Strategy.AUTO]
    return bool(((strategy == KINDS[Strategy.PACK]) | (is_auto & ~batch.is_shared)).any())


def _fit(
    batch: Batch,
    assessment: Assessment,
    strategy: Rows,
    spare: Ratios,
    quiet: Ratios,
    stranded: Ratios | None = None,
) -> Ratios:
    """Return the fit of the pod on each node, in units from 0 to below `FIT`."""
    is_packing = strategy == KINDS[Strategy.PACK]
    left = free_after(batch, assessment)
    room = left
    if stranded is None:  # stranded devices include those without CPU and memory
        room = np.where(strategy == KINDS[Strategy.AUTO], np.minimum(left, spare), left)
    whole = _fullness(room)
    if stranded is not None:
        whole = whole + _usable(stranded, _MOST_STRANDED)
    is_spreading = strategy == KINDS[Strategy.SPREAD]
    if is_spreading.any():
        whole = np.where(is_spreading, _MOST_FIT - _fullness(idle_devices(assessment)), whole)
    units = whole + _LOAD * quiet
    if not batch.is_shared.any():
        return units
    shared = SHARED * quiet
    if is_packing.any():
        packed = _fullness(left / batch.replicas)
        if stranded is not None:
            packed = _SHARED_FULLNESS * packed + _usable(stranded, _MOST_SHARED_STRANDED)
        shared = np.where(is_packing, packed + _LOAD * quiet, shared)
    return np.where(batch.is_shared, shared, units)


def _fullness(left: Ratios) -> Ratios:
    """Return the units of fit by the number of devices left free: fewer left, more units."""
    beyond = (_MOST_FIT - GPU * _MANY) * _MANY / np.maximum(left, _MANY)
    return np.where(left <= _MANY, _MOST_FIT - GPU * left, beyond)


def _usable(stranded: Ratios, most: float) -> Ratios:
    """Return the units of fit for devices that stay usable: fewer stranded, more units."""
    units: Ratios = _STRANDED * (most - np.maximum(np.minimum(stranded, most), -most))
    return units


def free_after(batch: Batch, assessment: Assessment) -> Ratios:
    """Return the number of devices or replicas per node that stay free once the pod is placed."""
    left = batch.allocatable - batch.held - assessment.landing.replicas
    free: Ratios = np.maximum(left, 0).astype(np.float64)
    return free


def idle_devices(assessment: Assessment) -> Ratios:
    """Return the number of idle devices per node; an unknown device counts half."""
    landing = assessment.landing
    hopes = np.where(landing.devices & assessment.fits, assessment.idle_chance, 0.0).sum(axis=1)
    counted = np.floor(hopes * _QUARTERS + 0.5) / _QUARTERS
    idle: Ratios = np.maximum(counted - landing.taken, 0.0)
    return idle


def _calm(batch: Batch, assessment: Assessment, weights: Weights = _WEIGHTS) -> Ratios:
    """Return the mean calmness of each node's working landing devices, 0 (busy) to 1.

    The weighted mean of `_calm_terms`. The bursts term, the forecast of the next hour
    (`core.devices.forecast`), outweighs the mean activity of the last hour. The number of tenants
    weighs most: at 100 % activity the demand is invisible.
    """
    shares = weights.shares
    total = sum(shares[name] * value for name, value in _calm_terms(batch, assessment).items())
    return mean(np.asarray(total), assessment.works, assessment.working)


def _calm_terms(batch: Batch, assessment: Assessment) -> dict[str, Ratios]:
    """Return the terms of `_calm` per device, by their names in `Weights.shares`."""
    shares_in_use = np.minimum(batch.used / batch.replicas[:, None], 1.0)
    return {
        "utilization": 1.0 - assessment.utilization,
        "headroom": assessment.headroom,
        "sharing": 1.0 - shares_in_use,
        "bursts": 1.0 - assessment.next_hour,
        "stress": 1.0 - batch.telemetry.stress,
    }


def mean(values: Ratios, devices: Flags, size: Rows) -> Ratios:
    """Return per node the mean of `values` over the flagged devices; 0 without any.

    Results are rounded, so that they do not depend on the number of rows in the batch.
    """
    total = np.where(devices, values, 0.0).sum(axis=1)
    result: Ratios = np.round(total / np.maximum(size, 1), _DECIMALS)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """One summand of a score: a digit of the mixed-radix number, or a part of its last digit.

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
        assessment: the nodes' devices, assessed for the pod.
        model: rank of each node's model in the pod's list, None without a list.
        spare: number of further devices that each node's CPU, memory and storage allow.
        weights: weights of the terms of `_calm`.
        cheapness: as in `score`, None if prices do not count.
        nearness: nearness of each node to the pod's group, None without a group.
        stranded: as in `score`.
    """
    landing = assessment.landing
    band = bands(assessment.band_chance, landing.needed)
    quiet = _calm(batch, assessment, weights)
    kind = np.array([KINDS[strategy]])
    unfit = penalty(batch, assessment)
    certain = _sure(batch, assessment, band)
    columns = _Columns(
        band=band,
        model=model,
        room=steps_of(assessment.room),
        steps=steps_of(certain * ((1.0 - unfit) * (1.0 - batch.suspicion))),
        fit=_fit(batch, assessment, kind, spare, quiet, stranded)
        - _load_units(batch, strategy) * quiet,
        most_fit=_MOST_FIT if stranded is None else FIT / 2,
        cheapness=cheapness,
        together=side_by_side(batch, assessment),
        nearness=nearness,
        load=_load_units(batch, strategy),
        calm={
            name: mean(value, assessment.works, assessment.working)
            for name, value in _calm_terms(batch, assessment).items()
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
    return np.where(is_fit, SHARED, _LOAD)


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
    if load != SHARED:
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
