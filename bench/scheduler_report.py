"""Results of the runs with kube-scheduler: ratios by pair, as a table and with bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from bench.machine import Bound

DEFAULT_SHORTLIST: Final = 100
"""The extender's default of `wire.shortlist`."""
ALLOWED_LOSS: Final = 0.05
"""Share of kube-scheduler's rate that the extender may cost with the default shortlist; with a
shortlist of one node it may cost nothing."""

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of one run.

    Attributes:
        shortlist: the extender's `wire.shortlist`; None without the extender.
        pods_per_second: from the first to the last binding.
        scheduling_seconds: kube-scheduler's own mean time to find a node, its calls to the
            extender included.
        between_seconds: mean time from filter's answer to the call of prioritize.
        filter_seconds: the extender's own mean time for an answer to filter; None if it was not
            called.
        prioritize_seconds: the same for prioritize; kube-scheduler does not call it if one node is
            left.
        first_choices: share of the pods on the extender's first choice, 0 to 1.
        scheduler_cpu_seconds: CPU time of kube-scheduler per pod.
        extender_cpu_seconds: CPU time of the extender and its worker per pod.
    """

    shortlist: int | None
    pods_per_second: float
    scheduling_seconds: float | None = None
    between_seconds: float | None = None
    filter_seconds: float | None = None
    prioritize_seconds: float | None = None
    first_choices: float | None = None
    scheduler_cpu_seconds: float | None = None
    extender_cpu_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Runs without and with the extender, one right after the other.

    Attributes:
        without: run without the extender.
        called: run with the extender.
        trivial: run with the trivial handler in its place; None without such a run.
    """

    without: Run
    called: Run
    trivial: Run | None = None

    @property
    def ratio(self) -> float:
        """Rate with the extender divided by the rate without it."""
        return self.called.pods_per_second / self.without.pods_per_second


def rows(pairs: Sequence[Pair]) -> list[Row]:
    """Return a row for each shortlist, in the order in which they first appear."""
    return [_row(shortlist, group) for shortlist, group in _by_shortlist(pairs).items()]


def bounds(pairs: Sequence[Pair]) -> list[Bound]:
    """Return the bounds on the extender's cost, for the measured shortlists and cluster size."""
    allowed = {DEFAULT_SHORTLIST: ALLOWED_LOSS, 1: 0.0}
    return [
        Bound(
            what=f"share of kube-scheduler's rate lost with shortlist {shortlist}, median of pairs",
            limit=limit,
            measured=median(lost),
            unit="of it",
            between=(min(lost), max(lost)),
        )
        for shortlist, group in _by_shortlist(pairs).items()
        if (limit := allowed.get(shortlist)) is not None
        for lost in [[1.0 - pair.ratio for pair in group]]
    ]


def _by_shortlist(pairs: Sequence[Pair]) -> dict[int, list[Pair]]:
    groups: dict[int, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.called.shortlist or 0, []).append(pair)
    return groups


def _row(shortlist: int, group: Sequence[Pair]) -> Row:
    ratios = [pair.ratio for pair in group]
    without, called = [pair.without for pair in group], [pair.called for pair in group]
    trivial = [(pair.trivial, pair.without) for pair in group if pair.trivial is not None]
    trivial_ratios = [one.pods_per_second / other.pods_per_second for one, other in trivial]
    return {
        "shortlist": shortlist or "0 (all)",
        "pods/s without": f"{median(run.pods_per_second for run in without):.1f}",
        "pods/s with": f"{median(run.pods_per_second for run in called):.1f}",
        "ratio: median": f"{median(ratios):.3f}",
        "least": f"{min(ratios):.3f}",
        "most": f"{max(ratios):.3f}",
        "of each pair": ", ".join(f"{ratio:.2f}" for ratio in ratios),
        "ratio of the trivial handler": f"{median(trivial_ratios):.3f}" if trivial else "-",
        "finding a node without, ms": _median(without, lambda run: run.scheduling_seconds),
        "with, ms": _median(called, lambda run: run.scheduling_seconds),
        "with the trivial handler, ms": _median(
            [run for run, _ in trivial], lambda run: run.scheduling_seconds
        ),
        "filter, ms": _median(called, lambda run: run.filter_seconds),
        "prioritize, ms": _median(called, lambda run: run.prioritize_seconds),
        "between these, ms": _median(called, lambda run: run.between_seconds),
        "CPU of kube-scheduler a pod without, ms": _median(
            without, lambda run: run.scheduler_cpu_seconds
        ),
        "with it, ms": _median(called, lambda run: run.scheduler_cpu_seconds),
        "CPU of the extender a pod, ms": _median(called, lambda run: run.extender_cpu_seconds),
        "first choice taken": _median(called, lambda run: run.first_choices, "{:.0%}", 1.0),
    }


def _median(
    runs: Sequence[Run],
    value: Callable[[Run], float | None],
    form: str = "{:.2f}",
    factor: float = 1000.0,
) -> str:
    """Format the median of the runs that have a value; a dash if none has."""
    known = [found for found in map(value, runs) if found is not None]
    return form.format(factor * median(known)) if known else "-"
