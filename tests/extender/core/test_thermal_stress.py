"""Heat and throttling of devices."""

import math
from typing import Any

import numpy as np
import pytest

from extender.core.decision.health import stress, stress_in_words
from extender.core.devices.readings import Column, Signal
from extender.core.policy import Health

NAN = float("nan")


def one(**values: float) -> dict[Signal, Column]:
    return {Signal[name]: np.array([value]) for name, value in values.items()}


def words(**values: float) -> str:
    known = {Signal[name].value: value for name, value in values.items() if not math.isnan(value)}
    return stress_in_words(known, Health())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 0.0),
        ({"TEMPERATURE": 60.0}, 0.0),
        ({"TEMPERATURE": 85.0}, 0.5),
        ({"TEMPERATURE": 95.0}, 1.0),
        ({"MEMORY_TEMPERATURE": 95.0}, 0.0),
        ({"MEMORY_TEMPERATURE": 100.0, "TEMPERATURE": 81.0}, 0.5),
        ({"MEMORY_TEMPERATURE": 110.0}, 1.0),
        ({"TEMPERATURE": 79.0, "TEMPERATURE_SLOWDOWN": 89.0}, 0.0),
        ({"TEMPERATURE": 84.0, "TEMPERATURE_SLOWDOWN": 89.0}, 0.5),
        ({"TEMPERATURE": 90.0, "TEMPERATURE_SLOWDOWN": 89.0}, 1.0),
        ({"TEMPERATURE": 90.0, "TEMPERATURE_SLOWDOWN": 110.0}, 0.0),
        ({"TEMPERATURE": 85.0, "TEMPERATURE_SLOWDOWN": 0.0}, 0.5),
        ({"CLOCK_EVENT_REASONS": float(0x1 | 0x2 | 0x4 | 0x10 | 0x100)}, 0.0),
        ({"CLOCK_EVENT_REASONS": float(0x20)}, 0.5),
        *[({"CLOCK_EVENT_REASONS": float(bit)}, 1.0) for bit in (0x8, 0x40, 0x80, 0xA8)],
        ({"CLOCK_EVENT_REASONS": 1e300}, 0.0),
        ({"CLOCK_EVENT_REASONS": NAN, "TEMPERATURE": NAN}, 0.0),
    ],
)
def test_heat_and_throttling_are_stress(values: dict[str, Any], expected: float) -> None:
    assert stress(one(**values), 1, Health())[0] == pytest.approx(expected)
    assert bool(words(**values)) == bool(expected), "the words name exactly what counts"


def test_temperature_bounds_that_are_equal_are_a_step() -> None:
    health = Health(temperature_warn_celsius=80, temperature_high_celsius=80)

    assert stress(one(TEMPERATURE=79.0), 1, health)[0] == 0.0
    assert stress(one(TEMPERATURE=81.0), 1, health)[0] == 1.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"CLOCK_EVENT_REASONS": float(0x4 | 0x8 | 0x20)},
            "hardware slowdown, software thermal slowdown",
        ),
        ({"CLOCK_EVENT_REASONS": float(0x80)}, "hardware power brake"),
        ({"TEMPERATURE": 86.0, "MEMORY_TEMPERATURE": 99.0}, "86 °C, memory at 99 °C"),
        (
            {"TEMPERATURE": 86.0, "TEMPERATURE_SLOWDOWN": 89.0},
            "86 °C, its clocks are held back from 89 °C on",
        ),
    ],
)
def test_stress_names_its_cause(values: dict[str, float], expected: str) -> None:
    assert words(**values) == expected
