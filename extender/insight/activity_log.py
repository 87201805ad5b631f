"""How active every device was over the last while, from looks at all of them at once."""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.nodes.snapshot import Ratios, Rows, Telemetry

PIECES: Final = 12
"""The span is looked back to in so many pieces: a mean begins up to one of them late."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """What had been seen of each device by some time.

    Attributes:
        at: seconds since the epoch.
        busy: seconds that it was busy, of those.
        seen: seconds of which that is known.
    """

    at: float
    busy: Ratios
    seen: Ratios


class ActivityLog:
    """Sums up the activity of every device, by its row; only fresh readings count.

    Args:
        span_seconds: so far back means may begin.
    """

    def __init__(self, span_seconds: float) -> None:
        self.span_seconds = span_seconds
        self._busy: Ratios = np.zeros(0)
        self._seen: Ratios = np.zeros(0)
        self._looked_at: float | None = None
        self._marks: deque[_Mark] = deque(maxlen=PIECES + 2)

    def look(self, telemetry: Telemetry, now: float) -> None:
        """Count what devices have done since the last look as what they do now.

        Args:
            telemetry: of every device.
            now: seconds since the epoch.
        """
        rows = len(telemetry.latest)
        if rows > len(self._busy):
            self._busy, self._seen = _longer(self._busy, rows), _longer(self._seen, rows)
        piece = self.span_seconds / PIECES
        passed = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), piece)
        self._looked_at = now
        is_fresh = telemetry.freshness >= 1.0
        self._busy[:rows] += np.where(is_fresh, telemetry.latest, 0.0) * passed
        self._seen[:rows] += np.where(is_fresh, passed, 0.0)
        if not self._marks or now - self._marks[-1].at >= piece:
            self._marks.append(_Mark(now, self._busy.copy(), self._seen.copy()))

    def means(self, rows: Rows, since: float) -> Ratios:
        """Return the mean activity of devices from soon after a time on; NaN where unknown."""
        mark = next((mark for mark in self._marks if mark.at >= since), None)
        if mark is None or not len(rows):
            return np.full(len(rows), np.nan)
        seen = self._seen[rows] - _longer(mark.seen, len(self._seen))[rows]
        busy = self._busy[rows] - _longer(mark.busy, len(self._busy))[rows]
        result: Ratios = np.where(seen > 0, busy / np.maximum(seen, 1e-9), np.nan)
        return result


def _longer(column: Ratios, rows: int) -> Ratios:
    """Return a column with zeros for rows that it does not have yet."""
    return np.concatenate([column, np.zeros(rows - len(column))]) if rows > len(column) else column
