"""Judges devices by the extender's own code and settings: the same facts give the same verdict."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.report import Verdict
from extender.core.causes import Sign, decode, words
from extender.core.health import (
    SEVERITY,
    HealthColumns,
    is_of_recovery,
    judge,
    xid_action,
)
from extender.core.policy import Health, HealthAction, Thresholds
from extender.core.readings import Column, Signal
from extender.core.signals import OTHER_ACTIVITY, UTILIZATION, activity, memory
from extender.core.stress import stress, stress_in_words

_NOTICEABLE: Final = 0.01
_DIGITS: Final = 4

_OF_IDLENESS: Final = (
    *UTILIZATION,
    *OTHER_ACTIVITY,
    Signal.POWER,
    Signal.POWER_LIMIT,
    Signal.MEMORY_USED,
    Signal.MEMORY_FREE,
    Signal.MEMORY_RESERVED,
    Signal.MEMORY_TOTAL,
)
_OF_STRESS: Final = (
    Signal.TEMPERATURE,
    Signal.TEMPERATURE_SLOWDOWN,
    Signal.MEMORY_TEMPERATURE,
    Signal.CLOCK_EVENT_REASONS,
)
_OF_HEALTH: Final = tuple(
    signal for signal in Signal if signal not in {*_OF_IDLENESS, *_OF_STRESS, Signal.PROCESSES}
)
"""Whatever does not tell these may tell health; temperature does where it is too high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is made of numbers.

    Attributes:
        thresholds: below both a device is idle.
        health: what signs of ill health mean.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    health: Health = field(default_factory=Health)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the devices of a node besides numbers; one entry for each.

    Attributes:
        sources: what tells their activity.
        xid_at: when their XID happened, None where there is none.
        is_lost: whether they cannot be read any more.
    """

    sources: Sequence[str]
    xid_at: Sequence[float | None]
    is_lost: Sequence[bool]


def gravest_xid(
    events: Sequence[tuple[float, int]],
    health: Health,
    now: float,
    *,
    reads_recovery: bool = False,
) -> tuple[float, int] | None:
    """Return the XID that a device is judged by: of those that still count the gravest.

    The last one alone would hide the one before, as an application's fault often follows a card's;
    and that the recovery action has changed follows what it was changed for.

    Args:
        events: when which XIDs happened, oldest first.
        health: what they mean, and how long they count.
        now: seconds since the epoch.
        reads_recovery: whether the recovery action is read, and speaks for itself.
    """
    if not events:
        return None
    recent = [event for event in events if now - event[0] < health.xid_seconds]
    if not recent:
        return events[-1]

    def gravity(event: tuple[float, int]) -> tuple[bool, int, bool, float]:
        at, xid = event
        says_why = not is_of_recovery(health, xid)
        counts = says_why or not reads_recovery
        return counts, SEVERITY[xid_action(health, xid)], says_why, at

    return max(recent, key=gravity)


class Judge:
    """Judges the devices of a node, and their health anew only where something of it changed.

    Args:
        judgement: the settings.
    """

    def __init__(self, judgement: Judgement) -> None:
        self._judgement = judgement
        self._asked: object = None
        self._health: tuple[tuple[str, str], ...] = ()

    def judge(
        self, signals: Mapping[str, Sequence[float | None]], facts: Facts, now: float
    ) -> tuple[Verdict, ...]:
        """Return the verdict on each device.

        Args:
            signals: what was measured, by name of the signal, None where missing.
            facts: what else is known of the devices.
            now: seconds since the epoch.
        """
        if not facts.sources:
            return ()
        health = self._judge_health(signals, facts, now)
        stressed = _judge_stress(signals, len(facts.sources), self._judgement.health)
        idle = _judge_idle(signals, facts.sources, self._judgement.thresholds)
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

    def _judge_health(
        self, signals: Mapping[str, Sequence[float | None]], facts: Facts, now: float
    ) -> tuple[tuple[str, str], ...]:
        """Return action and cause of each device's health."""
        health = self._judgement.health
        recent = tuple(at is not None and now - at < health.xid_seconds for at in facts.xid_at)
        told = {name.value: signals[name] for name in _OF_HEALTH if name in signals}
        told |= _too_hot(signals)
        asked = (told, recent, tuple(facts.is_lost))
        if asked != self._asked:
            is_lost = np.array(facts.is_lost)
            columns = _columns(told, told)
            found = judge(columns, len(is_lost), health, np.array(recent), is_lost)
            found.exclude_siblings(np.zeros(len(is_lost), dtype=np.intp))
            if not is_lost.all():  # else it is not they that are silent among others that speak
                found.apply(health.missing_device, is_lost, Sign.MISSING)
            rows = range(len(is_lost))
            self._health = tuple((_action(found, row), _cause(found, row)) for row in rows)
            self._asked = asked
        return self._health


def _columns(
    signals: Mapping[str, Sequence[float | None]], names: Iterable[str]
) -> dict[Signal, Column]:
    return {
        Signal(name): np.array(signals[name], dtype=np.float64) for name in names if name in signals
    }


def _too_hot(
    signals: Mapping[str, Sequence[float | None]],
) -> dict[str, Sequence[float | None]]:
    """Return the temperatures where one speaks against health: they change every second."""
    told = signals.get(Signal.TEMPERATURE, ())
    limits = signals.get(Signal.TEMPERATURE_SHUTDOWN, ())
    for celsius, limit in zip(told, limits, strict=False):
        if celsius is not None and limit is not None and celsius >= limit:
            return {Signal.TEMPERATURE.value: told}
    return {}


def _judge_stress(
    signals: Mapping[str, Sequence[float | None]], count: int, health: Health
) -> Sequence[tuple[float, str]]:
    """Return of each device how hot or throttled it is, and why."""
    told = [(name, signals[name]) for name in _OF_STRESS if name in signals]
    causes = [
        stress_in_words(
            {name: value for name, column in told if (value := column[row]) is not None}, health
        )
        for row in range(count)
    ]
    if not any(causes):
        return [(0.0, "")] * count
    ratios = stress(_columns(signals, _OF_STRESS), count, health).round(_DIGITS)
    return list(zip(ratios.tolist(), causes, strict=True))


def _judge_idle(
    signals: Mapping[str, Sequence[float | None]], sources: Sequence[str], thresholds: Thresholds
) -> Iterator[tuple[bool | None, str]]:
    """Return of each device whether it is idle, and why."""
    columns = _columns(signals, _OF_IDLENESS)
    nothing = np.full(len(sources), np.nan)
    busy = activity(columns, nothing).measured
    used, _, total = memory(columns, nothing)
    filled = used / np.where(total > 0, total, np.nan)
    graphics = columns.get(Signal.GRAPHICS_ACTIVE, nothing)
    told = np.where(np.isnan(graphics), columns.get(Signal.GPU_UTILIZATION, nothing), graphics)
    said = map(_say_busy, busy.tolist(), told.tolist(), sources)
    rows = zip(busy.tolist(), filled.tolist(), said, strict=True)
    return (_idle(*row, thresholds) for row in rows)


def _action(health: HealthColumns, row: int) -> str:
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


def _say_busy(busy: float, told: float, source: str) -> str:
    """Say how busy a device is, and by what; NaN is unknown.

    Example:
        >>> _say_busy(0.285, 0.01, "samples")
        'busy 28% (1% by samples, more by memory traffic)'
    """
    if math.isnan(busy):
        return "activity unknown"
    if busy - told > _NOTICEABLE:
        return f"busy {busy:.0%} ({told:.0%} by {source}, more by memory traffic)"
    return f"busy {busy:.0%} ({source})" if source else f"busy {busy:.0%}"


def _idle(busy: float, filled: float, said: str, thresholds: Thresholds) -> tuple[bool | None, str]:
    """Tell whether a device is idle, and why; NaN is unknown."""
    told = [said, "memory unknown" if math.isnan(filled) else f"memory {filled:.0%} used"]
    over = []
    if busy >= thresholds.utilization:
        over.append(f"{told[0]}, idle is below {thresholds.utilization:.0%}")
    if filled >= thresholds.memory:
        over.append(f"{told[1]}, idle is below {thresholds.memory:.0%}")
    if over:
        return False, "; ".join(over)
    is_known = busy < thresholds.utilization and filled < thresholds.memory
    return (True if is_known else None), ", ".join(told)
