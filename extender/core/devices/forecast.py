"""Forecast the load of the next hour from the last four, to order shared devices.

The forecast is the geometric mean of the root mean squares of the last 4 hours, 2 hours, hour, and
so on to the last eighth of an hour. A root mean square joins mean and bursts, and never falls while
a reading rises. The weights are fixed, so that all replicas choose alike. `bench.picks` compares
the forecast with mean + standard deviation.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.devices.window import TimeSteps
from extender.core.nodes.snapshot import Ratios

_WINDOWS: Final = np.array([1, 2, 4, 8, 16, 32])
"""Lengths of the windows, in steps of an eighth of an hour."""

_FIRST_STEPS: Final = np.append(0, _WINDOWS[:-1])
_LENGTHS: Final = _WINDOWS[:, None].astype(np.float32)

STEPS: Final = int(_WINDOWS[-1])
HOUR: Final = 8
"""Steps of the last hour."""

_UNSEEN: Final = 0.05
"""Load before the history of a device begins, unless its readings show more: about that of a usual
tenant, so that devices with a short history are neither preferred nor avoided."""

_LEAST: Final = 0.005
"""Added to a load before its logarithm, so that differences between tiny loads do not count."""


def next_hour(steps: TimeSteps) -> Ratios:
    """Return the expected load of each device."""
    logarithms = np.log(_root_mean_squares(steps) + _LEAST).sum(axis=0, dtype=np.float64)
    return np.asarray(np.clip(np.exp(logarithms / len(_WINDOWS)) - _LEAST, 0.0, 1.0))


def next_hour_between(steps: TimeSteps) -> tuple[Ratios, Ratios]:
    """Return the interval that holds the mean of the next hour in four of five cases.

    It goes from the lowest mean to the highest root mean square of the windows, so it is narrow for
    an even load. `bench.picks` counts the cases.
    """
    means = _by_window(steps, steps.sums, _UNSEEN)
    low, high = means.min(axis=0), _root_mean_squares(steps).max(axis=0)
    return np.minimum(low, 1.0).astype(np.float64), np.minimum(high, 1.0).astype(np.float64)


def _root_mean_squares(steps: TimeSteps) -> npt.NDArray[np.float32]:
    return np.sqrt(_by_window(steps, steps.squares, _UNSEEN**2))


def _by_window(
    steps: TimeSteps, sums: npt.NDArray[np.float32], unseen: float
) -> npt.NDArray[np.float32]:
    """Return means by window; the axes are (window, device).

    Args:
        sums: sums over the readings of each step.
        unseen: value of each step before the history begins.
    """
    is_known = steps.counts > 0
    values = sums / np.maximum(steps.counts, 1)
    if not is_known.all():
        usual = values.sum(axis=0) / np.maximum(is_known.sum(axis=0, dtype=np.float32), 1)
        # Steps between two readings are gaps; those before the first reading are no history.
        has_begun = np.logical_or.accumulate(is_known[::-1], axis=0)[::-1]
        missing = np.where(has_begun, usual, np.maximum(usual, np.float32(unseen)))
        values = np.where(is_known, values, missing)
    totals = np.add.reduceat(values, _FIRST_STEPS, axis=0).cumsum(axis=0)
    return np.asarray(totals / _LENGTHS)
