"""The past, asked for once: fills the windows at start. Lives in the worker process."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column, DeviceKey, Signal
from extender.sources.prometheus import promql
from extender.sources.prometheus.common import PrometheusError, read_rows, table_of
from extender.sources.prometheus.dcgm import Metric, convert
from extender.sources.prometheus.dcgm_devices import device_key, number
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.rows import Row

if TYPE_CHECKING:
    from extender.settings.config import Prometheus

Matrix = npt.NDArray[np.float32]

SHORTEST_STEP_SECONDS: Final = 60.0
_MOST_STEPS: Final = 120
_STEPS_AT_ONCE: Final = 15
_PIECE: Final = 4096
_PATIENCE: Final = 6.0  # an hour of readings takes the server longer than one instant


@dataclass(frozen=True, slots=True, kw_only=True)
class PastReadings:
    """Readings of the past; axes are (device, step).

    Attributes:
        times: time of each step, seconds since the epoch, oldest first.
        devices: identity of each device.
        utilization: ratio; NaN where missing.
        xid: number of the last XID; None where nothing was answered.
    """

    times: Column
    devices: tuple[DeviceKey, ...]
    utilization: Matrix
    xid: Matrix | None


class _Grid:
    """Collects rows of several answers over the same steps and a growing set of devices."""

    def __init__(self, times: Column) -> None:
        self._times = times
        self._devices: dict[DeviceKey, int] = {}
        self._matrices: dict[Signal, Matrix] = {}

    @property
    def devices(self) -> tuple[DeviceKey, ...]:
        """The devices, in the order of the first axis."""
        return tuple(self._devices)

    def add(self, rows: Sequence[Row], metric: Metric, steps: slice) -> None:
        """Take over one answer; where there is a value already, the higher one counts."""
        start, step = self._times[steps.start], self._times[1] - self._times[0]
        width = len(self._times[steps])
        found: dict[int, list[float]] = {}
        for row in rows:
            key = device_key(row["metric"])
            if key is None:
                continue
            values = [np.nan] * width
            for at, text in row["values"]:
                position = round((at - start) / step)
                if 0 <= position < width:
                    values[position] = number(text)
            found[self._devices.setdefault(key, len(self._devices))] = values
        matrix = self.matrix(metric.signal)
        for some in _pieces(list(found)):
            values_of = np.array([found.pop(device) for device in some])
            converted = convert(values_of, metric.unit, metric.signal)
            matrix[some, steps] = np.fmax(matrix[some, steps], converted)

    def matrix(self, signal: Signal) -> Matrix:
        """Return what there is of a signal, one row for each device."""
        matrix = self._matrices.get(signal)
        missing = len(self._devices) - (0 if matrix is None else len(matrix))
        if matrix is None or missing:
            more = np.full((missing, len(self._times)), np.nan, dtype=np.float32)
            matrix = more if matrix is None else np.concatenate([matrix, more])
            self._matrices[signal] = matrix
        return matrix


def collect_past(
    client: PrometheusClient, settings: "Prometheus", *, now: float, window_seconds: float
) -> PastReadings:
    """Ask for the last `window_seconds`: activity of the graphics engine, else utilization.

    A part of the time at once: all of it would be an answer of a hundred megabytes.

    Raises:
        PrometheusError: nothing usable was answered.
    """
    step = max(SHORTEST_STEP_SECONDS, math.ceil(window_seconds / _MOST_STEPS))
    count = max(2, round(window_seconds / step) + 1)
    times = round(now) - step * np.arange(count - 1, -1, -1, dtype=np.float64)
    grid = _Grid(times)
    limit_seconds = settings.timeout_seconds * _PATIENCE
    names = set(client.metric_names(since=times[0], timeout_seconds=limit_seconds))
    selector = promql.bare_selector(settings.selector)

    def ask(signal: Signal) -> bool:
        metrics = [
            metric
            for metric in table_of(settings)
            if metric.signal is signal and metric.name in names
        ]
        for metric in metrics:
            for first in range(0, count, _STEPS_AT_ONCE):
                steps = slice(first, min(first + _STEPS_AT_ONCE, count))
                rows = client.query_range(
                    promql.metric_query(metric, selector),
                    start=times[steps][0],
                    end=times[steps][-1],
                    step_seconds=step,
                    timeout_seconds=limit_seconds,
                )
                read_rows(partial(grid.add, metric=metric, steps=steps), rows)
        return bool(metrics)

    ask(Signal.GRAPHICS_ACTIVE)
    ask(Signal.GPU_UTILIZATION)
    try:
        has_xid = ask(Signal.XID)
    except PrometheusError:
        has_xid = False  # the windows matter more than when an old error was first seen
    preferred, fallback = map(grid.matrix, (Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION))
    return PastReadings(
        times=times,
        devices=grid.devices,
        utilization=np.where(np.isnan(preferred), fallback, preferred),
        xid=grid.matrix(Signal.XID) if has_xid else None,
    )


def _pieces(devices: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(devices), _PIECE):
        yield devices[start : start + _PIECE]
