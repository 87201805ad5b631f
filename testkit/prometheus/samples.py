"""Store of the simulated Prometheus' samples, with reads at any stored time."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

LOOKBACK_SECONDS: Final = 300.0
"""Longest age of a sample that answers an instant query, unless its series has ended."""

RETENTION_SECONDS: Final = 2 * 3600.0

NAME: Final = "__name__"

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')
_TRIM_POINTS: Final = 10_000

Labels = tuple[tuple[str, str], ...]
"""Labels of a series, sorted by name, including the metric's name."""

KeyedSample = tuple[Labels, Mapping[str, str], float]
"""Sorted labels, labels by name, and the value of a sample."""


@dataclass(slots=True)
class Series:
    """Time series.

    Attributes:
        labels: labels by name, including `__name__`.
        times: time of each sample, seconds since the epoch, ascending.
        values: value of each sample; None is a staleness marker.
    """

    labels: Mapping[str, str]
    times: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def append(self, at: float, value: float | None) -> None:
        """Append a sample, unless it is not newer than the last one."""
        if self.times and at <= self.times[-1]:
            return
        self.times.append(at)
        self.values.append(value)
        if len(self.times) > _TRIM_POINTS:
            keep = bisect_right(self.times, at - RETENTION_SECONDS)
            del self.times[:keep], self.values[:keep]

    def at(
        self, time: float, window_seconds: float = LOOKBACK_SECONDS
    ) -> tuple[float, float] | None:
        """Return time and value of the newest sample in the window that ends at `time`."""
        row = bisect_right(self.times, time) - 1
        if row < 0 or self.times[row] <= time - window_seconds:
            return None
        value = self.values[row]
        return None if value is None else (self.times[row], value)

    def most(self, time: float, window_seconds: float) -> float | None:
        """Return the highest value in the window that ends at `time`, or None without samples."""
        start, end = bisect_right(self.times, time - window_seconds), bisect_right(self.times, time)
        return max((value for value in self.values[start:end] if value is not None), default=None)

    def rate(self, time: float, window_seconds: float) -> float | None:
        """Return the growth of a counter per second in the window that ends at `time`.

        Returns None with fewer than two samples. Unlike the real Prometheus, it does not
        extrapolate before the first sample and after the last one.
        """
        start, end = bisect_right(self.times, time - window_seconds), bisect_right(self.times, time)
        samples = [value for value in self.values[start:end] if value is not None]
        if len(samples) < 2:
            return None
        # A decrease is a reset of the counter.
        steps = (
            after - before if after >= before else after for before, after in pairwise(samples)
        )
        return sum(steps) / window_seconds


@dataclass(slots=True, kw_only=True)
class SampleStore:
    """All time series; use it on one event loop.

    Attributes:
        series: series by metric name and labels.
        targets: labels of the series in each target's last scrape.
    """

    series: dict[str, dict[Labels, Series]] = field(default_factory=dict)
    targets: dict[str, frozenset[Labels]] = field(default_factory=dict)

    def ingest(
        self, target: str, at: float, samples: Iterable[tuple[Mapping[str, str], float]]
    ) -> None:
        """Add a scrape of a target, and end the target's series that are missing in it."""
        self.ingest_keyed(target, at, keyed(samples))

    def ingest_keyed(self, target: str, at: float, samples: Iterable[KeyedSample]) -> None:
        """Add a scrape whose samples `keyed` has prepared; see `ingest`."""
        at = round(at, 3)  # Prometheus stores milliseconds
        seen: set[Labels] = set()
        for key, labels, value in samples:
            seen.add(key)
            family = self.series.setdefault(labels[NAME], {})
            if key not in family:
                family[key] = Series(labels=labels)
            family[key].append(at, value)
        for key in self.targets.get(target, frozenset()) - seen:
            self.series[dict(key)[NAME]][key].append(at, None)
        self.targets[target] = frozenset(seen)

    def select(self, name: str = "") -> Iterator[Series]:
        """Yield the series of a metric, or of all metrics for ""."""
        families = [self.series.get(name, {})] if name else self.series.values()
        for family in families:
            yield from family.values()


def keyed(samples: Iterable[tuple[Mapping[str, str], float]]) -> list[KeyedSample]:
    """Add the sorted labels to each sample: a key that several scrapes can reuse.

    Example:
        >>> keyed([({"job": "a", "__name__": "up"}, 1.0)])
        [((('__name__', 'up'), ('job', 'a')), {'job': 'a', '__name__': 'up'}, 1.0)]
    """
    return [(tuple(sorted(labels.items())), labels, value) for labels, value in samples]


def parse_scrape(text: str) -> Iterator[tuple[dict[str, str], float]]:
    """Yield labels (with `__name__`) and value of each sample of an exposition.

    prometheus_client's parser is not used: it renames counters whose names do not end in `_total`,
    as DCGM's do not.

    Raises:
        ValueError: a line is not a sample; discard the whole scrape.

    Example:
        >>> list(parse_scrape('up{job="a"} 1'))
        [({'__name__': 'up', 'job': 'a'}, 1.0)]
    """
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise ValueError(f"cannot parse scrape: {line!r} is no sample")
        name, labels, value = match.groups()
        yield {NAME: name, **dict(_LABEL.findall(labels or ""))}, float(value)


def with_target_labels(
    labels: Mapping[str, str], target_labels: Mapping[str, str]
) -> dict[str, str]:
    """Add a target's labels as Prometheus does with `honor_labels: false`.

    Example:
        >>> with_target_labels({"pod": "worker"}, {"pod": "exporter"})
        {'exported_pod': 'worker', 'pod': 'exporter'}
    """
    renamed = {
        f"exported_{name}" if name in target_labels else name: value
        for name, value in labels.items()
    }
    return renamed | dict(target_labels)
