"""Tells how placements turned out: a table, and metrics."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from extender.observe.answers import json_answer
from extender.observe.parameters import check_parameters, read_number, refusing
from extender.observe.pending import moment
from extender.observe.seen import of_pod, pod_name, sees
from extender.observe.views import Json
from extender.placement.regret import Outcome, RegretWatch

PATH = "/v1/regret"
DEFAULT_OUTCOMES, MAX_OUTCOMES = 50, 1000

_ACTIVITY_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
_REGRET_BUCKETS = (-0.5, -0.2, -0.1, -0.05, -0.01, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class _Means:
    """Means over placements, None where there are none."""

    placements: int
    got: float | None
    choice: float | None
    best: float | None
    got_then: float | None
    choice_then: float | None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "_Means":
        """Return the means over placements of which our first choice's activity is known."""
        both = [one for one in outcomes if one.choice_since is not None]
        return cls(
            placements=len(both),
            got=_mean([one.got for one in both]),
            choice=_mean([one.choice_since for one in both]),
            best=_mean([one.best_since for one in both]),
            got_then=_mean([one.got_then for one in both]),
            choice_then=_mean([one.choice_then for one in both]),
        )


class RegretMetrics(Collector):
    """Counts how placements turned out.

    Args:
        registry: where the metrics are registered.
        watch: returns what is watching by now.
    """

    def __init__(self, registry: CollectorRegistry, watch: Callable[[], RegretWatch]) -> None:
        self._watch = watch
        self.activity = Histogram(
            "idlegpu_placement_activity",
            "Mean activity, as a ratio, of the GPUs that a pod got (got), of those of our first "
            "choice (choice), and of those on the node that turned out best (best), some time "
            "after the pod was bound.",
            ["gpus"],
            buckets=_ACTIVITY_BUCKETS,
            registry=registry,
        )
        self.regret = Histogram(
            "idlegpu_placement_regret",
            "By how much the GPUs that a pod got were busier than those of our first choice "
            "(choice) or of the node that turned out best (best), as a ratio.",
            ["against", "followed"],
            buckets=_REGRET_BUCKETS,
            registry=registry,
        )
        self.watched = Gauge(
            "idlegpu_regret_watched_pods",
            "Bound pods whose GPUs are watched to be compared later.",
            registry=registry,
        )
        self.watched.set_function(lambda: float(len(watch())))
        registry.register(self)

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield what is counted elsewhere."""
        left_out = CounterMetricFamily(
            "idlegpu_regret_left_out_pods",
            "Bound pods that were not compared: they came too fast, were too many, or too little "
            "was seen of them.",
        )
        left_out.add_metric([], self._watch().left_out)
        yield left_out

    def note(self, outcome: Outcome) -> None:
        """Count one placement."""
        followed = "yes" if outcome.is_followed else "no"
        self.activity.labels("got").observe(outcome.got)
        self.activity.labels("best").observe(outcome.best_since)
        self.regret.labels("best", followed).observe(outcome.hindsight)
        if outcome.choice_since is not None and outcome.regret is not None:
            self.activity.labels("choice").observe(outcome.choice_since)
            self.regret.labels("choice", followed).observe(outcome.regret)


def regret_routes(watch: Callable[[], RegretWatch]) -> list[web.RouteDef]:
    """Return the route.

    Args:
        watch: returns what is watching by now.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        check_parameters(request.query, frozenset({"limit", "namespace"}))
        namespace = request.query.get("namespace")
        limit = read_number(
            request.query, "limit", default=DEFAULT_OUTCOMES, low=1, high=MAX_OUTCOMES
        )
        watching = watch()
        shown = [
            one
            for one in reversed(watching.outcomes)
            if namespace is None or (sees(namespace) and one.pod.namespace == namespace)
        ]
        return json_answer(
            {
                "after_seconds": watching.after_seconds,
                "watched": len(watching),
                "left_out": watching.left_out,
                "total": len(shown),
                "all": _means_view(shown),
                "followed": _means_view([one for one in shown if one.is_followed]),
                "not_followed": _means_view([one for one in shown if not one.is_followed]),
                "placements": [_view(one) for one in shown[:limit]],
            }
        )

    return [web.get(PATH, refusing(answer))]


def _view(one: Outcome) -> Json:
    return {
        "pod": pod_name(one.pod.namespace, one.pod.name),
        "uid": of_pod(one.pod.namespace, one.pod.uid),
        "bound_at": moment(one.bound_at),
        "seconds": one.seconds,
        "node": one.node,
        "choice": one.choice or None,
        "best": one.best,
        "is_followed": one.is_followed,
        "is_shadow": one.is_shadow,
        "is_known": one.is_known,
        "gpus": one.gpus,
        "got_ratio": one.got,
        "choice_ratio": one.choice_since,
        "best_ratio": one.best_since,
        "got_then_ratio": one.got_then,
        "choice_then_ratio": one.choice_then,
        "regret_ratio": one.regret,
        "hindsight_ratio": one.hindsight,
    }


def _means_view(outcomes: Sequence[Outcome]) -> Json:
    means = _Means.of(outcomes)
    return {
        "placements": means.placements,
        "got_ratio": means.got,
        "choice_ratio": means.choice,
        "best_ratio": means.best,
        "got_then_ratio": means.got_then,
        "choice_then_ratio": means.choice_then,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
