"""Which reports are news to the extender: they may change where the next pod goes.

Everything else can wait for the next heartbeat. Activity of a device that pods hold is judged by
its mean over some seconds: it comes and goes, and decisions go by a mean as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.foreign import Threshold, shows
from agent.options import ReportOptions
from agent.report import Device, Report
from extender.core.policy import Thresholds
from extender.core.readings import Column, Signal
from extender.core.signals import activity, memory
from extender.core.stress import HARD_SLOWDOWN

SMOOTH_SECONDS: Final = 10.0
"""Over about so long the activity of a held device is averaged."""

NOTICEABLE: Final = 0.02
"""Less than this across a threshold is noise."""

_JUDGED: Final = (
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
    """What of a report counts for decisions.

    Attributes:
        sequence: of the report.
        facts: of each device and of the node: any change of them is news.
        busy: activity of each device, NaN where unknown.
        level: likewise; on average over some seconds where pods hold it or may.
        filled: share of its memory in use, NaN where unknown.
        is_used: whether each is in use although no pod accounts for it.
        totals: passes, activity and its square, summed since the agent started.
    """

    sequence: int = 0
    facts: tuple[object, ...] = ()
    busy: tuple[float, ...] = ()
    level: tuple[float, ...] = ()
    filled: tuple[float, ...] = ()
    is_used: tuple[bool, ...] = ()
    totals: Mapping[tuple[str, str], tuple[int, float, float]] = field(default_factory=dict)


class Digests:
    """Makes the digest of each report once, for all who send it; keeps what is averaged.

    Args:
        options: how reports are sent.
        thresholds: below them a device is idle.
        foreign: from where on a device that nobody holds counts as used.
    """

    def __init__(self, options: ReportOptions, thresholds: Thresholds, foreign: Threshold) -> None:
        self._steps = (options.utilization_step, options.memory_step)
        self._limits = (thresholds.utilization, thresholds.memory)
        self._foreign = foreign
        self._last = Digest()
        self._at = -math.inf
        self._levels: dict[tuple[str, str], float] = {}

    def of(self, report: Report) -> Digest:
        """Return the digest of a report; reports come in their order."""
        if report.sequence != self._last.sequence:
            self._last = self._digest(report)
        return self._last

    def is_news(self, before: Digest, after: Digest) -> bool:
        """Tell whether a report may change a decision that the other was the base of."""
        return before.facts != after.facts or any(
            _is_step(then, now, step, limit)
            for column, step, limit in zip(
                ("level", "filled"), self._steps, self._limits, strict=True
            )
            for then, now in zip(getattr(before, column), getattr(after, column), strict=True)
        )

    def _digest(self, report: Report) -> Digest:
        passed = max(report.at - self._at, 0.0)
        self._at = report.at
        busy, filled = _load(report)
        totals: dict[tuple[str, str], tuple[int, float, float]] = {}
        levels: dict[tuple[str, str], float] = {}
        is_used = []
        for row, device in enumerate(report.devices):
            now, is_free = busy[row], device.allocated_to == ()
            before = self._levels.get(device.key, math.nan)
            share = 1.0 if is_free or math.isnan(before) else -math.expm1(-passed / SMOOTH_SECONDS)
            levels[device.key] = (
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
                self._shows_foreign(device)
                or (is_free and shows(int(used or 0), ratio, self._foreign))
            )
        self._levels = levels
        return Digest(
            sequence=report.sequence,
            facts=self._facts(report, is_used),
            busy=tuple(busy),
            level=tuple(levels.values()),
            filled=tuple(filled),
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
            device.problem.code if device.problem is not None else "",
            None
            if holders is None
            else tuple((one.namespace, one.pod, one.uid, one.replicas) for one in holders),
            self._shows_foreign(device),
            verdict.action if verdict is not None else "",
            _value(report, Signal.XID, row),
            bool(reasons & HARD_SLOWDOWN),
        )

    def _shows_foreign(self, device: Device) -> bool:
        """Say whether somebody else's processes make a device used, whoever holds it."""
        foreign = device.foreign
        return foreign is not None and shows(
            foreign.memory_bytes, foreign.utilization_ratio, self._foreign
        )


def _is_step(then: float, now: float, step: float, limit: float) -> bool:
    """Tell whether a value has changed by a step, or has crossed a limit.

    Example:
        >>> _is_step(0.1, 0.15, 0.2, 0.3), _is_step(0.25, 0.35, 0.2, 0.3)
        (False, True)
    """
    if math.isnan(then) or math.isnan(now):
        return math.isnan(then) is not math.isnan(now)
    change = abs(now - then)
    has_crossed = (then >= limit) is not (now >= limit) and change >= NOTICEABLE
    return has_crossed or change >= step - 1e-9


def _load(report: Report) -> tuple[list[float], list[float]]:
    """Return how busy each device is and how full its memory, NaN where unknown."""
    nothing: Column = np.full(len(report.devices), np.nan)
    columns = {
        signal: np.array(report.signals[signal.value], dtype=np.float64)
        for signal in _JUDGED
        if signal.value in report.signals
    }
    busy = activity(columns, nothing).busiest
    used, _, total = memory(columns, nothing)
    with np.errstate(invalid="ignore"):
        filled = used / np.where(total > 0, total, np.nan)
    return busy.tolist(), filled.tolist()


def _value(report: Report, signal: Signal, row: int) -> float | None:
    column = report.signals.get(signal.value)
    return None if column is None else column[row]
