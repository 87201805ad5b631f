"""What each process of a card did lately, made of the driver's samples."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from agent.backend import ProcessRate
from agent.report import Process

_MICROSECONDS: Final = 1_000_000


class ProcessRates:
    """The last rates of the processes of one card; those that did nothing have none."""

    def __init__(self) -> None:
        self._since = 0
        self._ratios: dict[int, float] = {}

    def since(self, now: float) -> int:
        """Return from when on samples are new, in microseconds since the epoch.

        The first time they are those of the last second: the driver would tell of all since it
        started, dead processes included.
        """
        return self._since or int((now - 1) * _MICROSECONDS)

    def update(self, lines: Sequence[ProcessRate]) -> None:
        """Take over new samples; a process without any did nothing."""
        by_pid: defaultdict[int, list[float]] = defaultdict(list)
        for line in lines:
            self._since = max(self._since, line.at_microseconds)
            by_pid[line.pid].append(min(max(line.utilization_ratio, 0.0), 1.0))
        self._ratios = {pid: sum(ratios) / len(ratios) for pid, ratios in by_pid.items()}

    def apply(self, processes: Iterable[Process]) -> tuple[Process, ...]:
        """Return the processes with their rates; rates of pids that are not among them are lies."""
        return tuple(
            process
            if process.pid not in self._ratios
            else msgspec.structs.replace(process, utilization_ratio=self._ratios[process.pid])
            for process in processes
        )
