"""Fast replacements for slow numpy functions; each decision calls them dozens of times."""

import numpy as np
import numpy.typing as npt


def known(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Replace NaN by 0; `nan_to_num` takes ten times as long."""
    return np.where(np.isnan(values), 0.0, values)


def as_ratios(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Limit values to 0 to 1; NaN stays.

    `clip` takes longer than all other work on a handful of values.
    """
    return np.minimum(np.maximum(values, 0.0), 1.0)
