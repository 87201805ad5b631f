"""Forecasts of the next hour and their evaluation in `bench.picks`."""

from pathlib import Path

import numpy as np
import pytest

from bench import picks
from bench.forecasts import (
    HOUR,
    LAST_HOURS,
    OURS,
    OUTSIDE,
    PERFECT,
    TIME_OF_DAY,
    WANTED,
    Forecast,
    Series,
    judge,
)


def test_untrained_forecast_ranks_by_mean_and_standard_deviation() -> None:
    series = Series(np.random.default_rng(1).random((3 * HOUR, 20)))
    estimates = series.estimates(2 * HOUR)

    ranked = Forecast(list(estimates)).predict(estimates)

    assert np.array_equal(np.argsort(ranked), np.argsort(estimates[WANTED]))


def test_estimates_know_nothing_of_the_time_to_come() -> None:
    busy = np.random.default_rng(2).random((30 * HOUR, 5))
    changed = busy.copy()
    changed[26 * HOUR + 1 :] = 0.0

    before, after = (Series(of).estimates(26 * HOUR) for of in (busy, changed))

    assert all(np.allclose(before[name], after[name]) for name in before)
    assert np.allclose(
        before["this hour yesterday"], busy[2 * HOUR + 1 : 3 * HOUR + 1].mean(axis=0)
    )


def test_a_daily_rhythm_is_learned() -> None:
    draws = np.random.default_rng(3)
    hours, peak = np.arange(72 * HOUR)[:, None] / HOUR, 24 * draws.random(60)
    busy = 0.3 + 0.25 * np.cos((hours - peak) * 2 * np.pi / 24) + 0.02 * draws.random(60)

    found = judge(Series(busy), 48 * HOUR, picks.Fleet(60))

    gap = {name: found[name] - found[PERFECT] for name in (WANTED, LAST_HOURS, TIME_OF_DAY)}
    assert gap[TIME_OF_DAY] < gap[LAST_HOURS] < gap[WANTED]


def test_given_series_are_judged_by_the_same_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "series.csv"
    np.savetxt(file, np.random.default_rng(4).random((5 * HOUR, 12)), delimiter=",")

    status = picks.judge_given(file)

    assert status in {0, 1}
    assert OURS in capsys.readouterr().out


def test_the_extender_picks_the_gpu_that_stays_calm() -> None:
    busy = np.full((7 * HOUR, 12), 0.3)
    busy[:, 3] = 0.02

    found = judge(Series(busy), 5 * HOUR, picks.Fleet(12))

    assert found[OURS] == pytest.approx(found[PERFECT])
    assert found[OURS] < found["random"]
    assert found[OUTSIDE] == 0
