"""Compare picks by forecasts of the next hour: by the extender, and by forecasts that learn.

`bench.picks` judges these forecasts. A learned forecast is a product of powers of simple
estimators. The exponents are learned from all GPUs, by comparing the estimates of an hour ago with
the hour since. The prior is mean + standard deviation alone. The extender's own forecast does not
learn: docs/decision.md.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import comb
from typing import Final, Protocol

import numpy as np

from bench.sharing_pods import MOST_BURSTS, STEP_SECONDS, bursts
from bench.traces import Floats, Ints

HOUR: Final = 60
"""Readings in an hour: one a minute."""
DAY: Final = 24 * HOUR
EVERY: Final = 10
"""Minutes between two picks, and between two learning steps."""
OF: Final = 10
KEPT: Final = 5 * HOUR
"""Minutes of readings before the first pick; the extender keeps four hours."""

LEAST: Final = 0.01
"""Added to a load before its logarithm, so that differences between tiny loads do not count."""
PRIOR: Final = 20.0
"""Weight of the prior, in learning steps."""
MEANS: Final = (5, 15, 30, 60, 180)
"""Time constants of exponentially weighted means, minutes."""

WANTED: Final = "mean + standard deviation"
OURS: Final = "strategy auto"
LAST_HOURS: Final = "learned forecast by the last hours"
TIME_OF_DAY: Final = "learned forecast by the last hours and the time of day"
OUTSIDE: Final = "outside the interval of the forecast, % of GPUs"
PERFECT: Final = "perfect knowledge"

CURVE: Final = 0.9
"""Largest part of a pod's bursts that the time of day adds or removes."""
LEAST_SHARE: Final = 0.001
MOST_SHARE: Final = 0.6


class Extender(Protocol):
    """The extender, with a GPU for each column of the series."""

    def read(self, minute: int, busy: Floats) -> None:
        """Apply the readings of a minute."""

    def order(self) -> Ints:
        """Return the GPUs in the order in which a new pod prefers them."""

    def between(self) -> tuple[Floats, Floats]:
        """Return the interval of each GPU's forecast."""


class Series:
    """Loads of GPUs, with the input of the estimators at any minute.

    Args:
        busy: utilization ratio, a row for each minute and a column for each GPU.
    """

    def __init__(self, busy: Floats) -> None:
        self.busy = busy
        start = np.zeros((1, busy.shape[1]))
        self._sum = np.concatenate([start, np.cumsum(busy, axis=0)])
        self._square = np.concatenate([start, np.cumsum(busy * busy, axis=0)])
        self._means = {minutes: _weighted(busy, minutes) for minutes in MEANS}

    def __len__(self) -> int:
        return len(self.busy)

    def mean(self, start: int, stop: int) -> Floats:
        """Return each GPU's mean load from minute `start` to `stop` (exclusive)."""
        return np.asarray((self._sum[stop] - self._sum[start]) / (stop - start))

    def next_hour(self, minute: int) -> Floats:
        """Return each GPU's mean load in the hour after a minute."""
        return self.mean(minute + 1, minute + 1 + HOUR)

    def estimates(self, minute: int) -> dict[str, Floats]:
        """Return simple estimates of the next hour from the readings up to a minute (inclusive)."""
        stop = minute + 1
        mean = self.mean(stop - HOUR, stop)
        square = (self._square[stop] - self._square[stop - HOUR]) / HOUR
        day = self.mean(max(stop - DAY, 0), stop)
        is_known = stop >= DAY
        return {
            WANTED: mean + np.sqrt(np.maximum(square - mean * mean, 0.0)),
            **{f"mean over {minutes} min": of[minute] for minutes, of in self._means.items()},
            "mean of the day": day,
            "this hour yesterday": self.mean(stop - DAY, stop - DAY + HOUR) if is_known else day,
        }


def _weighted(busy: Floats, minutes: int) -> Floats:
    """Return exponentially weighted means; the first values are plain means."""
    means, mean = np.empty_like(busy), busy[0].copy()
    weight = 1 - np.exp(-1 / minutes)
    for at, row in enumerate(busy):
        mean += max(weight, 1 / (at + 1)) * (row - mean)
        means[at] = mean
    return means


class Forecast:
    """Forecast with learned exponents of simple estimators.

    Args:
        names: names of the estimators.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen = PRIOR * np.eye(len(names) + 1)
        self._wanted = np.zeros(len(names) + 1)

    def learn(self, estimates: Mapping[str, Floats], hour: Floats) -> None:
        """Learn from estimates and the load that followed."""
        columns = self._columns(estimates)
        self._seen += columns.T @ columns
        self._wanted += columns.T @ (np.log(hour + LEAST) - _prior(estimates))

    def predict(self, estimates: Mapping[str, Floats]) -> Floats:
        """Return the logarithm of each GPU's expected load."""
        exponents = np.linalg.solve(self._seen, self._wanted)
        return np.asarray(_prior(estimates) + self._columns(estimates) @ exponents)

    def _columns(self, estimates: Mapping[str, Floats]) -> Floats:
        logs = [np.log(estimates[name] + LEAST) for name in self._names]
        return np.stack([np.ones_like(logs[0]), *logs], axis=1)


def _prior(estimates: Mapping[str, Floats]) -> Floats:
    return np.log(estimates[WANTED] + LEAST)


def judge(series: Series, warm_up: int, extender: Extender) -> dict[str, float]:
    """Return the expected load of the pick of ten random GPUs in the next hour in %, by forecast.

    Args:
        series: loads of the GPUs.
        extender: the extender without any readings.
        warm_up: minutes before the first pick; from the second hour on the forecasts learn.
    """
    short = (WANTED, *(f"mean over {minutes} min" for minutes in (15, 60)))
    long = tuple(series.estimates(HOUR))
    forecasts = {LAST_HOURS: Forecast(short), TIME_OF_DAY: Forecast(long)}
    found: dict[str, list[float]] = {}
    seen = max(warm_up - KEPT, 0)
    for minute in range(2 * HOUR, len(series) - HOUR, EVERY):
        for forecast in forecasts.values():
            forecast.learn(series.estimates(minute - HOUR), series.next_hour(minute - HOUR))
        if minute < warm_up:
            continue
        for at in range(seen, minute + 1):
            extender.read(at, series.busy[at])
        seen = minute + 1
        hour, estimates = 100 * series.next_hour(minute), series.estimates(minute)
        ranked = {
            WANTED: estimates[WANTED],
            **{name: forecast.predict(estimates) for name, forecast in forecasts.items()},
            PERFECT: hour,
        }
        orders = {name: np.argsort(values, kind="stable") for name, values in ranked.items()}
        for name, order in {**orders, OURS: extender.order()}.items():
            found.setdefault(name, []).append(float(_chances(len(order)) @ hour[order]))
        found.setdefault("random", []).append(float(hour.mean()))
        low, high = extender.between()
        is_outside = (hour < 100 * low - 0.1) | (hour > 100 * high + 0.1)
        found.setdefault(OUTSIDE, []).append(100 * float(is_outside.mean()))
    return {name: float(np.mean(values)) for name, values in found.items()}


@cache
def _chances(gpus: int) -> Floats:
    """Return the chance of each GPU to be the first of ten random ones, by its rank."""
    return np.array([comb(gpus - 1 - rank, OF - 1) / comb(gpus, OF) for rank in range(gpus)])


def draw_pod(
    draws: np.random.Generator, minutes: int, steady_seconds: float, curve: float
) -> Floats:
    """Draw the load of one serving pod, a value for each minute.

    Args:
        draws: source of random numbers.
        minutes: number of minutes.
        steady_seconds: mean time between changes of its workload.
        curve: largest part of its bursts that the time of day adds or removes; 0 for none.
    """
    each = int(60 / STEP_SECONDS)
    peak, amplitude = 24 * draws.random(), curve * draws.random()
    parts, length = [], 0
    while length < minutes * each:
        part = 1 + int(draws.exponential(steady_seconds) / STEP_SECONDS)
        share, high = MOST_BURSTS * draws.random() ** 3, 0.2 + 0.7 * draws.random()
        stop = length + part
        while length < min(stop, minutes * each):
            some = min(stop - length, 15 * each if curve else part)
            hour = length * STEP_SECONDS / 3600
            factor = 1 + amplitude * np.cos((hour - peak) / 12 * np.pi)
            of_now = float(np.clip(share * factor, LEAST_SHARE, MOST_SHARE))
            parts.append(bursts(draws, some, of_now if curve else share, high))
            length += some
    return np.concatenate(parts)[: minutes * each : each]


KINDS: Final[Mapping[str, tuple[int, float, float, int]]] = {
    "work changes each hour, 8 h": (8, 3600.0, 0.0, 2),
    "work changes each hour, 36 h": (36, 3600.0, 0.0, 26),
    "work changes each 3 h, by time of day, 36 h": (36, 3 * 3600.0, CURVE, 26),
    "work changes each day, by time of day, 60 h": (60, 24 * 3600.0, CURVE, 30),
}
"""Hours, seconds between changes of work, part of the time of day, and hours before the first pick,
by kind."""


def draw_series(kind: str, seed: int, pods: int) -> tuple[Series, int]:
    """Draw the loads of one kind of pods; return them and the minutes before the first pick."""
    hours, steady_seconds, curve, warm_up = KINDS[kind]
    draws = np.random.default_rng([seed, 4])
    busy = [draw_pod(draws, hours * HOUR, steady_seconds, curve) for _ in range(pods)]
    return Series(np.stack(busy, axis=1)), warm_up * HOUR
