"""The last good value of each signal of each device, and when it was measured.

A source loses a signal now and then: a query that fails, a blank, a label that is gone for one
answer. That says nothing of the device. So a value stays until a newer one replaces it or it is
too old, and as each knows its own age it fades like any other: a signal that stays away never
looks fresh because other signals of its device are.
"""

from collections.abc import Mapping

import numpy as np

from extender.core.policy import Freshness
from extender.core.readings import Column, Signal
from extender.core.signals import OTHER_ACTIVITY, UTILIZATION, plausible
from extender.core.snapshot import Flags, Rows

ALL = slice(None)

FILLING = (Signal.MEMORY_USED, Signal.MEMORY_FREE)
"""What changes of a device's memory."""

_SHORT_LIVED = frozenset(
    {
        *OTHER_ACTIVITY,
        Signal.POWER,
        Signal.TEMPERATURE,
        Signal.MEMORY_TEMPERATURE,
        Signal.CLOCK_EVENT_REASONS,
    }
)
"""Kept as long as a value is fresh. All others are kept until the device would be forgotten:
health lasts, sizes do not change, and utilization and memory have to fade, not to vanish."""


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

    def grow(self, capacity: int) -> None:
        """Make room for so many rows."""
        for columns in (self._columns, self._times):
            for signal, column in columns.items():
                more = np.full(capacity - len(column), np.nan)
                columns[signal] = np.concatenate([column, more])
        self._capacity = capacity

    def clear(self, rows: Rows) -> None:
        """Forget everything of some rows."""
        for columns in (self._columns, self._times):
            for column in columns.values():
                column[rows] = np.nan

    def take(
        self, signal: Signal, rows: Rows, values: Column | None, measured_at: Column, now: float
    ) -> None:
        """Take over one signal of an answer; where it is missing, the last good value may stay.

        Args:
            signal: the signal.
            rows: the answer's devices.
            values: one for each of them, NaN where missing; None where the answer has none.
            measured_at: when each was measured, seconds since the epoch.
            now: seconds since the epoch.
        """
        keep_seconds = self._freshness.forget_seconds
        if signal in _SHORT_LIVED:
            keep_seconds = self._freshness.max_age_seconds
        self._merge(signal, rows, values, measured_at, now - keep_seconds)

    def take_filling(
        self,
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        now: float,
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
        self._take_pair(FILLING, rows, pair, measured_at, (now, np.inf))

    def take_utilization(
        self,
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        now: float,
    ) -> Flags:
        """Take over utilization; return for which of the devices none was told though it was.

        Where one way to measure it is told, the other counts as long as it is fresh.
        """
        limit = now - self._freshness.max_age_seconds
        told = self._take_pair(UTILIZATION, rows, answer, measured_at, (now, limit))
        return ~told & ~np.isnan(self.measured_at(*UTILIZATION)[rows])

    def _take_pair(
        self,
        pair: tuple[Signal, ...],
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        times: tuple[float, float],
    ) -> Flags:
        """Take over two signals; return of which devices the answer told one.

        Args:
            pair: the signals.
            rows: the answer's devices.
            answer: what it says.
            measured_at: when.
            times: now, and since when the untold one must be to stay beside the told one.
        """
        now, limit = times
        told = np.zeros(len(rows), dtype=np.bool_)
        for signal in pair:
            if signal in answer:
                told |= ~np.isnan(answer[signal])
        since = np.where(told, limit, now - self._freshness.forget_seconds)
        for signal in pair:
            if signal in answer or signal in self._columns:
                self._merge(signal, rows, answer.get(signal), measured_at, since)
        return told

    def _merge(
        self,
        signal: Signal,
        rows: Rows,
        values: Column | None,
        measured_at: Column,
        since: float | Column,
    ) -> None:
        """Put new values in; what is missing stays if it was measured since then."""
        column = self.column(signal)
        times = self._times[signal]
        before = times[rows]
        if values is None:
            lost = rows[~(before >= since)]
            column[lost] = times[lost] = np.nan
            return
        is_missing = np.isnan(values)
        if is_missing.any():
            stays = is_missing & (before >= since)
            values = np.where(stays, column[rows], values)
            gone = is_missing & ~stays
            times[rows] = np.where(
                gone, np.nan, np.where(stays, before, np.fmax(before, measured_at))
            )
        else:
            times[rows] = np.fmax(before, measured_at)
        column[rows] = values


def plausible_answer(columns: Mapping[Signal, Column]) -> dict[Signal, Column]:
    """Return the columns of an answer with what cannot be as NaN."""
    return {signal: plausible(values) for signal, values in columns.items()}
