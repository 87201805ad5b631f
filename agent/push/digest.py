"""Decide which reports are news for the extender: those that may change a scheduling decision.

All other reports wait for the next heartbeat. Activity of a held device is averaged over some
seconds: it fluctuates, and decisions use a mean as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.options import ReportOptions
from agent.report.contract import Device, Report
from agent.tenants.foreign import Threshold, exceeds
from extender.core.decision.signals import activity, memory
from extender.core.devices.readings import Column, Signal
from extender.core.devices.thermal_stress import HARD_SLOWDOWN
from extender.core.policy import Thresholds

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
        options: step sizes of changes that count as news.
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
