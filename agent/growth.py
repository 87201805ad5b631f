"""How fast counters of errors grow, over the last minutes: how many there ever were says little."""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agent.backend import Extra, Values
from extender.core.readings import GROWTH_SECONDS, Signal

_COUNTERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        Signal.PCIE_REPLAY_RATE: (Extra.PCIE_REPLAYS,),
        Signal.NVLINK_REPLAY_RATE: (Extra.NVLINK_REPLAYS,),
        Signal.NVLINK_RECOVERY_RATE: (Extra.NVLINK_RECOVERIES,),
        Signal.NVLINK_CRC_RATE: (Extra.NVLINK_CRC_FLITS, Extra.NVLINK_CRC_DATA),
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
