"""Detector of an idle extender: it has read the past and has no work left."""

import time
from collections.abc import Callable
from typing import Final

PAST_SECONDS: Final = 600.0
"""Upper limit of the time for reading the past."""

PAST_QUIET_SECONDS: Final = 20.0
"""After its start the extender reads the past from Prometheus in worker processes, one after the
other. If no worker ran for this long, no other starts."""


class Calm:
    """Checks whether a condition has held for a period.

    Args:
        lasts_seconds: length of the period.
        monotonic: clock in seconds.
    """

    def __init__(
        self, lasts_seconds: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._lasts_seconds = lasts_seconds
        self._monotonic = monotonic
        self._since: float | None = None

    def has_lasted(self, *, is_calm: bool) -> bool:
        """Return whether the extender is idle now and was idle in all samples of the period."""
        now = self._monotonic()
        if not is_calm:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= self._lasts_seconds
