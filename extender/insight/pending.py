"""The route /v1/pending: GPU pods that wait, with kube-scheduler's reasons and ours.

Replicas query each other for their latest decision about each waiting pod. Metrics count the same
pods by namespace, with the longest wait.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final
from urllib.parse import urlencode

import msgspec
import numpy as np
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from extender.answers import routes
from extender.answers.pods import LastDecision, PendingAnswer, ReasonCount, Waiting
from extender.core.decision.filtering import Code
from extender.core.devices.gpu_models import ANY, OTHER
from extender.core.nodes.inventory import PodRecord
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.insight.demand import lacks_a_node, size_of
from extender.insight.replicas import ONE, AnswerFormat, Replicas, query_replicas
from extender.insight.scheduler_message import CountedReason, hints, of_nodes, read_message
from extender.placement.history import DecisionHistory, DecisionRecord
from extender.server.json_api import CONTENT_TYPE, chunks, moment, read_number, serve, stream_answer
from extender.server.redaction import of_pod, pod_name, redactable, sees

PIECE_SCANNED = 2000
"""Pods to scan between two yields to the event loop."""
_PIECE_SHOWN = 16

_GATED = "a scheduling gate holds it back: the controller that set the gate must remove it"
_UNTRIED = "kube-scheduler has not reported on it yet: is the scheduler that it names running?"
_NOMINATED = "preemption makes room for it: it is placed once the victims are gone"
_PLACING = "the extender chose a node for it a moment ago; its binding is not seen yet"

_MAX_NAMESPACES: Final = 500
"""Number of namespaces with a label value of their own, first by number of waiting pods."""

_PIECE_PODS: Final = 2000
"""Pods to count in one step."""

_LABELS: Final = ("namespace", "resource", "model", "size", "refused_by")

_SELF_EVIDENT = {"gated": _GATED, "untried": _UNTRIED, "nominated": _NOMINATED, "placing": _PLACING}

_PEERS_PATH: Final = "/v1/peers/last"
"""Path for other replicas; its prefix requires a replica's client certificate."""

_MOST_SENT: Final = 10_000
"""Largest number of pods in an answer to another replica, latest decisions first: some
megabytes."""

_PIECE_DECISIONS: Final = 64
"""Decisions to encode for another replica between two yields to the event loop."""

_VERSION: Final = 1
"""Version of the format; it grows when an older replica would misread it."""


class _Last(msgspec.Struct, kw_only=True, frozen=True):
    """A `LastDecision` and more about it for another replica; it does not contain the pod's name.

    Attributes:
        at: time of the decision, seconds since the epoch.
        leaves_none: whether the answer left the pod without a node.
        refused: reasons of the rejected candidates, most frequent first.
        examples: one rejected candidate for each of these reasons.
    """

    id: str
    replica: str
    number: int
    at: float
    verb: str
    candidates: int
    feasible: int
    node: str | None
    leaves_none: bool
    refused: tuple[CountedReason, ...]
    examples: dict[str, str] = {}


class _PeerAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """A replica's answer to another replica: decisions about waiting pods, by UID."""

    version: int
    replica: str
    last: dict[str, _Last]


_FORM: Final = AnswerFormat(msgspec.json.Decoder(_PeerAnswer).decode, _VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReported:
    """Latest decisions of the other replicas.

    Attributes:
        last: latest decision about each pod, by UID.
        unreachable: addresses of replicas that did not answer or sent a malformed answer.
    """

    last: Mapping[str, _Last] = field(default_factory=dict)
    unreachable: Sequence[str] = ()


NOTHING_REPORTED: Final = LastReported()


class LastDecisions:
    """Finds the latest decision about a waiting pod across all replicas."""

    def __init__(self, fleet: Fleet, history: DecisionHistory, replicas: Replicas) -> None:
        self._fleet = fleet
        self._history = history
        self._replicas = replicas

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route at which other replicas query the latest decisions."""
        return self._replicas.peer_routes(_PEERS_PATH, self._answer_peer, {"uid", "namespace"})

    def of(self, uid: str, others: LastReported) -> _Last | None:
        """Return the latest decision about a pod by any replica, None if there is none."""
        record = self._history.last_of(uid)
        own = None if record is None else self._last(record)
        other = others.last.get(uid)
        if own is None or other is None:
            return own or other
        return own if own.at >= other.at else other

    async def fetch(self, *, uid: str = "", namespace: str = "") -> LastReported:
        """Query the other replicas.

        Args:
            uid: only this pod; "" for all waiting pods.
            namespace: only pods of this namespace; "" for all.
        """
        query = {name: it for name, it in (("uid", uid), ("namespace", namespace)) if it}
        path = f"{_PEERS_PATH}?{urlencode(query)}" if query else _PEERS_PATH
        answers, unreachable = await query_replicas(self._replicas, path, _FORM)
        last: dict[str, _Last] = {}
        for _, answer in answers:
            for pod, one in answer.last.items():
                known = last.get(pod)
                if known is None or one.at > known.at:
                    last[pod] = one
            await asyncio.sleep(0)
        return LastReported(last=last, unreachable=unreachable)

    async def _answer_peer(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica, which redacts the answer for its caller.

        Pods that no longer wait are left out: the asking replica sees their binding itself.
        """
        query = request.query
        records = self._waiting(query.get("uid", ""), query.get("namespace", ""))
        written: list[bytes] = []
        for some in chunks(islice(records, _MOST_SENT), _PIECE_DECISIONS):
            written += [
                b"%b:%b" % (msgspec.json.encode(it.pod.uid), msgspec.json.encode(self._last(it)))
                for it in some
            ]
            await asyncio.sleep(0)
        head = msgspec.json.encode({"version": _VERSION, "replica": self._replicas.name})
        body = b'%b,"last":{%b}}' % (head[:-1], b",".join(written))
        return web.Response(body=body, content_type=CONTENT_TYPE)

    def _waiting(self, uid: str, namespace: str) -> Iterator[DecisionRecord]:
        """Yield this replica's latest decision about each waiting pod, newest first."""
        pods = [uid] if uid else tuple(self._fleet.unbound_pods)
        last = (self._history.last_of(pod) for pod in pods)
        known = [record for record in last if record is not None]
        for record in sorted(known, key=lambda it: -it.number):
            pod = self._fleet.unbound_pods.get(record.pod.uid)
            if pod is not None and namespace in {"", pod.namespace}:
                yield record

    def _last(self, record: DecisionRecord) -> _Last:
        return _Last(
            id=self._replicas.id_of(record.number),
            replica=self._replicas.host,
            number=record.number,
            at=record.at,
            verb=record.verb,
            candidates=len(record.decision.candidates),
            feasible=record.decision.feasible,
            node=record.decision.best,
            leaves_none=record.leaves_none,
            refused=_rejections(record),
            examples=_examples(record),
        )


def _rejections(record: DecisionRecord) -> tuple[CountedReason, ...]:
    """Count a decision's rejected candidates by reason, most frequent first."""
    counts = np.bincount(record.decision.codes, minlength=len(Code)).tolist()
    found = [CountedReason(count=counts[code], reason=code.text) for code in Code if counts[code]]
    return tuple(sorted((one for one in found if one.reason), key=lambda one: -one.count))


def _examples(record: DecisionRecord) -> dict[str, str]:
    """Return the first rejected candidate for each reason."""
    codes = record.decision.codes
    found = [Code(code) for code in np.flatnonzero(np.bincount(codes)).tolist() if code]
    names = record.decision.candidates
    return {code.text: names[int(np.argmax(codes == code))] for code in found}


class Pending:
    """Handler of /v1/pending.

    Args:
        clock: seconds since the epoch.
        replicas: this replica and the others, which may have made the latest decision.
    """

    def __init__(
        self,
        fleet: Fleet,
        history: DecisionHistory,
        clock: Callable[[], float],
        replicas: Replicas = ONE,
    ) -> None:
        self.last = LastDecisions(fleet, history, replicas)
        self._fleet = fleet
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/pending."""
        return [serve(routes.PENDING, self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        namespace = request.query.get("namespace")
        limit = read_number(request.query, routes.PENDING, "limit")
        found = await self._waiting(namespace)
        replies = await self.last.fetch(namespace=namespace or "")
        shown = sorted(found, key=lambda record: (record.created_at, record.key))[:limit]
        pieces = ([self.view(one, replies) for one in some] for some in chunks(shown, _PIECE_SHOWN))
        nodes = {name for pool in self._fleet.snapshot().pools.values() for name in pool.nodes}
        answer = PendingAnswer(
            pods=[], total=len(found), nodes=len(nodes), unreachable=list(replies.unreachable)
        )
        return await stream_answer(request, answer, "pods", pieces)

    async def _waiting(self, namespace: str | None) -> list[PodRecord]:
        """Return the waiting pods, of one namespace if given."""
        if namespace is not None and not sees(namespace):
            return []
        found: list[PodRecord] = []
        for some in chunks(tuple(self._fleet.pods.values()), PIECE_SCANNED):
            found += (
                record for record in some if waits(record) and namespace in {None, record.namespace}
            )
            await asyncio.sleep(0)
        return found

    def view(self, record: PodRecord, others: LastReported) -> Waiting:
        """Describe a waiting pod.

        Args:
            others: latest decisions of the other replicas.
        """
        parsed = read_message(record.message)
        decided = self.last.of(record.uid, others)
        by_us = parsed.by_us
        state = self._state(record, decided)
        # Our newer decision counts only if kube-scheduler has not reported a reason yet.
        if not record.message and decided is not None and decided.leaves_none:
            by_us = decided.refused
        reasons = (*parsed.by_scheduler, *by_us)
        examples = {} if decided is None else decided.examples
        assumed = self._fleet.ledger.get(record.uid)
        hidden = record.namespace
        return Waiting(
            pod=pod_name(record.namespace, record.name),
            uid=of_pod(hidden, record.uid),
            owner=of_pod(hidden, record.owner or None),
            scheduler=record.scheduler_name,
            created_at=moment(record.created_at),
            waiting_seconds=max(self._clock() - record.created_at, 0.0),
            resources=dict(record.resources),
            gpu_memory_bytes=of_pod(hidden, record.memory_bytes),
            nominated_node=record.nominated_node or None,
            assumed_node=assumed.node if assumed else None,
            state=state,
            nodes=parsed.nodes,
            by_scheduler=_counted(hidden, parsed.by_scheduler),
            by_us=_counted(hidden, by_us),
            message=of_pod(hidden, record.message or None),
            preemption=of_pod(hidden, parsed.preemption or None),
            hints=redactable(
                hidden, _help(reasons, state, examples), _help(of_nodes(reasons), state, examples)
            ),
            decision=None if decided is None else _brief(decided),
        )

    def _state(self, record: PodRecord, decided: _Last | None) -> str:
        """Return a pod's state in a word, such as gated, nominated or refused."""
        if record.is_deleting:
            return "deleting"
        if record.is_gated:
            return "gated"
        if record.nominated_node:
            return "nominated"
        if self._fleet.ledger.get(record.uid) is not None:
            return "placing"
        if record.is_refused:
            return "refused"
        if record.is_unscheduled:
            return "unschedulable"
        if decided is not None:
            return "refused" if decided.leaves_none else "placing"
        return "untried"


def _help(reasons: Iterable[CountedReason], state: str, examples: Mapping[str, str]) -> list[str]:
    """Return hints for the reasons, else for the state."""
    return hints(reasons, examples) or [
        text for name, text in _SELF_EVIDENT.items() if name == state
    ]


def _counted(namespace: str, reasons: Iterable[CountedReason]) -> list[ReasonCount]:
    """Encode reasons for an answer; a text with names from the pod's namespace is redacted."""
    every = tuple(reasons)
    shown, instead = (
        [ReasonCount(count=one.count, reason=one.reason) for one in some]
        for some in (every, of_nodes(every))
    )
    return redactable(namespace, shown, instead)


def waits(record: PodRecord) -> bool:
    """Check whether a pod requests GPUs and is neither bound nor finished."""
    asks = bool(record.resources) or record.has_gpu_claims
    return asks and not record.node and not record.phase.is_terminal


def _brief(decided: _Last) -> LastDecision:
    return LastDecision(
        id=decided.id,
        replica=decided.replica,
        number=decided.number,
        at=moment(decided.at),
        verb=decided.verb,
        candidates=decided.candidates,
        feasible=decided.feasible,
        node=decided.node,
    )


class Waits:
    """Counts the pods without a node, and finds the longest wait, by namespace and request.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self._pods: Counter[tuple[str, ...]] = Counter()
        self._longest: dict[tuple[str, ...], float] = {}

    def add_in_steps(self, pods: Iterable[PodRecord]) -> Steps[None]:
        """Count pods; those that need no further node are skipped."""
        for at, record in enumerate(pods):
            if at % _PIECE_PODS == 0:
                yield
            if not lacks_a_node(record):
                continue
            refused_by = "idlegpu" if record.is_refused else "kube-scheduler"
            waited = max(self._now - record.created_at, 0.0)
            for resource, count in record.resources.items():
                model = record.wanted_model or ANY
                key = (record.namespace, resource, model, size_of(count), refused_by)
                self._pods[key] += 1
                self._longest[key] = max(self._longest.get(key, 0.0), waited)

    def metrics(self) -> Iterable[Metric]:
        """Yield the gauges of pods and of the longest wait."""
        pods = GaugeMetricFamily(
            "idlegpu_unplaced_pods",
            "Pods for which kube-scheduler found no node, by namespace and request; refused_by: "
            "whether idlegpu refused some of the nodes, or kube-scheduler's own filters all.",
            labels=_LABELS,
        )
        longest = GaugeMetricFamily(
            "idlegpu_unplaced_longest_seconds",
            "Time since the creation of the oldest pod of `idlegpu_unplaced_pods`.",
            labels=_LABELS,
        )
        by_namespace: Counter[str] = Counter()
        for key, count in self._pods.items():
            by_namespace[key[0]] += count
        named = {name for name, _ in by_namespace.most_common(_MAX_NAMESPACES)}
        counts: Counter[tuple[str, ...]] = Counter()
        waits: dict[tuple[str, ...], float] = {}
        for key, count in self._pods.items():
            labels = key if key[0] in named else (OTHER, *key[1:])
            counts[labels] += count
            waits[labels] = max(waits.get(labels, 0.0), self._longest[key])
        for labels, count in counts.items():
            pods.add_metric(labels, count)
            longest.add_metric(labels, waits[labels])
        yield from (pods, longest)
