"""Store the readings of all devices as columns, one row per device."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from extender.core.decision.signals import MEASURED, SignalEvidence, activity, memory, shows_use
from extender.core.devices import forecast
from extender.core.devices.readings import Column, Signal
from extender.core.devices.window import Windows
from extender.core.nodes.snapshot import Flags, Ratios, Rows
from extender.core.policy import Foreign, Policy
from extender.core.steps import Steps
from extender.fleet.device_holders import MemoryTenancy, Occupancy, account
from extender.fleet.latest_values import ALL, MEMORY_SIGNALS, LatestValues, ReportedSignals

_AnyArray = TypeVar("_AnyArray", Column, npt.NDArray[np.bool_], Rows)

_INITIAL: Mapping[str, float] = {
    "measured_at": np.nan,
    "lead_measured_at": np.nan,
    "freed_at": -np.inf,
    "tenants_since": -np.inf,
    "held_at": -np.inf,
    "was_used_at": -np.inf,
    "used_bytes": np.nan,
    "others_bytes": np.nan,
    "foreign_bytes": np.nan,
    "reported_foreign_bytes": np.nan,
    "declared_bytes": np.nan,
    "released_bytes": 0.0,
    "label_total_bytes": np.nan,
    "board_watts": np.nan,
    "rest_watts": np.nan,
    "known_total_bytes": np.nan,
    "reported_at": np.nan,
    "xid_since": np.nan,
    "seen_at": -np.inf,
    "first_seen_at": -np.inf,
}
"""Initial values of a device; times in seconds since the epoch.

Times of the readings: `measured_at` the last measurement, `lead_measured_at` that of the leading
source, `reported_at` the older one of activity and memory, `seen_at` the last answer with the
device, `first_seen_at` the first one.

Times of the tenants: `tenants_since` when they last changed; windows and streaks ignore older
measurements. `held_at` the time from which pods have held the device without a pause; the recent
window ignores older readings. `freed_at` when the last tenant ended; older measurements are not
attributed to any pod. `was_used_at` when use without a tenant was first measured.

Memory: as in `device_holders.MemoryTenancy`. `reported_foreign_bytes` is the foreign memory that
the node's agent reported with the last reading, if it did. `released_bytes` is the part of the
declared memory that ended pods used."""

_TIMES = (
    *(
        "measured_at",
        "lead_measured_at",
        "freed_at",
        "tenants_since",
        "held_at",
        "was_used_at",
        "reported_at",
    ),
    *("xid_since", "seen_at", "first_seen_at"),
)
_FLAGS = (
    *("has_tenants", "is_unheld", "is_free_for_sure", "is_lost", "is_in_use", "is_foreign"),
    *("disagrees", "was_used", "was_busy", "has_undeclared", "is_filling", "is_emptying"),
)
_COUNTS = ("use_streak", "foreign_streak", "node_row", "source_row", "withdrawn")
_RECENT_PARTS = 6
"""Number of parts of the recent window; its values expire one part at a time."""

_LEAST = 1024
_GROWTH = 1.125
"""Growth factor of the columns. Spare rows also take a kilobyte each."""


class DeviceColumns:
    """Values, times, flags and windows by row; spare rows have initial values.

    Attributes:
        capacity: number of rows, spare ones included.
        latest: last valid values.
        windows: utilization over the last hours, estimates from power included.
        recent: measured activity over the last minutes.
        numbers: columns of numbers by name; times in seconds since the epoch.
        flags: columns of flags by name.
        counts: columns of integers by name.
    """

    def __init__(self, policy: Policy) -> None:
        self.capacity = 0
        self.latest = LatestValues(policy.freshness)
        self.windows = Windows(policy.window_seconds, forecast.STEPS)
        self.recent = Windows(policy.recent_seconds, _RECENT_PARTS)
        self.numbers: dict[str, Column] = {name: np.zeros(0) for name in _INITIAL}
        self.flags: dict[str, Flags] = {name: np.zeros(0, dtype=np.bool_) for name in _FLAGS}
        self.counts: dict[str, Rows] = {name: np.zeros(0, dtype=np.intp) for name in _COUNTS}

    def adopt_in_steps(self, before: Policy, policy: Policy) -> Steps[None]:
        """Apply another policy in steps; it takes effect with the last step."""
        if policy.window_seconds != before.window_seconds:
            yield from self.windows.resize_in_steps(policy.window_seconds)
        if policy.recent_seconds != before.recent_seconds:
            yield from self.recent.resize_in_steps(policy.recent_seconds)
        self.latest.adopt(policy.freshness)
        if policy.foreign != before.foreign:
            self._forget_unshown_use(policy.foreign)

    def _forget_unshown_use(self, foreign: Foreign) -> None:
        """Clear use that the latest readings do not show under the new thresholds.

        The reverse is unknown: setting use takes several readings, and only the latest is kept.
        """
        seen = activity(
            self.latest.columns, self.numbers["board_watts"], self.numbers["rest_watts"]
        )
        used, _, _ = memory(self.latest.columns, self.total_bytes(ALL))
        is_known = ~(np.isnan(used) & np.isnan(seen.measured))
        self.clear_use(np.flatnonzero(is_known & ~shows_use(used, seen.agreed, foreign)))

    def grow(self, needed: int) -> None:
        """Make room for this many rows."""
        if needed <= self.capacity:
            return
        self.capacity = max(needed, int(_GROWTH * self.capacity), _LEAST)
        self.latest.grow(self.capacity)
        self.windows.grow(self.capacity)
        self.recent.grow(self.capacity)
        for name, numbers in self.numbers.items():
            self.numbers[name] = _padded(numbers, self.capacity, _INITIAL[name])
        for name, flags in self.flags.items():
            self.flags[name] = _padded(flags, self.capacity)
        for name, counts in self.counts.items():
            self.counts[name] = _padded(counts, self.capacity)

    def shift_back(self, seconds: float, now: float) -> None:
        """Shift all times back after the clock was set back; a time in the future becomes `now`.

        Args:
            seconds: time by which the clock was set back.
            now: current time, seconds since the epoch.
        """
        self.latest.shift_back(seconds, now)
        self.windows.shift_back(seconds)
        self.recent.shift_back(seconds)
        for name in _TIMES:
            times = self.numbers[name]
            np.minimum(times - seconds, now, out=times)

    def clear(self, rows: Iterable[int]) -> None:
        """Reset rows to their initial values."""
        index = np.array(list(rows), dtype=np.intp)
        self.latest.clear(index)
        for name, column in self.numbers.items():
            column[index] = _INITIAL[name]
        for flag in self.flags.values():
            flag[index] = False
        self.clear_use(index)
        self.counts["source_row"][index] = self.counts["withdrawn"][index] = 0
        self.windows.reset(index)
        self.recent.reset(index)

    def clear_use(self, rows: Rows) -> None:
        """Clear the use and foreign use of devices."""
        self.counts["use_streak"][rows] = self.counts["foreign_streak"][rows] = 0
        self.flags["is_in_use"][rows] = self.flags["is_foreign"][rows] = False

    def soften_use(self, rows: Rows) -> None:
        """Clear foreign use, and let a single reading clear use."""
        streaks = self.counts["use_streak"]
        streaks[rows] = np.minimum(streaks[rows], 1)
        self.counts["foreign_streak"][rows] = 0
        self.flags["is_foreign"][rows] = False

    def restore_foreign_use(self, rows: Rows, readings: int) -> None:
        """Restore the foreign use that existed before the pods that have just ended.

        A single reading confirms or clears it.

        Args:
            rows: devices that were just freed.
            readings: number of readings that otherwise set foreign use.
        """
        rows = rows[self.flags["was_used"][rows]]
        self.flags["is_foreign"][rows] = True
        self.counts["foreign_streak"][rows] = readings - 1

    def count_earlier_use(self, rows: Rows) -> None:
        """Count use as foreign that was measured before the devices were known to be free.

        Args:
            rows: devices whose tenancy has just become known.
        """
        free = rows[self.flags["is_free_for_sure"][rows]]
        self.counts["foreign_streak"][free] = self.counts["use_streak"][free]
        self.flags["is_foreign"][free] = self.flags["is_in_use"][free]

    def account(self, rows: Rows, used: Column, reported_foreign: Column) -> None:
        """Attribute the memory in use on devices from a new reading.

        Args:
            used: memory in use, in bytes.
            reported_foreign: foreign memory that the node's agent reports, in bytes; NaN if none is
                reported.
        """
        numbers, flags = self.numbers, self.flags
        numbers["reported_foreign_bytes"][rows] = reported_foreign
        before = self.occupancy(rows)
        after = account(
            replace(before, used=before.used - numbers["released_bytes"][rows]),
            MemoryTenancy(
                declared=numbers["declared_bytes"][rows],
                has_undeclared=flags["has_undeclared"][rows],
                is_filling=flags["is_filling"][rows],
                is_emptying=flags["is_emptying"][rows],
                is_free=flags["is_free_for_sure"][rows],
            ),
            used,
            reported_foreign,
        )
        self.set_occupancy(rows, after)
        flags["is_emptying"][rows], numbers["released_bytes"][rows] = False, 0.0

    def account_again(self, rows: Rows) -> None:
        """Attribute memory in use again, after tenants of already measured devices became known.

        Args:
            rows: the devices; some may never have been measured.
        """
        used = self.numbers["used_bytes"][rows]
        read = ~np.isnan(used)
        reported_foreign = self.numbers["reported_foreign_bytes"][rows]
        self.account(rows[read], used[read], reported_foreign[read])

    def occupancy(self, rows: Rows) -> Occupancy:
        """Return the memory in use on devices, and its owners."""
        numbers = self.numbers
        return Occupancy(
            used=numbers["used_bytes"][rows],
            others=numbers["others_bytes"][rows],
            foreign=numbers["foreign_bytes"][rows],
        )

    def set_occupancy(self, rows: Rows, occupancy: Occupancy) -> None:
        """Set the memory in use on devices, and its owners."""
        self.numbers["used_bytes"][rows] = occupancy.used
        self.numbers["others_bytes"][rows] = occupancy.others
        self.numbers["foreign_bytes"][rows] = occupancy.foreign

    def total_bytes(self, rows: Rows | slice) -> Column:
        """Return the devices' memory sizes from earlier readings or labels; NaN if unknown."""
        known, label = self.numbers["known_total_bytes"], self.numbers["label_total_bytes"]
        return np.where(np.isnan(known[rows]), label[rows], known[rows])

    def evidence(self, rows: Rows | slice = ALL) -> SignalEvidence:
        """Return the inputs of the estimates, for all devices or some."""
        past = self.windows.time_steps(rows)
        mean, count = past.mean(forecast.HOUR)
        recent_mean, recent_count = self.recent.mean(rows)
        columns = self.latest.columns
        return SignalEvidence(
            columns={signal: column[rows] for signal, column in columns.items()},
            measured_at=self.numbers["measured_at"][rows],
            activity_at=self.latest.activity_at(rows),
            memory_at=self.latest.measured_at(*MEMORY_SIGNALS, rows=rows),
            freed_at=self.numbers["freed_at"][rows],
            others_bytes=self.numbers["others_bytes"][rows],
            foreign_bytes=self.numbers["foreign_bytes"][rows],
            label_total_bytes=self.total_bytes(rows),
            board_watts=self.numbers["board_watts"][rows],
            rest_watts=self.numbers["rest_watts"][rows],
            hour_mean=mean,
            hour_count=count,
            next_hour=forecast.next_hour(past),
            recent_mean=recent_mean,
            recent_count=recent_count,
            has_tenants=self.flags["has_tenants"][rows],
            is_unheld=self.flags["is_unheld"][rows],
            is_in_use=self.flags["is_in_use"][rows],
            is_foreign=self.flags["is_foreign"][rows],
            was_used=self.flags["was_used"][rows] | self.flags["was_busy"][rows],
            xid_since=self.numbers["xid_since"][rows],
            xid_at=self.latest.measured_at(Signal.XID, rows=rows),
            recovery_at=self.latest.measured_at(Signal.RECOVERY_ACTION, rows=rows),
            is_lost=self.flags["is_lost"][rows],
            withdrawn=self.counts["withdrawn"][rows],
            node_row=self.counts["node_row"][rows],
        )

    def next_hour_between(self, rows: Rows) -> tuple[Ratios, Ratios]:
        """Return the interval of each forecast, NaN with less than half an hour of readings."""
        past = self.windows.time_steps(rows)
        has_history = (past.counts > 0).sum(axis=0) >= forecast.HOUR // 2
        is_known = self.flags["has_tenants"][rows] & has_history
        low, high = forecast.next_hour_between(past)
        return np.where(is_known, low, np.nan), np.where(is_known, high, np.nan)


def _padded(column: _AnyArray, capacity: int, value: float = 0.0) -> _AnyArray:
    """Return a column extended to `capacity` rows with the initial value."""
    more = np.full(capacity - len(column), value, dtype=column.dtype)
    return np.concatenate([column, more])


_KEPT: Final = (
    *MEASURED,
    Signal.TEMPERATURE,
    Signal.MEMORY_TEMPERATURE,
    Signal.CLOCK_EVENT_REASONS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedValues:
    """Last reported values of some devices.

    Attributes:
        signals: signals of the rows of `values`.
        values: one row per signal, one column per device, seven digits; NaN if missing.
        limit_watts: power limit of each device, NaN if unknown.
        rest_watts: power draw of each device at rest, NaN if unknown.
        memory: source and time of the memory signals.
        heat: source and time of the temperature.
        clocks: source and time of the clock event reasons.
    """

    signals: tuple[Signal, ...]
    values: npt.NDArray[np.float32]
    limit_watts: npt.NDArray[np.float32]
    rest_watts: npt.NDArray[np.float32]
    memory: ReportedSignals
    heat: ReportedSignals
    clocks: ReportedSignals

    def reading(self, at: int) -> dict[Signal, float]:
        """Return the values of the device at a position; missing ones are left out."""
        values = zip(self.signals, self.values[:, at].tolist(), strict=True)
        limit = float(self.limit_watts[at])
        known = {signal: value for signal, value in values if not np.isnan(value)}
        return known if np.isnan(limit) else {**known, Signal.POWER_LIMIT: limit}

    def sources(self, at: int) -> Mapping[str, tuple[str, float] | None]:
        """Return source and time of a device's memory, temperature and throttling."""
        signals = {"memory": self.memory, "temperature": self.heat, "throttling": self.clocks}
        return {name: part.of(at) for name, part in signals.items()}


def reported_values_of(
    columns: DeviceColumns, rows: Rows, sources: Sequence[str]
) -> ReportedValues:
    """Copy the reported values of the given devices.

    Args:
        sources: names of the sources, by number.
    """
    latest = columns.latest
    known = latest.columns
    signals = tuple(signal for signal in _KEPT if signal in known)
    values = np.empty((len(signals), len(rows)), dtype=np.float32)
    for place, signal in enumerate(signals):
        values[place] = known[signal].take(rows)
    limit = columns.numbers["board_watts"].take(rows)
    if Signal.POWER_LIMIT in known:
        reported = known[Signal.POWER_LIMIT].take(rows)
        limit = np.where(reported > 0, reported, limit)
    return ReportedValues(
        signals=signals,
        values=values,
        limit_watts=limit.astype(np.float32),
        rest_watts=columns.numbers["rest_watts"].take(rows).astype(np.float32),
        memory=latest.reported_signals(MEMORY_SIGNALS, rows, sources),
        heat=latest.reported_signals((Signal.TEMPERATURE,), rows, sources),
        clocks=latest.reported_signals((Signal.CLOCK_EVENT_REASONS,), rows, sources),
    )
