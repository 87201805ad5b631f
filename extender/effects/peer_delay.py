"""Estimate the delay of messages from a replica whose clock differs."""

import math
from typing import Final

WINDOW_SECONDS: Final = 10.0
"""NTP changes the speed of a clock by half a millisecond per second at most, so two clocks drift 20
ms apart during two windows."""


class Delay:
    """Estimates how much later a message arrived than the fastest recent one.

    The offset between the clocks is unknown. But among the messages of some seconds at least one
    had almost no delay, so a larger difference between send and receive time is delay.
    """

    def __init__(self) -> None:
        self._since = -math.inf
        self._least = self._least_before = math.inf

    def of(self, sent_at: float, now: float) -> float:
        """Return the delay of a message in seconds.

        Args:
            sent_at: send time on the sender's monotonic clock, in seconds.
            now: receive time on our monotonic clock, in seconds.
        """
        apart = now - sent_at
        age_seconds = now - self._since
        if age_seconds >= WINDOW_SECONDS:
            self._least_before = self._least if age_seconds < 2 * WINDOW_SECONDS else math.inf
            self._since, self._least = now, apart
        self._least = min(self._least, apart)
        return apart - min(self._least, self._least_before)
