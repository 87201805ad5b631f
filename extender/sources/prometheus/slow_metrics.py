"""Columns that hardly ever change: asked for in full now and then, and for less in between.

Sizes stay as they are, and of nearly all devices the faults that are counted are 0: together a
third of what a round would read. Lives in the worker process.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column
from extender.sources.prometheus.dcgm import FAULT_SIGNALS, SIZE_SIGNALS, Metric
from extender.sources.prometheus.promql import XID_COUNTS

FULL_SECONDS: Final = 45.0
"""Time between two answers of all devices: another size is noticed within a minute."""


class QueryColumn(Protocol):
    """Asks for a metric, and returns its column in base units; NaN for devices without a value."""

    def __call__(self, metric: Metric, *, is_above_zero: bool) -> Column:
        """Ask; if so, only for devices of which the metric is above 0."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What is known of a metric.

    Attributes:
        full_at: when it was asked for in full, seconds since the epoch.
        column: its values as they were last told.
        is_raised: per device, whether it was above 0 when it was last told.
    """

    full_at: float
    column: Column
    is_raised: npt.NDArray[np.bool_]


class SlowColumns:
    """The latest columns of such metrics. Several threads may ask, each for other metrics.

    Args:
        ask: asks the server.
    """

    def __init__(self, ask: QueryColumn) -> None:
        self._ask = ask
        self._known: dict[str, _Known] = {}

    def forget(self) -> None:
        """Forget them all: there are other devices now."""
        self._known.clear()

    def column(self, metric: Metric, now: float) -> Column:
        """Return a metric of all devices, whether it is steady or not.

        A fault shows in the round in which it comes, and goes in the one in which it has gone.

        Args:
            metric: the metric.
            now: seconds since the epoch.

        Raises:
            PrometheusError: no usable answer came.
        """
        is_size = metric.signal in SIZE_SIGNALS
        is_fault = metric.signal in FAULT_SIGNALS and metric.name != XID_COUNTS
        if not (is_size or is_fault):
            return self._ask(metric, is_above_zero=False)
        known = self._known.get(metric.name)
        if known is not None and now - known.full_at < FULL_SECONDS:
            again = known if is_size else self._with_faults(metric, known)
            if again is not None:
                self._known[metric.name] = again
                return again.column
        column = self._ask(metric, is_above_zero=False)
        is_untold = np.isnan(column)
        is_raised = column > 0
        if known is not None:
            is_raised |= is_untold & known.is_raised
        # What a device lacks may be there in the next round: a size, or that its fault has gone.
        is_complete = not (is_untold if is_size else is_untold & is_raised).any()
        self._known[metric.name] = _Known(now if is_complete else -np.inf, column, is_raised)
        return column

    def _with_faults(self, metric: Metric, known: _Known) -> _Known | None:
        """Return what is known, with the faults of now; None where one is not told any more.

        It may have gone, and the server may have lost sight of it: the full answer tells that.
        """
        faults = self._ask(metric, is_above_zero=True)
        is_untold = np.isnan(faults)
        if (known.is_raised & is_untold).any():
            return None
        return _Known(known.full_at, np.where(is_untold, known.column, faults), ~is_untold)
