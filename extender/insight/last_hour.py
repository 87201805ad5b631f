"""History of the devices over the last hour, from Prometheus or else from our own samples.

Our own samples are kept for an hour, one byte a minute, for plots without Prometheus.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column, DeviceInfo, DeviceKey
from extender.core.nodes.snapshot import Flags, Ratios, Snapshot
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.insight.views import Json, order_of
from extender.runtime.cooperative import YieldControl, run_in_steps

_FULL: Final = 200
"""Byte value of a ratio of 1: the unit is half a percent."""
UNKNOWN_BYTE: Final = 255

Small = npt.NDArray[np.uint8]

_STEP_SECONDS: Final = 60.0
_STEPS: Final = 60
_PIECE: Final = 1024
"""Devices to record between two yields to the event loop: half a millisecond's work."""

NOTHING: Final = DeviceInfo(node="", uuid="")

_KEPT_SECONDS: Final = 30.0
_KEPT_NODES: Final = 64

Values = list[float | None]


class ShortMemory:
    """Activity and used memory of every device, minute by minute, for an hour.

    A row's history is cleared when another device takes the row. Memory: `2 * STEPS` bytes per
    device, 4.8 MB for 40,000.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._columns = {name: _blank(0) for name in ("activity", "memory")}
        self._times = np.full(_STEPS, np.nan)
        self._infos: list[DeviceInfo | None] = []
        self._next = 0

    def note_in_steps(self) -> Steps[None]:
        """Record the current values of every device, in steps."""
        telemetry = self._fleet.snapshot().telemetry
        count = len(telemetry.utilization)
        self._grow(count)
        at = self._next
        self._times[at] = np.nan  # hide the minute until it is complete
        for column in self._columns.values():
            column[at] = UNKNOWN_BYTE
        yield
        for start in range(0, count, _PIECE):
            some = slice(start, min(start + _PIECE, count))
            for column, ratios, freshness in (
                (self._columns["activity"], telemetry.latest, telemetry.freshness),
                (self._columns["memory"], telemetry.memory_used, telemetry.memory_freshness),
            ):
                column[at, some] = half_percents(
                    ratios[some],
                    freshness[some] >= 1.0,  # a stale reading belongs to an earlier minute
                )
            self._forget_others(some, at)
            yield
        self._times[at] = self._clock()
        self._next = (at + 1) % _STEPS

    def _forget_others(self, rows: slice, at: int) -> None:
        """Clear the history of rows whose device was replaced."""
        store = self._fleet.store
        known = len(store)
        for row in range(rows.start, rows.stop):
            info, before = store.info(row) if row < known else None, self._infos[row]
            if info is before:
                continue
            self._infos[row] = info
            # A row that had no device has nothing to forget.
            if before is not None and (info is None or info.key != before.key):
                for column in self._columns.values():
                    latest = column[at, row]
                    column[:, row] = UNKNOWN_BYTE
                    column[at, row] = latest

    def _grow(self, count: int) -> None:
        missing = count - len(self._infos)
        if missing > 0:
            self._infos += [None] * missing
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, _blank(missing)], axis=1)

    def columns(self, rows: Sequence[int]) -> tuple[Column, Column, Column]:
        """Return the times, oldest first, with activity and used memory as arrays.

        The arrays have shape (times, devices) and contain ratios, NaN if unknown.
        """
        order = np.argsort(self._times)[: int((~np.isnan(self._times)).sum())]
        is_known = np.array([row < len(self._infos) for row in rows], dtype=np.bool_)
        places = np.where(is_known, np.array(rows, dtype=np.intp), 0)
        columns = []
        for column in self._columns.values():
            values = np.full((len(order), len(rows)), UNKNOWN_BYTE, dtype=np.uint8)
            if len(self._infos):
                values[:, is_known] = column[np.ix_(order, places[is_known])]
            columns.append(np.where(values == UNKNOWN_BYTE, np.nan, values / _FULL))
        activity, memory = columns
        return self._times[order], activity, memory

    async def run(self, yield_control: YieldControl) -> None:
        """Record the values of all devices every minute until cancelled."""
        while True:
            await run_in_steps(self.note_in_steps(), yield_control)
            await asyncio.sleep(_STEP_SECONDS)


def _blank(count: int) -> Small:
    return np.full((_STEPS, count), UNKNOWN_BYTE, dtype=np.uint8)


def half_percents(ratios: Ratios, is_known: Flags) -> Small:
    """Convert ratios to bytes in half percents, `UNKNOWN_BYTE` where they are unknown."""
    halves = np.round(np.minimum(np.maximum(ratios, 0.0), 1.0) * _FULL)
    column: Small = np.where(is_known, halves, UNKNOWN_BYTE).astype(np.uint8)
    return column


def rows_of(fleet: Fleet, snapshot: Snapshot, name: str) -> list[int]:
    """Return the telemetry rows of a node's devices, in the order of `node_views`."""
    rows = [
        row
        for pool in snapshot.pools.values()
        if name in pool.row_of
        for row in pool.rows[pool.row_of[name]].slots
    ]
    return sorted(rows, key=lambda row: order_of(fleet.store.info(row) or NOTHING))


class _Hour(Protocol):
    """Result of a Prometheus query; see `sources.prometheus.plots`."""

    @property
    def times(self) -> tuple[float, ...]:
        """Sample times, seconds since the epoch."""

    @property
    def activity(self) -> Mapping[DeviceKey, Values]:
        """Activity ratios by device."""

    @property
    def memory_bytes(self) -> Mapping[DeviceKey, Values]:
        """Used memory by device."""

    @property
    def error(self) -> str:
        """Reason why there is no data, "" if there is."""


class Plots(Protocol):
    """Interface to Prometheus range queries."""

    @property
    def is_configured(self) -> bool:
        """Whether a Prometheus is configured."""

    async def hour(self, devices: Sequence[DeviceKey]) -> _Hour:
        """Query the last hour of some devices."""

    async def past(self, devices: Sequence[DeviceKey], *, seconds: float, steps: int) -> _Hour:
        """Query a longer period of some devices, with a given number of samples."""


class LastHour:
    """Returns the history of a node's devices.

    Args:
        memory: our own history.
        plots: queries Prometheus; None to use our own history.
    """

    def __init__(self, fleet: Fleet, memory: ShortMemory, plots: Plots | None) -> None:
        self._fleet = fleet
        self._memory = memory
        self._plots = plots
        self._cache: OrderedDict[str, tuple[float, Json]] = OrderedDict()

    async def of(self, snapshot: Snapshot, node: str) -> Json:
        """Return the last hour of a node's devices, in the page's order."""
        rows = rows_of(self._fleet, snapshot, node)
        if self._plots is None or not self._plots.is_configured:
            return self._short(rows)
        cached = self._cache.get(node)
        if cached is not None and 0 <= snapshot.at - cached[0] < _KEPT_SECONDS:
            return cached[1]
        infos = [self._fleet.store.info(row) or NOTHING for row in rows]
        totals = snapshot.telemetry.memory_total_bytes[rows].tolist()
        hour = await self._plots.hour([info.key for info in infos])
        if not any(any(one is not None for one in line) for line in hour.activity.values()):
            return self._short(rows) | {"note": hour.error}
        blank: Values = [None] * len(hour.times)
        history: Json = {
            "source": "prometheus",
            "times": hour.times,
            "series": {
                "activity": [hour.activity.get(info.key, blank) for info in infos],
                "memory": [
                    _shares(hour.memory_bytes.get(info.key, blank), total)
                    for info, total in zip(infos, totals, strict=True)
                ],
            },
        }
        self._cache[node] = (snapshot.at, history)
        self._cache.move_to_end(node)
        if len(self._cache) > _KEPT_NODES:
            self._cache.popitem(last=False)
        return history

    def _short(self, rows: Sequence[int]) -> Json:
        times, activity, memory = self._memory.columns(rows)
        series = {"activity": _series(activity), "memory": _series(memory)}
        return {"source": "memory", "times": times.tolist(), "series": series}


def _series(ratios: Column) -> list[Values]:
    """Return the values of each device, None if unknown."""
    return [[None if math.isnan(one) else one for one in line] for line in ratios.T.tolist()]


def _shares(values: Values, total: float) -> Values:
    return [None if one is None or total <= 0 else one / total for one in values]
