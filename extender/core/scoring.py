"""Which of the nodes that would do is best: one number from 0 to 1 for each.

    score = (1 - penalty) x (1 - suspicion) x
        0.4 + 0.6 order                    where enough landing devices are known to be idle
        0.4 x (0.5 prospect + 0.5 order)   elsewhere

So a node with enough idle devices comes first (0.4 and more), then one that may have them for all
that is known (0.2 and more), then one that is known to be busy; ill health and early failures
take their share of any. `prospect` is 1 where the devices are unknown and 0 where they are known
to be busy; what fades lies between.

`order` puts, each before the next: the pod's order of models; the chance that all devices which
the kubelet picks are idle, together with how many idle ones there are (strategy spread) or how
few free ones (strategy pack); the load and the smaller terms of `calm`.
"""

from dataclasses import dataclass

import numpy as np

from extender.core.assessment import Assessment
from extender.core.columns import within
from extender.core.policy import Weights
from extender.core.snapshot import Batch, Flags, Ratios, Rows

ENOUGH_SCORE = 0.4
"""Any node with enough idle devices scores from here, and every node without scores below."""

UNKNOWN_SCORE = 0.2
"""A node that may have enough idle devices scores from here, and one known to be busy below."""

CHANCE_WEIGHT = 1 / 3
"""What the certainty of idle devices weighs against their number."""

STEPS = 16
"""Numbers of devices are told apart up to here; nodes carry at most 16 cards."""

WEIGHTS = Weights()
"""Of the terms of `calm`, unless configured."""

BELOW_ONE = 0.999
"""Keeps the largest sum of small terms below one step."""

DECIMALS = 12
"""Scores are rounded, so that the order of additions makes no difference between equal nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Which models pods prefer, as columns: a row for each node of a batch.

    Attributes:
        place: how early the pod's list of models names the node's: the list's length for the
            first, 1 for the last, 0 for the others.
        best: the earliest place of any model; one row for each node, or one for all.
    """

    place: Rows
    best: Rows


def score(
    batch: Batch,
    assessment: Assessment,
    is_packing: Flags,
    preference: Preference,
    weights: Weights = WEIGHTS,
) -> Ratios:
    """Score each node of the batch.

    More load on any landing device never raises a node's score.

    Args:
        batch: the nodes.
        assessment: what their devices are worth to the pod.
        is_packing: whether the fullest nodes come first, not the emptiest; per node, or of all.
        preference: which models the pod prefers.
        weights: of the terms of `calm`.

    Returns:
        Ratios from 0 to 1, one per node.
    """
    landing = assessment.landing
    is_enough = (assessment.idle >= landing.needed) & (landing.needed > 0)
    steps = spread_steps(batch, assessment)
    if is_packing.any():
        steps = np.where(is_packing, pack_steps(batch, assessment), steps)
    # Of all requests with the same grounds these are the same.
    memo, grounds = batch.memo, assessment.grounds
    quiet = memo.get(
        grounds and ("calm", weights, grounds), lambda: calm(batch, assessment, weights)
    )
    penalty = memo.get(
        grounds and ("penalty", grounds[2]),
        lambda: mean(batch.telemetry.penalty, landing.devices, landing.size),
    )
    place = (within(steps, 0, STEPS) + quiet) / (STEPS + 1)
    order = CHANCE_WEIGHT * assessment.chance + (1 - CHANCE_WEIGHT) * place
    order = (preference.place + order) / (preference.best + 1)
    raw = np.where(
        is_enough,
        ENOUGH_SCORE + (1 - ENOUGH_SCORE) * order,
        UNKNOWN_SCORE * prospect(assessment) + (ENOUGH_SCORE - UNKNOWN_SCORE) * order,
    )
    result: Ratios = np.round(raw * (1 - penalty) * (1 - batch.suspicion), DECIMALS)
    return result


def calm(batch: Batch, assessment: Assessment, weights: Weights = WEIGHTS) -> Ratios:
    """Return how calm the landing devices of each node are, 0 to below 1.

    Bursts are the root of the mean square of the load, mean and spread in one: unlike the spread
    alone, it never falls while a load rises.
    """
    landing, shares = assessment.landing, weights.shares
    total = sum(shares[name] * value for name, value in calm_terms(batch, assessment).items())
    return mean(np.asarray(total), landing.devices, landing.size) * BELOW_ONE


def calm_terms(batch: Batch, assessment: Assessment) -> dict[str, Ratios]:
    """Return the terms of `calm` by their names in `Weights.shares`, per device."""
    telemetry = batch.telemetry
    shares_in_use = np.minimum(batch.used / np.maximum(batch.replicas[:, None], 1), 1.0)
    bursts = np.hypot(assessment.utilization, telemetry.spread * telemetry.freshness)
    return {
        "utilization": 1.0 - assessment.utilization,
        "headroom": assessment.headroom,
        "sharing": 1.0 - shares_in_use,
        "bursts": 1.0 - np.minimum(bursts, 1.0),
        "stress": 1.0 - telemetry.stress,
    }


def prospect(assessment: Assessment) -> Ratios:
    """Return per node whether enough devices may be idle: 1 where unknown, 0 where known not.

    It rests on the worst of the devices that the pod would get if it got the best.
    """
    landing = assessment.landing
    chances = np.where(landing.devices & assessment.fits, assessment.idle_chance, 0.0)
    wanted = np.maximum(landing.needed + landing.taken, 1)
    last = np.minimum(wanted, np.maximum(landing.size, 1)) - 1
    if last.any():
        worst = np.take_along_axis(np.sort(chances, axis=1)[:, ::-1], last[:, None], axis=1)[:, 0]
    else:
        worst = chances.max(axis=1, initial=0.0)
    hope: Ratios = np.minimum(2 * worst, 1.0)
    return hope


def spread_steps(batch: Batch, assessment: Assessment) -> Ratios:
    """Return how many idle devices there are; an unknown one counts half.

    A shared pod lands where the plugin's policy puts it: further idle cards are worth nothing
    to it.
    """
    landing = assessment.landing
    hopes = np.where(landing.devices & assessment.fits, assessment.idle_chance, 0.0).sum(axis=1)
    share = landing.needed / np.maximum(landing.size, 1)
    steps: Ratios = np.where(batch.is_shared, hopes * share, np.maximum(hopes - landing.taken, 0.0))
    return steps


def pack_steps(batch: Batch, assessment: Assessment) -> Ratios:
    """Return how full each node is: the fewer devices or replicas are free, the more."""
    free = np.maximum(batch.allocatable - batch.held, assessment.landing.needed)
    free = np.where(batch.is_shared, free / np.maximum(batch.replicas, 1), free)
    steps: Ratios = STEPS - np.minimum(free, STEPS)
    return steps


def mean(values: Ratios, devices: Flags, size: Rows) -> Ratios:
    """Return per node the mean of `values` over `devices`; 0 where there are none.

    Rounded: how many rows lie side by side must make no difference.
    """
    total = np.where(devices, values, 0.0).sum(axis=1)
    result: Ratios = np.round(total / np.maximum(size, 1), DECIMALS)
    return result
