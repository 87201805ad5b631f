"""The past, asked for once: fills the windows at start. Lives in the worker process."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column, DeviceKey, Signal
from extender.core.nodes.snapshot import Flags
from extender.sources.prometheus import promql
from extender.sources.prometheus.common import PrometheusError, read_rows, table_of
from extender.sources.prometheus.dcgm import Metric, convert
from extender.sources.prometheus.dcgm_devices import device_key, number
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.rows import Row

# When devices were last used, asked of Prometheus once. Lives in the worker process.
#
# A step tells whether a device was active at any scrape in it: what lies between two scrapes nobody
# saw, and a gap shorter than a step does not show.

if TYPE_CHECKING:
    from extender.settings.config import Prometheus

STEP_SECONDS: Final = 900.0
STEPS_AT_ONCE: Final = 8
"""Two hours in one answer: ten megabytes for forty thousand devices."""
SIGNALS: Final = (Signal.GRAPHICS_ACTIVE, Signal.GPU_UTILIZATION)
"""Each of them tells of activity; the higher one counts."""
PATIENCE: Final = 6.0  # two hours of readings take the server longer than one instant


@dataclass(frozen=True, slots=True, kw_only=True)
class LastUse:
    """When devices were last used that were not used lately.

    Attributes:
        devices: those of which nothing was seen in the latest step.
        used_at: end of the last step in which each was active, or may have been.
        is_guess: whether nobody knows that it was: nothing is known of that step, or nobody was
            asked about it.
    """

    devices: tuple[DeviceKey, ...]
    used_at: Column
    is_guess: Flags


def collect_use(
    client: PrometheusClient,
    settings: "Prometheus",
    *,
    now: float,
    seconds: float,
    active_from: float,
) -> LastUse:
    """Look back step by step, as long as there is a device that was not used since.

    Args:
        client: asks.
        settings: of Prometheus.
        now: seconds since the epoch.
        seconds: how far back at most.
        active_from: ratio of activity from which on a device is used.

    Raises:
        PrometheusError: nothing usable was answered.
    """
    limit_seconds = settings.timeout_seconds * PATIENCE
    names = set(client.metric_names(since=now - seconds, timeout_seconds=limit_seconds))
    metrics = [one for one in table_of(settings) if one.signal in SIGNALS and one.name in names]
    selector = promql.bare_selector(settings.selector)
    steps = max(1, round(seconds / STEP_SECONDS))
    unused: list[DeviceKey] | None = None
    found: dict[DeviceKey, tuple[float, bool]] = {}
    for first in range(0, steps, STEPS_AT_ONCE):
        # Newest first: most devices that are used at all were used a moment ago.
        times: Column = now - STEP_SECONDS * np.arange(
            first, min(first + STEPS_AT_ONCE, steps), dtype=np.float64
        )
        most: dict[DeviceKey, Column] = {} if unused is None else _unknown(unused, len(times))
        for metric in metrics:
            rows = client.query_range(
                promql.most_query(metric, selector, STEP_SECONDS),
                start=times[-1],
                end=times[0],
                step_seconds=STEP_SECONDS,
                timeout_seconds=limit_seconds,
            )
            take = partial(_take, metric=metric, times=times, most=most, is_first=unused is None)
            read_rows(take, rows)
        unused = []
        for key, values in most.items():
            ended = np.flatnonzero(~(values < active_from))
            if len(ended):
                at = int(ended[0])
                is_unknown = bool(np.isnan(values[at]))
                # Of the step after an unknown one, too, it may be the end alone that is known.
                found[key] = (float(times[at]) + STEP_SECONDS * is_unknown, is_unknown)
            else:
                unused.append(key)
        if not unused:
            break
    oldest = now - STEP_SECONDS * steps
    found |= dict.fromkeys(unused or (), (oldest, True))
    told = {key: use for key, use in found.items() if use[0] < now}
    return LastUse(
        devices=tuple(told),
        used_at=np.array([at for at, _ in told.values()], dtype=np.float64),
        is_guess=np.array([is_guess for _, is_guess in told.values()], dtype=np.bool_),
    )


def _unknown(devices: Iterable[DeviceKey], width: int) -> dict[DeviceKey, Column]:
    return {key: np.full(width, np.nan) for key in devices}


def _take(
    rows: Sequence[Row],
    *,
    metric: Metric,
    times: Column,
    most: dict[DeviceKey, Column],
    is_first: bool,
) -> None:
    """Take over the answer for one metric, of the devices that are asked about.

    Args:
        rows: the answer.
        metric: what was asked for.
        times: ends of the steps, the newest first.
        most: the highest activity by device and step.
        is_first: every device is asked about.
    """
    for row in rows:
        key = device_key(row["metric"])
        if key is not None and (is_first or key in most):
            told = convert(_values(row, times), metric.unit, metric.signal)
            most[key] = np.fmax(most[key], told) if key in most else told


def _values(row: Row, times: Column) -> Column:
    values = np.full(len(times), np.nan)
    for at, text in row["values"]:
        place = round((times[0] - at) / STEP_SECONDS)
        if 0 <= place < len(times):
            values[place] = number(text)
    return values


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
