"""Store the readings of every device: latest values, windows, streaks."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from extender.core.decision.signals import SignalEvidence, board_power, plausible
from extender.core.devices.gpu_models import normalize_model
from extender.core.devices.readings import Column, DeviceInfo, DeviceKey, History, Readings, Signal
from extender.core.nodes.snapshot import Flags, Ratios, Rows, nan_to_zero
from extender.core.policy import HealthAction, Policy
from extender.core.steps import Steps, finish
from extender.fleet.columns import DeviceColumns, ReportedValues, reported_values_of
from extender.fleet.device_holders import WHOLE_DEVICE, DeviceUse
from extender.fleet.intake import Intake, without
from extender.fleet.latest_values import ALL
from extender.fleet.registry import Applied, DeviceRegistry, PlacedDevices

_PIECE = 1024
"""Devices whose history is applied per cooperative step."""

_FIRST_USE_SECONDS = 5.0
"""A pod uses no memory of a GPU so soon after it was bound: its container has to start first."""

_REPORTED_MARGIN = 0.1
"""Tolerance between the sum of the processes' memory and the memory in use, as a ratio."""


class DeviceStore:
    """Readings of each device in one row, which the device keeps until it is dropped.

    Use it on the event loop's thread only, and never across an await.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._registry = DeviceRegistry()
        self._columns = DeviceColumns(policy)
        self._intake = Intake(self._columns, policy)
        self._latest = self._columns.latest
        self._float, self._flag = self._columns.numbers, self._columns.flags
        self._count = self._columns.counts

    def __len__(self) -> int:
        return len(self._registry)

    def adopt_in_steps(self, policy: Policy) -> Steps[None]:
        """Apply another policy in steps; it takes effect with the last step, and readings stay."""
        yield from self._columns.adopt_in_steps(self._policy, policy)
        self._policy = self._intake.policy = policy

    def shift_back(self, seconds: float, now: float) -> None:
        """Shift all times back after the clock was set back; a time in the future becomes `now`."""
        self._columns.shift_back(seconds, now)

    def prefer(self, source: str, seconds: float) -> None:
        """Prefer a source to newer readings of another one for this many seconds."""
        self._latest.prefer(self._intake.number(source), seconds)

    def info(self, row: int) -> DeviceInfo | None:
        """Return the identity of the device in a row; None for a spare row."""
        return self._registry.info(row)

    def model_of(self, row: int) -> str:
        """Return the model of a row's device, "" if no source reports it."""
        info = self._registry.info(row)
        return info.model if info else ""

    def row_of(self, key: DeviceKey) -> int | None:
        """Return the row of a device, None if it is unknown."""
        return self._registry.row_of(key)

    def rows_of_node(self, node: str) -> list[int]:
        """Return the rows of the devices that telemetry reports on a node, in the node's order.

        If a card is reported whole and as MIG instances, its MIG layout has changed: the latest
        measurement counts.
        """
        rows = self._registry.reported_on(node)
        newest: dict[str, tuple[float, bool]] = {}
        for row in rows:
            info = self.info(row)
            if info is not None:
                measured = (self.measured_at(row) or 0.0, bool(info.gpu_instance_id))
                newest[info.uuid] = max(newest.get(info.uuid, measured), measured)
        return [row for row in rows if self._is_current(row, newest)]

    def _is_current(self, row: int, newest: Mapping[str, tuple[float, bool]]) -> bool:
        info = self.info(row)
        return info is not None and bool(info.gpu_instance_id) is newest[info.uuid][1]

    def placeholders(
        self, node: str, resource: str, count: int, memory_bytes: int | None
    ) -> list[int]:
        """Return the rows of devices that the node must have and no source reports."""
        rows, new = self._registry.placeholders(node, resource, count)
        if new:
            self._columns.grow(len(self))
            self._count["node_row"][new] = self._registry.node_row(node)
            self._note_models(tuple(new))
        self.set_label_total(rows, memory_bytes)
        return rows

    def rows_on(self, nodes: Iterable[str]) -> Rows:
        """Return the rows of all devices of the given nodes, including placeholders."""
        rows = [row for node in nodes for row in self._registry.of_node(node)]
        return np.array(rows, dtype=np.intp)

    def surplus(self, node: str, used: Container[int]) -> list[int]:
        """Return the placeholders of a node that are not needed any more."""
        rows = self._registry.of_node(node)
        return [row for row in rows if row not in used and self._registry.is_placeholder(row)]

    def is_shown_whole(self, rows: Sequence[int]) -> bool:
        """Return whether the latest answer about the given devices covers all of them."""
        return len(set(self._float["seen_at"][list(rows)].tolist())) <= 1

    def replaced(self, rows: Sequence[int], count: int, since: float) -> list[int]:
        """Return the devices that were replaced or removed.

        A device was replaced if the source reports the full number of devices without it, and one
        of them is newer. It was removed if it was not measured since the node began to offer fewer
        devices. A device that is only missing from an answer is not replaced, because then fewer
        devices are reported.

        After a node came back, a source may still report its former devices. Once the full number
        of devices has been measured since then, the former ones are removed.

        Args:
            rows: devices of a node behind one of its resources.
            count: number of devices that it must have.
            since: when the node last began to offer fewer, or came back, seconds since the epoch;
                -inf if never.
        """
        index = np.array(rows, dtype=np.intp)
        measured_at = self._float["measured_at"][index]
        is_current = measured_at > since
        if since > -np.inf and is_current.sum() >= count:
            former: list[int] = index[~is_current].tolist()
            return former
        seen_at, source = self._float["seen_at"][index], self._count["source_row"][index]
        shown = seen_at == seen_at.max(initial=-np.inf)
        if len(rows) <= count or shown.sum() != count:
            return []
        is_before = np.isfinite(seen_at) & (
            seen_at < self._float["first_seen_at"][index][shown].max()
        )
        is_before |= measured_at <= since
        gone: list[int] = index[~shown & is_before & np.isin(source, source[shown])].tolist()
        return gone

    def drop(self, rows: Iterable[int]) -> set[str]:
        """Clear and free rows for other devices; return the nodes of the dropped devices."""
        dropped = tuple(rows)
        if dropped:
            self._columns.clear(dropped)
        return self._registry.drop(dropped)

    def forget(self, now: float) -> set[str]:
        """Drop devices that no source has reported for too long; return their nodes."""
        limit = now - self._policy.freshness.forget_seconds
        seen_at = self._float["seen_at"][: len(self)]
        return self.drop(np.flatnonzero((seen_at < limit) & np.isfinite(seen_at)).tolist())

    def forget_node(self, node: str) -> None:
        """Drop all devices of a removed node."""
        self.drop(self._registry.of_node(node))

    # --- readings -------------------------------------------------------------------------------

    def value(self, signal: Signal, row: int) -> float | None:
        """Return the last valid value of a signal, None if it is missing."""
        column = self._latest.columns.get(signal)
        if column is None or np.isnan(column[row]):
            return None
        return float(column[row])

    def measured_at(self, row: int) -> float | None:
        """Return when the device was measured last, seconds since the epoch; None if never."""
        at = float(self._float["measured_at"][row])
        return None if np.isnan(at) else at

    def activity_sources(self, rows: Rows) -> tuple[tuple[str, ...], Column]:
        """Return source and time of the devices' activity; "" and NaN without a reading."""
        at = self._float["measured_at"][rows]
        source, reported_at = self._latest.activity_by(rows), self._latest.activity_at(rows)
        numbers = np.where(source > 0, source, self._count["source_row"][rows]).tolist()
        names = self._intake.sources
        return tuple(names[number] for number in numbers), np.where(source > 0, reported_at, at)

    def had_fault(self, node: str, at: float) -> bool:
        """Return whether a node's device had an XID around a time; faults of programs do not count.

        Args:
            at: seconds since the epoch; an XID may be reported as late as readings count as fresh.
        """
        rows = self.rows_on([node])
        apart = np.abs(self._float["xid_since"][rows] - at)
        near = rows[apart <= self._policy.freshness.max_age_seconds]  # NaN is never near
        xids = (self.value(Signal.XID, row) for row in near.tolist())
        health = self._policy.health
        return any(xid and health.xid_action(int(xid)) is not HealthAction.IGNORE for xid in xids)

    def reported(self, signals: Iterable[Signal], row: int) -> tuple[str, float] | None:
        """Return source and time of a device's newest value among some signals.

        None if no signal has a value.
        """
        newest = self._latest.newest(signals, row)
        return None if newest is None else (self._intake.sources[newest[0]], newest[1])

    def reported_activity(self, row: int) -> tuple[str, float] | None:
        """Return source and time of a device's activity, None without a reading."""
        found = self._latest.activity_of(row)
        return None if found is None else (self._intake.sources[found[0]], found[1])

    def copy_reported(self, rows: Rows) -> ReportedValues:
        """Copy the reported values of the given devices, with their sources."""
        return reported_values_of(self._columns, rows, self._intake.sources)

    def disagreements(self, source: str) -> int:
        """Return the number of a source's devices whose signals contradict each other."""
        is_led = self._count["source_row"] == self._intake.number(source)
        return int((self._flag["disagrees"] & is_led).sum())

    def reported_at(self, row: int) -> float | None:
        """Return when the older of activity and memory was measured; None if neither was."""
        at = float(self._float["reported_at"][row])
        return None if np.isnan(at) else at

    def tenants_since(self, row: int) -> float:
        """Return when the tenants of a device changed last, -inf if they never did."""
        return float(self._float["tenants_since"][row])

    def source(self, row: int) -> str:
        """Return the source that reported a device last, "" if none did."""
        return self._intake.sources[int(self._count["source_row"][row])]

    def ages(self, now: float) -> Mapping[str, Column]:
        """Return the age in seconds of each device's last measurement, by source."""
        age = np.maximum(now - self._float["measured_at"], 0.0)
        kept = ~np.isnan(age)
        kept[self._registry.spare_rows()] = False
        kept[len(self) :] = False
        sources = self._count["source_row"]
        return {
            name: age[kept & (sources == number)]
            for number, name in enumerate(self._intake.sources)
            if number
        }

    def apply(self, readings: Readings, now: float) -> Applied:
        """Apply one answer of a source."""
        return finish(self.apply_in_steps(readings, now))

    def apply_in_steps(self, readings: Readings, now: float) -> Steps[Applied]:
        """Apply one answer of a source in steps of a few milliseconds.

        Devices may change between the steps. Each value counts as soon as its step has run; values
        of a device that is dropped meanwhile are ignored.
        """
        # The source has another clock, or ours was set back.
        readings = replace(readings, measured_at=np.minimum(readings.measured_at, now))
        placed = yield from self._place(readings, now)
        contested = 0
        if placed.is_contested:
            kept = placed.rows >= 0
            contested = int((~kept).sum())
            readings, placed = without(readings, kept), placed.only(kept)
        disagree = yield from self._until_rows_change(self._intake.apply(readings, placed, now))
        if disagree is None:
            is_still = partial(self._keep_rows, readings.devices, placed.rows)
            disagree = yield from self._intake.apply_in_pieces(readings, placed, now, is_still)
        return Applied(changed_nodes=placed.changed_nodes, disagree=disagree, contested=contested)

    def _keep_rows(self, devices: Sequence[DeviceInfo], rows: Rows, some: slice) -> Flags:
        """Return whether each of the given devices still has its row."""
        still = zip(devices[some], rows[some].tolist(), strict=True)
        return np.array([self.row_of(info.key) == row for info, row in still], dtype=np.bool_)

    def _until_rows_change(self, steps: Steps[Flags]) -> Steps[Flags | None]:
        """Run steps as long as no row changes its device; return None if one does."""
        drops = self._registry.drops
        while self._registry.drops == drops:
            try:
                next(steps)
            except StopIteration as end:
                disagree: Flags = end.value
                return disagree
            yield
        return None

    def _place(self, readings: Readings, now: float) -> Steps[PlacedDevices]:
        """Assign a row to every device of an answer."""
        own, origin = readings.own, self._intake.number(readings.source)
        sources, seen_at = self._count["source_row"], self._float["seen_at"]
        lately = now - self._policy.freshness.max_age_seconds

        def is_shown_by_others(row: int) -> bool:
            return bool(sources[row] != origin and seen_at[row] > lately)

        if own is None:
            placing = self._registry.place(
                readings.devices, readings.source, is_kept=is_shown_by_others
            )
        else:
            placing = self._registry.place_on(
                own.nodes,
                readings.devices,
                readings.source,
                lambda row: bool(seen_at[row] > lately),
            )
        while True:
            try:
                assigned, updated = next(placing)
            except StopIteration as end:
                placed: PlacedDevices = end.value
                if placed.dropped:
                    self._columns.clear(placed.dropped)
                return placed
            self._start(assigned, now)
            self._note_models(updated)
            yield

    def history_in_steps(self, history: History) -> Steps[None]:
        """Fill the windows of known devices with past readings, in steps; call once, at start."""
        for start in range(0, len(history.devices), _PIECE):
            some = slice(start, start + _PIECE)
            found = [self.row_of(key) for key in history.devices[some]]
            known = np.array([row is not None for row in found], dtype=np.bool_)
            rows = np.array([row for row in found if row is not None], dtype=np.intp)
            utilization = np.minimum(plausible(history.utilization[:, some][:, known]), 1.0)
            for step, at in enumerate(history.times):
                for windows, since in (
                    (self._columns.windows, self._float["tenants_since"]),
                    (self._columns.recent, self._float["held_at"]),
                ):
                    is_own = since[rows] < at
                    windows.add(float(at), rows[is_own], utilization[step, is_own])
            if history.xid is not None:
                seen = history.xid[:, some][:, known]
                for row, xids in zip(rows.tolist(), seen.T, strict=True):
                    self._date_xid(row, history.times, xids)
            yield

    def _date_xid(self, row: int, times: Column, xids: Column) -> None:
        """Set the time of a sticky XID that existed before our start."""
        xid = self.value(Signal.XID, row)
        was_there = xids == xid
        if not xid or not len(times) or not was_there[-1]:
            return
        absent = np.flatnonzero(~was_there)
        since = times[absent[-1] + 1 if len(absent) else 0]
        self._float["xid_since"][row] = np.fmin(self._float["xid_since"][row], since)

    # --- tenants and memory -------------------------------------------------------------------

    def set_label_total(self, rows: Sequence[int], memory_bytes: int | None) -> None:
        """Set the memory of devices from the node's labels."""
        self._float["label_total_bytes"][rows] = np.nan if memory_bytes is None else memory_bytes

    def set_lost(self, rows: Sequence[int], *, is_lost: bool) -> None:
        """Set whether devices are missing among reported siblings."""
        self._flag["is_lost"][rows] = is_lost

    def set_withdrawn(self, rows: Iterable[int], devices: int) -> None:
        """Set how many devices of this kind the kubelet does not offer on the devices' node."""
        self._count["withdrawn"][list(rows)] = devices

    def set_tenancy(self, held: Sequence[DeviceUse] | Rows) -> None:
        """Set the tenancy of the given devices, one row each."""
        columns = np.array(held, dtype=np.intp).reshape(-1, len(DeviceUse._fields))
        fields = dict(zip(DeviceUse._fields, columns.T, strict=True))
        rows = fields.pop("row")
        declared = fields.pop("declared_bytes")
        is_first = np.isnan(self._float["declared_bytes"][rows])
        self._float["declared_bytes"][rows] = np.where(declared < WHOLE_DEVICE, declared, np.inf)
        for name, values in fields.items():
            self._flag[name][rows] = values
        if is_first.any():
            self._columns.account_again(rows[is_first])
            self._columns.count_earlier_use(rows[is_first])

    def is_foreign(self, row: int) -> bool:
        """Return whether the device was used while no pod can have held it."""
        return bool(self._flag["is_foreign"][row])

    def is_in_use(self, row: int) -> bool:
        """Return whether readings show the device in use."""
        return bool(self._flag["is_in_use"][row])

    def was_used(self, row: int) -> bool:
        """Return whether the last reading without a tenant showed use."""
        return bool(self._flag["was_used"][row])

    def was_active(self, row: int) -> bool:
        """Return whether the last reading without a tenant showed use or activity."""
        return self.was_used(row) or bool(self._flag["was_busy"][row])

    def counts_as_foreign(self, row: int) -> bool:
        """Return whether the device has foreign use and no pod is reported on it now."""
        return self.is_foreign(row) and bool(self._flag["is_unheld"][row])

    def soften_use(self, rows: Sequence[int]) -> None:
        """Let a single reading clear the use of devices without foreign use."""
        self._columns.soften_use(np.array(rows, dtype=np.intp))

    def forget_past_use(self, rows: Sequence[int], since: float, held: Iterable[int]) -> None:
        """Clear use that was measured since a time and seemed to belong to no pod.

        Call this when a pod becomes known that already held the devices. If it was bound some time
        before the last reading, the memory that seemed foreign is its own.

        Args:
            rows: the devices that it may hold.
            since: when it was bound, seconds since the epoch.
            held: the devices that it holds, as far as known; else `rows`.
        """
        index = np.array(rows, dtype=np.intp)
        self._flag["was_used"][index] &= self._float["was_used_at"][index] < since
        self._flag["was_busy"][index] &= self._float["measured_at"][index] < since
        index = np.array([*held], dtype=np.intp)
        late = index[self._float["reported_at"][index] > since + _FIRST_USE_SECONDS]
        for name in ("others_bytes", "foreign_bytes", "declared_bytes"):
            self._float[name][late] = np.nan  # attributed again with the next tenancy
        self._columns.soften_use(late)

    def largest_bytes(self, rows: Sequence[int] | Rows) -> int:
        """Return the memory of the largest of some devices, 0 if unknown."""
        total = self._columns.total_bytes(np.array(rows, dtype=np.intp))
        return int(np.nanmax(total)) if np.any(~np.isnan(total)) else 0

    def occupancy(self, row: int) -> tuple[float, float, float]:
        """Return the memory of a device in use, in use beyond declarations, and in foreign use.

        In bytes; 0 if unknown.
        """
        found = self._columns.occupancy(np.array([row], dtype=np.intp))
        parts = np.concatenate([found.used, found.others, found.foreign])
        used, others, foreign = nan_to_zero(parts).tolist()
        return used, others, foreign

    def note_shares(self, row: int, held: Sequence[tuple[int, int]]) -> None:
        """Apply the memory that the processes of each pod use on a shared device.

        The rest is foreign. Some drivers report no process, or the whole device's memory for each:
        then nothing is applied.

        Args:
            row: the device.
            held: for each pod, the memory that it uses and that it declared, in bytes.
        """
        used, total = self.occupancy(row)[0], sum(used_by for used_by, _ in held)
        known = total + float(nan_to_zero(self._float["reported_foreign_bytes"][row]))
        is_explained = known >= (1 - _REPORTED_MARGIN) * used or all(used_by for used_by, _ in held)
        if not is_explained or total > (1 + _REPORTED_MARGIN) * used:
            return
        foreign = max(used - total, 0.0)
        others = foreign + sum(max(used_by - declared, 0) for used_by, declared in held)
        self._float["foreign_bytes"][row] = foreign
        self._float["others_bytes"][row] = min(others, used)

    def release(
        self, rows: Sequence[int], declared: Column, seen: Column, *, is_last: bool
    ) -> None:
        """Release the memory that an ended pod was seen to use on some devices.

        On a whole device this is all memory except the memory that was in use without a tenant. On
        a shared device the use of a tenant without a declaration may be unknown: then nothing is
        released until the next reading.

        Args:
            declared: memory that the pod declared of each device, in bytes; NaN if none.
            seen: memory that its processes used of each device, in bytes; NaN if unknown.
            is_last: whether no other pod holds the devices.
        """
        index = np.array(rows, dtype=np.intp)
        before = self._columns.occupancy(index)
        if not is_last:
            self._flag["is_emptying"][index] |= np.isnan(declared)
            own = np.minimum(declared, np.maximum(before.used - before.others, 0.0))
            self._float["released_bytes"][index] += np.nan_to_num(own)
            return
        is_whole = np.isinf(self._float["declared_bytes"][index])
        of_whole = np.where(np.isnan(before.foreign), before.used, before.foreign)
        of_shared = np.where(np.isnan(declared), before.used, before.others)
        of_shared = np.where(np.isnan(seen), of_shared, np.maximum(before.used - seen, 0.0))
        left = np.where(is_whole, of_whole, of_shared)
        self._columns.set_occupancy(index, replace(before, used=left, others=left))

    def restart_history(
        self,
        rows: Iterable[int],
        at: float,
        *,
        is_freed: bool,
        held_since: float | None = None,
        staying: Column | float = 1.0,
        is_use_known: bool = False,
    ) -> None:
        """Forget the history of devices whose tenants have changed.

        The long window covers the present tenants only. The recent window, which decides idleness,
        is kept while some tenants stay: a pause in their work is not idleness.

        Args:
            at: time of the change, seconds since the epoch.
            is_freed: whether no pod holds the devices now: earlier readings are not attributed to
                any pod.
            held_since: time from which pods have held the devices without a pause; -inf if already
                before `at`, None for `at`.
            staying: share of the recent load that belongs to pods that stay; one for each device,
                or one for all.
            is_use_known: whether the staying pods use most devices that are in use: one reading
                shows which ones.
        """
        index = np.array(list(rows), dtype=np.intp)
        columns, held_at = self._columns, self._float["held_at"]
        since = at if held_since is None else held_since
        columns.windows.reset(index, at)
        columns.recent.reset(index, since)
        if np.min(staying, initial=1.0) < 1:
            columns.recent.scale(index, staying)
        (columns.soften_use if is_use_known else columns.clear_use)(index)
        self._float["tenants_since"][index] = np.maximum(self._float["tenants_since"][index], at)
        held_at[index] = np.maximum(held_at[index], since)
        if is_freed:
            self._float["freed_at"][index] = at
            columns.restore_foreign_use(index, self._policy.foreign.readings)

    def next_hour_between(self, rows: Rows) -> tuple[Ratios, Ratios]:
        """Return the interval of each device's forecast, as `DeviceColumns.next_hour_between`."""
        return self._columns.next_hour_between(rows)

    def evidence(self, rows: Rows | slice = ALL) -> SignalEvidence:
        """Return the inputs of the estimates, for all devices or some."""
        return self._columns.evidence(rows)

    @property
    def capacity(self) -> int:
        """Number of rows in the columns, spare ones included."""
        return self._columns.capacity

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that have devices, placeholders included."""
        return self._registry.nodes()

    def _start(self, rows: tuple[int, ...], now: float) -> None:
        self._columns.grow(len(self))
        self._columns.clear(rows)
        self._float["first_seen_at"][list(rows)] = now
        for row in rows:
            info = self.info(row)
            self._count["node_row"][row] = self._registry.node_row(info.node) if info else 0
        self._note_models(rows)

    def _note_models(self, rows: tuple[int, ...]) -> None:
        for row in rows:
            info = self.info(row)
            self._float["board_watts"][row] = _board_watts(info.model if info else "")


@lru_cache(maxsize=256)
def _board_watts(model: str) -> float:
    return board_power(normalize_model(model))
