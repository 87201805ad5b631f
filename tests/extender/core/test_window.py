"""Utilization over a window."""

import numpy as np
import pytest

from extender.core.devices.window import Windows
from testkit.windows import summarize

ROWS = np.array([0, 1])
NAN = float("nan")


def windows(seconds: float = 600.0, steps: int = 10) -> Windows:
    made = Windows(seconds, steps)
    made.grow(2)
    return made


def means(made: Windows) -> list[float]:
    found: list[float] = summarize(made)[0].tolist()
    return found


def test_mean_and_spread_are_those_of_the_readings() -> None:
    made = windows()
    for at, values in [(0, [0.2, 0.5]), (30, [0.4, NAN]), (90, [0.6, 0.5])]:
        made.add(at, ROWS, np.array(values))

    mean, spread, count = summarize(made)

    assert mean.tolist() == pytest.approx([0.4, 0.5])
    assert spread.tolist() == pytest.approx([np.std([0.2, 0.4, 0.6]), 0.0], abs=1e-4)
    assert count.tolist() == [3, 2]


def test_a_new_window_has_no_devices() -> None:
    steps = Windows(600.0, 10).time_steps()

    assert {each.shape for each in (steps.sums, steps.squares, steps.counts)} == {(10, 0)}


@pytest.mark.parametrize(("seconds", "counts"), [(0, [1, 2]), (20, [1, 2]), (120, [2, 1])])
def test_readings_move_with_a_clock_that_was_set_back(seconds: float, counts: list[int]) -> None:
    made = windows()
    for at in (480, 600):
        made.add(at, ROWS, np.ones(2))

    made.shift_back(seconds)
    made.add(480, ROWS, np.ones(2))

    steps = made.time_steps().counts[:, 0]
    assert steps[steps > 0].tolist() == counts


def test_a_mean_is_never_above_one() -> None:
    made = windows()
    made.add(0, ROWS, np.full(2, 1.5))

    assert means(made) == [1.0, 1.0]
    assert made.mean()[0].tolist() == made.time_steps().mean(2)[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("at", "mean", "count"), [(180, 0.55, 2.0), (210, 0.5, 1.5), (240, 0.4, 1.0)]
)
def test_the_oldest_of_the_last_steps_leaves_bit_by_bit(
    at: float, mean: float, count: float
) -> None:
    made = windows()
    for seconds, values in [(60, [0.7, 0.7]), (120, [0.4, NAN]), (at, [NAN, NAN])]:
        made.add(seconds, ROWS, np.array(values))

    found, readings = made.time_steps().mean(2)

    assert found[0] == pytest.approx(mean)
    assert readings[0] == count
    assert found[1] == pytest.approx(0.7 if readings[1] else 0.0)


def test_values_older_than_the_window_are_dropped() -> None:
    made = windows()
    made.add(0, ROWS, np.ones(2))
    made.add(599, ROWS, np.zeros(2))
    assert means(made) == [0.5, 0.5]

    made.add(601, ROWS, np.zeros(2))

    assert means(made) == [0.0, 0.0]
    assert summarize(made)[2].tolist() == [2, 2]


def test_a_long_silence_empties_the_window() -> None:
    made = windows()
    made.add(0, ROWS, np.ones(2))

    made.add(1e9, ROWS, np.array([0.25, NAN]))

    assert means(made) == [0.25, 0.0]


def test_past_readings_fill_the_window_and_older_ones_do_not() -> None:
    made = windows()
    made.add(1000, ROWS, np.zeros(2))

    made.add(700, ROWS, np.ones(2))
    made.add(100, ROWS, np.ones(2))

    assert means(made) == [0.5, 0.5]


def test_a_device_starts_afresh_alone() -> None:
    made = windows()
    made.add(0, ROWS, np.ones(2))

    made.reset(np.array([1]))

    assert summarize(made)[2].tolist() == [1, 0]


def test_readings_after_the_tenants_start_stay() -> None:
    made = windows()
    for at, value in [(0, 1.0), (300, 1.0), (360, 0.2), (420, 0.2)]:
        made.add(at, ROWS, np.full(2, value))

    made.reset(np.array([0]), until=301)

    assert means(made) == pytest.approx([0.2, 0.6])


def test_growing_the_window_keeps_its_values() -> None:
    made = windows()
    made.add(0, ROWS, np.ones(2))

    made.grow(3)
    made.grow(1)

    assert means(made) == [1.0, 1.0, 0.0]


def test_the_newest_time_step_comes_first() -> None:
    made = windows()
    for at, value in [(0, 0.1), (60, 0.2), (61, 0.4), (180, 0.5)]:
        made.add(at, ROWS, np.array([value, NAN]))

    steps = made.time_steps(ROWS[:1])

    assert steps.sums[:4, 0].tolist() == pytest.approx([0.5, 0.0, 0.6, 0.1])
    assert steps.counts[:4, 0].tolist() == [1, 0, 2, 1]
    assert made.time_steps().counts[:, 1].sum() == 0
    assert made.time_steps(slice(0, 1)).counts[:4].tolist() == [[1], [0], [2], [1]]


def test_the_mean_of_a_device_at_rest_never_rises() -> None:
    made, means = windows(), []
    for at in range(0, 1200, 6):
        made.add(at, ROWS, np.full(2, 0.9 if 120 <= at < 240 else 0.0))
        means.append(made.time_steps().mean(5)[0][0])

    resting = means[240 // 6 :]
    assert (np.diff(resting) <= 1e-3).all()
    assert resting[-1] == 0.0


def test_readings_can_count_in_part() -> None:
    made = windows()
    for at in (0, 60, 120):
        made.add(at, ROWS, np.array([0.8, 0.8]))

    made.scale(ROWS[:1], 0.5)

    assert means(made) == pytest.approx([0.4, 0.8])
    made.add(660, ROWS, np.array([0.4, 0.8]))
    made.add(720, ROWS, np.array([0.4, 0.8]))
    assert means(made) == pytest.approx([0.4, 0.8])
    assert summarize(made)[1].tolist() == pytest.approx([0.0, 0.0], abs=1e-3)
