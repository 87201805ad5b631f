"""What a score is made of: the terms of `core.scoring`, each with what it adds to the sum.

score = sum of what the parts add x product of what the factors keep
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from extender.core.assessment import Assessment
from extender.core.columns import within
from extender.core.policy import Weights
from extender.core.scoring import (
    BELOW_ONE,
    CHANCE_WEIGHT,
    ENOUGH_SCORE,
    STEPS,
    UNKNOWN_SCORE,
    Preference,
    calm_terms,
    mean,
    pack_steps,
    prospect,
    spread_steps,
)
from extender.core.snapshot import Batch, Ratios

ENOUGH = "enough idle GPUs"
HOPE = "GPUs that may be idle"
MODEL = "preferred model"
CHANCE = "chance to get idle ones"
NUMBER = "many idle GPUs"
FULLNESS = "how full the node is"
CALM = {
    "utilization": "low activity",
    "headroom": "free memory",
    "sharing": "few tenants",
    "bursts": "even load",
    "stress": "cool and unthrottled",
}
"""Names of the terms of `calm`."""

ILL_HEALTH = "ill health"
EARLY_FAILURES = "early failures of pods"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One term of a score.

    Attributes:
        name: what it rewards.
        share: the most that it can add.
        value: how much of that the node earns, 0 to 1.
        adds: what it adds to the score before the factors: share times value.
    """

    name: str
    share: float
    value: float
    adds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What takes its share of the whole score.

    Attributes:
        name: what it is.
        value: 0 for nothing, to 1.
        keeps: what it leaves of the score: 1 less the value.
    """

    name: str
    value: float
    keeps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What one node's score is made of.

    Attributes:
        parts: they add up.
        factors: each takes its share of that sum.
    """

    parts: tuple[Part, ...]
    factors: tuple[Factor, ...]

    @property
    def score(self) -> float:
        """What they come to."""
        total = sum(part.adds for part in self.parts)
        for factor in self.factors:
            total *= factor.keeps
        return total


def break_down(
    batch: Batch,
    assessment: Assessment,
    preference: Preference,
    *,
    is_packing: bool,
    weights: Weights,
) -> tuple[Breakdown, ...]:
    """Return what the score of each node of a batch is made of.

    Args:
        batch: the nodes.
        assessment: what their devices are worth to the pod.
        preference: which models the pod prefers; one row for each node.
        is_packing: whether the fullest nodes come first.
        weights: of the terms of `calm`.
    """
    landing = assessment.landing
    terms = {
        name: mean(value, landing.devices, landing.size)
        for name, value in calm_terms(batch, assessment).items()
    }
    count = pack_steps if is_packing else spread_steps
    columns = _Columns(
        is_enough=(assessment.idle >= landing.needed) & (landing.needed > 0),
        hope=prospect(assessment),
        chance=assessment.chance,
        steps=within(count(batch, assessment), 0, STEPS) / STEPS,
        calm=terms,
        shares=weights.shares,
        penalty=mean(batch.telemetry.penalty, landing.devices, landing.size),
        suspicion=batch.suspicion,
    )
    best = np.broadcast_to(preference.best, len(batch))
    return tuple(
        Breakdown(
            parts=tuple(
                _parts(columns, at, (int(preference.place[at]), int(best[at])), is_packing)
            ),
            factors=(
                _factor(ILL_HEALTH, float(columns.penalty[at])),
                _factor(EARLY_FAILURES, float(columns.suspicion[at])),
            ),
        )
        for at in range(len(batch))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """What scores are made of; one row for each node."""

    is_enough: np.ndarray[tuple[int], np.dtype[np.bool_]]
    hope: Ratios
    chance: Ratios
    steps: Ratios
    calm: dict[str, Ratios]
    shares: Mapping[str, float]
    penalty: Ratios
    suspicion: Ratios


def _parts(
    columns: _Columns,
    at: int,
    preferred: tuple[int, int],
    is_packing: bool,  # noqa: FBT001 - one of the four that a node's parts rest on
) -> Iterator[Part]:
    """Yield what one node's score is the sum of."""
    place, best = preferred
    if columns.is_enough[at]:
        yield _part(ENOUGH, ENOUGH_SCORE, 1.0)
        weight = 1 - ENOUGH_SCORE
    else:
        yield _part(HOPE, UNKNOWN_SCORE, float(columns.hope[at]))
        weight = ENOUGH_SCORE - UNKNOWN_SCORE
    if best:
        yield _part(MODEL, weight * best / (best + 1), place / best)
    weight /= best + 1
    yield _part(CHANCE, weight * CHANCE_WEIGHT, float(columns.chance[at]))
    step = weight * (1 - CHANCE_WEIGHT) / (STEPS + 1)
    yield _part(FULLNESS if is_packing else NUMBER, step * STEPS, float(columns.steps[at]))
    for name, value in columns.calm.items():
        yield _part(CALM[name], step * columns.shares[name] * BELOW_ONE, float(value[at]))


def _part(name: str, share: float, value: float) -> Part:
    return Part(name=name, share=share, value=value, adds=share * value)


def _factor(name: str, value: float) -> Factor:
    return Factor(name=name, value=value, keeps=1 - value)
