"""Samples of devices over a period: from our own history of an hour, or from Prometheus."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from extender.core.devices.readings import DeviceKey
from extender.fleet.fleet import Fleet
from extender.insight.advice_rules import Column, Matrix
from extender.insight.last_hour import Plots, Values

OWN_SECONDS: Final = 3600
"""Length of our own history."""
_LONG_STEPS: Final = 241
"""Samples of a Prometheus query: one every six minutes for a day."""
_MOST_DEVICES: Final = 2048
"""Largest number of devices to query for one answer: 32 sequential queries for each metric."""

KEPT_SECONDS: Final = 60.0
"""Lifetime of a cached Prometheus answer; its samples are a minute or more apart."""
_MOST_KEPT: Final = 64
"""Size of the cache: each entry has 64 devices and a quarter of a megabyte."""

_BY_US: Final = "memory"
_BY_PROMETHEUS: Final = "prometheus"


_CacheKey = tuple[float, tuple[DeviceKey, ...]]
"""Cache key: length of the period, and devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples of some devices.

    Attributes:
        source: "memory" or "prometheus".
        times: sample times in ascending order, seconds since the epoch.
        activity: activity ratios, shape (times, devices), NaN if unknown.
        memory_bytes: used memory, same shape, NaN if unknown.
    """

    source: str
    times: Column
    activity: Matrix
    memory_bytes: Matrix


class MinuteHistory(Protocol):
    """Interface to our own history, `page.history.MinuteHistory`."""

    def columns(self, rows: Sequence[int]) -> tuple[Column, Matrix, Matrix]:
        """Return sample times, activity ratios and memory ratios."""


class PrometheusCache:
    """Cache of Prometheus answers, shared by all callers because it contains no pod data.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[_CacheKey, tuple[float, Samples]] = OrderedDict()

    def get(self, key: _CacheKey) -> Samples | None:
        """Return the cached answer to a query, None if it is missing or expired."""
        until, samples = self._entries.get(key, (0.0, None))
        return samples if self._clock() < until else None

    def put(self, key: _CacheKey, samples: Samples) -> None:
        """Cache an answer for `KEPT_SECONDS`."""
        self._entries[key] = (self._clock() + KEPT_SECONDS, samples)
        self._entries.move_to_end(key)
        if len(self._entries) > _MOST_KEPT:
            self._entries.popitem(last=False)


class Measured:
    """Reads the samples for one answer, with a limit on the Prometheus queries.

    Args:
        fleet: state of the fleet.
        memory: our own history.
        plots: reads from Prometheus; None to use our own history.
        seconds: length of the period.
        kept: cache of Prometheus answers.

    Attributes:
        note: reason why our own history replaced Prometheus, "" if it did not.
    """

    def __init__(
        self,
        fleet: Fleet,
        memory: MinuteHistory,
        plots: Plots | None,
        seconds: float,
        kept: PrometheusCache,
    ) -> None:
        self.note = ""
        self._fleet = fleet
        self._memory = memory
        self._plots = plots
        self._seconds = seconds
        self._cache = kept
        self._left = _MOST_DEVICES

    async def of(self, rows: Sequence[int]) -> Samples:
        """Return the samples of some devices, few enough for one query."""
        if self._plots is not None:
            samples = await self._query(self._plots, rows)
            if samples is not None:
                return samples
        times, activity, memory = self._memory.columns(rows)
        totals = self._fleet.snapshot().telemetry.memory_total_bytes[list(rows)]
        since = times[-1] - self._seconds if len(times) else 0.0
        is_in = times >= since
        return Samples(
            source=_BY_US,
            times=times[is_in],
            activity=activity[is_in],
            # Without the card's total, a memory ratio cannot be converted to bytes.
            memory_bytes=np.where(totals > 0, memory[is_in] * totals, np.nan),
        )

    async def _query(self, plots: Plots, rows: Sequence[int]) -> Samples | None:
        if self._left < len(rows):
            self.note = (
                self.note or f"only {_MOST_DEVICES} GPUs were queried in Prometheus: name a node"
            )
            return None
        self._left -= len(rows)
        infos = [self._fleet.store.info(row) for row in rows]
        keys = [DeviceKey(("", "")) if info is None else info.key for info in infos]
        key = (self._seconds, tuple(keys))
        samples = self._cache.get(key)
        if samples is not None:
            return samples
        answer = await plots.past(keys, seconds=self._seconds, steps=_LONG_STEPS)
        if answer.error:
            self.note = answer.error
            self._left = 0  # do not query a failing Prometheus again for this answer
            return None
        samples = Samples(
            source=_BY_PROMETHEUS,
            times=np.array(answer.times, dtype=np.float64),
            activity=_matrix(answer.activity, keys, len(answer.times)),
            memory_bytes=_matrix(answer.memory_bytes, keys, len(answer.times)),
        )
        self._cache.put(key, samples)
        return samples


def _matrix(values: Mapping[DeviceKey, Values], keys: Sequence[DeviceKey], steps: int) -> Matrix:
    matrix = np.full((steps, len(keys)), np.nan)
    for at, key in enumerate(keys):
        if key in values:
            matrix[:, at] = [np.nan if value is None else value for value in values[key]]
    return matrix
