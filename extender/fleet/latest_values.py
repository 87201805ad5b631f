"""The last good value of each signal of each device, and when it was measured.

A source loses a signal now and then: a query that fails, a blank, a label that is gone for one
answer. That says nothing of the device. So a value stays until a newer one replaces it or it is
too old, and as each knows its own age it fades like any other: a signal that stays away never
looks fresh because other signals of its device are.

Of several sources the freshest word on a signal counts, but a source that speaks only where
something changes is believed for some seconds more: until then its silence says that all is as it
was.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extender.core.decision.signals import OTHER_ACTIVITY, UTILIZATION, plausible
from extender.core.devices.readings import GROWING, Column, Signal
from extender.core.nodes.snapshot import Flags, Rows
from extender.core.policy import Freshness

Origins = npt.NDArray[np.int8]
"""Number of a source, one for each row; 0 for none."""

ALL = slice(None)

FILLING = (Signal.MEMORY_USED, Signal.MEMORY_FREE)
"""What changes of a device's memory."""

_EVIDENCE = (*UTILIZATION, *OTHER_ACTIVITY, Signal.POWER)
"""What tells of activity, together: the busiest of it counts."""

_TOGETHER_SECONDS = 2.0
"""What two sources say of activity counts side by side only if it was measured at one time: else
what one saw a minute ago would outvote what the other sees now."""

MOST_SOURCES = 8

_SHORT_LIVED = frozenset(
    {
        *OTHER_ACTIVITY,
        Signal.POWER,
        Signal.TEMPERATURE,
        Signal.MEMORY_TEMPERATURE,
        Signal.CLOCK_EVENT_REASONS,
        *GROWING,
        Signal.ROWS_REMAPPED_LATELY,
    }
)
"""Kept as long as a value is fresh. All others are kept until the device would be forgotten:
health lasts, sizes do not change, and utilization and memory have to fade, not to vanish."""


@dataclass(frozen=True, slots=True)
class ReportedSignals:
    """Who told some signals of some devices, and when they were measured: kept as it was.

    Attributes:
        times: when, seconds since the epoch, by signal; one for each device, NaN for never.
        origins: numbers of the sources, likewise.
        names: names of the sources, by number.
    """

    times: tuple[Column, ...]
    origins: tuple[Origins, ...]
    names: Sequence[str]

    def of(self, at: int) -> tuple[str, float] | None:
        """Return who told the newest signal of a device, and when it was measured, None for nobody.

        Args:
            at: the device's place.
        """
        told = (
            (float(times[at]), int(origins[at]))
            for times, origins in zip(self.times, self.origins, strict=True)
        )
        newest, origin = max((one for one in told if not math.isnan(one[0])), default=(0.0, -1))
        return None if origin < 0 else (self.names[origin], newest)


class LatestValues:
    """The latest values by signal and row; rows as the device store gives them.

    Args:
        freshness: how long a value counts.
    """

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness
        self._capacity = 0
        self._columns: dict[Signal, Column] = {}
        self._times: dict[Signal, Column] = {}
        self._origins: dict[Signal, Origins] = {}
        self._holds = np.zeros(MOST_SOURCES)
        self._seen: set[int] = set()

    def hold(self, origin: int, seconds: float) -> None:
        """Believe a source for so long before another's word that is newer."""
        self._holds[origin] = seconds

    def adopt(self, freshness: Freshness) -> None:
        """Keep values for as long as this says from now on."""
        self._freshness = freshness

    @property
    def columns(self) -> Mapping[Signal, Column]:
        """Values by signal, one for each row; NaN where missing."""
        return self._columns

    def column(self, signal: Signal) -> Column:
        """Return the values of one signal."""
        if signal not in self._columns:
            self._columns[signal] = np.full(self._capacity, np.nan)
            self._times[signal] = np.full(self._capacity, np.nan)
            self._origins[signal] = np.zeros(self._capacity, dtype=np.int8)
        return self._columns[signal]

    def measured_at(self, *signals: Signal, rows: Rows | slice = ALL) -> Column:
        """Return when the newest of the signals was measured, seconds since the epoch.

        NaN where none has a value.
        """
        known = [self._times[signal][rows] for signal in signals if signal in self._times]
        newest = known[0] if known else np.full(self._capacity, np.nan)[rows]
        for times in known[1:]:
            newest = np.fmax(newest, times)
        return newest

    def activity_at(self, rows: Rows | slice = ALL) -> Column:
        """Return when what tells of each device's activity was measured; NaN where nothing does.

        Other evidence stands in for utilization only where there never was any: it does not make
        up for one that is gone. That it shows much load does not count more either: no reading
        may be worth more to a node for being higher.
        """
        by_utilization = self.measured_at(*UTILIZATION, rows=rows)
        by_others = self.measured_at(*OTHER_ACTIVITY, rows=rows)
        return np.where(np.isnan(by_utilization), by_others, by_utilization)

    def told_by(self, *signals: Signal, rows: Rows | slice = ALL, is_held: bool = False) -> Origins:
        """Return by which source the newest of the signals was told, 0 where by none.

        Args:
            signals: the signals.
            rows: the devices.
            is_held: a source that is believed for a while comes before another's newer word.
        """
        found = np.zeros(self._capacity, dtype=np.int8)[rows]
        newest = np.full(len(found), -np.inf)
        for signal in signals:
            if signal in self._times:
                times, origins = self._times[signal][rows], self._origins[signal][rows]
                if is_held:
                    times = times + self._holds[origins]
                is_newer = times > newest
                newest = np.where(is_newer, times, newest)
                found = np.where(is_newer, origins, found)
        return found

    def newest(self, signals: Iterable[Signal], row: int) -> tuple[int, float] | None:
        """Return by which source the newest of the signals of one row was told, and when measured.

        None where none has a value.
        """
        told = (
            (float(self._times[signal][row]), int(self._origins[signal][row]))
            for signal in signals
            if signal in self._times
        )
        at, origin = max((one for one in told if not math.isnan(one[0])), default=(math.nan, 0))
        return None if math.isnan(at) else (origin, at)

    def activity_of(self, row: int) -> tuple[int, float] | None:
        """Return by which source the activity of one row is told, and when it was measured.

        None where nobody tells it.
        """
        for signals in (UTILIZATION, OTHER_ACTIVITY):
            told = (self.newest([signal], row) for signal in signals)
            known = [one for one in told if one is not None]
            if known:
                return max(known, key=lambda one: one[1] + self._holds[one[0]])
        return None

    def word(self, signals: Iterable[Signal], rows: Rows, names: Sequence[str]) -> ReportedSignals:
        """Return who told signals of some rows, and when; `names` are the sources' by number."""
        known = [signal for signal in signals if signal in self._times]
        return ReportedSignals(
            times=tuple(self._times[signal][rows] for signal in known),
            origins=tuple(self._origins[signal][rows] for signal in known),
            names=names,
        )

    def activity_by(self, rows: Rows | slice = ALL) -> Origins:
        """Return by which source each device's activity is told, 0 where by none."""
        by_utilization = self.told_by(*UTILIZATION, rows=rows, is_held=True)
        by_others = self.told_by(*OTHER_ACTIVITY, rows=rows, is_held=True)
        return np.where(by_utilization > 0, by_utilization, by_others)

    def stands(self, origin: int, others: Origins, before: Column, measured_at: Column) -> Flags:
        """Tell where a source's word counts in place of what was last told.

        Args:
            origin: the source.
            others: by whom that was told.
            before: when that was measured, seconds since the epoch, NaN where never.
            measured_at: when the source measured.
        """
        is_older: Flags = before + self._holds[others] > measured_at + self._holds[origin]
        counts: Flags = (others == origin) | ~is_older
        return counts

    def settle_activity(self, rows: Rows) -> None:
        """Drop what sources said of activity at another time than the one that leads."""
        if len(self._seen) < 2:  # noqa: PLR2004 - with one there is nothing to settle
            return
        leader = self.activity_by(rows)
        led_at = np.full(len(rows), np.nan)
        evidence = [signal for signal in _EVIDENCE if signal in self._columns]
        for signal in evidence:
            is_leaders = self._origins[signal][rows] == leader
            led_at = np.fmax(led_at, np.where(is_leaders, self._times[signal][rows], np.nan))
        for signal in evidence:
            times = self._times[signal]
            is_others = (self._origins[signal][rows] != leader) & (leader > 0)
            apart = rows[is_others & (np.abs(times[rows] - led_at) > _TOGETHER_SECONDS)]
            self._columns[signal][apart] = times[apart] = np.nan

    def grow(self, capacity: int) -> None:
        """Make room for so many rows."""
        for signal, origins in self._origins.items():
            more_origins = np.zeros(capacity - len(origins), dtype=np.int8)
            self._origins[signal] = np.concatenate([origins, more_origins])
        for columns in (self._columns, self._times):
            for signal, column in columns.items():
                more = np.full(capacity - len(column), np.nan)
                columns[signal] = np.concatenate([column, more])
        self._capacity = capacity

    def put_back(self, seconds: float, now: float) -> None:
        """Date all values back, and none after now."""
        for times in self._times.values():
            np.minimum(times - seconds, now, out=times)

    def clear(self, rows: Rows) -> None:
        """Forget everything of some rows."""
        for columns in (self._columns, self._times):
            for column in columns.values():
                column[rows] = np.nan

    def take(
        self,
        signal: Signal,
        rows: Rows,
        values: Column | None,
        measured_at: Column,
        now: float,
        origin: int = 0,
    ) -> None:
        """Take over one signal of an answer; where it is missing, the last good value may stay.

        Args:
            signal: the signal.
            rows: the answer's devices.
            values: one for each of them, NaN where missing; None where the answer has none.
            measured_at: when each was measured, seconds since the epoch.
            now: seconds since the epoch.
            origin: number of the source.
        """
        keep_seconds = self._freshness.forget_seconds
        if signal in _SHORT_LIVED:
            keep_seconds = self._freshness.max_age_seconds
        self._seen.add(origin)
        self._merge(signal, rows, values, measured_at, now - keep_seconds, origin)

    def take_filling(
        self,
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        now: float,
        origin: int = 0,
    ) -> None:
        """Take over used and free memory, which are one statement.

        A new value of one never stands beside an old one of the other: the missing one follows
        from the device's size.
        """
        pair = {signal: answer[signal] for signal in FILLING if signal in answer}
        if len(pair) == len(FILLING):
            # A device that says it has no memory at all, neither used nor free, says nothing.
            is_blank = pair[Signal.MEMORY_USED] + pair[Signal.MEMORY_FREE] <= 0
            pair = {signal: np.where(is_blank, np.nan, told) for signal, told in pair.items()}
        self._take_pair(FILLING, rows, pair, measured_at, (now, np.inf), origin)

    def take_utilization(
        self,
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        now: float,
        origin: int = 0,
    ) -> Flags:
        """Take over utilization; return for which of the devices none was told though it was.

        Where one way to measure it is told, the other counts as long as it is fresh.
        """
        limit = now - self._freshness.max_age_seconds
        told = self._take_pair(UTILIZATION, rows, answer, measured_at, (now, limit), origin)
        return ~told & ~np.isnan(self.measured_at(*UTILIZATION)[rows])

    def _take_pair(
        self,
        pair: tuple[Signal, ...],
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        times: tuple[float, float],
        origin: int,
    ) -> Flags:
        """Take over two signals; return of which devices the answer told one.

        Args:
            pair: the signals.
            rows: the answer's devices.
            answer: what it says.
            measured_at: when.
            times: now, and since when the untold one must be to stay beside the told one.
            origin: number of the source.
        """
        now, limit = times
        before = self.measured_at(*pair, rows=rows)
        counts = self.stands(origin, self.told_by(*pair, rows=rows), before, measured_at)
        told = np.zeros(len(rows), dtype=np.bool_)
        for signal in pair:
            if signal in answer:
                told |= ~np.isnan(answer[signal])
        self._seen.add(origin)
        since = np.where(told & counts, limit, now - self._freshness.forget_seconds)
        for signal in pair:
            if signal in answer:
                # The two are one statement: where another's counts, neither is taken.
                values = np.where(counts, answer[signal], np.nan)
                self._merge(signal, rows, values, measured_at, since, origin)
            elif signal in self._columns:
                self._merge(signal, rows, None, measured_at, since, origin)
        return told

    def _merge(
        self,
        signal: Signal,
        rows: Rows,
        values: Column | None,
        measured_at: Column,
        since: float | Column,
        origin: int,
    ) -> None:
        """Put new values in; what is missing stays if it was measured since then.

        What another source said stays where that counts more.
        """
        column = self.column(signal)
        times, origins = self._times[signal], self._origins[signal]
        before, others = times[rows], origins[rows]
        if values is None:
            lost = rows[~(before >= since)]
            column[lost] = times[lost] = np.nan
            return
        is_missing = np.isnan(values)
        counts = self.stands(origin, others, before, measured_at)
        is_own = others == origin
        at = np.where(is_own, np.fmax(before, measured_at), measured_at)
        if is_missing.any() or not counts.all():
            stays = np.where(is_missing, before >= since, ~counts)
            values = np.where(stays, column[rows], values)
            gone = is_missing & ~stays
            at = np.where(gone, np.nan, np.where(stays, before, at))
            origins[rows] = np.where(stays, others, origin)
        else:
            origins[rows] = origin
        times[rows] = at
        column[rows] = values


def plausible_answer(columns: Mapping[Signal, Column]) -> dict[Signal, Column]:
    """Return the columns of an answer with what cannot be as NaN."""
    return {signal: plausible(values) for signal, values in columns.items()}
