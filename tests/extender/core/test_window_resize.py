"""Resized windows keep the values that still lie within them."""

from collections.abc import Generator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.window import Windows
from testkit.windows import summarize

ROWS = np.array([0, 1])


def windows(seconds: float = 600.0) -> Windows:
    made = Windows(seconds, 10)
    made.grow(2)
    return made


def finish(steps: Generator[None, None, None]) -> int:
    """Run all steps; return their number."""
    return sum(1 for _ in steps)


def fill(made: Windows, *values: float, start: float = 0.0, apart: float = 60.0) -> None:
    for number, value in enumerate(values):
        made.add(start + number * apart, ROWS, np.array([value, 1.0 - value]))


def values_of(made: Windows) -> list[list[float]]:
    return [column.tolist() for column in summarize(made)]


READINGS = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20)


@given(READINGS, st.floats(1.0, 30.0))
def test_a_longer_window_holds_all_that_the_shorter_one_held(
    values: list[float], times: float
) -> None:
    made = windows()
    fill(made, *values)
    mean, spread, count = values_of(made)

    finish(made.resize_in_steps(600.0 * times))

    assert summarize(made)[0].tolist() == pytest.approx(mean, abs=1e-5)
    assert summarize(made)[1].tolist() == pytest.approx(spread, abs=1e-2)
    assert summarize(made)[2].tolist() == count


@given(READINGS, st.floats(0.05, 10.0), READINGS)
def test_mean_stays_within_the_readings(
    values: list[float], times: float, later: list[float]
) -> None:
    made = windows()
    fill(made, *values)

    finish(made.resize_in_steps(600.0 * times))
    fill(made, *later, start=60.0 * len(values))

    mean, spread, count = summarize(made)
    assert 0 < count[0] <= len(values) + len(later)
    assert min(values + later) - 1e-6 <= mean[0] <= max(values + later) + 1e-6
    assert np.isfinite(spread).all()


def test_shorter_window_drops_older_values() -> None:
    made = windows()
    fill(made, *[1.0] * 7, *[0.0] * 3)

    finish(made.resize_in_steps(180.0))

    mean, _, count = values_of(made)
    assert (mean, count) == ([0.0, 1.0], [3, 3])


def test_moved_readings_leave_the_resized_window_on_time() -> None:
    made = windows()
    fill(made, 1.0)
    finish(made.resize_in_steps(1200.0))

    made.add(1100.0, ROWS, np.zeros(2))
    assert values_of(made)[2] == [2, 2]

    made.add(1300.0, ROWS, np.zeros(2))
    assert (values_of(made)[0], values_of(made)[2]) == ([0.0, 0.0], [2, 2])


def test_devices_that_are_reset_between_the_steps_stay_reset() -> None:
    steps_taken = 0
    while True:
        made = windows()
        fill(made, *[0.5] * 10)
        steps = made.resize_in_steps(1200.0)
        if sum(1 for _, _ in zip(range(steps_taken), steps, strict=False)) < steps_taken:
            break
        made.reset(np.array([0]))
        finish(steps)
        assert values_of(made)[2] == [0, 10], steps_taken
        steps_taken += 1
    assert steps_taken > 10


def test_readings_between_the_steps_count_once() -> None:
    steps_taken = 0
    while True:
        made = windows()
        fill(made, *[0.5] * 9)
        steps = made.resize_in_steps(1200.0)
        if sum(1 for _, _ in zip(range(steps_taken), steps, strict=False)) < steps_taken:
            break
        made.add(545.0, ROWS, np.ones(2))
        finish(steps)
        assert values_of(made)[2] == [10, 10], steps_taken
        steps_taken += 1
    assert steps_taken > 10


def test_devices_that_come_between_the_steps_have_room() -> None:
    made = windows()
    fill(made, *[0.5] * 5)
    steps = made.resize_in_steps(1200.0)
    for _ in range(3):
        next(steps)
    made.grow(4)
    finish(steps)

    made.add(300.0, np.array([3]), np.array([0.25]))

    assert values_of(made)[0] == [0.5, 0.5, 0.0, 0.25]


def test_an_empty_window_takes_the_new_length() -> None:
    made = windows()

    finish(made.resize_in_steps(60.0))

    assert made.step_seconds == 6.0
    fill(made, 0.5, apart=1.0)
    assert values_of(made)[2] == [1, 1]
