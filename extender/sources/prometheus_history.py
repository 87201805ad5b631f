"""The past, asked for once: fills the windows at start. Lives in the worker process."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.config import Prometheus
from extender.core.readings import Column, DeviceKey, Signal
from extender.sources import promql
from extender.sources.dcgm import Metric, convert
from extender.sources.dcgm_devices import device_key, number
from extender.sources.prometheus_collector import table_of
from extender.sources.prometheus_http import PrometheusClient, PrometheusError, Row

Matrix = npt.NDArray[np.float64]

SHORTEST_STEP_SECONDS: Final = 60.0
_MOST_STEPS: Final = 120
_PATIENCE: Final = 6.0  # an hour of readings takes the server longer than one instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Readings of the past; axes are (step, device).

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
        self.devices: dict[DeviceKey, int] = {}

    def parse(self, rows: Iterable[Row], metric: Metric) -> dict[int, Column]:
        """Read one answer: by device, its values in base units."""
        start, step = self._times[0], self._times[1] - self._times[0]
        found: dict[int, Column] = {}
        for row in rows:
            key = device_key(row["metric"])
            if key is None:
                continue
            values = np.full(len(self._times), np.nan)
            for at, text in row["values"]:
                position = round((at - start) / step)
                if 0 <= position < len(values):
                    values[position] = number(text)
            found[self.devices.setdefault(key, len(self.devices))] = convert(
                values, metric.unit, metric.signal
            )
        return found

    def matrix(self, answers: Iterable[dict[int, Column]]) -> Matrix:
        """Put answers over each other; where several have a value, the higher one counts."""
        matrix = np.full((len(self._times), len(self.devices)), np.nan)
        for answer in answers:
            for device, values in answer.items():
                matrix[:, device] = np.fmax(matrix[:, device], values)
        return matrix


def collect_past(
    client: PrometheusClient, settings: Prometheus, *, now: float, window_seconds: float
) -> Past:
    """Ask for the last `window_seconds`: activity of the graphics engine, else utilization.

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

    def ask(signal: Signal) -> list[dict[int, Column]]:
        answers = []
        for metric in table_of(settings):
            if metric.signal is signal and metric.name in names:
                rows = client.query_range(
                    promql.metric_query(metric, selector),
                    start=times[0],
                    end=times[-1],
                    step_seconds=step,
                    timeout_seconds=limit_seconds,
                )
                answers.append(_checked(grid, rows, metric))
        return answers

    active, utilization = ask(Signal.GRAPHICS_ACTIVE), ask(Signal.GPU_UTILIZATION)
    try:
        xid: list[dict[int, Column]] | None = ask(Signal.XID)
    except PrometheusError:
        xid = None  # the windows matter more than when an old error was first seen
    preferred, fallback = grid.matrix(active), grid.matrix(utilization)
    return Past(
        times=times,
        devices=tuple(grid.devices),
        utilization=np.where(np.isnan(preferred), fallback, preferred),
        xid=grid.matrix(xid) if xid else None,
    )


def _checked(grid: _Grid, rows: Sequence[Row], metric: Metric) -> dict[int, Column]:
    try:
        return grid.parse(rows, metric)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise PrometheusError(
            f"cannot read the past from Prometheus: {type(error).__name__} {error}: is "
            "prometheus.url a Prometheus?"
        ) from error
