"""Remembers of each GPU when it was last seen active: three numbers a device, nothing else.

A device of which nothing is known counts as active: idleness is claimed only of what was watched.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.readings import Column, DeviceKey
from extender.core.snapshot import Telemetry
from extender.fleet.fleet import Fleet

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 15.0
ACTIVE_FROM: Final = 0.02
"""A device that is busy for this share of the time and more is used. Not 0: monitoring itself, and
a display server, show up as a percent now and then."""

RISE: Final = 0.001
"""Where the mean over the window has risen by so much, something ran between two looks."""


class Idleness:
    """Looks at every device again and again. Only the event loop's thread changes it.

    Args:
        fleet: the fleet.
        clock: seconds since the epoch.

    Attributes:
        began_at: when the watch began, seconds since the epoch; None before the first look.
        seen: is set once a look has found a device of which something is known.
        active_from: ratio of activity from which on a device is used.
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
        """Look until cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # placing pods must go on whatever is wrong here
                logger.exception("fault", extra={"verb": "idleness"})
            await asyncio.sleep(SWEEP_SECONDS)

    def look(self) -> None:
        """Look at every device once: a few vector operations."""
        now = self._clock()
        if self.began_at is None:
            self.began_at = now
        telemetry = self._fleet.snapshot().telemetry
        new = self._grow(len(telemetry.latest), now)
        is_known = telemetry.freshness > 0
        if not self.seen.is_set() and is_known.any():
            self.seen.set()
        is_active = is_known & _is_active(telemetry, self._mean)
        is_active[new:] &= telemetry.latest[new:] >= ACTIVE_FROM  # what rose was not watched yet
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
        """Take over what somebody else saw of devices before this watch began.

        Of a device that was seen active here since then, or of which nothing was known for a while,
        it says nothing new.

        Args:
            devices: the devices.
            used_at: when each was last active, seconds since the epoch.
            is_guess: whether that is only how far back it is known.
            until: the last moment that they were watched; this watch had begun by then.
        """
        for key, at, guess in zip(devices, used_at.tolist(), is_guess.tolist(), strict=True):
            row = self._fleet.store.row_of(key)
            if row is None or row >= len(self._used_at) or not self._is_guess[row]:
                continue
            if at < self._used_at[row] <= until:
                self._used_at[row], self._is_guess[row] = at, guess

    def last_used(self, row: int) -> tuple[float, bool]:
        """Return when a device was last active, and whether it is only known since then.

        Args:
            row: the device's row in the telemetry.
        """
        if row >= len(self._used_at):
            return self._clock(), True
        return float(self._used_at[row]), bool(self._is_guess[row])

    def idle_rows(self, seconds: float) -> list[int]:
        """Return the rows of the devices that were not seen active for so long."""
        used_at = self._used_at[: len(self._fleet.store)]  # there may be spare rows behind
        return np.flatnonzero(self._clock() - used_at >= seconds).tolist()

    def _grow(self, devices: int, now: float) -> int:
        """Make room for so many devices; return the first that was not watched before."""
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
    """Tell of each device whether it is active, or was since the last look."""
    has_risen = telemetry.utilization > before + RISE
    is_active: npt.NDArray[np.bool_] = (telemetry.latest >= ACTIVE_FROM) | has_risen
    return is_active
