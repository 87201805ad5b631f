"""Fast replacements for slow numpy functions; each decision calls them dozens of times."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

_AnyNumbers = TypeVar("_AnyNumbers", npt.NDArray[np.float64], npt.NDArray[np.intp])


def known(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Replace NaN by 0; `nan_to_num` takes ten times as long."""
    return np.where(np.isnan(values), 0.0, values)


def within(values: _AnyNumbers, low: float, high: float) -> _AnyNumbers:
    """Limit values to the bounds; NaN stays.

    `clip` takes longer than all other work on a handful of values.
    """
    bounded: _AnyNumbers = np.minimum(np.maximum(values, low), high).astype(
        values.dtype, copy=False
    )
    return bounded
