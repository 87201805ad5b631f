"""Store the last valid value of each signal of each device, and its time.

A source sometimes loses a signal: a query fails, a value is blank, a label is missing once. A loss
says nothing about the device. So a value stays until a newer one replaces it or it is too old. Each
value fades by its own age: a missing signal does not look fresh because other signals of the device
are.

Of several sources, the newest value of a signal counts. A source that reports only changes is
preferred for some more seconds, because its silence means that nothing has changed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extender.core.decision.signals import OTHER_ACTIVITY, UTILIZATION
from extender.core.devices.readings import GROWING, Column, Signal
from extender.core.nodes.snapshot import Flags, Rows
from extender.core.policy import Freshness

_Origins = npt.NDArray[np.int8]
"""Number of a source for each row; 0 for none."""

ALL = slice(None)

MEMORY_SIGNALS = (Signal.MEMORY_USED, Signal.MEMORY_FREE)
"""Signals of memory that change."""

_EVIDENCE = (*UTILIZATION, *OTHER_ACTIVITY, Signal.POWER)
"""Signals of activity. The busiest of them counts."""

_TOGETHER_SECONDS = 2.0
"""Activity from two sources is combined only if it was measured within this time of each other.
Otherwise an old value of one source would outweigh the present value of the other."""

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
"""Signals that are kept only as long as they are fresh. Others are kept until the device would be
forgotten: health and sizes last, and utilization and memory must fade rather than vanish."""


@dataclass(frozen=True, slots=True)
class ReportedSignals:
    """Sources and times of some signals of some devices, as a copy.

    Attributes:
        times: times of measurement by signal, one for each device, seconds since the epoch; NaN if
            never.
        origins: numbers of the sources by signal, one for each device.
        names: names of the sources, by number.
    """

    times: tuple[Column, ...]
    origins: tuple[_Origins, ...]
    names: Sequence[str]

    def of(self, at: int) -> tuple[str, float] | None:
        """Return source and time of the newest signal of a device, None without any.

        Args:
            at: position of the device.
        """
        reported = (
            (float(times[at]), int(origins[at]))
            for times, origins in zip(self.times, self.origins, strict=True)
        )
        newest, origin = max((one for one in reported if not math.isnan(one[0])), default=(0.0, -1))
        return None if origin < 0 else (self.names[origin], newest)


class LatestValues:
    """Latest values by signal and row; the device store assigns the rows.

    Args:
        freshness: time limits of values.
    """

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness
        self._capacity = 0
        self._columns: dict[Signal, Column] = {}
        self._times: dict[Signal, Column] = {}
        self._origins: dict[Signal, _Origins] = {}
        self._preference_seconds = np.zeros(MOST_SOURCES)
        self._seen: set[int] = set()

    def prefer(self, origin: int, seconds: float) -> None:
        """Prefer a source to newer values of another one for this many seconds."""
        self._preference_seconds[origin] = seconds

    def adopt(self, freshness: Freshness) -> None:
        """Switch to other limits on the age of values."""
        self._freshness = freshness

    @property
    def columns(self) -> Mapping[Signal, Column]:
        """Values by signal, one for each row; NaN if missing."""
        return self._columns

    def column(self, signal: Signal) -> Column:
        """Return the values of one signal."""
        if signal not in self._columns:
            self._columns[signal] = np.full(self._capacity, np.nan)
            self._times[signal] = np.full(self._capacity, np.nan)
            self._origins[signal] = np.zeros(self._capacity, dtype=np.int8)
        return self._columns[signal]

    def measured_at(self, *signals: Signal, rows: Rows | slice = ALL) -> Column:
        """Return the measurement time of each device's newest value among the signals.

        In seconds since the epoch; NaN without a value.
        """
        known = [self._times[signal][rows] for signal in signals if signal in self._times]
        newest = known[0] if known else np.full(self._capacity, np.nan)[rows]
        for times in known[1:]:
            newest = np.fmax(newest, times)
        return newest

    def activity_at(self, rows: Rows | slice) -> Column:
        """Return when each device's activity was measured, seconds since the epoch; NaN if never.

        Other evidence replaces utilization only if a device never had any. It does not refresh a
        utilization that is missing now, even if it shows more load: a node must not gain from a
        higher reading.
        """
        by_utilization = self.measured_at(*UTILIZATION, rows=rows)
        by_others = self.measured_at(*OTHER_ACTIVITY, rows=rows)
        return np.where(np.isnan(by_utilization), by_others, by_utilization)

    def _newest_source(
        self, *signals: Signal, rows: Rows | slice = ALL, with_preference: bool = False
    ) -> _Origins:
        """Return the source of each device's newest value among the signals, 0 without a value.

        Args:
            with_preference: whether a preferred source counts before newer values of another one.
        """
        found = np.zeros(self._capacity, dtype=np.int8)[rows]
        newest = np.full(len(found), -np.inf)
        for signal in signals:
            if signal in self._times:
                times, origins = self._times[signal][rows], self._origins[signal][rows]
                if with_preference:
                    times = times + self._preference_seconds[origins]
                is_newer = times > newest
                newest = np.where(is_newer, times, newest)
                found = np.where(is_newer, origins, found)
        return found

    def newest(self, signals: Iterable[Signal], row: int) -> tuple[int, float] | None:
        """Return source and time of a row's newest value among the signals, None without any."""
        reported = (
            (float(self._times[signal][row]), int(self._origins[signal][row]))
            for signal in signals
            if signal in self._times
        )
        at, origin = max((one for one in reported if not math.isnan(one[0])), default=(math.nan, 0))
        return None if math.isnan(at) else (origin, at)

    def activity_of(self, row: int) -> tuple[int, float] | None:
        """Return source and time of a row's activity, None without a value."""
        for signals in (UTILIZATION, OTHER_ACTIVITY):
            reported = (self.newest([signal], row) for signal in signals)
            known = [one for one in reported if one is not None]
            if known:
                return max(known, key=lambda one: one[1] + self._preference_seconds[one[0]])
        return None

    def reported_signals(
        self, signals: Iterable[Signal], rows: Rows, names: Sequence[str]
    ) -> ReportedSignals:
        """Copy sources and times of the given signals and rows.

        Args:
            names: names of the sources, by number.
        """
        known = [signal for signal in signals if signal in self._times]
        return ReportedSignals(
            times=tuple(self._times[signal][rows] for signal in known),
            origins=tuple(self._origins[signal][rows] for signal in known),
            names=names,
        )

    def activity_by(self, rows: Rows | slice) -> _Origins:
        """Return the source of each device's activity, 0 if there is none."""
        by_utilization = self._newest_source(*UTILIZATION, rows=rows, with_preference=True)
        by_others = self._newest_source(*OTHER_ACTIVITY, rows=rows, with_preference=True)
        return np.where(by_utilization > 0, by_utilization, by_others)

    def replaces(self, origin: int, others: _Origins, before: Column, measured_at: Column) -> Flags:
        """Return per device whether a source's new value replaces the last one.

        Args:
            origin: the source.
            others: sources of the last values.
            before: times of the last values, seconds since the epoch; NaN if there was none.
            measured_at: times of the new values.
        """
        is_older: Flags = (
            before + self._preference_seconds[others]
            > measured_at + self._preference_seconds[origin]
        )
        counts: Flags = (others == origin) | ~is_older
        return counts

    def align_activity(self, rows: Rows) -> None:
        """Drop activity that was not measured at the time of the leading source's activity."""
        if len(self._seen) < 2:  # noqa: PLR2004 - with one source there is nothing to drop
            return
        leader = self.activity_by(rows)
        lead_measured_at = np.full(len(rows), np.nan)
        evidence = [signal for signal in _EVIDENCE if signal in self._columns]
        for signal in evidence:
            is_leaders = self._origins[signal][rows] == leader
            lead_measured_at = np.fmax(
                lead_measured_at, np.where(is_leaders, self._times[signal][rows], np.nan)
            )
        for signal in evidence:
            times = self._times[signal]
            is_others = (self._origins[signal][rows] != leader) & (leader > 0)
            apart = rows[is_others & (np.abs(times[rows] - lead_measured_at) > _TOGETHER_SECONDS)]
            self._columns[signal][apart] = times[apart] = np.nan

    def grow(self, capacity: int) -> None:
        """Make room for this many rows."""
        for signal, origins in self._origins.items():
            more_origins = np.zeros(capacity - len(origins), dtype=np.int8)
            self._origins[signal] = np.concatenate([origins, more_origins])
        for columns in (self._columns, self._times):
            for signal, column in columns.items():
                more = np.full(capacity - len(column), np.nan)
                columns[signal] = np.concatenate([column, more])
        self._capacity = capacity

    def shift_back(self, seconds: float, now: float) -> None:
        """Shift all times back after the clock was set back; a time in the future becomes `now`."""
        for times in self._times.values():
            np.minimum(times - seconds, now, out=times)

    def clear(self, rows: Rows) -> None:
        """Clear the values of some rows."""
        for columns in (self._columns, self._times):
            for column in columns.values():
                column[rows] = np.nan

    def apply(
        self,
        signal: Signal,
        rows: Rows,
        values: Column | None,
        measured_at: Column,
        now: float,
        origin: int = 0,
    ) -> None:
        """Apply one signal of an answer; a missing value may leave the last one.

        Args:
            rows: rows of the answer's devices.
            values: value for each device, NaN if missing; None if the answer lacks the signal.
            measured_at: times of measurement, seconds since the epoch.
            now: seconds since the epoch.
            origin: number of the source.
        """
        keep_seconds = self._freshness.forget_seconds
        if signal in _SHORT_LIVED:
            keep_seconds = self._freshness.max_age_seconds
        self._seen.add(origin)
        self._merge(signal, rows, values, measured_at, now - keep_seconds, origin)

    def apply_memory(
        self,
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        now: float,
        origin: int,
    ) -> None:
        """Apply used and free memory together.

        A new value of one is never combined with an old value of the other. The missing one follows
        from the size of the memory.
        """
        pair = {signal: answer[signal] for signal in MEMORY_SIGNALS if signal in answer}
        if len(pair) == len(MEMORY_SIGNALS):
            # Neither used nor free memory: the values are blank.
            is_blank = pair[Signal.MEMORY_USED] + pair[Signal.MEMORY_FREE] <= 0
            pair = {
                signal: np.where(is_blank, np.nan, reported) for signal, reported in pair.items()
            }
        self._apply_pair(MEMORY_SIGNALS, rows, pair, measured_at, (now, np.inf), origin)

    def apply_utilization(
        self,
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        now: float,
        origin: int,
    ) -> Flags:
        """Apply utilization; return which devices lack it in this answer but had it before.

        If one kind of utilization is reported, the other one counts as long as it is fresh.
        """
        limit = now - self._freshness.max_age_seconds
        reported = self._apply_pair(UTILIZATION, rows, answer, measured_at, (now, limit), origin)
        return ~reported & ~np.isnan(self.measured_at(*UTILIZATION)[rows])

    def _apply_pair(
        self,
        pair: tuple[Signal, ...],
        rows: Rows,
        answer: Mapping[Signal, Column],
        measured_at: Column,
        times: tuple[float, float],
        origin: int,
    ) -> Flags:
        """Apply two signals together; return for which devices the answer has one of them.

        Args:
            times: now, and the oldest time at which a missing signal may stay beside a reported
                one.
        """
        now, limit = times
        before = self.measured_at(*pair, rows=rows)
        counts = self.replaces(origin, self._newest_source(*pair, rows=rows), before, measured_at)
        reported = np.zeros(len(rows), dtype=np.bool_)
        for signal in pair:
            if signal in answer:
                reported |= ~np.isnan(answer[signal])
        self._seen.add(origin)
        since = np.where(reported & counts, limit, now - self._freshness.forget_seconds)
        for signal in pair:
            if signal in answer:
                # Both belong together: if another source counts, neither is applied.
                values = np.where(counts, answer[signal], np.nan)
                self._merge(signal, rows, values, measured_at, since, origin)
            elif signal in self._columns:
                self._merge(signal, rows, None, measured_at, since, origin)
        return reported

    def _merge(
        self,
        signal: Signal,
        rows: Rows,
        values: Column | None,
        measured_at: Column,
        since: float | Column,
        origin: int,
    ) -> None:
        """Replace values; a missing one leaves the last value if it was measured since `since`.

        Values of a preferred source also stay.
        """
        column = self.column(signal)
        times, origins = self._times[signal], self._origins[signal]
        before, others = times[rows], origins[rows]
        if values is None:
            lost = rows[~(before >= since)]
            column[lost] = times[lost] = np.nan
            return
        is_missing = np.isnan(values)
        counts = self.replaces(origin, others, before, measured_at)
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
