"""Utilization of each device over a window, by time step, since its tenants last changed."""

from collections.abc import Generator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from extender.core.nodes.snapshot import Ratios, Rows

_Parts = TypeVar("_Parts", npt.NDArray[np.float32], npt.NDArray[np.uint16])
"""One row per time step of the window, one column per device."""


class TimeSteps(NamedTuple):
    """Readings of devices by time step, newest first; the axes are (step, device).

    Attributes:
        sums: sum of the ratios.
        squares: sum of their squares.
        counts: number of readings.
        elapsed: share of the newest step that has passed.
    """

    sums: npt.NDArray[np.float32]
    squares: npt.NDArray[np.float32]
    counts: npt.NDArray[np.uint16]
    elapsed: float

    def mean(self, steps: int) -> tuple[Ratios, npt.NDArray[np.float64]]:
        """Return the mean of the last steps and its number of readings, per device.

        The oldest step counts in part, less and less as the newest one fills: with whole steps
        the mean of a device at rest would rise when a step begins.
        """
        rest = 1.0 - self.elapsed
        total, count = (
            of[:steps].sum(axis=0, dtype=np.float64) + rest * of[steps]
            for of in (self.sums, self.counts)
        )
        return np.minimum(total / np.maximum(count, 1e-9), 1.0), count


class Windows:
    """Ring buffer with sums of utilization by device and time step.

    Memory is steps x devices x 10 bytes. Only the owner's task changes it.

    Args:
        window_seconds: length of the window.
        steps: number of time steps; old values leave one step at a time.
    """

    def __init__(self, window_seconds: float, steps: int) -> None:
        self.step_seconds = window_seconds / steps
        self._steps = steps
        self._ages = np.arange(steps)
        self._sum = np.zeros((steps, 0), dtype=np.float32)
        self._square = np.zeros((steps, 0), dtype=np.float32)
        self._count = np.zeros((steps, 0), dtype=np.uint16)
        self._filled: set[int] = set()
        self._step = -1
        self._newest = 0.0
        self._version = 0
        self._resets: list[tuple[Rows, float | None]] | None = None

    def grow(self, devices: int) -> None:
        """Extend the arrays to at least `devices` columns."""
        missing = devices - self._sum.shape[1]
        if missing > 0:
            self._version += 1
            self._sum = self._grown(self._sum, devices)
            self._square = self._grown(self._square, devices)
            self._count = self._grown(self._count, devices)

    def _grown(self, parts: _Parts, devices: int) -> _Parts:
        """Return wider arrays; only steps with data are copied."""
        grown = np.zeros((self._steps, devices), dtype=parts.dtype)
        for part in self._filled:
            grown[part, : parts.shape[1]] = parts[part]
        return grown

    def add(
        self,
        at: float,
        rows: Rows,
        values: npt.NDArray[np.float64],
        squares: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Add one reading of each device in `rows`; NaN is skipped.

        Args:
            at: time of the reading, seconds since the epoch; ignored if older than the window.
            rows: device rows, each once.
            values: ratios, in the order of `rows`.
            squares: means of the squares, if the values are means of several readings.
        """
        step = int(at // self.step_seconds)
        self._version += 1
        self._advance(step)
        self._newest = max(self._newest, at)
        if step <= self._step - self._steps:
            return
        known = ~np.isnan(values)
        at_rows, good = rows[known], values[known]
        part = step % self._steps
        self._sum[part, at_rows] += good
        self._square[part, at_rows] += good * good if squares is None else squares[known]
        self._filled.add(part)
        self._count[part, at_rows] += 1

    def shift_back(self, seconds: float) -> None:
        """Shift all readings back in time, after the clock was set back by `seconds`."""
        steps = round(seconds / self.step_seconds)
        if self._step < 0 or not steps:
            return
        self._version += 1
        self._step -= steps
        self._newest -= steps * self.step_seconds
        self._filled = {(part - steps) % self._steps for part in self._filled}
        for parts in (self._sum, self._square, self._count):
            parts[:] = np.roll(parts, -steps, axis=0)

    def _advance(self, step: int) -> None:
        """Clear the steps that have left the window."""
        if self._step < 0:
            self._step = step
        for passed in range(self._step + 1, min(step, self._step + self._steps) + 1):
            part = passed % self._steps
            if part not in self._filled:
                continue
            self._filled.discard(part)
            self._sum[part] = self._square[part] = 0.0
            self._count[part] = 0
        self._step = max(self._step, step)

    def resize_in_steps(self, window_seconds: float) -> Generator[None, None, None]:
        """Change the window's length in steps; readings within the new length stay.

        `reset` may be called between steps. If readings arrive meanwhile, the work starts over.
        Each old step is moved as a whole by its middle, because readings have no time of their own.
        """
        version = -1
        fresh = self
        while version != self._version:
            version, self._resets = self._version, []
            fresh = Windows(window_seconds, self._steps)
            yield from fresh.grow_in_steps(self._sum.shape[1])
            for since, part in sorted(((self._step - at) % self._steps, at) for at in self._filled):
                middle = (self._step - since + 0.5) * self.step_seconds
                if version == self._version:
                    fresh.merge(middle, self._sum[part], self._square[part], self._count[part])
                    yield
        for rows, until in self._resets or ():
            fresh.reset(rows, until)
        vars(self).update(vars(fresh))

    def grow_in_steps(self, devices: int) -> Generator[None, None, None]:
        """Allocate `devices` columns in an empty window, one time step per step of work."""
        shape = (self._steps, devices)
        self._sum, self._square = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._count = np.empty(shape, np.uint16)
        for part in range(self._steps):
            self._sum[part] = self._square[part] = 0.0
            self._count[part] = 0
            yield

    def merge(
        self,
        at: float,
        sums: npt.NDArray[np.float32],
        squares: npt.NDArray[np.float32],
        counts: npt.NDArray[np.uint16],
    ) -> None:
        """Add the sums of many readings of each device, taken at about the same time.

        Args:
            at: time of the readings, seconds since the epoch; ignored if older than the window.
            sums: sum of the ratios per device.
            squares: sum of their squares per device.
            counts: number of readings per device.
        """
        step = int(at // self.step_seconds)
        self._advance(step)
        self._newest = max(self._newest, at)
        if step <= self._step - self._steps:
            return
        part = step % self._steps
        self._sum[part] += sums
        self._square[part] += squares
        self._count[part] += counts
        self._filled.add(part)

    def reset(self, rows: Rows, until: float | None = None) -> None:
        """Clear the history of devices whose tenants have changed.

        Args:
            until: time of the change, seconds since the epoch; later time steps stay. None clears
                all.
        """
        if self._resets is not None:
            self._resets.append((rows, until))
        passed = (self._step - np.arange(self._steps)) % self._steps  # age of each part in steps
        begins = (self._step - passed) * self.step_seconds
        is_old = begins <= (np.inf if until is None else until)
        old = np.array([part for part in self._filled if is_old[part]], dtype=np.intp)
        if not old.size:
            return
        cells = np.ix_(old, rows)
        self._sum[cells] = self._square[cells] = 0.0
        self._count[cells] = 0

    def scale(self, rows: Rows, share: Ratios | float) -> None:
        """Multiply the stored readings of devices by a factor.

        Args:
            share: factor per device, or one for all.
        """
        self._version += 1
        filled = np.array(sorted(self._filled), dtype=np.intp)
        cells = np.ix_(filled, rows)
        self._sum[cells] *= share
        self._square[cells] *= np.square(share)

    def time_steps(self, rows: Rows | slice = slice(None)) -> TimeSteps:
        """Return the readings of devices by time step; all devices by default."""
        order = (self._step - self._ages) % self._steps
        return TimeSteps(
            sums=_of(self._sum, rows).take(order, 0, mode="clip"),
            squares=_of(self._square, rows).take(order, 0, mode="clip"),
            counts=_of(self._count, rows).take(order, 0, mode="clip"),
            elapsed=min(max(self._newest / self.step_seconds - self._step, 0.0), 1.0),
        )

    def mean(self, rows: Rows | slice = slice(None)) -> tuple[Ratios, npt.NDArray[np.int64]]:
        """Return the mean of all readings and their number, per device; all devices by default."""
        count = _of(self._count, rows).sum(axis=0, dtype=np.int64)
        total = _of(self._sum, rows).sum(axis=0, dtype=np.float64)
        return np.minimum(total / np.maximum(count, 1), 1.0), count


def _of(parts: _Parts, rows: Rows | slice) -> _Parts:
    """Return the columns of some devices; `clip` is much faster than the check of each index."""
    return parts[:, rows] if isinstance(rows, slice) else parts.take(rows, 1, mode="clip")
