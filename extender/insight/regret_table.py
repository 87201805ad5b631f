"""The route /v1/regret and its metrics: measured outcome of placements."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, product
from typing import Final

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from extender.answers import routes
from extender.answers.decisions import OutcomeAnswer, Regret, RegretMeans
from extender.insight.regret_watch import MOST_NODES, PlacementOutcome, RegretWatch
from extender.insight.replicas import ONE, AnswerFormat, Replicas, query_replicas
from extender.server.json_api import CONTENT_TYPE, chunks, json_answer, moment, read_number, serve
from extender.server.redaction import VIEWER, of_pod, pod_name, sees

_PEERS_PATH = "/v1/peers/regret"
"""Path for other replicas; its prefix requires a replica's client certificate."""
_MOST_SENT = 10_000
"""Largest number of outcomes in an answer to another replica, newest first: some megabytes."""
_PIECE_OUTCOMES = 100
"""Outcomes to encode for another replica between two yields to the event loop."""
_VERSION = 1
"""Version of the format; it grows when an older replica would misread it."""

_GPUS = ("got", "choice", "best")
_AGAINST = ("choice", "best")
_FOLLOWED = ("yes", "no")
_ACTIVITY_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
_REGRET_BUCKETS = (-0.5, -0.2, -0.1, -0.05, -0.01, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)


_KINDS: Final[Mapping[str, Callable[[PlacementOutcome], bool]]] = {
    "all": lambda _: True,
    "followed": lambda one: one.is_followed,
    "not_followed": lambda one: not one.is_followed,
}


class _PeerAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """A replica's answer to another replica, not redacted.

    Attributes:
        left_out: pods that were not compared.
        outcomes: outcomes, newest first.
    """

    version: int
    replica: str
    watched: int
    left_out: int
    outcomes: list[PlacementOutcome]


_FORM = AnswerFormat(msgspec.json.Decoder(_PeerAnswer).decode, _VERSION)


class RegretMetrics(Collector):
    """Metrics of placement outcomes; each placement counts at one replica only.

    Args:
        watch: returns the current watch.
    """

    def __init__(self, registry: CollectorRegistry, watch: Callable[[], RegretWatch]) -> None:
        self._watch = watch
        self.activity = Histogram(
            "idlegpu_placement_activity",
            "Mean activity, as a ratio, of the GPUs that a pod got (got), of those of idlegpu's "
            "first choice (choice), and of those on the node that turned out best (best) of its "
            f"own and the {MOST_NODES} best of the decision, some time after the pod was bound.",
            ["gpus"],
            buckets=_ACTIVITY_BUCKETS,
            registry=registry,
        )
        self.regret = Histogram(
            "idlegpu_placement_regret",
            "By how much the GPUs that a pod got were busier than those of idlegpu's first choice "
            "(choice) or of the node that turned out best (best) of its own and the "
            f"{MOST_NODES} best of the decision, as a ratio.",
            ["against", "followed"],
            buckets=_REGRET_BUCKETS,
            registry=registry,
        )
        for gpus in _GPUS:
            self.activity.labels(gpus)
        for against, followed in product(_AGAINST, _FOLLOWED):
            self.regret.labels(against, followed)
        self.watched = Gauge(
            "idlegpu_regret_watched_pods",
            "Bound pods whose GPUs are watched to be compared later.",
            registry=registry,
        )
        self.watched.set_function(lambda: float(len(watch())))
        registry.register(self)

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the counter of pods that were not compared."""
        left_out = CounterMetricFamily(
            "idlegpu_regret_left_out_pods",
            "Bound pods that were not compared, because too many were bound at a time or they had "
            "too few readings.",
        )
        left_out.add_metric([], self._watch().left_out)
        yield left_out

    def note(self, outcome: PlacementOutcome) -> None:
        """Count one placement in the histograms."""
        followed = "yes" if outcome.is_followed else "no"
        activities = outcome.got, outcome.choice_since, outcome.best_since
        for gpus, activity in zip(_GPUS, activities, strict=True):
            if activity is not None:
                self.activity.labels(gpus).observe(activity)
        for against, regret in zip(_AGAINST, (outcome.regret, outcome.hindsight), strict=True):
            if regret is not None:
                self.regret.labels(against, followed).observe(regret)


class RegretTable:
    """Handlers of /v1/regret, for clients and for other replicas.

    Args:
        watch: returns the current watch.
        replicas: this replica and the others; each watches the pods of its own latest decisions.
    """

    def __init__(self, watch: Callable[[], RegretWatch], replicas: Replicas = ONE) -> None:
        self._watch = watch
        self._replicas = replicas

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/regret."""
        return [serve(routes.REGRET, self._answer)]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route at which other replicas query outcomes."""
        return self._replicas.peer_routes(_PEERS_PATH, self._answer_peer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        namespace = request.query.get("namespace")
        limit = read_number(request.query, routes.REGRET, "limit")
        watching = self._watch()
        replies, unreachable = await query_replicas(self._replicas, _PEERS_PATH, _FORM)
        answers = [each for _, each in replies]
        own = _outcomes_of(watching)
        known = await _newest(chain(own, *(each.outcomes for each in answers)))
        await VIEWER.get().learn({one.pod.namespace for one in known})
        shown = [
            one
            for one in known
            if namespace is None or (sees(namespace) and one.pod.namespace == namespace)
        ]
        means: dict[str, RegretMeans] = {}
        for name, wanted in _KINDS.items():
            means[name] = _means([one for one in shown if wanted(one)])
            await asyncio.sleep(0)
        return json_answer(
            Regret(
                after_seconds=watching.after_seconds,
                watched=len(watching) + sum(each.watched for each in answers),
                left_out=watching.left_out + sum(each.left_out for each in answers),
                total=len(shown),
                **means,
                placements=[_view(one) for one in shown[:limit]],
                unreachable=unreachable,
            )
        )

    async def _answer_peer(self, _: web.Request) -> web.StreamResponse:
        """Answer another replica, which redacts the answer for its caller."""
        watching = self._watch()
        written: list[bytes] = []
        for some in chunks(_outcomes_of(watching), _PIECE_OUTCOMES):
            written += map(msgspec.json.encode, some)
            await asyncio.sleep(0)
        head = msgspec.json.encode(
            {
                "version": _VERSION,
                "replica": self._replicas.name,
                "watched": len(watching),
                "left_out": watching.left_out,
            }
        )
        body = b'%b,"outcomes":[%b]}' % (head[:-1], b",".join(written))
        return web.Response(body=body, content_type=CONTENT_TYPE)


def _outcomes_of(watching: RegretWatch) -> list[PlacementOutcome]:
    """Copy the newest outcomes, because more may be added while they are encoded."""
    return list(islice(reversed(watching.outcomes), _MOST_SENT))


async def _newest(outcomes: Iterable[PlacementOutcome]) -> list[PlacementOutcome]:
    """Sort outcomes, newest first; keep one for each pod, of its latest decision."""
    last: dict[str, PlacementOutcome] = {}
    for some in chunks(outcomes, _PIECE_OUTCOMES):
        for one in some:
            other = last.get(one.pod.uid)
            if other is None or one.decided_at > other.decided_at:
                last[one.pod.uid] = one
        await asyncio.sleep(0)
    return sorted(last.values(), key=lambda one: -(one.bound_at + one.seconds))


def _view(one: PlacementOutcome) -> OutcomeAnswer:
    return OutcomeAnswer(
        pod=pod_name(one.pod.namespace, one.pod.name),
        uid=of_pod(one.pod.namespace, one.pod.uid),
        bound_at=moment(one.bound_at),
        seconds=one.seconds,
        node=one.node,
        choice=one.choice or None,
        best=one.best,
        is_followed=one.is_followed,
        is_shadow=one.is_shadow,
        is_known=one.is_known,
        gpus=one.gpus,
        got_ratio=one.got,
        choice_ratio=one.choice_since,
        best_ratio=one.best_since,
        got_then_ratio=one.got_then,
        choice_then_ratio=one.choice_then,
        regret_ratio=one.regret,
        hindsight_ratio=one.hindsight,
    )


def _means(outcomes: Sequence[PlacementOutcome]) -> RegretMeans:
    """Compute the means over the placements whose first choice has a known activity."""
    both = [one for one in outcomes if one.choice_since is not None]
    return RegretMeans(
        placements=len(both),
        got_ratio=_mean([one.got for one in both]),
        choice_ratio=_mean([one.choice_since for one in both]),
        best_ratio=_mean([one.best_since for one in both]),
        got_then_ratio=_mean([one.got_then for one in both]),
        choice_then_ratio=_mean([one.choice_then for one in both]),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
