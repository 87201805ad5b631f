"""Knows when an extender is calm: has read the past, and has nothing left to do."""

import time
from collections.abc import Callable
from typing import Final

PAST_SECONDS: Final = 600.0
"""Reading the past takes no longer than this."""

PAST_QUIET_SECONDS: Final = 20.0
"""After its start the extender has Prometheus asked for the past by workers of their own, one after
another: so long after the first one has ended no other comes."""


class Calm:
    """Says whether it has been calm for a while, by the value of each sample.

    Args:
        lasts_seconds: how long the while is.
        monotonic: seconds.
    """

    def __init__(
        self, lasts_seconds: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._lasts_seconds = lasts_seconds
        self._monotonic = monotonic
        self._since: float | None = None

    def has_lasted(self, *, is_calm: bool) -> bool:
        """Return whether it is calm and was calm in all samples of the period."""
        now = self._monotonic()
        if not is_calm:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= self._lasts_seconds
