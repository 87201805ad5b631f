"""Compute the probability that a pod gets only good devices; docs/decision.md explains it."""

from enum import IntEnum
from typing import Final

import numpy as np

from extender.core.nodes.snapshot import Ratios, Rows

_MOST: Final = 256
"""Maximum number of devices that one node offers of a resource."""

_JUST: Final = 1e-9
"""Tolerance at a bound, so that rounding cannot move a probability across it."""


class Band(IntEnum):
    """Likelihood that a pod lands on good devices."""

    UNLIKELY = 0
    UNKNOWN = 1
    LIKELY = 2


LEAST: Final = {Band.UNKNOWN: 1 / 3, Band.LIKELY: 2 / 3}
"""Lower bound of each band: mean probability per device."""

_LEAST_OF_ALL: Final = {
    band: each ** np.arange(_MOST + 1) * (1 - _JUST) for band, each in LEAST.items()
}
"""Lower bound of each band by number of devices: probability that all are good."""

STEPS: Final = 16
"""Steps of certainty: differences below half a step have no effect."""


def _count_choices() -> Ratios:
    """Return Pascal's triangle: entry (n, k) is the number of choices of k from n devices."""
    choices = np.zeros((_MOST + 1, _MOST + 1))
    choices[:, 0] = 1.0
    for row in range(1, _MOST + 1):
        choices[row, 1:] = choices[row - 1, 1:] + choices[row - 1, :-1]
    return choices


_CHOICES: Final = _count_choices()


def chance_of_all(chances: Ratios, offered: Rows, needed: Rows) -> Ratios:
    """Return per node the probability that all devices allocated to a pod are good.

    The kubelet takes `needed` of the `offered` devices at random. The probability is the elementary
    symmetric polynomial of the devices' probabilities, divided by the number of choices.

    Args:
        chances: probability that each device is good, 0 if the pod cannot get it; one column per
            slot.
        offered: number of devices that may be allocated; devices beyond `chances` count as bad.
        needed: number of devices that are allocated.
    """
    most = int(needed.max(initial=0))
    if most <= 1:
        together = chances.sum(axis=1)
    else:
        # Row k: sum over all choices of k devices so far of the product of their chances.
        sums = np.zeros((most + 1, len(chances)))
        sums[0] = 1.0
        for slot in range(chances.shape[1]):
            sums[1:] += sums[:-1] * chances[:, slot]
        together = np.take_along_axis(sums, needed[None], axis=0)[0]
    chance = together / np.maximum(_CHOICES[offered, needed], 1.0)
    return np.where((needed > 0) & (needed <= offered), np.minimum(chance, 1.0), 0.0)


def bands(chance: Ratios, needed: Rows) -> Rows:
    """Return the band of each node, by the mean probability per device."""
    found: Rows = (chance >= _LEAST_OF_ALL[Band.UNKNOWN][needed]).astype(np.intp)
    found += chance >= _LEAST_OF_ALL[Band.LIKELY][needed]
    return np.where(needed > 0, found, Band.UNLIKELY)


def certainty(chance: Ratios, band: Rows, needed: Rows) -> Ratios:
    """Return the certainty that ranks nodes within a band.

    Likely band: the probability that all devices are good. Other bands: its mean per device,
    because with several unknown devices the product vanishes and all nodes would tie.
    """
    at = np.flatnonzero((band < Band.LIKELY) & (needed > 1) & (chance > 0))
    if not at.size:
        return chance
    result = chance.copy()
    result[at] = chance[at] ** (1 / needed[at])
    return result


def steps_of(certain: Ratios) -> Ratios:
    """Round certainty to whole steps, 0 to `STEPS`.

    Example:
        >>> steps_of(np.array([1.0, 0.98, 0.95, 0.5, 0.0])).tolist()
        [16.0, 16.0, 15.0, 8.0, 0.0]
    """
    return np.floor(certain * STEPS + 0.5 - _JUST)
