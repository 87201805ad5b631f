"""Why a pod went where it went, or waits; and what would happen to one that is not there."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from typing import Final
from urllib.parse import urlencode

import orjson
from aiohttp import web

from extender.core.annotations import AnnotationProblem
from extender.core.decision import Decision
from extender.core.explain import NodeVerdict
from extender.core.inventory import PodRecord
from extender.core.request import GpuRequest, PodRef, parse_pod_ref, parse_request
from extender.core.resources import MOST_CONTAINERS, ResourceNames, count_containers
from extender.core.untyped import mapping_of, text_of
from extender.fleet.fleet import Fleet
from extender.observe.answers import CONTENT_TYPE, error_answer, json_answer
from extender.observe.decisions import Nobody, Others
from extender.observe.explain_node import Wish, one_node
from extender.observe.explain_views import (
    Ranking,
    closed_nodes,
    full_nodes,
    kept,
    rejected_nodes,
    request_view,
    short_nodes,
)
from extender.observe.parameters import QueryError, check_parameters, read_number, refusing
from extender.observe.pending import PIECE_SCANNED, Pending, waits
from extender.observe.seen import (
    SEES_ALL,
    VIEWER,
    namespace_of,
    of_pod,
    pod_name,
    sees,
    write_json_in_full,
)
from extender.observe.views import Json, decision_view
from extender.observe.what_if import open_nodes, read_selection
from extender.placement.history import DecisionRecord
from extender.placement.placer import Placer

PATH: Final = "/v1/explain"
PEERS_PATH: Final = "/v1/peers/explain"
"""Where other replicas ask: under the prefix that only their certificates open."""
MAX_BODY: Final = 1 << 20
"""The API server takes no larger object."""
PIECE_EXPLAINED: Final = 16
"""Nodes that are explained between two turns of the event loop."""
ATTEMPT_SECONDS: Final = 5.0
"""Filter and prioritize of one attempt are asked so close together."""


class Explain:
    """Explains decisions.

    Args:
        fleet: the fleet.
        placer: ranks, and remembers decisions.
        pending: tells of the pods that wait.
        resources: says which resources are GPUs.
        others: the other replicas: one of them may have decided.
        tells_others: whether it is known of those who come to the peers' path that they are
            replicas, or nothing is hidden from anybody.
    """

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        pending: Pending,
        *,
        resources: Callable[[], ResourceNames],
        others: Others | None = None,
        tells_others: bool = False,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._pending = pending
        self._resources = resources
        self._others = others or Nobody()
        self._tells_others = tells_others

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get(PATH, refusing(self._explain)),
            web.post(PATH, refusing(self._foresee)),
        ]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the route for other replicas."""
        return [web.get(PEERS_PATH, refusing(self._tell))]

    # --- a pod that is there ------------------------------------------------------------------

    async def _explain(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        check_parameters(query, frozenset({"pod", "number", "limit", "node"}))
        wish = Wish.read(query)
        number = read_number(query, "number", default=0, low=1, high=10**9)
        name = query.get("pod", "")
        if bool(name) == bool(number):
            raise QueryError("pod", name, "must be namespace/name, name or UID; or give number")
        view, at = await self._own(name, number, wish)
        if name:
            told = await self._told(name, wish)
            view = next((other for other, newer in told if newer > at), view)
        if view is None:
            return error_answer(
                404,
                f"no decision about {name or f'number {number}'!r} is remembered, and there is no "
                "such GPU pod: GET /v1/decisions and /v1/pending list what is known",
            )
        return json_answer(view)

    async def _own(self, name: str, number: int, wish: Wish) -> tuple[Json | None, float]:
        """Return what this replica knows, None for nothing, and when it decided, 0 for never.

        Raises:
            QueryError: several pods have that name.
        """
        decided = self._find(name, number)
        record = self._fleet.pods.get(decided.pod.uid) if decided else await self._known(name)
        if decided is None and record is None:
            return None, 0.0
        return await self._view(decided, record, wish), decided.at if decided else 0.0

    async def _told(self, name: str, wish: Wish) -> list[tuple[Json, float]]:
        """Return what the other replicas decided of pods that the caller sees, the newest first."""
        query = urlencode({"pod": name, **wish.query})
        found = []
        for body in (await self._others.ask(f"{PEERS_PATH}?{query}")).values():
            view = _read(body)
            at = _decided_at(view)
            if at:
                namespace = namespace_of(text_of(view.get("pod")))
                await VIEWER.get().learn({namespace})
                if sees(namespace):
                    found.append((view, at))
        return sorted(found, key=lambda one: -one[1])

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        """Answer another replica, which hides what its caller may not see."""
        if not self._tells_others:
            return error_answer(
                403, "without TLS (tls.*) nobody can be known as a replica: decisions stay here"
            )
        query = request.query
        check_parameters(query, frozenset({"pod", "limit", "node"}))
        # For this answer alone: the next one on this connection may be for somebody else.
        whose = VIEWER.set(SEES_ALL)
        try:
            view, at = await self._own(query.get("pod", ""), 0, Wish.read(query))
        finally:
            VIEWER.reset(whose)
        body = write_json_in_full(view if view is not None and at else {})
        return web.Response(body=body, content_type=CONTENT_TYPE)

    def _find(self, name: str, number: int) -> DecisionRecord | None:
        """Return the last decision about a pod, or that of a number, None where there is none.

        Raises:
            QueryError: several pods have that name.
        """
        found: dict[str, DecisionRecord] = {}
        for record in self._placer.history:
            pod = record.pod
            is_meant = record.number == number or (name and name in {pod.key, pod.uid, pod.name})
            if is_meant and sees(pod.namespace):
                found.setdefault(pod.key, record)
        _require_one("pod", name, found)
        return next(iter(found.values()), None)

    async def _known(self, name: str) -> PodRecord | None:
        """Return the GPU pod of a name, None where there is none.

        Raises:
            QueryError: several pods have that name.
        """
        found: dict[str, PodRecord] = {}
        records = iter(tuple(self._fleet.pods.values()))
        while some := list(islice(records, PIECE_SCANNED)):
            found |= {
                record.key: record
                for record in some
                if name in {record.key, record.uid, record.name} and sees(record.namespace)
            }
            await asyncio.sleep(0)
        _require_one("pod", name, found)
        return next(iter(found.values()), None)

    async def _view(
        self, decided: DecisionRecord | None, record: PodRecord | None, wish: Wish
    ) -> Json:
        """Return the record of a decision, and how the pod fares."""
        pod = decided.pod if decided else _ref(record)
        is_waiting = record is not None and waits(record)
        state = "gone"
        if record is not None:
            state = self._pending.state(record) if is_waiting else "bound"
        bound = record.node if record is not None else (decided.bound_node if decided else "")
        view: Json = {
            "pod": pod_name(pod.namespace, pod.name),
            "uid": of_pod(pod.namespace, pod.uid),
            "is_hypothetical": False,
            "state": state,
            "bound_node": bound or None,
            "is_followed": decided.decision.best == bound if decided and bound else None,
            "pending": self._pending.view(record) if record is not None and is_waiting else None,
            "decision": None,
            "filter": None,
            "kept": None,
            "nodes": [],
            "others": [],
            "others_left": 0,
            "rejected": [],
            "asked_node": None,
        }
        if decided is None:
            return view
        filtered = self._filter_of(decided)
        # What prioritize was asked about is what filter left: that one knows the other nodes.
        asked = (filtered or decided).decision
        details = decided.details
        await asyncio.sleep(0)
        others, left = short_nodes(asked, (verdict.node for verdict in details), wish.limit)
        await asyncio.sleep(0)
        ranking = Ranking(decision=decided.decision, details=details, bound_node=bound)
        return view | {
            "decision": decision_view(decided, brief=True),
            "filter": decision_view(filtered, brief=True) if filtered else None,
            "kept": kept(asked, details),
            "nodes": full_nodes(ranking),
            "others": others,
            "others_left": left,
            "rejected": rejected_nodes(asked),
            "asked_node": self._one(wish.node, asked, details),
        }

    def _one(
        self, name: str, decision: Decision, details: Iterable[NodeVerdict], closed_by: str = ""
    ) -> Json | None:
        """Return what is known of the node that somebody asks for, None where nobody does."""
        if not name:
            return None
        return one_node(
            name,
            decision,
            (verdict.node for verdict in details),
            is_known=name in self._fleet.nodes,
            closed_by=closed_by,
        )

    def _filter_of(self, decided: DecisionRecord) -> DecisionRecord | None:
        """Return what filter said in the same attempt, None where that is not remembered."""
        if decided.verb == "filter":
            return None
        for record in self._placer.history:
            if record.pod.uid == decided.pod.uid and record.number < decided.number:
                is_same = decided.at - record.at < ATTEMPT_SECONDS and record.verb == "filter"
                return record if is_same else None
        return None

    # --- a pod that is not there ----------------------------------------------------------------

    async def _foresee(self, request: web.Request) -> web.StreamResponse:
        check_parameters(request.query, frozenset({"limit", "node"}))
        wish = Wish.read(request.query)
        body = bytearray()
        async for part in request.content.iter_any():
            body += part
            if len(body) > MAX_BODY:
                return error_answer(413, f"the pod is larger than {MAX_BODY} bytes")
        try:
            pod = mapping_of(orjson.loads(body))
        except orjson.JSONDecodeError as error:
            return error_answer(400, f"the body is no JSON: {error}: send a Pod object")
        if not mapping_of(pod.get("spec")).get("containers"):
            return error_answer(400, "the body is no pod: spec.containers must name its containers")
        if (count := count_containers(pod)) > MOST_CONTAINERS:
            return error_answer(
                400, f"the pod has {count} containers: must be at most {MOST_CONTAINERS}"
            )
        resources = self._resources()
        parsed = parse_request(pod, resources=resources, defaults=self._placer.policy)
        if parsed.request is None:
            return error_answer(400, _not_asked(resources, is_disabled=parsed.is_disabled))
        ref = parse_pod_ref(pod)
        seen = await self._foreseen(parsed.request, pod, wish)
        problems = [_problem(problem) for problem in parsed.problems]
        # The pod is the caller's own text: whoever sent it may read it.
        own: Json = {"pod": f"{ref.namespace or 'default'}/{ref.name}", "problems": problems}
        return json_answer(seen | own)

    async def _foreseen(self, wanted: GpuRequest, pod: Mapping[str, object], wish: Wish) -> Json:
        """Return what would happen to a pod; nothing is assumed or remembered."""
        selection = read_selection(pod, self._fleet.nodes)
        names, closed = await open_nodes(self._fleet, wanted, selection)
        decision = self._placer.guess(wanted, names)
        best = [decision.candidates[at] for at in decision.order[: self._placer.detailed].tolist()]
        if wish.node in names and wish.node not in best:
            best.append(wish.node)
        details: list[NodeVerdict] = []
        for start in range(0, len(best), PIECE_EXPLAINED):
            some = best[start : start + PIECE_EXPLAINED]
            details += self._placer.explain_nodes(wanted, some)
            await asyncio.sleep(0)
        others, left = short_nodes(decision, best, wish.limit)
        reasons = [reason for reason, shut in closed.items() if wish.node in shut]
        ordered = decision.order.tolist()
        return {
            "uid": None,
            "is_hypothetical": True,
            "state": "placeable" if ordered else "unplaceable",
            "bound_node": None,
            "is_followed": None,
            "pending": None,
            "decision": {
                "request": request_view(wanted),
                "candidates": len(decision.candidates),
                "feasible": decision.feasible,
                "node": decision.best,
                "runner_up": decision.candidates[ordered[1]] if len(ordered) > 1 else None,
            },
            "filter": None,
            "kept": kept(decision, details),
            "nodes": full_nodes(Ranking(decision=decision, details=tuple(details))),
            "others": others,
            "others_left": left,
            "rejected": rejected_nodes(decision),
            "closed": closed_nodes(closed),
            "not_checked": list(selection.not_checked),
            "asked_node": self._one(wish.node, decision, details, "".join(reasons)),
        }


def _require_one(
    parameter: str, name: str, found: "dict[str, DecisionRecord] | dict[str, PodRecord]"
) -> None:
    """Refuse a name that several pods have.

    Raises:
        QueryError: which ones.
    """
    if len(found) > 1:
        some = ", ".join(sorted(found)[:5])
        raise QueryError(parameter, name, f"is the name of several pods: use one of {some}")


def _read(body: bytes | None) -> Json:
    """Return what another replica told, empty where it is nothing that can be read."""
    try:
        return dict(mapping_of(orjson.loads(body or b"{}")))
    except orjson.JSONDecodeError:
        return {}


def _decided_at(view: Mapping[str, object]) -> float:
    """Return when what another replica told was decided, 0 where it does not say."""
    try:
        return datetime.fromisoformat(
            text_of(mapping_of(view.get("decision")).get("at"))
        ).timestamp()
    except ValueError:
        return 0.0


def _ref(record: PodRecord | None) -> PodRef:
    if record is None:
        return PodRef(uid="", namespace="", name="")
    return PodRef(uid=record.uid, namespace=record.namespace, name=record.name)


def _not_asked(resources: ResourceNames, *, is_disabled: bool) -> str:
    """Return why nobody would ask us about a pod."""
    if is_disabled:
        return "the pod says idlegpu.io/enabled: false: it is left to kube-scheduler"
    names = ", ".join(resources.names)
    return f"the pod asks for no GPU: one of its containers must limit one of {names}"


def _problem(problem: AnnotationProblem) -> Json:
    return asdict(problem) | {"message": problem.message}
