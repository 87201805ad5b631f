"""How certain it is that every device which a pod is handed is good: docs/decision.md."""

from enum import IntEnum
from typing import Final

import numpy as np

from extender.core.snapshot import Ratios, Rows

MOST: Final = 256
"""Devices that one node offers of a resource at most."""

_JUST: Final = 1e-9
"""A chance that is exactly at a bound is on one side of it, however it was summed up."""


class Band(IntEnum):
    """Whether a pod will land on good devices."""

    UNLIKELY = 0
    UNKNOWN = 1
    LIKELY = 2


LEAST: Final = {Band.UNKNOWN: 1 / 3, Band.LIKELY: 2 / 3}
"""The least chance of each device, on average, of a band."""

_LEAST_OF_ALL: Final = {
    band: each ** np.arange(MOST + 1) * (1 - _JUST) for band, each in LEAST.items()
}
"""The least chance that so many devices are all good, of a band."""

STEPS: Final = 16
"""Steps of certainty: what differs by less than half of one makes no difference."""


def _count_choices() -> Ratios:
    """Return of so many devices, the row, the number of choices of so many, the column."""
    choices = np.zeros((MOST + 1, MOST + 1))
    choices[:, 0] = 1.0
    for row in range(1, MOST + 1):
        choices[row, 1:] = choices[row - 1, 1:] + choices[row - 1, :-1]
    return choices


_CHOICES: Final = _count_choices()


def chance_of_all(chances: Ratios, offered: Rows, needed: Rows) -> Ratios:
    """Return the chance that all devices which a pod is handed are good; one row per node.

    The kubelet takes `needed` of the `offered` ones at random. The chance is the elementary
    symmetric polynomial of the devices' own chances over the number of choices.

    Args:
        chances: that each device is good, 0 where the pod cannot get it; one column per slot.
        offered: how many devices may be handed out; the others have no chance.
        needed: how many are handed out.
    """
    most = int(needed.max(initial=0))
    if most <= 1:
        together = chances.sum(axis=1)
    else:
        # Row k: over all choices of k of the devices so far, the sum of the products of chances.
        sums = np.zeros((most + 1, len(chances)))
        sums[0] = 1.0
        for slot in range(chances.shape[1]):
            sums[1:] += sums[:-1] * chances[:, slot]
        together = np.take_along_axis(sums, needed[None], axis=0)[0]
    chance = together / np.maximum(_CHOICES[offered, needed], 1.0)
    return np.where((needed > 0) & (needed <= offered), np.minimum(chance, 1.0), 0.0)


def bands(chance: Ratios, needed: Rows) -> Rows:
    """Return the band of each node, by the chance of each device on average."""
    found: Rows = (chance >= _LEAST_OF_ALL[Band.UNKNOWN][needed]).astype(np.intp)
    found += chance >= _LEAST_OF_ALL[Band.LIKELY][needed]
    return np.where(needed > 0, found, Band.UNLIKELY)


def certainty(chance: Ratios, band: Rows, needed: Rows) -> Ratios:
    """Return what ranks nodes of one band: the chance of all devices, or of each on average.

    Of several unknown devices the chance of all vanishes, and all nodes would be alike.
    """
    at = np.flatnonzero((band < Band.LIKELY) & (needed > 1) & (chance > 0))
    if not at.size:
        return chance
    result = chance.copy()
    result[at] = chance[at] ** (1 / needed[at])
    return result


def steps_of(certain: Ratios) -> Ratios:
    """Return certainty in whole steps, 0 to `STEPS`.

    Example:
        >>> steps_of(np.array([1.0, 0.98, 0.95, 0.5, 0.0])).tolist()
        [16.0, 16.0, 15.0, 8.0, 0.0]
    """
    return np.floor(certain * STEPS + 0.5 - _JUST)
