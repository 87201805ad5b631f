"""The verbs that kube-scheduler calls: filter, prioritize, preempt."""

import asyncio
import logging
import select
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from http import HTTPStatus
from operator import is_not
from time import perf_counter
from typing import Final

import numpy as np
from aiohttp import web

from extender.core.decision.filtering import Code
from extender.core.nodes.inventory import PodRecord
from extender.core.request.annotations import KNOWN, AnnotationProblem
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import (
    GpuRequest,
    ParsedRequest,
    PodRef,
    WaitingRequests,
    parse_pod_ref,
    parse_request,
)
from extender.fleet.impossible_requests import request_problems
from extender.placement.history import DecisionRecord
from extender.placement.placer import Placer, Victims
from extender.placement.request_log import FILTER, PRIORITIZE, AnsweredRequest, RequestLog
from extender.runtime.logs import LogThrottle
from extender.runtime.metrics import Metrics
from extender.settings.config import Settings
from extender.webhook import wire
from extender.webhook.go_json import WireError

logger = logging.getLogger(__name__)

# Label values of the webhook metrics; create every series at 0 at start.
#
# A counter that appears with its first event shows no increase: `increase()` and alerts built on it
# would miss the first fault, and panels would be empty until then.

_VERBS: Final = ("filter", "prioritize", "preempt")

_FAULTY: Final = (*_VERBS, "explain", "report")
"""Steps in which an internal fault is counted."""

_UNKNOWN: Final = "unknown"
"""Label for all unknown annotations, because pods can have any names."""

_WarnAnnotation = Callable[[PodRef, AnnotationProblem], None]

_NO_SCORES: Final = b"[]"
_INTERNAL_ERROR: Final = "internal error: see the extender's log"
MAX_BODY_BYTES: Final = 256 << 20
"""Largest body of a request while the nodes are unknown. Once they are known, the limit is
`_BODY_BYTES` plus `_NODE_BYTES` for each node if that is less."""
_BODY_BYTES: Final = 8 << 20
_NODE_BYTES: Final = 64 << 10
"""A request body may have `_BODY_BYTES` plus `_NODE_BYTES` for each known node, enough even for
whole Node objects."""
_BETWEEN_VERBS_SECONDS: Final = 0.02
"""Longest expected time from filter's answer to the prioritize request of the same pod."""
_CANNOT_READ = "cannot read the request"
_SEND_NAMES = "with nodeCacheCapable: true kube-scheduler sends the nodes' names alone"


class RequestOutcome(StrEnum):
    """Outcome of a request, as a metric label."""

    ANSWERED = "answered"
    NO_GPU = "no-gpu"
    """The pod requests no GPU: every candidate passes."""
    DISABLED = "disabled"
    """The pod is annotated `idlegpu.io/enabled: "false"`: every candidate passes."""
    NOT_READY = "not-ready"
    """The inventory is not complete yet: every candidate passes."""
    MALFORMED = "malformed"
    FAULT = "fault"
    DISCONNECTED = "disconnected"
    """The client disconnected before its request was complete."""
    UNREAD = "unread"
    """The client disconnected before the answer was complete: kube-scheduler after httpTimeout."""


def _create_series(metrics: Metrics) -> None:
    for verb in _VERBS:
        metrics.candidates.labels(verb)
        # A histogram has many series, and the duration of other outcomes does not matter.
        metrics.latency.labels(verb, RequestOutcome.ANSWERED)
        for outcome in RequestOutcome:
            metrics.requests.labels(verb, outcome)
    for verb in _FAULTY:
        metrics.faults.labels(verb)
    for code in Code:
        if code is not Code.PASSES:
            metrics.rejections.labels(code.name.lower())
    for annotation in (*sorted(KNOWN), _UNKNOWN):
        metrics.annotation_problems.labels(annotation)


# Attach the pod and the decision to an HTTP answer, to record them after it was sent.


@dataclass(frozen=True, slots=True)
class _About:
    """The request and the decision behind an answer.

    Attributes:
        record: the decision; None if none was made.
    """

    verb: str
    request: wire.ExtenderRequest
    record: DecisionRecord | None

    def answered(self, shortlist: int, *, at: float, is_lost: bool) -> AnsweredRequest:
        """Build the entry for the request log: the pod, and the node that was its first choice.

        Args:
            shortlist: maximum number of nodes in filter's answer; 0 for all that pass.
            at: time of the answer, seconds of this process's monotonic clock.
            is_lost: whether kube-scheduler had disconnected before the answer.
        """
        record = self.record
        if record is None:
            pod = self.request.about
            return AnsweredRequest(
                verb=self.verb,
                uid=pod.uid,
                key=pod.key,
                at=at,
                choices=len(self.request.nodes),
                is_lost=is_lost,
            )
        feasible = record.decision.feasible
        return AnsweredRequest(
            verb=self.verb,
            uid=record.pod.uid,
            key=record.pod.key,
            at=at,
            choices=min(feasible, shortlist or feasible),
            is_lost=is_lost,
            node=record.decision.best or "",
            resources=record.request.resources,
            memory_bytes=record.request.memory_bytes,
        )


_ABOUT: Final = web.ResponseKey("about", _About)
"""Key of the `_About` of an answer about a pod."""


_Answer = tuple[RequestOutcome, web.Response]


@dataclass(slots=True, kw_only=True)
class Webhooks:
    """HTTP handlers of filter, prioritize and preempt.

    Attributes:
        resources: returns the names of the GPU resources.
        metrics: metrics to update.
        max_score: highest score on the wire.
        shortlist: maximum number of nodes in filter's answer; 0 for all that pass.
        is_ready: returns whether the inventory is complete; until then every candidate passes.
        warn_annotation: writes an event about an invalid annotation.
        request_log: log of the pods of all requests.
        expect: called when a prioritize request will follow.
        requests: parses GPU requests of pods that the inventory knows.
    """

    placer: Placer
    resources: Callable[[], ResourceNames]
    metrics: Metrics
    max_score: int
    shortlist: int
    is_ready: Callable[[], bool]
    warn_annotation: _WarnAnnotation
    request_log: RequestLog
    expect: Callable[[], None] = lambda: None
    requests: WaitingRequests = field(default_factory=WaitingRequests)
    _last: tuple[tuple[object, ...], PodRef, ParsedRequest] | None = field(default=None, init=False)
    """Last parsed pod and its inputs, because prioritize follows filter for the same pod."""
    _filtered: tuple[str, float] = field(default=("", 0.0), init=False)
    """UID of the pod of the last filter answer that leaves a choice, and `time.perf_counter`."""
    _undetailed: list[DecisionRecord] = field(default_factory=list, init=False)
    _throttle: LogThrottle = field(default_factory=LogThrottle, init=False)

    def __post_init__(self) -> None:
        _create_series(self.metrics)

    def adopt(self, settings: Settings) -> None:
        """Apply new settings from the next request on."""
        self.max_score = settings.wire.max_score
        self.shortlist = settings.wire.shortlist

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the verbs."""
        return [
            web.post("/filter", self._timed("filter", self.filter)),
            web.post("/prioritize", self._timed("prioritize", self.prioritize)),
            web.post("/preempt", self._timed("preempt", self.preempt)),
        ]

    async def filter(self, body: bytes) -> _Answer:
        """Answer a filter request: which candidates are suitable.

        After an internal fault every candidate passes, so that no pod is stranded.
        """
        try:
            request = self._decode(body)
        except WireError as error:
            return self._malformed("filter", str(error))
        except Exception:  # noqa: BLE001 - without the candidates none can pass
            self._note_fault("filter")
            return RequestOutcome.FAULT, _json(wire.encode_filter_error(_INTERNAL_ERROR))
        try:
            record, outcome = self._place(FILTER, request)
            shown = None if self.placer.is_shadow else record
            decision = shown.decision if shown else None
            answer = wire.encode_filter(
                request,
                decision,
                self.shortlist,
                has_preferences=record is not None and record.request.has_preferences,
            )
        except Exception:  # noqa: BLE001 - any fault of ours must not strand a pod
            self._note_fault("filter")
            answer = wire.encode_filter(request, None)
            return RequestOutcome.FAULT, _json(answer, about=_About(FILTER, request, None))
        # kube-scheduler sends no prioritize request for a single node.
        if shown is not None and self.shortlist != 1 and len(shown.decision.order) > 1:
            self._filtered = (shown.pod.uid, perf_counter())
            self.expect()
        return outcome, _json(answer, about=_About(FILTER, request, shown))

    async def prioritize(self, body: bytes) -> _Answer:
        """Answer a prioritize request: the score of each candidate."""
        started = perf_counter()
        try:
            request = self._decode(body)
            record, outcome = self._place(PRIORITIZE, request)
            uid, filtered_at = self._filtered
            if record is not None and uid and record.pod.uid == uid:
                self.metrics.between_verbs.observe(started - filtered_at)
            if self.placer.is_shadow:
                # Equal scores would still change how kube-scheduler breaks ties.
                return outcome, _json(_NO_SCORES, about=_About(PRIORITIZE, request, None))
            decision = record.decision if record else None
            answer = wire.encode_scores(request, decision, self.max_score)
        except WireError as error:
            return self._malformed("prioritize", str(error))
        except Exception:  # noqa: BLE001 - kube-scheduler continues without our scores
            return self._fault("prioritize")
        return outcome, _json(answer, about=_About(PRIORITIZE, request, record))

    async def preempt(self, body: bytes) -> _Answer:
        """Answer a preempt request: the candidates on which evicting the victims helps the pod."""
        try:
            request = wire.decode_preemption(body, known=len(self.placer.fleet.nodes))
            kept, outcome = self._preemptible(request)
            answer = wire.encode_preemption(kept)
        except WireError as error:
            return self._malformed("preempt", str(error))
        except Exception:  # noqa: BLE001 - an internal fault evicts no pod
            return self._fault("preempt")
        return outcome, _json(answer)

    def _preemptible(
        self, request: wire.PreemptionRequest
    ) -> tuple[tuple[wire.PreemptionCandidate, ...], RequestOutcome]:
        """Return the candidates that would pass filter without their victims."""
        # A candidate without victims would make kube-scheduler fail the whole preemption.
        candidates = tuple(candidate for candidate in request.candidates if candidate.uids)
        self.metrics.candidates.labels("preempt").observe(len(candidates))
        pod, parsed = self._parse(request.pod)
        if parsed.request is None:
            return candidates, _left_alone(parsed)
        if self._passes_all(parsed.request):
            return candidates, RequestOutcome.NOT_READY
        accepted = self.placer.accepts_without(
            pod,
            parsed.request,
            [
                Victims(node=candidate.node, uids=frozenset(candidate.uids))
                for candidate in candidates
            ],
        )
        logger.info(
            "preemption",
            extra={"pod": pod.key, "candidates": len(candidates), "accepted": len(accepted)},
        )
        if self.placer.is_shadow:
            return candidates, RequestOutcome.ANSWERED
        kept = tuple(candidate for candidate in candidates if candidate.node in accepted)
        return kept, RequestOutcome.ANSWERED

    def _place(
        self, verb: str, request: wire.ExtenderRequest
    ) -> tuple[DecisionRecord | None, RequestOutcome]:
        """Decide for the pod; the record is None if every candidate passes without a decision."""
        pod, parsed = self._parse(request.pod)
        if parsed.request is None:
            return None, _left_alone(parsed)
        if self._passes_all(parsed.request):
            return None, RequestOutcome.NOT_READY
        nodes = request.nodes
        record = self.placer.place(verb, pod, parsed.request, nodes, ranked=self.shortlist)
        # Details for explanations are recorded after the answer. After filter they also wait for
        # prioritize, which comes at once and must not be delayed.
        self._undetailed.append(record)
        loop = asyncio.get_running_loop()
        if verb == FILTER:
            loop.call_later(_BETWEEN_VERBS_SECONDS, self._catch_up, record)
        else:
            loop.call_soon(self._catch_up, record)
        loop.call_soon(self._report, record)
        return record, RequestOutcome.ANSWERED

    def _note(
        self, verb: str, about: _About | None, outcome: RequestOutcome, seconds: float
    ) -> None:
        """Count and log a request; called after the answer was sent."""
        self.metrics.requests.labels(verb, outcome).inc()
        self.metrics.latency.labels(verb, outcome).observe(seconds)
        is_lost = outcome in {RequestOutcome.DISCONNECTED, RequestOutcome.UNREAD}
        if outcome is RequestOutcome.MALFORMED:
            self.request_log.note_unreadable()
        else:
            self.request_log.note_answer(seconds, is_lost=is_lost)
        if about is not None:
            self.metrics.candidates.labels(verb).observe(len(about.request.nodes))
            at = self.request_log.monotonic()
            self.request_log.note(about.answered(self.shortlist, at=at, is_lost=is_lost))

    def _passes_all(self, request: GpuRequest) -> bool:
        """Return whether every candidate passes, because the inventory is not complete yet.

        A pod that waits for its own requirements also waits now.
        """
        return not self.is_ready() and not request.may_wait

    def _decode(self, body: bytes) -> wire.ExtenderRequest:
        fleet = self.placer.fleet
        return wire.decode_request(
            body, fleet.node_index, fleet.unbound_pods, known=len(fleet.nodes)
        )

    def _parse(self, sent: wire.RequestPod) -> tuple[PodRef, ParsedRequest]:
        """Parse the pod's GPU request, and report invalid annotations by an event."""
        if isinstance(sent, PodRecord):
            pod, parsed = PodRef.of(sent), self.requests.read(sent, self.placer.policy)
            kin = sent.kin
        else:
            pod, parsed = self._parse_object(sent)
            kin = parsed.kin
        if parsed.request is not None:
            request = self.placer.fleet.informed(parsed.request, kin)
            if request is not parsed.request or request.memory_bytes:
                fleet, policy = self.placer.fleet, self.placer.policy
                problems = request_problems(request, fleet.snapshot(), fleet.store, policy)
                parsed = replace(parsed, request=request, problems=(*parsed.problems, *problems))
        for problem in parsed.problems:
            known = problem.annotation if problem.annotation in KNOWN else _UNKNOWN
            self.metrics.annotation_problems.labels(known).inc()
            self.warn_annotation(pod, problem)
        return pod, parsed

    def _parse_object(self, sent: wire.JsonObject) -> tuple[PodRef, ParsedRequest]:
        """Parse a pod that the inventory does not know in this version."""
        resources, policy = self.resources(), self.placer.policy
        grounds = (sent, resources, policy)
        if self._last is None or any(map(is_not, self._last[0], grounds)):
            parsed = parse_request(sent, resources=resources, defaults=policy)
            self._last = (grounds, parse_pod_ref(sent), parsed)
        return self._last[1:]

    def _catch_up(self, record: DecisionRecord) -> None:
        """Record the details of all decisions up to this one, for explanations."""
        if not any(each is record for each in self._undetailed):
            return  # prioritize has come since; the other pod may be between filter and prioritize
        try:
            done = None
            while done is not record:
                done = self._undetailed.pop(0)
                self.placer.detail(done)
            self.placer.fleet.changed.publish()
        except Exception:  # noqa: BLE001 - a failed explanation must not cost a pod its node
            self._note_fault("explain")

    def _report(self, record: DecisionRecord) -> None:
        """Log a decision, and count filter's verdicts; called after the answer was sent."""
        try:
            _log_decision(record)
            if record.verb == FILTER:
                self._count_verdicts(record)
        except Exception:  # noqa: BLE001 - the answer was sent already
            self._note_fault("report")

    def _count_verdicts(self, record: DecisionRecord) -> None:
        """Count the nodes that passed, and the rejections by reason."""
        counts = np.bincount(record.decision.codes, minlength=len(Code))
        self.metrics.feasible.observe(int(counts[Code.PASSES]))
        for code in np.flatnonzero(counts).tolist():
            if code != Code.PASSES:
                self.metrics.rejections.labels(Code(code).name.lower()).inc(int(counts[code]))

    def _note_fault(self, verb: str) -> None:
        logger.exception("internal error", extra={"verb": verb})  # noqa: LOG004 - called while handling
        self.metrics.faults.labels(verb).inc()

    def _fault(self, verb: str) -> _Answer:
        self._note_fault(verb)
        return RequestOutcome.FAULT, _json(wire.encode_error(_INTERNAL_ERROR), 500)

    def _malformed(self, verb: str, error: str, status: int = 400) -> _Answer:
        """Build the answer to a malformed request; only filter has a field for the reason."""
        unlogged = self._throttle.due(verb, error)
        if unlogged is not None:
            extra = {"verb": verb, "error": error, "also_unlogged": unlogged}
            logger.warning("malformed request", extra=extra)
        if verb == "filter":
            return RequestOutcome.MALFORMED, _json(wire.encode_filter_error(error))
        return RequestOutcome.MALFORMED, _json(wire.encode_error(error), status)

    async def _body(self, request: web.Request) -> bytes:
        """Read the body of a request.

        Raises:
            HTTPRequestEntityTooLarge: it is larger than the limit.
            RequestPayloadError: it is malformed.
            OSError: the client has disconnected.
        """
        limit = request.client_max_size
        if self.is_ready():
            limit = min(limit, _BODY_BYTES + len(self.placer.fleet.nodes) * _NODE_BYTES)
        length = request.content_length
        if length is not None and length <= limit:
            return await request.content.read()  # the other way copies it twice
        return await request.clone(client_max_size=limit).read()

    def _timed(
        self, verb: str, answer: Callable[[bytes], Awaitable[_Answer]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that reads the body, times the answer and counts its outcome."""

        async def handle(request: web.Request) -> web.StreamResponse:
            started = perf_counter()
            try:
                body = await self._body(request)
            except web.HTTPRequestEntityTooLarge as error:
                outcome, response = self._malformed(
                    verb, f"{_CANNOT_READ}: {error.text}: {_SEND_NAMES}", 413
                )
            except web.RequestPayloadError as error:
                outcome, response = self._malformed(verb, f"{_CANNOT_READ}: {error}")
            except OSError:
                # The client has disconnected, so it does not read this answer.
                outcome, response = RequestOutcome.DISCONNECTED, web.Response(status=400)
            else:
                outcome, response = await answer(body)
                if _is_gone(request):
                    outcome = RequestOutcome.UNREAD
            seconds = perf_counter() - started
            about = response.get(_ABOUT)
            asyncio.get_running_loop().call_soon(self._note, verb, about, outcome, seconds)
            return response

        return handle


def _left_alone(parsed: ParsedRequest) -> RequestOutcome:
    """Return the outcome for a pod without a GPU request."""
    return RequestOutcome.DISABLED if parsed.is_disabled else RequestOutcome.NO_GPU


def _json(body: bytes, status: int = 200, *, about: _About | None = None) -> web.Response:
    """Build the HTTP response; `about` is recorded after the response was sent."""
    response = web.Response(body=body, status=status, content_type="application/json")
    if about is not None:
        response[_ABOUT] = about
    return response


def _log_decision(record: DecisionRecord) -> None:
    decision = record.decision
    best = decision.order[0] if len(decision.order) else None
    runner_up = decision.order[1] if len(decision.order) > 1 else None
    logger.info(
        "decision",
        extra={
            "verb": record.verb,
            "pod": record.pod.key,
            "resource": record.request.resource,
            "count": record.request.count,
            "strategy": record.request.strategy.value,
            "candidates": len(decision.candidates),
            "feasible": decision.feasible,
            "node": None if best is None else decision.candidates[best],
            "score": None if best is None else round(float(decision.scores[best]), 6),
            "runner_up": None if runner_up is None else decision.candidates[runner_up],
            "snapshot": record.snapshot_version,
            "duration_seconds": round(record.seconds, 6),
        },
    )


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GONE: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""Poll events of a connection that the peer closed; POLLRDHUP exists on Linux only."""


def _is_gone(request: web.Request) -> bool:
    """Return whether the client of a request has disconnected.

    The transport notices this only at the event loop's next read, so the socket is polled.
    kube-scheduler disconnects after `httpTimeout`.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        return True
    socket = transport.get_extra_info("socket")
    if socket is None or socket.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(socket, _GONE)
    return bool(poll.poll(0))


def noting_wrong_paths(request_log: RequestLog) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return a middleware that records the paths of POST requests that no route serves."""

    @web.middleware
    async def note(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status == HTTPStatus.NOT_FOUND and request.method == "POST":
                request_log.note_wrong_path(request.path)
            raise

    return note
