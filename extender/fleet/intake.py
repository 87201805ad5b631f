"""Apply a source's answer to the device columns, in cooperative steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from extender.core.decision.signals import (
    UTILIZATION,
    Activity,
    activity,
    learn_rest,
    memory,
    plausible,
    shows_use,
    step_streak,
)
from extender.core.devices.readings import Column, Own, Readings, Signal
from extender.core.nodes.snapshot import Flags, Rows
from extender.core.policy import Policy
from extender.core.steps import Steps, finish
from extender.fleet.columns import DeviceColumns
from extender.fleet.latest_values import MEMORY_SIGNALS, MOST_SOURCES
from extender.fleet.registry import PlacedDevices


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """Summary of a source's last answer, as `SourceSummary` describes it."""

    at: float
    devices: int
    unmatched_series: int
    unmatched_example: str
    disagreements: int


_PIECE_VALUES = 8192
"""Values applied per cooperative step: less than a millisecond."""

_PIECE_DEVICES = 4096
"""Devices applied completely per cooperative step: two or three milliseconds."""

_MEAN_SPAN_SECONDS = 15.0
"""Longest period that a reported mean may cover: more than the time between two heartbeats."""

_XID_AGAIN_SECONDS = 10.0
"""An XID has occurred again if its time is more than this many seconds later than before. The times
in an agent's reports vary by less."""


class Intake:
    """Applies readings to devices whose rows are known.

    Args:
        columns: columns to update.
    """

    def __init__(self, columns: DeviceColumns, policy: Policy) -> None:
        self.policy = policy
        self.sources: list[str] = [""]
        """Sources by number, in the order of their first answers."""
        self._columns = columns
        self._latest = columns.latest
        self._float, self._flag = columns.numbers, columns.flags
        self._count = columns.counts

    def number(self, source: str) -> int:
        """Return the number of a source."""
        if source not in self.sources:
            if len(self.sources) >= MOST_SOURCES:
                raise ValueError(f"too many sources: {source}")
            self.sources.append(source)
        return self.sources.index(source)

    def apply(self, readings: Readings, placed: PlacedDevices, now: float) -> Steps[Flags]:
        """Apply the values of an answer; return which devices' signals contradict each other."""
        rows, measured_at = placed.rows, readings.measured_at
        origin = self.number(readings.source)
        answer = {signal: plausible(values) for signal, values in readings.columns.items()}
        if Signal.POWER in answer:
            # Power is measured for the whole card, which says nothing about one instance.
            answer[Signal.POWER] = np.where(placed.is_instance, np.nan, answer[Signal.POWER])
        yield
        is_unreported = self._latest.apply_utilization(rows, answer, measured_at, now, origin)
        yield
        self._latest.apply_memory(rows, answer, measured_at, now, origin)
        yield
        yield from self._apply_others(readings, rows, answer, now)
        self._latest.align_activity(rows)
        self._note_reported(rows, answer)
        yield
        # Windows and streaks count new measurements only, not values that were kept.
        board, rest = self._float["board_watts"][rows], self._float["rest_watts"][rows]
        seen = activity(answer, board, rest)
        seen = replace(
            seen,
            measured=np.where(is_unreported, np.nan, seen.measured),
            agreed=np.where(is_unreported, np.nan, seen.agreed),
            busiest=np.where(is_unreported, np.nan, seen.busiest),
        )
        power = answer.get(Signal.POWER, np.full(len(rows), np.nan))
        used, _, _ = memory(answer, self._columns.total_bytes(rows))
        yield
        for start in range(0, len(rows), _PIECE_VALUES):
            some = slice(start, start + _PIECE_VALUES)
            part = replace(
                readings,
                devices=(),
                columns={},
                measured_at=measured_at[some],
                own=None if readings.own is None else _own_of(readings.own, some),
            )
            of_some = Activity(
                measured=seen.measured[some],
                agreed=seen.agreed[some],
                busiest=seen.busiest[some],
                disagree=seen.disagree[some],
            )
            self._apply_use(part, rows[some], used[some], of_some, power[some])
            self._float["seen_at"][rows[some]] = now
            yield
        return seen.disagree

    def apply_in_pieces(
        self,
        readings: Readings,
        placed: PlacedDevices,
        now: float,
        keep_rows: Callable[[slice], Flags],
    ) -> Steps[Flags]:
        """Apply an answer as in `apply`, some devices per step; rows may change between steps.

        Args:
            placed: rows of its devices.
            now: seconds since the epoch.
            keep_rows: returns which of the given devices still have their row; others are skipped.
        """
        disagree = np.zeros(len(placed.rows), dtype=np.bool_)
        for start in range(0, len(placed.rows), _PIECE_DEVICES):
            some = start + np.flatnonzero(keep_rows(slice(start, start + _PIECE_DEVICES)))
            part = replace(
                readings,
                devices=(),
                columns={signal: column[some] for signal, column in readings.columns.items()},
                measured_at=readings.measured_at[some],
                own=None if readings.own is None else _own_of(readings.own, some),
            )
            disagree[some] = finish(self.apply(part, placed.only(some), now))
            yield
        return disagree

    def _apply_use(
        self, readings: Readings, rows: Rows, used: Column, seen: Activity, power: Column
    ) -> None:
        """Update windows and streaks with new measurements, and record the source.

        Args:
            readings: times of the measurements; the values are ignored.
            used: memory in use, bytes.
            power: power draw, watts.
        """
        measured_at, origin = readings.measured_at, self.number(readings.source)
        lead_measured_at = self._float["lead_measured_at"][rows]
        leads = self._latest.replaces(
            origin, self._count["source_row"][rows].astype(np.int8), lead_measured_at, measured_at
        )
        is_new = np.isnan(lead_measured_at) | (measured_at > lead_measured_at)
        is_new &= measured_at > self._float["tenants_since"][rows]
        is_new &= leads
        self._note_use(rows, used, seen, is_new, readings)
        self._note_occupancy(rows, used, is_new, readings.own)
        self._feed(readings, rows, seen, is_new)
        self._note_rest(rows[is_new], power[is_new], seen.measured[is_new])
        before = self._float["measured_at"][rows]
        self._float["measured_at"][rows] = np.fmax(before, measured_at)
        self._float["lead_measured_at"][rows[leads]] = np.fmax(lead_measured_at, measured_at)[leads]
        self._count["source_row"][rows[leads]] = origin
        self._flag["disagrees"][rows[leads]] = seen.disagree[leads]

    def _apply_others(
        self, readings: Readings, rows: Rows, answer: Mapping[Signal, Column], now: float
    ) -> Steps[None]:
        """Apply the signals that do not depend on other signals."""
        origin, applied = self.number(readings.source), 0
        for signal in sorted({*self._latest.columns, *answer} - {*UTILIZATION, *MEMORY_SIGNALS}):
            before = self._latest.column(signal)[rows]
            self._latest.apply(signal, rows, answer.get(signal), readings.measured_at, now, origin)
            if signal is Signal.XID:
                self._date_xids(readings, rows, before, now)
            applied += len(rows)
            if applied >= _PIECE_VALUES:
                applied = 0
                yield

    def _date_xids(self, readings: Readings, rows: Rows, before: Column, now: float) -> None:
        """Record when each sticky XID happened: as reported, else when it was first reported."""
        xids = np.nan_to_num(self._latest.column(Signal.XID)[rows])
        since = self._float["xid_since"]
        seen, is_new_xid = np.full(len(rows), now), xids != np.nan_to_num(before)
        if readings.own is not None:
            # If the node's clock was set back, its XIDs lie in the future: their time is unknown.
            age = np.where(readings.own.xid_age >= 0, readings.own.xid_age, np.nan)
            happened = readings.measured_at - age
            seen = np.where(np.isnan(happened), seen, happened)
            is_new_xid |= happened > since[rows] + _XID_AGAIN_SECONDS
        first_seen = np.where(xids > 0, seen, np.nan)
        since[rows] = np.where(is_new_xid, first_seen, since[rows])

    def _note_reported(self, rows: Rows, answer: Mapping[Signal, Column]) -> None:
        """Record the devices' memory sizes and when their activity and memory were measured."""
        _, _, total = memory(answer, np.full(len(rows), np.nan))
        known = total > 0
        self._float["known_total_bytes"][rows[known]] = total[known]
        memory_at = self._latest.measured_at(*MEMORY_SIGNALS, rows=rows)
        self._float["reported_at"][rows] = np.fmin(self._latest.activity_at(rows), memory_at)

    def _note_use(
        self, rows: Rows, used: Column, seen: Activity, is_new: Flags, readings: Readings
    ) -> None:
        """Count consecutive readings that show use; a missing reading does not count."""
        own = readings.own
        known = is_new & ~(np.isnan(used) & np.isnan(seen.measured))
        uses = shows_use(used, seen.agreed, self.policy.foreign)
        if own is not None:
            uses |= own.is_foreign  # by its processes
        # A pod that the mapping does not show yet may use the device. So the use is not foreign,
        # unless the node's agent knows that the process belongs to no pod.
        is_certain = self._flag["is_free_for_sure"][rows] | ~uses
        if own is not None:
            is_certain |= own.is_foreign
        for streak, verdict, counts in (
            ("use_streak", "is_in_use", known),
            ("foreign_streak", "is_foreign", known & is_certain),
        ):
            at = rows[counts]
            self._count[streak][at], self._flag[verdict][at] = step_streak(
                self._count[streak][at],
                self._flag[verdict][at],
                uses[counts],
                self.policy.foreign.readings,
            )
        # Use of a free device counts again after its next tenant has ended.
        counts_when_free = known & (self._flag["is_free_for_sure"][rows] | is_certain & uses)
        free, before = rows[counts_when_free], self._flag["was_used"][rows[counts_when_free]]
        self._flag["was_used"][free] = (
            self._flag["is_in_use"][free] | self._flag["is_foreign"][free]
        )
        at = np.where(
            before, self._float["was_used_at"][free], readings.measured_at[counts_when_free]
        )
        self._float["was_used_at"][free] = at
        # A single busy signal does not prove use, but the device must not count as idle.
        is_free = known & self._flag["is_free_for_sure"][rows]
        is_busy = seen.measured > self.policy.foreign.utilization
        self._flag["was_busy"][rows[is_free]] = is_busy[is_free]
        if own is not None and own.foreign_bytes is not None:
            # The agent knows every process on a held device: earlier foreign use has ended.
            is_clean = own.foreign_bytes <= self.policy.foreign.memory_bytes
            is_clean &= is_new & self._flag["has_tenants"][rows] & ~own.is_foreign
            self._flag["was_used"][rows[is_clean]] = False

    def _note_occupancy(self, rows: Rows, used: Column, is_new: Flags, own: Own | None) -> None:
        """Record the owners of the memory in use; skip missing readings."""
        is_known = is_new & ~np.isnan(used)
        foreign = None if own is None else own.foreign_bytes
        foreign = np.full(len(rows), np.nan) if foreign is None else foreign
        self._columns.account(rows[is_known], used[is_known], foreign[is_known])

    def _feed(self, readings: Readings, rows: Rows, seen: Activity, is_new: Flags) -> None:
        """Add new measurements to the windows: reported means, else single values."""
        own, at = readings.own, readings.at
        fed = (self._columns.windows, seen.busiest), (self._columns.recent, seen.measured)
        if own is None:
            for windows, busy in fed:
                windows.add(at, rows[is_new], busy[is_new])
            return
        # A mean that began before the tenants changed includes the former tenants.
        is_own_mean = self._float["tenants_since"][rows] < readings.measured_at - _MEAN_SPAN_SECONDS
        has_mean = is_new & ~np.isnan(own.mean)
        for windows, busy in fed:
            values = np.where(is_own_mean, np.minimum(own.mean, 1.0), busy)
            squares = np.where(is_own_mean, np.minimum(own.mean_square, 1.0), busy * busy)
            known = has_mean & ~np.isnan(values) & ~np.isnan(squares)
            windows.add(at, rows[known], values[known], squares[known])

    def _note_rest(self, rows: Rows, power: Column, measured: Column) -> None:
        """Learn the devices' power draw at rest from new measurements."""
        mean, count = self._columns.recent.mean(rows)
        rest = self._float["rest_watts"]
        rest[rows] = learn_rest(rest[rows], power, measured, (mean, count))


def without(readings: Readings, kept: Flags) -> Readings:
    """Filter the devices of an answer.

    Args:
        kept: whether each device stays.
    """
    return replace(
        readings,
        devices=tuple(
            info for info, stays in zip(readings.devices, kept.tolist(), strict=True) if stays
        ),
        columns={signal: column[kept] for signal, column in readings.columns.items()},
        measured_at=readings.measured_at[kept],
        own=None if readings.own is None else _own_of(readings.own, kept),
    )


def _own_of(own: Own, kept: Flags | Rows | slice) -> Own:
    """Filter the devices of an agent's additional data."""
    return replace(
        own,
        mean=own.mean[kept],
        mean_square=own.mean_square[kept],
        is_foreign=own.is_foreign[kept],
        foreign_bytes=None if own.foreign_bytes is None else own.foreign_bytes[kept],
        xid_age=own.xid_age[kept],
    )
