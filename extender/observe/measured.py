"""What was measured of devices for a while: from our own memory of an hour, or from Prometheus."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from extender.core.advice import Column, Matrix
from extender.core.readings import DeviceKey
from extender.fleet.fleet import Fleet
from extender.observe.page.past import Plots, Values

OWN_SECONDS: Final = 3600
"""So long reaches our own memory."""
LONG_STEPS: Final = 241
"""Samples that Prometheus is asked for beyond that: one in six minutes of a day."""
MOST_ASKED: Final = 2048
"""Of so many devices at most, for one answer: 32 questions for each metric, one after the other."""

KEPT_SECONDS: Final = 60.0
"""So long what Prometheus said is good for whoever asks next: it samples a minute or more apart."""
MOST_KEPT: Final = 64
"""Answers about 64 devices, of a quarter of a megabyte each."""

BY_US: Final = "memory"
BY_PROMETHEUS: Final = "prometheus"


Question = tuple[float, tuple[DeviceKey, ...]]
"""How far back, and of which devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What was measured of some devices.

    Attributes:
        source: who remembered it.
        times: ascending, seconds since the epoch.
        activity: ratios; a row a time, a column a device, NaN where unknown.
        memory_bytes: in use, likewise.
    """

    source: str
    times: Column
    activity: Matrix
    memory_bytes: Matrix


class ShortMemory(Protocol):
    """Our own; see `page.history`."""

    def columns(self, rows: Sequence[int]) -> tuple[Column, Matrix, Matrix]:
        """Return times, activity and memory in use, as ratios."""


class Kept:
    """What Prometheus said lately, for everybody: it tells of devices, and not of pods.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[Question, tuple[float, Samples]] = OrderedDict()

    def get(self, question: Question) -> Samples | None:
        """Return the answer to a question, None where it is old or was never there."""
        until, samples = self._kept.get(question, (0.0, None))
        return samples if self._clock() < until else None

    def put(self, question: Question, samples: Samples) -> None:
        """Keep an answer for a while."""
        self._kept[question] = (self._clock() + KEPT_SECONDS, samples)
        self._kept.move_to_end(question)
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)


class Measured:
    """Remembers for one answer how much Prometheus was asked, and what it said.

    Args:
        fleet: the fleet.
        memory: our own.
        plots: asks Prometheus; None where our own is to do.
        seconds: how far back.
        kept: what Prometheus said lately.

    Attributes:
        note: why something is of our own memory although Prometheus was to tell, "" where nothing
            is.
    """

    def __init__(
        self, fleet: Fleet, memory: ShortMemory, plots: Plots | None, seconds: float, kept: Kept
    ) -> None:
        self.note = ""
        self._fleet = fleet
        self._memory = memory
        self._plots = plots
        self._seconds = seconds
        self._kept = kept
        self._left = MOST_ASKED

    async def of(self, rows: Sequence[int]) -> Samples:
        """Return what was measured of some devices, few enough for one question."""
        if self._plots is not None:
            told = await self._ask(self._plots, rows)
            if told is not None:
                return told
        times, activity, memory = self._memory.columns(rows)
        totals = self._fleet.snapshot().telemetry.memory_total_bytes[list(rows)]
        since = times[-1] - self._seconds if len(times) else 0.0
        is_in = times >= since
        return Samples(
            source=BY_US,
            times=times[is_in],
            activity=activity[is_in],
            # A card whose size is unknown has no memory that could be told in bytes.
            memory_bytes=np.where(totals > 0, memory[is_in] * totals, np.nan),
        )

    async def _ask(self, plots: Plots, rows: Sequence[int]) -> Samples | None:
        if self._left < len(rows):
            self.note = self.note or f"Prometheus was asked of {MOST_ASKED} GPUs only: name a node"
            return None
        self._left -= len(rows)
        infos = [self._fleet.store.info(row) for row in rows]
        keys = [DeviceKey(("", "")) if info is None else info.key for info in infos]
        question = (self._seconds, tuple(keys))
        samples = self._kept.get(question)
        if samples is not None:
            return samples
        told = await plots.past(keys, seconds=self._seconds, steps=LONG_STEPS)
        if told.error:
            self.note = told.error
            self._left = 0  # what does not answer is not asked again
            return None
        samples = Samples(
            source=BY_PROMETHEUS,
            times=np.array(told.times, dtype=np.float64),
            activity=_matrix(told.activity, keys, len(told.times)),
            memory_bytes=_matrix(told.memory_bytes, keys, len(told.times)),
        )
        self._kept.put(question, samples)
        return samples


def _matrix(told: Mapping[DeviceKey, Values], keys: Sequence[DeviceKey], steps: int) -> Matrix:
    matrix = np.full((steps, len(keys)), np.nan)
    for at, key in enumerate(keys):
        if key in told:
            matrix[:, at] = [np.nan if value is None else value for value in told[key]]
    return matrix
