"""How fast counters of errors grow, over the last minutes: how many there ever were says little."""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agent import nvlink5
from agent.backend import Extra, Values
from extender.core.readings import GROWTH_SECONDS, REMAPPED_SECONDS, Signal

_COUNTERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        Signal.PCIE_REPLAY_RATE: (Extra.PCIE_REPLAYS,),
        Signal.NVLINK_REPLAY_RATE: (Extra.NVLINK_REPLAYS,),
        Signal.NVLINK_RECOVERY_RATE: (Extra.NVLINK_RECOVERIES, *nvlink5.RECOVERIES),
        Signal.NVLINK_CRC_RATE: (
            Extra.NVLINK_CRC_FLITS,
            Extra.NVLINK_CRC_DATA,
            *nvlink5.ERRORS,
        ),
    }
)
"""What each rate is of; of several counters the one that grows fastest, as for DCGM's."""

_LEAST_SECONDS: Final = 60.0
"""What was counted over less is taken for what came in a minute: one error is no storm."""


class Growth:
    """The counters of a card, as they were over the last minutes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Values]] = deque()

    def rates(self, values: Values, now: float) -> dict[str, float]:
        """Return how fast each counter grows, per second; nothing at first.

        Args:
            values: what was read, counters among it.
            now: seconds since the epoch.
        """
        names = {name for counters in _COUNTERS.values() for name in counters} & values.keys()
        if not names:
            return {}  # it could not be read: nothing to compare with later
        self._seen.append((now, {name: values[name] for name in names}))
        while len(self._seen) > 2 and self._seen[1][0] <= now - GROWTH_SECONDS:  # noqa: PLR2004 - it and one before
            self._seen.popleft()
        at, before = self._seen[0]
        if any(values[name] < before.get(name, 0.0) for name in names) or now < at:
            self._seen = deque([self._seen[-1]])  # the driver was loaded anew, or the clock set
            return {}
        if now == at:
            return {}
        seconds = max(now - at, _LEAST_SECONDS)
        return {
            rate: max((values[name] - before[name]) / seconds for name in known)
            for rate, counters in _COUNTERS.items()
            if (known := [name for name in counters if name in names and name in before])
        }


class Remapped:
    """The remapped memory rows of a card, as their number was over the last day."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, float]] = deque()
        self._since = 0.0

    def lately(self, values: Values, now: float) -> dict[str, float]:
        """Return how many rows were added in a day; nothing while that cannot be known.

        What is seen to be added counts at once. That there was nothing is known after a day.

        Args:
            values: what was read, the number of rows among it.
            now: seconds since the epoch.
        """
        rows = values.get(Signal.UNCORRECTABLE_REMAPPED_ROWS)
        if rows is None:
            return {}
        if not self._changes or rows < self._changes[-1][1] or now < self._changes[-1][0]:
            self._changes, self._since = deque([(now, rows)]), now  # the clock may have been set
        elif rows > self._changes[-1][1]:
            self._changes.append((now, rows))
        while len(self._changes) > 1 and self._changes[1][0] <= now - REMAPPED_SECONDS:
            self._changes.popleft()
        added = rows - self._changes[0][1]
        is_known = added > 0 or now - self._since >= REMAPPED_SECONDS
        return {Signal.ROWS_REMAPPED_LATELY: added} if is_known else {}
