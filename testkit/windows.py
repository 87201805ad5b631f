"""Mean, standard deviation and number of all readings of a window."""

import numpy as np
import numpy.typing as npt

from extender.core.devices.window import Windows

_Column = npt.NDArray[np.float64]


def summarize(windows: Windows) -> tuple[_Column, _Column, npt.NDArray[np.int64]]:
    """Return mean, standard deviation and number of readings per device."""
    mean, count = windows.mean()
    squares = windows.time_steps().squares.sum(axis=0, dtype=np.float64)
    variance = squares / np.maximum(count, 1) - mean**2
    return mean, np.sqrt(np.maximum(variance, 0.0)), count
