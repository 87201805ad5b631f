"""How hot or throttled devices are: it costs them some of their score, and excludes none."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from extender.core.policy import Health
from extender.core.readings import Column, Signal
from extender.core.snapshot import Ratios

SLOWDOWN_RAMP_CELSIUS: Final = 10.0
"""So far below where its clocks are held back a card counts less for its heat: a guess of ours.
NVIDIA names temperatures at which something happens, and none from which it is near."""

_SW_THERMAL: Final = 0x20
HARD_SLOWDOWN: Final = 0x8 | 0x40 | 0x80
"""Bits of NVML's clock event reasons: hardware holds the clocks back."""

SLOWDOWN_WORDS: Final[Mapping[int, str]] = MappingProxyType(
    {
        0x04: "software power cap",
        0x08: "hardware slowdown",
        0x20: "software thermal slowdown",
        0x40: "hardware thermal slowdown",
        0x80: "hardware power brake",
    }
)
"""Bits of NVML's clock event reasons that slow a card down; the others are no trouble. The power
cap is none either: cards meet it under normal load."""

_MASK_LIMIT: Final = float(1 << 53)  # no bit mask is larger, and larger ones are not exact


def stress(columns: Mapping[Signal, Column], count: int, health: Health) -> Ratios:
    """Return how hot or throttled each device is, 0 (not, or unknown) to 1.

    Where it is known from which temperature on a card's clocks are held back, its heat is judged by
    that, else by the settings.

    Args:
        columns: what was read; NaN where missing.
        count: devices.
        health: the settings.
    """
    missing = np.full(count, np.nan)
    slowdown = columns.get(Signal.TEMPERATURE_SLOWDOWN, missing)
    is_known = slowdown > SLOWDOWN_RAMP_CELSIUS
    heat = _heat(
        columns.get(Signal.TEMPERATURE, missing),
        np.where(is_known, slowdown - SLOWDOWN_RAMP_CELSIUS, health.temperature_warn_celsius),
        np.where(is_known, slowdown, health.temperature_high_celsius),
    )
    memory_heat = _heat(
        columns.get(Signal.MEMORY_TEMPERATURE, missing),
        np.full(count, health.memory_temperature_warn_celsius),
        np.full(count, health.memory_temperature_high_celsius),
    )
    mask = columns.get(Signal.CLOCK_EVENT_REASONS, missing)
    reasons = np.where(mask < _MASK_LIMIT, mask, 0.0).astype(np.int64)
    hard = (reasons & HARD_SLOWDOWN) != 0
    soft = (reasons & _SW_THERMAL) != 0
    throttling = np.where(hard, 1.0, np.where(soft, 0.5, 0.0))
    hottest: Ratios = np.maximum(np.maximum(heat, memory_heat), throttling)
    return hottest


def _heat(celsius: Column, warn: Column, high: Column) -> Ratios:
    """Return how hot something is: 0 up to `warn` and where unknown, 1 from `high` on."""
    known = np.where(np.isnan(celsius), warn, celsius)
    return np.clip((known - warn) / np.maximum(high - warn, 1.0), 0.0, 1.0)


def stress_in_words(reading: Mapping[str, float], health: Health) -> str:
    """Return why a device has `stress`, "" where it has none.

    Args:
        reading: what was read of it, by name of the signal.
        health: the settings.

    Example:
        >>> stress_in_words({"temperature_celsius": 86.0, "clock_event_reasons": 0x44}, Health())
        'hardware thermal slowdown, 86 °C'
    """
    return ", ".join(_causes(reading, health))


def throttling_in_words(mask: float) -> str:
    """Return what of a card's clock event reasons costs it, "" where none does.

    Example:
        >>> throttling_in_words(0x44), throttling_in_words(0x04)
        ('hardware thermal slowdown', '')
    """
    bits = int(mask) & (HARD_SLOWDOWN | _SW_THERMAL) if mask < _MASK_LIMIT else 0
    return ", ".join(text for bit, text in SLOWDOWN_WORDS.items() if bits & bit)


def _causes(reading: Mapping[str, float], health: Health) -> Iterator[str]:
    throttling = throttling_in_words(reading.get(Signal.CLOCK_EVENT_REASONS, 0.0))
    if throttling:
        yield throttling
    celsius = reading.get(Signal.TEMPERATURE, 0.0)
    slowdown = reading.get(Signal.TEMPERATURE_SLOWDOWN, 0.0)
    if slowdown > SLOWDOWN_RAMP_CELSIUS:
        if celsius > slowdown - SLOWDOWN_RAMP_CELSIUS:
            yield f"{celsius:.0f} °C, its clocks are held back from {slowdown:.0f} °C on"
    elif celsius > health.temperature_warn_celsius:
        yield f"{celsius:.0f} °C"
    of_memory = reading.get(Signal.MEMORY_TEMPERATURE, 0.0)
    if of_memory > health.memory_temperature_warn_celsius:
        yield f"memory at {of_memory:.0f} °C"
