"""History of every device for an hour, one byte a minute, for plots without Prometheus."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column, DeviceInfo
from extender.core.nodes.snapshot import (
    Flags,
    Ratios,
)
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet

_FULL: Final = 200
"""Byte value of a ratio of 1: the unit is half a percent."""
UNKNOWN_BYTE: Final = 255


Small = npt.NDArray[np.uint8]


_Bytes = npt.NDArray[np.uint8]

_STEP_SECONDS: Final = 60.0
STEPS: Final = 60
_PIECE: Final = 1024
"""Devices to record between two yields to the event loop: half a millisecond's work."""


class ShortMemory:
    """Activity and used memory of every device, minute by minute, for an hour.

    A row's history is cleared when another device takes the row. Memory: `2 * STEPS` bytes per
    device, 4.8 MB for 40,000.

    Args:
        fleet: state of the fleet.
        clock: seconds since the epoch.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._columns = {name: _blank(0) for name in ("activity", "memory")}
        self._times = np.full(STEPS, np.nan)
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
        self._next = (at + 1) % STEPS

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

    def of(self, rows: Sequence[int]) -> tuple[list[float], dict[str, list[list[float | None]]]]:
        """Return the times, oldest first, and each device's values at these times by column."""
        order = np.argsort(self._times)[: int((~np.isnan(self._times)).sum())]
        known = [row < len(self._infos) for row in rows]
        blank: list[float | None] = [None] * len(order)
        series = {
            name: [
                _ratios(column[order, row]) if is_known else blank
                for row, is_known in zip(rows, known, strict=True)
            ]
            for name, column in self._columns.items()
        }
        times: list[float] = self._times[order].tolist()
        return times, series

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

    async def run(self, yield_control: Callable[[], Awaitable[None]]) -> None:
        """Record every minute until cancelled."""
        while True:
            for _ in self.note_in_steps():
                await yield_control()
            await asyncio.sleep(_STEP_SECONDS)


def _blank(count: int) -> _Bytes:
    return np.full((STEPS, count), UNKNOWN_BYTE, dtype=np.uint8)


def _ratios(column: _Bytes) -> list[float | None]:
    return [None if value == UNKNOWN_BYTE else value / _FULL for value in column.tolist()]


def half_percents(ratios: Ratios, is_known: Flags) -> Small:
    """Convert ratios to bytes in half percents, `UNKNOWN_BYTE` where they are unknown."""
    halves = np.round(np.minimum(np.maximum(ratios, 0.0), 1.0) * _FULL)
    column: Small = np.where(is_known, halves, UNKNOWN_BYTE).astype(np.uint8)
    return column
