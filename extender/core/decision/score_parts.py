"""Break a score down into the digits of `scoring`, each with its contribution.

score = sum of all `ScorePart.adds`
certainty = product of all `Factor.keeps`, in sixteenths
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.decision.assessment import Assessment
from extender.core.decision.certainty import STEPS, Band, bands, steps_of
from extender.core.decision.device_sets import JOINED, side_by_side
from extender.core.decision.group_fit import Nearness
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
NEAR: Final = "near its group"
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
        yield _part(NEAR, near.most, near.units / near.most if near.most else 0.0)
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
