"""The route GET /v1/explain: explain a pod's placement, or why it waits, across all replicas.

kube-scheduler may call one replica for filter and another for prioritize. The first one then has
the reasons of the rejected nodes, the second one the ranking of the others: both are joined.
"""

import asyncio
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from extender.answers import routes
from extender.answers.decisions import VerdictAnswer
from extender.answers.pods import NodeReport, Other
from extender.core.nodes.inventory import PodRecord
from extender.core.request.request import GpuRequest, PodRef
from extender.core.steps import Steps, let_go
from extender.core.untyped import mapping_of, text_of
from extender.fleet.fleet import Fleet
from extender.insight.decisions import named
from extender.insight.explain_views import (
    Ranking,
    Wish,
    details_in_steps,
    full_nodes,
    in_short_or_full,
    kept_view,
    rejected_nodes,
    requested_node,
    short_nodes,
)
from extender.insight.pending import NOTHING_REPORTED, PIECE_SCANNED, LastReported, Pending, waits
from extender.insight.replicas import ONE, Replicas
from extender.insight.views import PIECE_SHORT, PIECE_VERDICTS, Json, decision_view, verdict_view
from extender.placement.history import DecisionRecord
from extender.placement.placer import Placer
from extender.runtime.cooperative import run_in_steps
from extender.runtime.decoding import MalformedError, decode_with
from extender.server.json_api import (
    CONTENT_TYPE,
    QueryError,
    chunks,
    document_answer,
    error_answer,
    read_number,
    serve,
    unknown_decision,
    write_in_pieces,
)
from extender.server.redaction import (
    SEES_ALL,
    VIEWER,
    namespace_of,
    of_pod,
    pod_name,
    sees,
    write_json_in_full,
)

_PEERS_PATH: Final = "/v1/peers/explain"
"""Path for other replicas; its prefix requires a replica's client certificate."""

_ATTEMPT_SECONDS: Final = 5.0
"""Longest time between filter and prioritize of one attempt."""

_CLOCKS_SECONDS: Final = 1.0
"""Tolerated difference between two replicas' clocks."""

_LONG: Final = frozenset({"nodes", "others"})
"""Fields with thousands of nodes, which are forwarded to the caller without being decoded."""

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A replica's explanation of a pod.

    Attributes:
        at: time of the decision, seconds since the epoch; 0 if there is none.
    """

    view: Json
    at: float
    uid: str


class Explain:
    """Handlers of GET /v1/explain.

    Args:
        placer: ranks nodes, and remembers decisions.
        pending: describes waiting pods.
        replicas: this replica and the others, which may have made the decision.
    """

    def __init__(
        self, fleet: Fleet, placer: Placer, pending: Pending, *, replicas: Replicas = ONE
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._pending = pending
        self._replicas = replicas

    def routes(self) -> list[web.RouteDef]:
        """Return the route GET /v1/explain."""
        return [serve(routes.EXPLAIN, self._explain)]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route at which other replicas query explanations."""
        return self._replicas.peer_routes(
            _PEERS_PATH, self._answer_peer, {"pod", "id", "limit", "node", "attempt"}
        )

    async def _explain(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        wish = Wish.read(query)
        number = read_number(query, routes.EXPLAIN, "number")
        name, wanted = query.get("pod", ""), query.get("id", "") or (str(number) if number else "")
        if bool(name) == bool(wanted) or (number and "id" in query):
            raise QueryError(
                "pod", name, "must be namespace/name, name or UID; or give number, or id"
            )
        if wanted:
            return await self._explain_one(request, wanted, wish)
        name = await self._resolve(name)
        own = await self._own(name, "", wish)
        theirs = await self._theirs({"pod": name} | wish.query)
        known = next((one for one in theirs if own is None or one.at > own.at), own)
        if known is None:
            return error_answer(
                404,
                f"no decision about {name!r} is remembered, and there is no such GPU pod: "
                "`idlegpu decisions` and `idlegpu pending` list the known pods (GET /v1/decisions, "
                "/v1/pending)",
            )
        return await self._answer(request, await self._with_filter(known, wish))

    async def _explain_one(
        self, request: web.Request, wanted: str, wish: Wish
    ) -> web.StreamResponse:
        """Explain one decision, made by any replica.

        Args:
            wanted: the decision's id, or its number, which several replicas may have.
        """
        own = await self._own("", wanted, wish)
        found = [] if own is None else [own]
        if not self._replicas.is_ours(wanted):
            found += await self._theirs({"id": wanted} | wish.query)
        if len(found) == 1:
            return await self._answer(request, await self._with_filter(found[0], wish))
        if found:
            views = (mapping_of(one.view["decision"]) for one in found)
            ids = ", ".join(sorted(text_of(view.get("id")) for view in views))
            return error_answer(
                409,
                f"several replicas have a decision {wanted!r}: request it by its id, one of {ids}",
            )
        return error_answer(404, unknown_decision(wanted))

    async def _answer(self, request: web.Request, known: _Known) -> web.StreamResponse:
        """Send an explanation; of a waiting pod include the latest decision of any replica."""
        record, view = self._fleet.pods.get(known.uid), known.view
        if record is not None and waits(record) and view.get("pending") is not None:
            view = view | self._waiting(record, await self._pending.last.fetch(uid=known.uid))
        return await document_answer(request, view)

    def _waiting(self, record: PodRecord, others: LastReported) -> Json:
        """Return the state and the reasons of a waiting pod."""
        pending = self._pending.view(record, others)
        return {"state": pending.state, "pending": pending}

    async def _own(self, name: str, wanted: str, wish: Wish) -> _Known | None:
        """Return this replica's explanation, None if it knows nothing.

        Args:
            name: the pod, "" to look up a decision.
            wanted: the decision's id or number, "" to look up a pod.

        Raises:
            QueryError: several pods have this name.
        """
        decided = self._find(name, wanted)
        record = self._fleet.pods.get(decided.pod.uid) if decided else None
        if record is None and name:
            # A new pod may have the deleted pod's name, without a decision yet.
            record = await self._known(name)
            decided = None if record is not None else decided
        if decided is None and record is None:
            return None
        view = await self._view(decided, record, wish)
        uid = decided.pod.uid if decided else _ref(record).uid
        return _Known(view=view, at=decided.at if decided else 0.0, uid=uid)

    async def _with_filter(self, known: _Known, wish: Wish) -> _Known:
        """Add the rejected nodes from the filter call to a ranking that lacks them."""
        if not _lacks_filter(known.view):
            return known
        found = await self._theirs({"pod": known.uid, "attempt": f"{known.at:.3f}"} | wish.query)
        own = await self._own_filter(known.uid, known.at, wish)
        halves = sorted([*found, *([own] if own else [])], key=lambda one: one.at)
        if not halves:
            return known
        steps = _joined_in_steps(known.view, halves[-1].view, wish.limit)
        return replace(known, view=await run_in_steps(steps))

    async def _own_filter(self, uid: str, at: float, wish: Wish) -> _Known | None:
        """Return this replica's filter decision shortly before another replica's ranking, or None.

        Args:
            at: time of the ranking, seconds since the epoch.
        """
        record = _filter_near(self._placer.history, uid, at)
        if record is None:
            return None
        view = await self._view(record, self._fleet.pods.get(uid), wish)
        return _Known(view=view, at=record.at, uid=uid)

    async def _theirs(self, query: Mapping[str, str]) -> list[_Known]:
        """Return the other replicas' explanations that the caller may see, newest first."""
        found: list[_Known] = []
        ids = {""}  # a replica may have several addresses, and this one is among them
        answers = await self._replicas.others.query(f"{_PEERS_PATH}?{urlencode(query)}")
        for body in answers.values():
            view = _read_explanation(body)
            at = _decided_at(view)
            name = text_of(mapping_of(view.get("decision")).get("id"))
            if at and name not in ids and not self._replicas.is_ours(name):
                ids.add(name)
                namespace = namespace_of(text_of(view.get("pod")))
                await VIEWER.get().learn({namespace})
                if sees(namespace):
                    found.append(_Known(view=view, at=at, uid=text_of(view.get("uid"))))
        return sorted(found, key=lambda one: -one.at)

    async def _answer_peer(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica, which redacts the answer for its caller."""
        query = request.query
        wish, pod = Wish.read(query), query.get("pod", "")
        attempt = _read_attempt(query)
        # Reset afterwards: the next request on this connection may have another caller.
        previous = VIEWER.set(SEES_ALL)
        try:
            if attempt:
                own = await self._own_filter(pod, attempt, wish)
            else:
                own = await self._own(pod, query.get("id", ""), wish)
        finally:
            VIEWER.reset(previous)
        written: list[bytes] = []
        view = own.view if own is not None and own.at else {}
        for piece in write_in_pieces(view, write_json_in_full):
            written.append(piece)
            await asyncio.sleep(0)
        return web.Response(body=b"".join(written), content_type=CONTENT_TYPE)

    async def _resolve(self, name: str) -> str:
        """Complete a short pod name with its namespace; return it unchanged if no pod matches.

        Other replicas are queried by the full name, because they do not know the caller's rights.

        Raises:
            QueryError: several pods have this name.
        """
        if "/" in name:
            return name
        known = {
            record.pod.key
            for record in self._placer.history
            if record.pod.name == name and sees(record.pod.namespace)
        }
        known |= {record.key for record in await self._called(name) if record.name == name}
        _require_one("pod", name, known)
        return next(iter(known), name)

    def _find(self, name: str, wanted: str) -> DecisionRecord | None:
        """Return the latest decision about a pod, or the one with an id or number; else None.

        Raises:
            QueryError: several pods have this name.
        """
        found: dict[str, DecisionRecord] = {}
        for record in self._placer.history:
            pod = record.pod
            is_meant = (
                name in {pod.key, pod.uid, pod.name}
                if name
                else wanted in {str(record.number), self._replicas.id_of(record.number)}
            )
            if is_meant and sees(pod.namespace):
                found.setdefault(pod.key, record)
        _require_one("pod", name, found)
        return next(iter(found.values()), None)

    async def _known(self, name: str) -> PodRecord | None:
        """Return the GPU pod with a name, None if there is none.

        Raises:
            QueryError: several pods have this name.
        """
        found = {record.key: record for record in await self._called(name)}
        _require_one("pod", name, found)
        return next(iter(found.values()), None)

    async def _called(self, name: str) -> list[PodRecord]:
        """Return the GPU pods with a name or UID that the caller may read."""
        found: list[PodRecord] = []
        for some in chunks(tuple(self._fleet.pods.values()), PIECE_SCANNED):
            found += (
                record
                for record in some
                if name in {record.key, record.uid, record.name} and sees(record.namespace)
            )
            await asyncio.sleep(0)
        return found

    async def _view(
        self, decided: DecisionRecord | None, record: PodRecord | None, wish: Wish
    ) -> Json:
        """Build the explanation of a decision, with the pod's current state."""
        pod = decided.pod if decided else _ref(record)
        bound = record.node if record is not None else (decided.bound_node if decided else "")
        view: Json = {
            "pod": pod_name(pod.namespace, pod.name),
            "uid": of_pod(pod.namespace, pod.uid),
            "is_hypothetical": False,
            "state": "gone" if record is None else "bound",
            "bound_node": bound or None,
            "gpus": list(self._fleet.gpus_of(record)) if record is not None and bound else [],
            "is_followed": decided.decision.best == bound if decided and bound else None,
            "pending": None,
            "decision": None,
            "filter": None,
            "kept": None,
            "nodes": [],
            "others": [],
            "others_left": 0,
            "rejected": [],
            "requested_node": None,
        }
        if record is not None and waits(record):
            view |= self._waiting(record, NOTHING_REPORTED)
        if decided is None:
            return view
        filtered = _filter_before(self._placer.history, decided)
        # Prioritize covers only the nodes that passed filter: take the rejected ones from there.
        decision = (filtered or decided).decision
        details = await run_in_steps(details_in_steps(decided, filtered))
        names = [verdict.node for verdict in details]
        others, left = await run_in_steps(short_nodes(decision, names, wish.limit))
        nodes = await run_in_steps(
            full_nodes(Ranking(decision=decided.decision, details=details, bound_node=bound))
        )
        await run_in_steps(let_go(details))
        return view | {
            "decision": self._brief(decided),
            "filter": self._brief(filtered) if filtered else None,
            "kept": kept_view(len(decision.candidates), len(set(names))),
            "nodes": nodes,
            "others": others,
            "others_left": left,
            "rejected": rejected_nodes(decision, wish.names),
            "requested_node": requested_node(
                wish, decision, names, self._fleet.nodes, now=partial(self._now, decided.request)
            ),
        }

    def _now(self, request: GpuRequest, node: str) -> list[VerdictAnswer]:
        return [verdict_view(verdict) for verdict in self._placer.explain_nodes(request, [node])]

    def _brief(self, record: DecisionRecord) -> Json:
        return named(self._replicas, record) | decision_view(record, brief=True)


def _require_one(parameter: str, name: str, found: Collection[str]) -> None:
    """Check that a name is not ambiguous."""
    if len(found) > 1:
        some = ", ".join(sorted(found)[:5])
        raise QueryError(parameter, name, f"is the name of several pods: use one of {some}")


def _ref(record: PodRecord | None) -> PodRef:
    if record is None:
        return PodRef(uid="", namespace="", name="")
    return PodRef.of(record)


class _Node(msgspec.Struct, frozen=True):
    """Fields of a node that the join needs."""

    node: str
    score: float
    rejection: str | None


class _Counts(msgspec.Struct, frozen=True):
    """Fields of a decision that the join needs."""

    candidates: int
    feasible: int


_NODE: Final = msgspec.json.Decoder(_Node)


def _read_explanation(body: bytes | None) -> Json:
    """Decode another replica's explanation; empty if it is malformed. Long fields stay encoded."""
    try:
        return decode_with(_decode, body or b"{}")
    except MalformedError:
        return {}


def _decode(body: bytes) -> Json:
    fields = _FIELDS.decode(body)
    return {
        name: raw if name in _LONG else msgspec.json.decode(raw) for name, raw in fields.items()
    }


def _decided_at(view: Mapping[str, object]) -> float:
    """Return the time of an explanation's decision, 0 if it is missing."""
    try:
        return datetime.fromisoformat(
            text_of(mapping_of(view.get("decision")).get("at"))
        ).timestamp()
    except ValueError:
        return 0.0


def _filter_before(
    history: Iterable[DecisionRecord], decided: DecisionRecord
) -> DecisionRecord | None:
    """Return the filter decision of the same attempt, None if it is not remembered.

    Args:
        history: decisions of one replica, newest first.
        decided: one of these decisions.
    """
    if decided.verb == "filter":
        return None
    for record in history:
        if record.pod.uid == decided.pod.uid and record.number < decided.number:
            is_same = decided.at - record.at < _ATTEMPT_SECONDS and record.verb == "filter"
            return record if is_same else None
    return None


def _filter_near(history: Iterable[DecisionRecord], uid: str, at: float) -> DecisionRecord | None:
    """Return the filter decision shortly before another replica's ranking, None if there is none.

    Args:
        history: decisions of one replica, newest first.
        at: time of the ranking, seconds since the epoch.
    """
    for record in history:
        is_same = -_CLOCKS_SECONDS < at - record.at < _ATTEMPT_SECONDS
        if record.pod.uid == uid and record.verb == "filter" and is_same:
            return record
    return None


def _read_attempt(query: Mapping[str, str]) -> float:
    """Parse the time of the attempt that another replica asks for, 0 for none."""
    text = query.get("attempt", "0")
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text):
        raise QueryError("attempt", text, "must be seconds since the epoch")
    return float(text)


def _lacks_filter(view: Mapping[str, object]) -> bool:
    """Check whether an explanation has a ranking without its filter decision."""
    verb = mapping_of(view.get("decision")).get("verb")
    return verb == "prioritize" and view.get("filter") is None


def _joined_in_steps(ranked: Json, filtered: Json, limit: int) -> Steps[Json]:
    """Add a filter decision's rejected nodes to the explanation of a ranking.

    Args:
        ranked: explanation from the replica that was called for prioritize.
        filtered: explanation of the same attempt from the replica that was called for filter.
        limit: largest number of nodes without full detail.

    Returns:
        The joined explanation; `ranked` unchanged if `filtered` is malformed.
    """
    try:
        return (yield from _join(ranked, filtered, limit))
    except (msgspec.MsgspecError, KeyError):
        return ranked


def _join(ranked: Json, filtered: Json, limit: int) -> Steps[Json]:
    counts = msgspec.convert(filtered["decision"], _Counts)
    nodes = yield from _items(ranked["nodes"])
    in_full = {one.node for one, _ in nodes}
    # Nodes that passed filter have a better record in the ranking: keep only their score.
    passed: dict[str, float] = {}
    for one, item in (yield from _items(filtered["nodes"])):
        if one.node in in_full:
            continue
        if one.rejection:
            nodes.append((one, item))
        else:
            passed[one.node] = min(one.score, passed.get(one.node, one.score))
    for one, _ in (yield from _items(filtered["others"])):
        if one.node not in in_full:
            passed[one.node] = one.score
    shown = sorted(passed, key=lambda name: -passed[name])[:limit]
    ranked_in_full = len({one.node for one, _ in nodes if not one.rejection})
    names = {one.node for one, _ in nodes}
    raw = filtered.get("requested_node")
    node_report = msgspec.convert(raw, NodeReport) if raw is not None else None
    return ranked | {
        "filter": filtered["decision"],
        "kept": kept_view(counts.candidates, len(names)),
        "nodes": [item for _, item in nodes],
        "others": [Other(node=name, score=passed[name]) for name in shown],
        "others_left": max(counts.feasible - ranked_in_full - len(shown), 0),
        "rejected": filtered["rejected"],
        "requested_node": in_short_or_full(node_report, names, counts.feasible)
        if node_report
        else None,
    }


def _items(listed: object) -> Steps[list[tuple[_Node, object]]]:
    """Decode the nodes of a list; keep each node's full record encoded."""
    found: list[tuple[_Node, object]] = []
    if isinstance(listed, list):
        for start in range(0, len(listed), PIECE_SHORT):
            yield
            found += (
                (msgspec.convert(item, _Node, from_attributes=True), item)
                for item in listed[start : start + PIECE_SHORT]
            )
        return found
    raws = _ITEMS.decode(listed) if isinstance(listed, msgspec.Raw) else []
    for start in range(0, len(raws), PIECE_VERDICTS):
        yield
        found += ((_NODE.decode(raw), raw.copy()) for raw in raws[start : start + PIECE_VERDICTS])
    return found
