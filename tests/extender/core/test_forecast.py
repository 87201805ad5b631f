"""Forecast of the next hour's load."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices import forecast
from extender.core.devices.window import TimeSteps, Windows

STEP_SECONDS = 450.0
NAN = float("nan")


def past(*loads: float) -> TimeSteps:
    """Return the time steps of one device with a reading in each, the newest last; NaN for none."""
    made = Windows(forecast.STEPS * STEP_SECONDS, forecast.STEPS)
    made.grow(1)
    for step, load in enumerate(loads):
        made.add(step * STEP_SECONDS, np.array([0]), np.array([load]))
    return made.time_steps()


def expected(*loads: float) -> float:
    return float(forecast.next_hour(past(*loads))[0])


def between(*loads: float) -> tuple[float, float]:
    low, high = forecast.next_hour_between(past(*loads))
    return float(low[0]), float(high[0])


@pytest.mark.parametrize("steps", [1, 8, 32])
@pytest.mark.parametrize("load", [0.05, 0.4, 1.0])
def test_an_even_load_goes_on(load: float, steps: int) -> None:
    assert expected(*[load] * steps) == pytest.approx(load)
    assert between(*[load] * steps) == pytest.approx((load, load))


def test_a_device_at_rest_for_four_hours_stays_at_rest() -> None:
    assert expected(*[0.0] * 32) == 0.0


def test_a_device_without_bursts_for_four_hours_comes_before_one_without_them_for_an_hour() -> None:
    assert expected(*[0.01] * 32) < expected(*[0.01] * 8) < expected(*[0.05] * 32)


def test_late_bursts_count_more_than_early_ones_and_early_ones_still_count() -> None:
    calm = [0.01] * 32
    early, late = [0.8, *calm[1:]], [*calm[:-1], 0.8]

    assert expected(*calm) < expected(*early) < expected(*late)


def test_a_burst_counts_more_than_the_same_load_spread_evenly() -> None:
    assert expected(*[0.0, 0.4] * 16) > expected(*[0.2] * 32)


def test_a_gap_between_readings_counts_as_the_load_around_it() -> None:
    calm = [0.01] * 32
    calm[-1] = calm[5] = NAN

    assert expected(*calm) == pytest.approx(0.01)


def test_the_forecast_is_the_geometric_mean_of_the_root_mean_squares() -> None:
    loads = [step * 7 % 32 / 32 for step in range(32)]
    windows = [np.array(loads[-steps:]) for steps in (1, 2, 4, 8, 16, 32)]

    squares = [np.sqrt(np.mean(window**2)) for window in windows]
    assert expected(*loads) == pytest.approx(np.exp(np.mean(np.log(squares))), abs=0.005)
    means = [window.mean() for window in windows]
    assert between(*loads) == pytest.approx((min(means), max(squares)))


LOADS = st.lists(st.floats(0, 1, width=32) | st.just(NAN), min_size=1, max_size=40)


@given(loads=LOADS, data=st.data())
def test_the_forecast_never_falls_while_a_reading_rises(
    loads: list[float], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(loads) - 1))
    risen = loads.copy()
    risen[at] = data.draw(st.floats(loads[at], 1, width=32)) if loads[at] == loads[at] else NAN

    assert expected(*risen) >= expected(*loads) - 1e-6
    for before, after in zip(between(*loads), between(*risen), strict=True):
        assert after >= before - 1e-6


@given(LOADS)
def test_the_forecast_is_within_its_interval(loads: list[float]) -> None:
    low, high = between(*loads)

    assert 0 <= low <= expected(*loads) + 1e-6 <= high + 2e-6 <= 1 + 2e-6
