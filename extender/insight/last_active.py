"""Record when each GPU was last active, with three numbers per device.

A device without readings counts as active: idleness is claimed only for observed time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column, DeviceKey
from extender.core.nodes.snapshot import Telemetry
from extender.fleet.fleet import Fleet

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 15.0
ACTIVE_FROM: Final = 0.02
"""Minimum activity of a device that counts as used. Monitoring and a display server cause about 1
%."""

_RISE: Final = 0.001
"""Increase of the window's mean that shows activity between two sweeps."""


class Idleness:
    """Records the last activity of all devices in periodic sweeps, on the event loop's thread only.

    Args:
        clock: seconds since the epoch.

    Attributes:
        began_at: time of the first sweep, seconds since the epoch; None before it.
        seen: event that is set after a sweep has found a device with readings.
        active_from: minimum activity ratio of a device that counts as used.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.began_at: float | None = None
        self.seen = asyncio.Event()
        self.active_from = ACTIVE_FROM
        self._fleet = fleet
        self._clock = clock
        self._used_at: npt.NDArray[np.float64] = np.zeros(0)
        self._is_guess: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._mean: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)

    async def run(self) -> None:
        """Sweep all devices periodically until cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # a fault here must not stop the extender
                logger.exception("internal error", extra={"verb": "idleness"})
            await asyncio.sleep(SWEEP_SECONDS)

    def look(self) -> None:
        """Update the last activity of all devices in a few vector operations."""
        now = self._clock()
        if self.began_at is None:
            self.began_at = now
        telemetry = self._fleet.snapshot().telemetry
        new = self._grow(len(telemetry.latest), now)
        is_known = telemetry.freshness > 0
        if not self.seen.is_set() and is_known.any():
            self.seen.set()
        is_active = is_known & _is_active(telemetry, self._mean)
        is_active[new:] &= telemetry.latest[new:] >= ACTIVE_FROM  # no earlier mean to compare with
        is_guess = ~is_known
        self._used_at[is_active | is_guess] = now
        self._is_guess[is_active] = False
        self._is_guess[is_guess] = True
        self._mean[:] = np.where(is_known, telemetry.utilization, 0.0)

    def learn(
        self,
        devices: Sequence[DeviceKey],
        used_at: Column,
        is_guess: npt.NDArray[np.bool_],
        until: float,
    ) -> None:
        """Import activity times from before the first sweep, for example from Prometheus.

        A device keeps its own time if it was active since then, or had no readings for a while.

        Args:
            used_at: time of each device's last activity, seconds since the epoch.
            is_guess: whether that time is only the start of the known history.
            until: end of the history; the first sweep was before it.
        """
        for key, at, guess in zip(devices, used_at.tolist(), is_guess.tolist(), strict=True):
            row = self._fleet.store.row_of(key)
            if row is None or row >= len(self._used_at) or not self._is_guess[row]:
                continue
            if at < self._used_at[row] <= until:
                self._used_at[row], self._is_guess[row] = at, guess

    def last_used(self, row: int) -> tuple[float, bool]:
        """Return the time of a device's last activity, and whether it is only a lower bound.

        Args:
            row: the device's row in the telemetry.
        """
        if row >= len(self._used_at):
            return self._clock(), True
        return float(self._used_at[row]), bool(self._is_guess[row])

    def idle_rows(self, seconds: float) -> list[int]:
        """Return the rows of the devices without activity for at least this long."""
        used_at = self._used_at[: len(self._fleet.store)]  # the arrays may have spare rows
        return np.flatnonzero(self._clock() - used_at >= seconds).tolist()

    def _grow(self, devices: int, now: float) -> int:
        """Resize the arrays; return the first row without history."""
        before = len(self._used_at)
        missing = devices - before
        if missing > 0:
            self._used_at = np.pad(self._used_at, (0, missing), constant_values=now)
            self._is_guess = np.pad(self._is_guess, (0, missing), constant_values=True)
            self._mean = np.pad(self._mean, (0, missing))
        elif missing < 0:
            self._used_at = self._used_at[:devices].copy()
            self._is_guess = self._is_guess[:devices].copy()
            self._mean = self._mean[:devices].copy()
        return min(before, devices)


def _is_active(telemetry: Telemetry, before: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Mark the devices that are active now or were since the last sweep."""
    has_risen = telemetry.utilization > before + _RISE
    is_active: npt.NDArray[np.bool_] = (telemetry.latest >= ACTIVE_FROM) | has_risen
    return is_active
