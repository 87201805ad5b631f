"""Which of the nodes that would do is best: one number from 0 to 1 for each.

docs/decision.md has the order, and what it is for:

    (band, model, room, certainty x health, fit, load)

The score is that in mixed radix, so that comparing scores compares from left to right:

    score = ((((band x 17 + model) x 17 + room) x 17 + certainty) x 320 + fit) / 4,716,480

`band` is 0 to 2, `model`, `room` and `certainty` 0 to 16, and `fit`, which has the load in it,
stays below `FIT` / 2. No digit overflows into the next; that fit fills half of its own alone keeps
nodes of other certainty as far apart as fit tells them apart, also on the wire.
"""

from typing import Final

import numpy as np

from extender.core.assessment import Assessment
from extender.core.certainty import LEAST, STEPS, Band, bands, certainty, steps_of
from extender.core.policy import Strategy, Weights
from extender.core.snapshot import Batch, Flags, Ratios, Rows

PLACES: Final = 16
"""Places in a pod's order of models: as many as it may name."""

FIT: Final = 320
"""Units between two steps of certainty."""

UNITS: Final = len(Band) * (PLACES + 1) * (STEPS + 1) * (STEPS + 1) * FIT
"""All units of a score."""

GPU: Final = 4
"""Units of fit for one whole device ..."""

MANY: Final = 16
"""... up to so many; beyond, each further one counts less, and none counts nothing."""

MOST_FIT: Final = GPU * (MANY + 4)

LOAD: Final = 0.003
"""Units of the load on whole devices: less than the least difference of fit."""

SHARED: Final = 160
"""Units of the load on shared devices, of which it is the fit."""

SHARED_CERTAINTY: Final = dict(
    zip(LEAST, (steps_of(np.array([*LEAST.values()])) / STEPS).tolist(), strict=True)
)
"""Certainty of shared devices by the band: the least of it, in whole steps."""

QUARTERS: Final = 4
"""Idle devices are counted in quarters: one that is unknown counts half."""

WEIGHTS: Final = Weights()
"""Of the terms of `calm`, unless configured."""

DECIMALS: Final = 12
"""Means are rounded: the order of additions makes no difference between equal nodes."""

KINDS: Final = {strategy: kind for kind, strategy in enumerate(Strategy)}
"""Strategies as numbers, for columns."""


def score(
    batch: Batch,
    assessment: Assessment,
    strategy: Rows,
    model: Rows,
    spare: Ratios,
    weights: Weights = WEIGHTS,
) -> tuple[Ratios, Rows]:
    """Score each node of the batch.

    More load on any landing device never raises a node's score.

    Args:
        batch: the nodes.
        assessment: what their devices are worth to the pod.
        strategy: of the pod, as `KINDS` has it; per node, or of all.
        model: place of the node's model in the pod's order, `PLACES` for the best; likewise.
        spare: devices for which the node has CPU and memory once the pod is there.
        weights: of the terms of `calm`.

    Returns:
        Ratios from 0 to 1, and the bands; one per node.
    """
    needed = assessment.landing.needed
    band = bands(assessment.band_chance, needed)
    certain = sure(batch, assessment, band) * health(batch, assessment)
    # Of all requests with the same grounds this is the same.
    quiet = batch.memo.get(
        assessment.grounds and ("calm", weights, assessment.grounds),
        lambda: calm(batch, assessment, weights),
    )
    digits = (band * (PLACES + 1) + model) * (STEPS + 1) + steps_of(assessment.room)
    digits = digits * (STEPS + 1) + steps_of(certain)
    fitting = fit(batch, assessment, strategy, spare, quiet)
    return (digits * FIT + fitting) / UNITS, band


def unknown_score(model: int) -> float:
    """Return the score of a node of which nothing is known.

    Args:
        model: its place in the pod's order of models.
    """
    digits = (Band.UNKNOWN * (PLACES + 1) + model) * (STEPS + 1) + STEPS
    return (digits * (STEPS + 1) + STEPS // 2) * FIT / UNITS


def sure(batch: Batch, assessment: Assessment, band: Rows) -> Ratios:
    """Return how certain each node is to do, before ill health takes its part, 0 to 1.

    Of shared devices the band says whether they are idle, and the load how idle: steps of the
    chance between them would stack pods on the device that is the surest by a shade. A device of
    the pod's own that is as likely idle comes before them. Broken devices are cold, for pods die
    there at once: the share that works is the chance to get none of them, and they cost a step at
    least.

    Args:
        batch: the nodes.
        assessment: what their devices are worth to the pod.
        band: of each node.
    """
    certain = certainty(assessment.chance, band, assessment.landing.needed)
    shared = np.where(
        band == Band.LIKELY, SHARED_CERTAINTY[Band.LIKELY], SHARED_CERTAINTY[Band.UNKNOWN]
    )
    at = np.flatnonzero(assessment.working < assessment.offered)
    if at.size:
        working = assessment.working[at] / assessment.offered[at]
        shared[at] = np.minimum(shared[at] * working, shared[at] - 1 / STEPS)
    return np.where(batch.is_shared, shared, certain)


def health(batch: Batch, assessment: Assessment) -> Ratios:
    """Return what ill health and early failures leave of each node's certainty, 0 to 1."""
    return (1.0 - penalty(batch, assessment)) * (1.0 - batch.suspicion)


def penalty(batch: Batch, assessment: Assessment) -> Ratios:
    """Return what the ill health of the landing devices costs each node, 0 to 1."""
    landing, memo, grounds = assessment.landing, batch.memo, assessment.grounds
    return memo.get(
        grounds and ("penalty", grounds[2]),
        lambda: mean(batch.telemetry.penalty, landing.devices, landing.size),
    )


def fit(
    batch: Batch, assessment: Assessment, strategy: Rows, spare: Ratios, quiet: Ratios
) -> Ratios:
    """Return how well the pod fits each node, in units from 0 to below `FIT`.

    Args:
        batch: the nodes.
        assessment: what their devices are worth to the pod.
        strategy: as `score` has it.
        spare: likewise.
        quiet: how calm each node is.
    """
    is_packing = strategy == KINDS[Strategy.PACK]
    left = free_after(batch, assessment)
    is_auto = strategy == KINDS[Strategy.AUTO]
    room = np.where(is_auto, np.minimum(left, spare), left)
    whole = _fullness(room)
    is_spreading = strategy == KINDS[Strategy.SPREAD]
    if is_spreading.any():
        whole = np.where(is_spreading, MOST_FIT - _fullness(idle_devices(assessment)), whole)
    units = whole + LOAD * quiet
    if not batch.is_shared.any():
        return units
    shared = SHARED * quiet
    if is_packing.any():
        replicas = np.maximum(batch.replicas, 1)
        shared = np.where(is_packing, _fullness(left / replicas) + LOAD * quiet, shared)
    return np.where(batch.is_shared, shared, units)


def _fullness(left: Ratios) -> Ratios:
    """Return the units of fit where so many devices are left; the fewer, the more."""
    beyond = (MOST_FIT - GPU * MANY) * MANY / np.maximum(left, MANY)
    return np.where(left <= MANY, MOST_FIT - GPU * left, beyond)


def free_after(batch: Batch, assessment: Assessment) -> Ratios:
    """Return how many devices or replicas of each node stay free by count beside the pod's own."""
    asked = np.where(batch.is_shared, 1, assessment.landing.needed)
    free: Ratios = np.maximum(batch.allocatable - batch.held - asked, 0).astype(np.float64)
    return free


def idle_devices(assessment: Assessment) -> Ratios:
    """Return how many idle devices there are; an unknown one counts half."""
    landing = assessment.landing
    hopes = np.where(landing.devices & assessment.fits, assessment.idle_chance, 0.0).sum(axis=1)
    counted = np.floor(hopes * QUARTERS + 0.5) / QUARTERS
    idle: Ratios = np.maximum(counted - landing.taken, 0.0)
    return idle


def calm(batch: Batch, assessment: Assessment, weights: Weights = WEIGHTS) -> Ratios:
    """Return how calm the landing devices of each node are that work, 0 to 1.

    Bursts are the root of the mean square of the load, mean and spread in one: unlike the spread
    alone, it never falls while a load rises. Of the terms of activity it leads: mean plus standard
    deviation of an hour tells the next one best, and this orders devices as that does. The number
    of tenants weighs more than both: activity that ends at 100 % hides how many want it.
    """
    shares = weights.shares
    total = sum(shares[name] * value for name, value in calm_terms(batch, assessment).items())
    return mean(np.asarray(total), assessment.works, assessment.working)


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


def mean(values: Ratios, devices: Flags, size: Rows) -> Ratios:
    """Return per node the mean of `values` over `devices`; 0 where there are none.

    Rounded: how many rows lie side by side must make no difference.
    """
    total = np.where(devices, values, 0.0).sum(axis=1)
    result: Ratios = np.round(total / np.maximum(size, 1), DECIMALS)
    return result
