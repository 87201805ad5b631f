"""Build the updates of a connection from reports, and decide when to send one.

A report is sent at once if it may change a scheduling decision; all others wait for the next
heartbeat. Activity of a held device is averaged over some seconds: it fluctuates, and decisions use
a mean as well.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from agent.options import ReportOptions
from agent.report.contract import (
    AGE,
    FOREIGN_MEMORY,
    FOREIGN_UTILIZATION,
    MAX_DEVICE_PROCESSES,
    MAX_NAME,
    MAX_PROCESSES,
    MEAN,
    MEAN_SQUARE,
    XID_AGE,
    Device,
    ForeignProcess,
    Holders,
    Layout,
    LayoutDevice,
    Place,
    Process,
    Report,
    Update,
)
from agent.tenants.foreign import Threshold, exceeds
from extender.core.decision.health import HARD_SLOWDOWN
from extender.core.decision.signals import activity, memory
from extender.core.devices.readings import Column, Signal
from extender.core.policy import Thresholds
from extender.runtime.terminal_escapes import plain_text

_SMOOTH_SECONDS: Final = 10.0
"""Time constant of the average activity of a held device."""

_NOTICEABLE: Final = 0.02
"""A smaller change across a threshold counts as noise."""

_LOAD_SIGNALS: Final = (
    Signal.GPU_UTILIZATION,
    Signal.GRAPHICS_ACTIVE,
    Signal.SM_ACTIVE,
    Signal.TENSOR_ACTIVE,
    Signal.DRAM_ACTIVE,
    Signal.MEMORY_COPY_UTILIZATION,
    Signal.POWER,
    Signal.POWER_LIMIT,
    Signal.MEMORY_USED,
    Signal.MEMORY_FREE,
    Signal.MEMORY_RESERVED,
    Signal.MEMORY_TOTAL,
)

_MEAN_SECONDS: Final = 5.0
"""Minimum period of a mean; each mean counts as one reading in the extender's window."""

_SHARES_SECONDS: Final = 60.0
"""Interval of memory shares of shared devices; the extender's advice needs no more."""

_SIGNALS: Final = tuple(signal.value for signal in Signal)
_REST: Final = (AGE, XID_AGE, FOREIGN_MEMORY, FOREIGN_UTILIZATION, MEAN, MEAN_SQUARE)

_MEMORY_STEP: Final = 256 << 20
"""Memory is rounded up to this step, so that small changes are not reported again."""

_CONTAINER_ID: Final = re.compile(r"([0-9a-f]{12})[0-9a-f]{52}")
"""Ids are shortened as `docker ps` and `crictl ps` show them."""

_Number = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The parts of a report that affect scheduling decisions.

    Attributes:
        sequence: sequence number of the report.
        facts: facts about the node and each device; any change of them is news.
        activity: activity of each device, 0 to 1, NaN if unknown; averaged over some seconds if a
            pod holds the device or may hold it.
        memory_used: share of each device's memory in use, 0 to 1, NaN if unknown.
        is_used: whether each device is in use although no pod accounts for the use.
        totals: number of passes, sum of activity and sum of its square by device, since the start.
    """

    sequence: int = 0
    facts: tuple[object, ...] = ()
    activity: tuple[float, ...] = ()
    memory_used: tuple[float, ...] = ()
    is_used: tuple[bool, ...] = ()
    totals: Mapping[tuple[str, str], tuple[int, float, float]] = field(default_factory=dict)


class DigestBuilder:
    """Builds the digest of each report once for all connections, and keeps moving averages.

    Args:
        options: smallest changes of utilization and memory that count as news.
        thresholds: limits below which a device is idle.
        foreign: limits above which a free device counts as used.
    """

    def __init__(self, options: ReportOptions, thresholds: Thresholds, foreign: Threshold) -> None:
        self._options = options
        self._thresholds = thresholds
        self._foreign = foreign
        self._last = Digest()
        self._at = -math.inf
        self._averages: dict[tuple[str, str], float] = {}

    def build(self, report: Report) -> Digest:
        """Return the digest of a report; call it with reports in their order."""
        if report.sequence != self._last.sequence:
            self._last = self._digest(report)
        return self._last

    def is_news(self, before: Digest, after: Digest) -> bool:
        """Return whether the second report may change a decision based on the first.

        Args:
            before: digest of the last report sent.
            after: digest of the report to send.
        """
        if before.facts != after.facts:
            return True
        step, limit = self._options.utilization_step, self._thresholds.utilization
        memory_step, memory_limit = self._options.memory_step, self._thresholds.memory
        return any(
            _has_changed(then, now, step, limit)
            for then, now in zip(before.activity, after.activity, strict=True)
        ) or any(
            _has_changed(then, now, memory_step, memory_limit)
            for then, now in zip(before.memory_used, after.memory_used, strict=True)
        )

    def _digest(self, report: Report) -> Digest:
        passed = max(report.at - self._at, 0.0)
        self._at = report.at
        activities, memory_used = _load(report)
        totals: dict[tuple[str, str], tuple[int, float, float]] = {}
        averages: dict[tuple[str, str], float] = {}
        is_used = []
        for row, device in enumerate(report.devices):
            now, is_free = activities[row], device.allocated_to == ()
            before = self._averages.get(device.key, math.nan)
            share = 1.0 if is_free or math.isnan(before) else -math.expm1(-passed / _SMOOTH_SECONDS)
            averages[device.key] = (
                now if share == 1.0 or math.isnan(now) else (before + share * (now - before))
            )
            count, total, square = self._last.totals.get(device.key, (0, 0.0, 0.0))
            totals[device.key] = (
                (count, total, square)
                if math.isnan(now)
                else (count + 1, total + now, square + now * now)
            )
            used = _value(report, Signal.MEMORY_USED, row)
            ratio = None if math.isnan(now) else now
            is_used.append(
                self._has_foreign_use(device)
                or (is_free and exceeds(int(used or 0), ratio, self._foreign))
            )
        self._averages = averages
        return Digest(
            sequence=report.sequence,
            facts=self._facts(report, is_used),
            activity=tuple(averages.values()),
            memory_used=tuple(memory_used),
            is_used=tuple(is_used),
            totals=totals,
        )

    def _facts(self, report: Report, is_used: Sequence[bool]) -> tuple[object, ...]:
        devices = tuple(
            (*self._facts_of(report, device, row), is_used[row])
            for row, device in enumerate(report.devices)
        )
        problem = report.problem.code if report.problem is not None else ""
        return (problem, *devices)

    def _facts_of(self, report: Report, device: Device, row: int) -> tuple[object, ...]:
        verdict = device.verdict
        reasons = int(_value(report, Signal.CLOCK_EVENT_REASONS, row) or 0)
        holders = device.allocated_to
        return (
            device.key,
            device.mig_profile,
            device.replicas,
            device.problem.code if device.problem is not None else "",
            None
            if holders is None
            else tuple((one.namespace, one.pod, one.uid, one.replicas) for one in holders),
            self._has_foreign_use(device),
            verdict.action if verdict is not None else "",
            _value(report, Signal.XID, row),
            bool(reasons & HARD_SLOWDOWN),
        )

    def _has_foreign_use(self, device: Device) -> bool:
        """Return whether foreign processes use the device above the threshold."""
        foreign = device.foreign
        return foreign is not None and exceeds(
            foreign.memory_bytes, foreign.utilization_ratio, self._foreign
        )


def _has_changed(then: float, now: float, step: float, limit: float) -> bool:
    """Return whether a value has changed by a step, or has crossed a limit.

    Example:
        >>> _has_changed(0.1, 0.15, 0.2, 0.3), _has_changed(0.25, 0.35, 0.2, 0.3)
        (False, True)
    """
    if math.isnan(then) or math.isnan(now):
        return math.isnan(then) is not math.isnan(now)
    change = abs(now - then)
    has_crossed = (then >= limit) is not (now >= limit) and change >= _NOTICEABLE
    return has_crossed or change >= step - 1e-9


def _load(report: Report) -> tuple[list[float], list[float]]:
    """Return activity and share of memory in use of each device, 0 to 1, NaN if unknown."""
    nothing: Column = np.full(len(report.devices), np.nan)
    columns = {
        signal: np.array(report.signals[signal.value], dtype=np.float64)
        for signal in _LOAD_SIGNALS
        if signal.value in report.signals
    }
    busiest = activity(columns, nothing).busiest
    used, _, total = memory(columns, nothing)
    with np.errstate(invalid="ignore"):
        memory_used = used / np.where(total > 0, total, np.nan)
    return busiest.tolist(), memory_used.tolist()


def _value(report: Report, signal: Signal, row: int) -> float | None:
    column = report.signals.get(signal.value)
    return None if column is None else column[row]


class UpdateBuilder:
    """Builds the updates of one connection; omits what the connection has already carried."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._holders: Holders | None = None
        self._foreign: tuple[ForeignProcess, ...] = ()
        self._means_at = -math.inf
        self._shares_at = -math.inf
        self._totals: dict[tuple[str, str], tuple[int, float, float]] = {}

    def build(self, report: Report, digest: Digest, *, is_news: bool, sent_at: float) -> Update:
        """Build the update for a report; the caller must send it, and in this order.

        Args:
            digest: digest of the report.
            is_news: whether the report may change a decision.
            sent_at: time of sending, seconds since the epoch.
        """
        names, columns = self._columns(report, digest)
        layout = Layout(
            driver_version=report.driver_version,
            topology_policy=report.topology_policy,
            topology_scope=report.topology_scope,
            devices=msgspec.convert(report.devices, tuple[LayoutDevice, ...], from_attributes=True),
            rows=names,
        )
        holders = Holders(pods=tuple(map(_pods, report.devices)))
        foreign = _foreign_processes(report.devices)
        known = self._foreign if layout == self._layout else ()
        update = Update(
            node=report.node,
            started_at=report.started_at,
            sequence=report.sequence,
            at=report.at,
            sent_at=sent_at,
            is_news=is_news,
            layout=None if layout == self._layout else layout,
            holders=None if holders == self._holders else holders,
            values=_pack(columns),
            shares=self._shares(report),
            foreign=None if foreign == known else foreign,
        )
        self._layout, self._holders, self._foreign = layout, holders, foreign
        return update

    def _shares(self, report: Report) -> tuple[tuple[int, str, int], ...]:
        """Return (device number, pod UID, memory in bytes) for shared devices; () until due."""
        if 0 <= report.at - self._shares_at < _SHARES_SECONDS:  # also due if the clock was set back
            return ()
        self._shares_at = report.at
        return tuple(
            (place, uid, count)
            for place, device in enumerate(report.devices)
            if len(shares := _shares_of(device)) > 1
            for uid, count in sorted(shares.items())
        )

    def _columns(
        self, report: Report, digest: Digest
    ) -> tuple[tuple[str, ...], list[Sequence[_Number]]]:
        """Return the names and columns of all rows that have values."""
        devices = report.devices
        means = self._means(report, digest)
        foreign = [device.foreign for device in devices]
        rest: tuple[Sequence[_Number], ...] = (
            [device.age_seconds for device in devices],
            [device.xid_age_seconds for device in devices],
            [None if one is None else one.memory_bytes for one in foreign],
            [None if one is None else one.utilization_ratio for one in foreign],
            [mean for mean, _ in means],
            [square for _, square in means],
        )
        names = tuple(name for name in _SIGNALS if name in report.signals)
        return (*names, *_REST), [*(report.signals[name] for name in names), *rest]

    def _means(self, report: Report, digest: Digest) -> list[tuple[_Number, _Number]]:
        """Return each device's mean activity since the last sent mean, and the mean square."""
        if 0 <= report.at - self._means_at < _MEAN_SECONDS:  # likewise
            return [(None, None)] * len(report.devices)
        means: list[tuple[_Number, _Number]] = []
        for device in report.devices:
            count, total, square = digest.totals.get(device.key, (0, 0.0, 0.0))
            passes, before, squares = self._totals.get(device.key, (0, 0.0, 0.0))
            if not self._totals or count <= passes:
                means.append((None, None))  # no mean over the time before this connection
                continue
            new = count - passes
            means.append(((total - before) / new, max((square - squares) / new, 0.0)))
        self._totals, self._means_at = dict(digest.totals), report.at
        return means


def _shares_of(device: Device) -> dict[str, int]:
    """Return the memory in bytes of each pod on the device, by UID; {} if it is not fully known.

    A pod that holds a share and has no process on the device uses none of its memory.
    """
    used_by = device.used_by
    if used_by is None or any(
        one.place is Place.UNKNOWN or (one.place is Place.POD and not one.uid) for one in used_by
    ):
        return {}
    shares = {one.uid: 0 for one in device.allocated_to or () if one.uid}
    for one in used_by:
        if one.place is not Place.POD:
            continue
        if one.memory_bytes is None:
            return {}
        shares[one.uid] = shares.get(one.uid, 0) + one.memory_bytes
    return shares


def _pods(device: Device) -> tuple[tuple[str, str, str], ...] | None:
    """Return the pods on a device: its holders, else the pods of its processes; None if unknown.

    Processes do not show holders without processes, and processes of unknown location may belong to
    any pod.
    """
    if device.allocated_to is not None:
        found = {(one.namespace, one.pod, one.uid) for one in device.allocated_to}
        return tuple(sorted(found))
    used_by = device.used_by
    if used_by is None or any(one.place is Place.UNKNOWN for one in used_by):
        return None
    inside = [one for one in used_by if one.place is Place.POD]
    if not inside or not all(one.pod for one in inside):
        return None
    return tuple(sorted({(one.namespace, one.pod, one.uid) for one in inside}))


def _pack(columns: Sequence[Sequence[_Number]]) -> bytes:
    values = [math.nan if value is None else value for column in columns for value in column]
    return struct.pack(f"<{len(values)}d", *values)


def _foreign_processes(devices: Sequence[Device]) -> tuple[ForeignProcess, ...]:
    """Return the processes that use devices without holding them, by device, most memory first.

    If there are too many, each device keeps its largest ones.
    """
    ranked: list[tuple[int, ForeignProcess]] = []
    for number, device in enumerate(devices):
        pids = frozenset(() if device.foreign is None else device.foreign.pids)
        if not pids:
            continue
        inside = [one for one in device.used_by or () if one.pid in pids]
        inside.sort(key=lambda one: (-(one.memory_bytes or 0), one.pid))
        ranked += enumerate(_named(number, one) for one in inside[:MAX_DEVICE_PROCESSES])
    ranked.sort(key=lambda one: one[0])  # stable: the largest process of each device comes first
    return tuple(sorted((one for _, one in ranked[:MAX_PROCESSES]), key=lambda one: one.device))


def _named(device: int, process: Process) -> ForeignProcess:
    name = f"{process.namespace}/{process.pod}" if process.pod else process.uid
    memory = process.memory_bytes
    return ForeignProcess(
        device=device,
        pid=process.pid,
        name=plain_text(process.name, MAX_NAME),
        memory_bytes=None if memory is None else -(-memory // _MEMORY_STEP) * _MEMORY_STEP,
        started_at=process.started_at,
        pod=name if process.place is Place.POD else "",
        container=plain_text(_CONTAINER_ID.sub(r"\1", process.container), MAX_NAME),
    )
