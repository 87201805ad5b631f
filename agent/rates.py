"""Rates from the driver's cumulative data: error counters, remapped rows, process utilization.

Totals since the driver was loaded say little about a GPU's present health; growth does.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from agent import nvlink5
from agent.backend import Extra, ProcessRate, Values
from agent.report import Process
from extender.core.devices.readings import GROWTH_SECONDS, REMAPPED_SECONDS, Signal

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
"""Counters of each rate; of several counters the fastest-growing one counts, as for DCGM."""

_MIN_SECONDS: Final = 60.0
"""Minimum interval of a rate: one error within a second must not look like many per minute."""
_MICROSECONDS: Final = 1_000_000


class CounterRates:
    """Growth rates of one card's error counters over the last minutes."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, Values]] = deque()

    def rates(self, values: Values, now: float) -> dict[str, float]:
        """Add a reading and return the growth of each counter per second.

        Returns {} until there are two readings.

        Args:
            values: values read, including counters.
            now: seconds since the epoch.
        """
        names = {name for counters in _COUNTERS.values() for name in counters} & values.keys()
        if not names:
            return {}  # the counters could not be read
        self._history.append((now, {name: values[name] for name in names}))
        while len(self._history) > 2 and self._history[1][0] <= now - GROWTH_SECONDS:  # noqa: PLR2004 - it and one before
            self._history.popleft()
        at, before = self._history[0]
        if any(values[name] < before.get(name, 0.0) for name in names) or now < at:
            self._history = deque([self._history[-1]])  # driver reloaded, or clock set back
            return {}
        if now == at:
            return {}
        seconds = max(now - at, _MIN_SECONDS)
        return {
            rate: max((values[name] - before[name]) / seconds for name in known)
            for rate, counters in _COUNTERS.items()
            if (known := [name for name in counters if name in names and name in before])
        }


class RemappedRows:
    """Number of rows of one card that were remapped within the last day."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, float]] = deque()
        self._since = 0.0

    def recent(self, values: Values, now: float) -> dict[str, float]:
        """Add a reading and return the rows remapped within a day; {} while the number is unknown.

        An increase counts at once. Zero is reported only after a day of readings.

        Args:
            values: values read, including the number of remapped rows.
            now: seconds since the epoch.
        """
        rows = values.get(Signal.UNCORRECTABLE_REMAPPED_ROWS)
        if rows is None:
            return {}
        if not self._changes or rows < self._changes[-1][1] or now < self._changes[-1][0]:
            # Start over: first reading, row count reset, or clock set back.
            self._changes, self._since = deque([(now, rows)]), now
        elif rows > self._changes[-1][1]:
            self._changes.append((now, rows))
        while len(self._changes) > 1 and self._changes[1][0] <= now - REMAPPED_SECONDS:
            self._changes.popleft()
        added = rows - self._changes[0][1]
        is_known = added > 0 or now - self._since >= REMAPPED_SECONDS
        return {Signal.ROWS_REMAPPED_LATELY: added} if is_known else {}


class ProcessRates:
    """Latest utilization of the processes of one card; idle processes have no entry."""

    def __init__(self) -> None:
        self._since = 0
        self._ratios: dict[int, float] = {}

    def since(self, now: float) -> int:
        """Return the time after which samples are new, in microseconds since the epoch.

        The first call returns the last second. From time 0 the driver would return every sample
        since it was loaded, including those of ended processes.
        """
        return self._since or int((now - 1) * _MICROSECONDS)

    def update(self, lines: Sequence[ProcessRate]) -> None:
        """Replace the rates by those of new samples; a process without samples was idle."""
        by_pid: defaultdict[int, list[float]] = defaultdict(list)
        for line in lines:
            self._since = max(self._since, line.at_microseconds)
            by_pid[line.pid].append(min(max(line.utilization_ratio, 0.0), 1.0))
        self._ratios = {pid: sum(ratios) / len(ratios) for pid, ratios in by_pid.items()}

    def apply(self, processes: Iterable[Process]) -> tuple[Process, ...]:
        """Return the processes with their rates.

        Rates of other pids are driver errors, and are ignored.
        """
        return tuple(
            process
            if process.pid not in self._ratios
            else msgspec.structs.replace(process, utilization_ratio=self._ratios[process.pid])
            for process in processes
        )
