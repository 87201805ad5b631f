"""Mean and spread of each device's utilization over a window, since its tenants last changed."""

from collections.abc import Generator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from extender.core.nodes.snapshot import Ratios, Rows

_Parts = TypeVar("_Parts", npt.NDArray[np.float32], npt.NDArray[np.uint16])
"""One row per time step of the window, one column per device."""


class Windows:
    """Ring buffer with sums of utilization by device and time step.

    Totals over all steps are updated incrementally, so that `summarize` is fast. Memory is steps x
    devices x 10 bytes. Only the owner's task changes it.

    Args:
        window_seconds: length of the window.
        steps: number of time steps; old values leave one step at a time.
    """

    def __init__(self, window_seconds: float, steps: int = 40) -> None:
        self.step_seconds = window_seconds / steps
        self._steps = steps
        self._sum = np.zeros((steps, 0), dtype=np.float32)
        self._square = np.zeros((steps, 0), dtype=np.float32)
        self._count = np.zeros((steps, 0), dtype=np.uint16)
        self._total_sum = np.zeros(0)
        self._total_square = np.zeros(0)
        self._total_count = np.zeros(0, dtype=np.int64)
        self._filled: set[int] = set()
        self._step = -1
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
            self._total_sum = np.pad(self._total_sum, (0, missing))
            self._total_square = np.pad(self._total_square, (0, missing))
            self._total_count = np.pad(self._total_count, (0, missing))

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
        if step <= self._step - self._steps:
            return
        known = ~np.isnan(values)
        at_rows, good = rows[known], values[known]
        part = step % self._steps
        squared = good * good if squares is None else squares[known]
        for parts, total, amount in (
            (self._sum, self._total_sum, good),
            (self._square, self._total_square, squared),
        ):
            # Add the float32-rounded difference, so that the step's removal restores the total.
            before = parts[part, at_rows].astype(np.float64)
            parts[part, at_rows] += amount
            total[at_rows] += parts[part, at_rows] - before
        self._filled.add(part)
        self._count[part, at_rows] += 1
        self._total_count[at_rows] += 1

    def shift_back(self, seconds: float) -> None:
        """Shift all readings back in time, after the clock was set back by `seconds`."""
        steps = round(seconds / self.step_seconds)
        if self._step < 0 or not steps:
            return
        self._version += 1
        self._step -= steps
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
            self._total_sum -= self._sum[part]
            self._total_square -= self._square[part]
            self._total_count -= self._count[part]
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
        self._total_sum, self._total_square = np.zeros(devices), np.zeros(devices)
        self._total_count = np.zeros(devices, dtype=np.int64)
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
        if step <= self._step - self._steps:
            return
        part = step % self._steps
        self._total_sum -= self._sum[part]
        self._total_square -= self._square[part]
        self._sum[part] += sums
        self._square[part] += squares
        self._count[part] += counts
        self._total_sum += self._sum[part]
        self._total_square += self._square[part]
        self._total_count += counts
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
        self._total_sum[rows] = self._sum[:, rows].sum(axis=0, dtype=np.float64)
        self._total_square[rows] = self._square[:, rows].sum(axis=0, dtype=np.float64)
        self._total_count[rows] = self._count[:, rows].sum(axis=0, dtype=np.int64)

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
        self._total_sum[rows] = self._sum[:, rows].sum(axis=0, dtype=np.float64)
        self._total_square[rows] = self._square[:, rows].sum(axis=0, dtype=np.float64)

    def summarize(
        self, rows: Rows | slice = slice(None)
    ) -> tuple[Ratios, Ratios, npt.NDArray[np.int64]]:
        """Return the mean, the standard deviation and the number of readings per device.

        Args:
            rows: the devices; all by default.
        """
        count = self._total_count[rows].copy()
        divisor = np.maximum(count, 1)
        average = np.clip(self._total_sum[rows] / divisor, 0.0, 1.0)
        variance = self._total_square[rows] / divisor - average**2
        return average, np.sqrt(np.maximum(variance, 0.0)), count
