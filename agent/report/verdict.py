"""Evaluate devices with the extender's code and settings, so that both reach the same verdict."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.report.contract import Verdict
from extender.core.decision.health import (
    HealthColumns,
    Sign,
    decode,
    judge,
    stress,
    stress_in_words,
    words,
)
from extender.core.decision.signals import OTHER_ACTIVITY, UTILIZATION, activity, memory
from extender.core.devices.readings import Column, Signal
from extender.core.policy import Health, HealthAction, Thresholds

_EXCLUDED: Final = "excluded"
"""Action of a device that works, but another device excludes its node."""
_NOTICEABLE: Final = 0.01
_DIGITS: Final = 4

_IDLE_SIGNALS: Final = (
    *UTILIZATION,
    *OTHER_ACTIVITY,
    Signal.POWER,
    Signal.POWER_LIMIT,
    Signal.MEMORY_USED,
    Signal.MEMORY_FREE,
    Signal.MEMORY_RESERVED,
    Signal.MEMORY_TOTAL,
)
_STRESS_SIGNALS: Final = (
    Signal.TEMPERATURE,
    Signal.TEMPERATURE_SLOWDOWN,
    Signal.MEMORY_TEMPERATURE,
    Signal.CLOCK_EVENT_REASONS,
)
_HEALTH_SIGNALS: Final = tuple(
    signal
    for signal in Signal
    if signal not in {*_IDLE_SIGNALS, *_STRESS_SIGNALS, Signal.PROCESSES}
)
"""All other signals may affect health; temperature counts only from the shutdown limit on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictPolicy:
    """Settings for the evaluation of devices.

    Attributes:
        thresholds: utilization and memory limits below which a device is idle.
        health: actions for signs of ill health.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    health: Health = field(default_factory=Health)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Facts about the devices besides signals, one entry for each device.

    Attributes:
        sources: source of the utilization.
        xid_at: time of the XID error, seconds since the epoch; None without one.
        is_lost: whether the device cannot be read any more.
    """

    sources: Sequence[str]
    xid_at: Sequence[float | None]
    is_lost: Sequence[bool]


def most_severe_xid(
    events: Sequence[tuple[float, int]], health: Health, now: float, *, reads_recovery: bool = False
) -> tuple[float, int] | None:
    """Return (time, number) of the most severe recent XID of a device.

    The last one alone could hide the cause: application errors often follow a hardware error, and
    the "recovery action changed" XID follows the error that changed the action.

    Args:
        events: (time, number) of XIDs, oldest first; times in seconds since the epoch.
        health: the action of each XID, and how long an XID counts.
        now: seconds since the epoch.
        reads_recovery: whether the driver reports the recovery action as a signal of its own.

    Returns:
        None without events; the last event if none is recent.
    """
    if not events:
        return None
    recent = [event for event in events if now - event[0] < health.xid_seconds]
    if not recent:
        return events[-1]

    def severity(event: tuple[float, int]) -> tuple[bool, int, bool, float]:
        at, xid = event
        is_cause = not health.only_repeats_recovery(xid)
        counts = is_cause or not reads_recovery
        return counts, health.xid_action(xid).severity, is_cause, at

    return max(recent, key=severity)


class DeviceEvaluator:
    """Evaluates the devices of a node; health again only when a signal of it has changed."""

    def __init__(self, verdict_policy: VerdictPolicy) -> None:
        self._policy = verdict_policy
        self._cache_key: object = None
        self._cached_health: tuple[tuple[str, str], ...] = ()

    def evaluate(
        self, signals: Mapping[str, Sequence[float | None]], facts: DeviceFacts, now: float
    ) -> tuple[Verdict, ...]:
        """Return the verdict on each device.

        Args:
            signals: columns of values in base units by name of the signal, None where missing.
            facts: other facts about the devices.
            now: seconds since the epoch.
        """
        if not facts.sources:
            return ()
        health = self._evaluate_health(signals, facts, now)
        stressed = _evaluate_stress(signals, len(facts.sources), self._policy.health)
        idle = _evaluate_idle(signals, facts.sources, self._policy.thresholds)
        return tuple(
            Verdict(
                is_idle=is_idle,
                reason=reason,
                action=action,
                cause=cause,
                stress_ratio=ratio,
                stress_cause=why,
            )
            for (is_idle, reason), (action, cause), (ratio, why) in zip(
                idle, health, stressed, strict=True
            )
        )

    def _evaluate_health(
        self, signals: Mapping[str, Sequence[float | None]], facts: DeviceFacts, now: float
    ) -> tuple[tuple[str, str], ...]:
        """Return (action, cause) of each device's health."""
        health = self._policy.health
        recent = tuple(at is not None and now - at < health.xid_seconds for at in facts.xid_at)
        relevant = {name.value: signals[name] for name in _HEALTH_SIGNALS if name in signals}
        relevant |= _shutdown_temperatures(signals)
        cache_key = (relevant, recent, tuple(facts.is_lost))
        if cache_key != self._cache_key:
            is_lost = np.array(facts.is_lost)
            columns = _columns(relevant, relevant)
            result = judge(columns, len(is_lost), health, np.array(recent), is_lost)
            result.exclude_siblings(np.zeros(len(is_lost), dtype=np.intp))
            if not is_lost.all():  # a missing device is one that is silent while others answer
                result.apply(health.missing_device, is_lost, Sign.MISSING)
            rows = range(len(is_lost))
            self._cached_health = tuple((_action(result, row), _cause(result, row)) for row in rows)
            self._cache_key = cache_key
        return self._cached_health


def _columns(
    signals: Mapping[str, Sequence[float | None]], names: Iterable[str]
) -> dict[Signal, Column]:
    return {
        Signal(name): np.array(signals[name], dtype=np.float64) for name in names if name in signals
    }


def _shutdown_temperatures(
    signals: Mapping[str, Sequence[float | None]],
) -> dict[str, Sequence[float | None]]:
    """Return the temperature column if any device has reached its shutdown limit, else {}.

    Temperatures change every second: below the limit they would only defeat the cache.
    """
    temperatures = signals.get(Signal.TEMPERATURE, ())
    limits = signals.get(Signal.TEMPERATURE_SHUTDOWN, ())
    for celsius, limit in zip(temperatures, limits, strict=False):
        if celsius is not None and limit is not None and celsius >= limit:
            return {Signal.TEMPERATURE.value: temperatures}
    return {}


def _evaluate_stress(
    signals: Mapping[str, Sequence[float | None]], count: int, health: Health
) -> Sequence[tuple[float, str]]:
    """Return (stress ratio, cause) of each device from temperatures and clock events."""
    columns = [(name, signals[name]) for name in _STRESS_SIGNALS if name in signals]
    causes = [
        stress_in_words(
            {name: value for name, column in columns if (value := column[row]) is not None}, health
        )
        for row in range(count)
    ]
    if not any(causes):
        return [(0.0, "")] * count
    ratios = stress(_columns(signals, _STRESS_SIGNALS), count, health).round(_DIGITS)
    return list(zip(ratios.tolist(), causes, strict=True))


def _evaluate_idle(
    signals: Mapping[str, Sequence[float | None]], sources: Sequence[str], thresholds: Thresholds
) -> Iterator[tuple[bool | None, str]]:
    """Return (is idle, reason) of each device."""
    columns = _columns(signals, _IDLE_SIGNALS)
    unknown = np.full(len(sources), np.nan)
    busy = activity(columns, unknown).measured
    used, _, total = memory(columns, unknown)
    memory_used = used / np.where(total > 0, total, np.nan)
    graphics = columns.get(Signal.GRAPHICS_ACTIVE, unknown)
    direct = np.where(np.isnan(graphics), columns.get(Signal.GPU_UTILIZATION, unknown), graphics)
    activity_texts = map(_describe_activity, busy.tolist(), direct.tolist(), sources)
    rows = zip(busy.tolist(), memory_used.tolist(), activity_texts, strict=True)
    return (_describe_idle(*row, thresholds) for row in rows)


def _action(health: HealthColumns, row: int) -> str:
    if decode(int(health.cause[row]))[0] is Sign.SIBLING:
        return _EXCLUDED
    if health.is_node_excluded[row]:
        return HealthAction.EXCLUDE_NODE
    if health.is_excluded[row]:
        return HealthAction.EXCLUDE
    if health.is_excluded_multi[row]:
        return HealthAction.EXCLUDE_MULTI_GPU
    return HealthAction.PENALTY if health.penalty[row] else ""


def _cause(health: HealthColumns, row: int) -> str:
    cause = int(health.cause[row])
    sign, value = decode(cause)
    if sign is Sign.SIBLING:
        return f"{words(cause)}: {words(int(health.cause[value]))}"
    return words(cause)


def _describe_activity(busy: float, direct: float, source: str) -> str:
    """Describe a device's activity and its source; NaN is unknown.

    Args:
        busy: activity by all signals, 0 to 1.
        direct: utilization alone, 0 to 1.

    Example:
        >>> _describe_activity(0.285, 0.01, "samples")
        'busy 28% (1% by samples, more by memory traffic)'
    """
    if math.isnan(busy):
        return "activity unknown"
    if busy - direct > _NOTICEABLE:
        return f"busy {busy:.0%} ({direct:.0%} by {source}, more by memory traffic)"
    return f"busy {busy:.0%} ({source})" if source else f"busy {busy:.0%}"


def _describe_idle(
    busy: float, memory_used: float, activity_text: str, thresholds: Thresholds
) -> tuple[bool | None, str]:
    """Return whether a device is idle, and the reason; NaN is unknown."""
    memory_text = "memory unknown" if math.isnan(memory_used) else f"memory {memory_used:.0%} used"
    exceeded = []
    if busy >= thresholds.utilization:
        exceeded.append(f"{activity_text}, idle is below {thresholds.utilization:.0%}")
    if memory_used >= thresholds.memory:
        exceeded.append(f"{memory_text}, idle is below {thresholds.memory:.0%}")
    if exceeded:
        return False, "; ".join(exceeded)
    is_idle = busy < thresholds.utilization and memory_used < thresholds.memory
    return (True if is_idle else None), f"{activity_text}, {memory_text}"
