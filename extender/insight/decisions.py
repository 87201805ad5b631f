"""Routes for decisions, and for pods that were bound without one.

Every replica answers for the decisions of all replicas.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import takewhile
from typing import Final
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from extender.answers import routes
from extender.answers.decisions import Decisions
from extender.answers.pods import BypassedAnswer, BypassedGroup, Cause
from extender.core.untyped import number_of, text_of
from extender.insight.replicas import ONE, AnswerFormat, Replicas, query_replicas
from extender.insight.views import Json, decision_in_steps, veiled
from extender.placement.bypassed_pods import BypassedPods, likely_causes
from extender.placement.history import DecisionHistory, DecisionRecord
from extender.runtime.cooperative import run_in_steps
from extender.server.json_api import (
    CONTENT_TYPE,
    chunks,
    document_answer,
    json_answer,
    read_boolean,
    read_number,
    serve,
    stream_answer,
    unknown_decision,
    write_in_pieces,
)
from extender.server.redaction import VIEWER, namespace_of, pod_key, sees, write_json_in_full

PEERS_PATH: Final = "/v1/peers/decisions"
"""Path for other replicas; its prefix requires a replica's client certificate."""

_MOST_DECISIONS: Final = routes.DECISIONS.number("limit").high
_PIECE_DECISIONS: Final = 32
"""Decisions to encode for another replica between two yields to the event loop."""

_VERSION: Final = 1
"""Version of the format; it grows when an older replica would misread it."""

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VIEW: Final = msgspec.json.Decoder(dict[str, object])

_LONG_BYTES: Final = 1 << 16
"""Size from which a decision is decoded field by field; one in short form is below a kilobyte."""


class _ReportedDecisions(msgspec.Struct, kw_only=True, frozen=True):
    """A replica's answer to another replica.

    Attributes:
        decisions: decisions, not redacted: the asking replica redacts them for its caller.
    """

    version: int
    replica: str
    decisions: list[dict[str, object]] = []


class _Written(msgspec.Struct, kw_only=True, frozen=True):
    """A replica's answer to another replica, with its decisions still encoded as JSON."""

    version: int
    replica: str
    decisions: list[msgspec.Raw] = []


_WRITTEN: Final = msgspec.json.Decoder(_Written)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteDecision:
    """A decision of another replica, in short form."""

    address: str
    view: Json
    at: float


class DecisionRoutes:
    """Routes under /v1/decisions, for clients and for other replicas.

    A decision's `number` is unique within its replica's process, its `id` across all of them.
    """

    def __init__(self, history: DecisionHistory, replicas: Replicas = ONE) -> None:
        self._history = history
        self._replicas = replicas

    def routes(self) -> list[web.RouteDef]:
        """Return the routes GET /v1/decisions and GET /v1/decisions/{id}."""
        return [serve(routes.DECISIONS, self._list), serve(routes.DECISION, self._one)]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route at which other replicas query decisions."""
        return self._replicas.peer_routes(
            PEERS_PATH, self._answer_peer, {"limit", "pod", "id", "after"}
        )

    async def _list(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        limit = read_number(query, routes.DECISIONS, "limit")
        brief = read_boolean(query, "brief")
        pod = query.get("pod")
        # Pods of this name in namespaces that the caller may not read are left out below.
        parameters = (
            {"limit": str(limit)} if pod is None else {"limit": str(_MOST_DECISIONS), "pod": pod}
        )
        decisions, unreachable = await self._fetch(parameters)
        near = [it for it in self._near(pod) if pod is None or sees(it.pod.namespace)]
        far = [it for it in decisions if pod is None or sees(_namespace(it.view))]
        both: list[DecisionRecord | _RemoteDecision] = [*near, *far]
        newest = sorted(both, key=lambda it: -it.at)[:limit]
        answer = Decisions(decisions=[], unreachable=unreachable)
        return await stream_answer(request, answer, "decisions", self._pieces(newest, brief=brief))

    async def _pieces(
        self, newest: Sequence[DecisionRecord | _RemoteDecision], *, brief: bool
    ) -> AsyncIterator[list[Json]]:
        """Yield the decisions; fetch other replicas' decisions in full one by one.

        If a replica stops answering, its remaining decisions are returned in short form.
        """
        silent: set[str] = set()
        for decision in newest:
            if isinstance(decision, DecisionRecord):
                yield [await self._view(decision, brief=brief)]
                continue
            view = None
            if not brief and decision.address not in silent:
                query = urlencode({"id": text_of(decision.view["id"])})
                body = await self._replicas.others.query_one(
                    decision.address, f"{PEERS_PATH}?{query}"
                )
                if body is None:
                    silent.add(decision.address)
                answer = FORM.read(body)
                view = answer.decisions[0] if answer and answer.decisions else None
            # If the replica has dropped the decision by now, return the short form.
            yield [veiled(view or decision.view)]

    async def _one(self, request: web.Request) -> web.StreamResponse:
        wanted = request.match_info["id"]
        own = [record for record in self._history if self._is(record, wanted)]
        near = [await self._view(record, brief=False) for record in own]
        decisions, unreachable = list[_RemoteDecision](), list[str]()
        if not self._replicas.is_ours(wanted):
            decisions, unreachable = await self._fetch({"id": wanted})
        found = [*near, *(veiled(it.view) for it in decisions)]
        rest: Json = {"unreachable": unreachable} if unreachable else {}
        if len(found) == 1:
            return await document_answer(request, found[0] | rest)
        if found:
            ids = ", ".join(sorted(text_of(view["id"]) for view in found))
            error = f"several replicas have a decision {wanted!r}: request one of {ids}"
            return json_answer({"error": error} | rest, 409)
        error = unknown_decision(wanted)
        return json_answer({"error": error} | rest, 404)

    async def _answer_peer(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica."""
        query = request.query
        limit = read_number(query, routes.DECISIONS, "limit")
        wanted, after = query.get("id"), query.get("after")
        if wanted is not None:
            records = [record for record in self._history if self._is(record, wanted)]
        elif after is not None:
            records = self._after(after)[:limit]
        else:
            records = self._near(query.get("pod"))[:limit]
        written: list[bytes] = []
        if wanted is not None:
            written += [await self._written(record) for record in records]
        else:
            for some in chunks(records, _PIECE_DECISIONS):
                written += [
                    write_json_in_full(await self._view(record, brief=True)) for record in some
                ]
                await asyncio.sleep(0)
        body = b'{"version":%d,"replica":%b,"decisions":[%b]}' % (
            _VERSION,
            write_json_in_full(self._replicas.name),
            b",".join(written),
        )
        return web.Response(body=body, content_type=CONTENT_TYPE)

    async def _written(self, record: DecisionRecord) -> bytes:
        """Encode a decision in full for another replica, in steps."""
        pieces: list[bytes] = []
        for piece in write_in_pieces(await self._view(record, brief=False), write_json_in_full):
            pieces.append(piece)
            await asyncio.sleep(0)
        return b"".join(pieces)

    def _near(self, pod: str | None) -> list[DecisionRecord]:
        """Return this replica's decisions about a pod, or all, newest first."""
        return [
            record
            for record in self._history
            if pod is None or pod in {record.pod.key, record.pod.uid, record.pod.name}
        ]

    def _after(self, known: str) -> list[DecisionRecord]:
        """Return this replica's decisions after the last one that the other replica has.

        Args:
            known: comma-separated decision ids of any replicas.
        """
        ours = (one for one in known.split(",") if self._replicas.is_ours(one))
        last = max((number_of(one.rpartition("-")[2]) or 0 for one in ours), default=0)
        return list(takewhile(lambda record: record.number > last, self._history))

    def _is(self, record: DecisionRecord, wanted: str) -> bool:
        return wanted in {str(record.number), self._replicas.id_of(record.number)}

    async def _view(self, record: DecisionRecord, *, brief: bool) -> Json:
        view = await run_in_steps(decision_in_steps(record, brief=brief))
        return named(self._replicas, record) | view

    async def _fetch(self, query: Mapping[str, str]) -> tuple[list[_RemoteDecision], list[str]]:
        """Query the other replicas, and review the caller's rights for the answers' namespaces.

        Returns:
            Decisions, newest first for each replica, and the addresses without an answer.
        """
        path = f"{PEERS_PATH}?{urlencode(query)}"
        answers, unreachable = await query_replicas(self._replicas, path, FORM)
        decisions = [it for address, answer in answers for it in _far(address, answer)]
        await VIEWER.get().learn({_namespace(it.view) for it in decisions})
        return decisions, unreachable


def named(replicas: Replicas, record: DecisionRecord) -> Json:
    """Return the id and the replica's name of a decision of this replica."""
    return {"id": replicas.id_of(record.number), "replica": replicas.host}


def _decode(body: bytes) -> _ReportedDecisions:
    """Decode another replica's answer; large fields stay encoded as `msgspec.Raw`.

    Raises:
        Exception: the answer is malformed.
    """
    written = _WRITTEN.decode(body)
    return _ReportedDecisions(
        version=written.version,
        replica=written.replica,
        decisions=[_read_view(view) for view in written.decisions],
    )


def _read_view(written: msgspec.Raw) -> dict[str, object]:
    if not _is_long(written):
        return _VIEW.decode(written)
    fields = _FIELDS.decode(written).items()
    return {name: raw if _is_long(raw) else msgspec.json.decode(raw) for name, raw in fields}


def _is_long(written: msgspec.Raw) -> bool:
    return memoryview(written).nbytes >= _LONG_BYTES


FORM: Final = AnswerFormat(_decode, _VERSION)


def _far(address: str, answer: _ReportedDecisions) -> list[_RemoteDecision]:
    """Return the decisions in an answer; skip those without a valid time or id."""
    found = []
    for view in answer.decisions:
        try:
            at = datetime.fromisoformat(text_of(view.get("at"))).timestamp()
        except ValueError:
            continue
        if text_of(view.get("id")).startswith(f"{answer.replica}-"):
            found.append(_RemoteDecision(address=address, view=view, at=at))
    return found


def _namespace(view: Mapping[str, object]) -> str:
    return namespace_of(text_of(view.get("pod")))


class BypassedPodsTable:
    """Handler of /v1/bypassed: each replica classifies and reports the pods that it saw waiting."""

    def __init__(self, bypassed_pods: BypassedPods) -> None:
        self._bypassed_pods = bypassed_pods

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/bypassed."""
        return [web.get(routes.BYPASSED.path, self._answer)]

    async def _answer(self, _: web.Request) -> web.StreamResponse:
        report = self._bypassed_pods.report()
        examples = (group.example for group in report.pods if group.example)
        await VIEWER.get().learn({namespace_of(example) for example in examples})
        groups = [
            BypassedGroup(
                scheduler=group.scheduler,
                resources=list(group.resources),
                verdict=group.verdict,
                count=group.count,
                example=pod_key(group.example),
                first_age_seconds=report.at - group.first_at,
                last_age_seconds=report.at - group.last_at,
            )
            for group in report.pods
        ]
        return json_answer(
            BypassedAnswer(
                unjudged=report.unjudged,
                bound=groups,
                schedulers=sorted(report.schedulers),
                likely_causes=[Cause(**asdict(cause)) for cause in likely_causes(report)],
            )
        )
