"""Rate heat and throttling of devices; stress lowers a device's score and never excludes it."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from extender.core.devices.readings import Column, Signal
from extender.core.nodes.snapshot import Ratios
from extender.core.policy import WARN_CELSIUS, Health

_SW_THERMAL: Final = 0x20
HARD_SLOWDOWN: Final = 0x8 | 0x40 | 0x80
"""Bits of NVML's clock event reasons for hardware slowdown."""

SLOWDOWN_WORDS: Final[Mapping[int, str]] = MappingProxyType(
    {
        0x04: "software power cap",
        0x08: "hardware slowdown",
        0x20: "software thermal slowdown",
        0x40: "hardware thermal slowdown",
        0x80: "hardware power brake",
    }
)
"""Bits of NVML's clock event reasons that slow a card down. The software power cap causes no
stress: cards reach it under normal load."""

_MASK_LIMIT: Final = float(1 << 53)  # larger floats are not exact, and no bit mask is larger


def stress(columns: Mapping[Signal, Column], count: int, health: Health) -> Ratios:
    """Return the stress of each device, from 0 (none or unknown) to 1.

    Heat is rated against the card's slowdown temperature if known, else against the settings.

    Args:
        columns: values by signal; NaN for a missing value.
        count: number of devices.
        health: the settings.
    """
    missing = np.full(count, np.nan)
    slowdown = columns.get(Signal.TEMPERATURE_SLOWDOWN, missing)
    is_known = slowdown > WARN_CELSIUS
    heat = _heat(
        columns.get(Signal.TEMPERATURE, missing),
        np.where(is_known, slowdown - WARN_CELSIUS, health.temperature_warn_celsius),
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
    """Return the heat from 0 (up to `warn`, or unknown) to 1 (from `high`)."""
    known = np.where(np.isnan(celsius), warn, celsius)
    return np.clip((known - warn) / np.maximum(high - warn, 1.0), 0.0, 1.0)


def stress_in_words(reading: Mapping[str, float], health: Health) -> str:
    """Return the causes of a device's stress in words, "" without stress.

    Args:
        reading: value by signal name.
        health: the settings.

    Example:
        >>> stress_in_words({"temperature_celsius": 86.0, "clock_event_reasons": 0x44}, Health())
        'hardware thermal slowdown, 86 °C'
    """
    return ", ".join(_causes(reading, health))


def throttling_in_words(mask: float) -> str:
    """Return the clock event reasons that cause stress in words, "" for none.

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
    if slowdown > WARN_CELSIUS:
        if celsius > slowdown - WARN_CELSIUS:
            yield f"{celsius:.0f} °C, its clocks are held back from {slowdown:.0f} °C on"
    elif celsius > health.temperature_warn_celsius:
        yield f"{celsius:.0f} °C"
    of_memory = reading.get(Signal.MEMORY_TEMPERATURE, 0.0)
    if of_memory > health.memory_temperature_warn_celsius:
        yield f"memory at {of_memory:.0f} °C"
