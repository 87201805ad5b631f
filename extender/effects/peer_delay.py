"""How late the messages of another replica come, whose clock is not ours."""

import math
from typing import Final

WINDOW_SECONDS: Final = 10.0
"""NTP has a clock run wrong by half a millisecond a second at most: two are 20 ms further apart
after two of these."""


class Delay:
    """How much later a message came than the quickest one of late.

    How far the clocks are apart nobody knows. But of the messages of some seconds one was hardly
    delayed, and whatever lies longer between a sender's time and ours has come late.
    """

    def __init__(self) -> None:
        self._since = -math.inf
        self._least = self._least_before = math.inf

    def of(self, sent_at: float, now: float) -> float:
        """Return by how much a message is late, in seconds.

        Args:
            sent_at: when it was sent, in seconds of the sender's monotonic clock.
            now: when it came, in seconds of ours.
        """
        apart = now - sent_at
        age_seconds = now - self._since
        if age_seconds >= WINDOW_SECONDS:
            self._least_before = self._least if age_seconds < 2 * WINDOW_SECONDS else math.inf
            self._since, self._least = now, apart
        self._least = min(self._least, apart)
        return apart - min(self._least, self._least_before)
