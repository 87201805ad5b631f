"""The JSON API for people and programs that watch; nothing here changes anything."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict

import numpy as np
from aiohttp import web
from multidict import MultiMapping

from extender.core.annotations import BOOLEAN_ALLOWED, Annotation, parse_boolean
from extender.core.decision import Decision
from extender.core.filtering import Code
from extender.core.request import GpuRequest, parse_request
from extender.core.resources import ResourceNames
from extender.fleet.fleet import Fleet
from extender.observe.answers import chunks, error_answer, json_answer, stream_answer
from extender.observe.views import (
    GpuState,
    Json,
    decision_view,
    gpus_of,
    node_views,
    verdict_view,
)
from extender.placement.placer import Placer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_DECISIONS = 1000
DEFAULT_BEST, MAX_BEST = 20, 1000
MAX_GPUS = 1024
SHOWN = 80
"""So many characters of a value are enough to recognize it."""
PIECE_NODES = 32
"""Nodes that are looked at before the event loop has its next turn: a few milliseconds' work."""
PIECE_RANKED = 512
"""Nodes that are told open or closed between two turns."""
PIECE_VERDICTS = 16
"""Nodes that are explained between two turns."""

_ANNOTATION_OF = {
    "memory": Annotation.GPU_MEMORY,
    "model": Annotation.PREFER_MODELS,
    "strategy": Annotation.STRATEGY,
    "max_utilization": Annotation.MAX_UTILIZATION,
    "max_memory": Annotation.MAX_MEMORY,
    "require_idle": Annotation.REQUIRE_IDLE,
}
_BEST_PARAMETERS = frozenset({*_ANNOTATION_OF, "gpus", "resource", "limit"})

NO_ROOM = "node(s) had too few free GPUs by kube-scheduler's count"
CORDONED = "node(s) were unschedulable"
NOT_READY = "node(s) were not ready"
TAINTED = "node(s) had taints that a plain GPU pod does not tolerate"
TOLERATED_TAINT = "nvidia.com/gpu"
"""Key of the taint that keeps other pods off GPU nodes: the admission controller
ExtendedResourceToleration lets pods tolerate the one with the name of the resource they ask for."""


class QueryError(ValueError):
    """A parameter of a question that cannot be used.

    Args:
        name: the parameter.
        value: its value; shown, and cut where it is long.
        problem: what is wrong with it and what is allowed, to follow the value.
    """

    def __init__(self, name: str, value: str, problem: str) -> None:
        shown = value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
        super().__init__(f"{name}={shown!r} {problem}")


class Api:
    """The routes under /v1.

    Args:
        fleet: the fleet.
        placer: ranks, and remembers decisions.
        resources: which resources are GPUs; may be changed.
    """

    def __init__(self, fleet: Fleet, placer: Placer, resources: ResourceNames) -> None:
        self._fleet = fleet
        self._placer = placer
        self.resources = resources

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get(path, _refusing(handler))
            for path, handler in {
                "/v1/nodes": self._nodes,
                "/v1/nodes/{name}": self._node,
                "/v1/gpus": self._gpus,
                "/v1/best": self._best,
                "/v1/decisions": self._decisions,
                "/v1/decisions/{number}": self._decision,
            }.items()
        ]

    async def _nodes(self, request: web.Request) -> web.StreamResponse:
        _check_parameters(request.query, frozenset())
        sources = {name: asdict(state) for name, state in self._fleet.sources.items()}
        return await stream_answer(request, "nodes", self._node_pieces(), {"sources": sources})

    def _node_pieces(self) -> Iterable[list[Json]]:
        """Return the nodes, some at a time, each piece as the fleet is when it is made."""
        for names in chunks(self._gpu_nodes(), PIECE_NODES):
            known = [name for name in names if name in self._fleet.nodes]
            yield node_views(self._fleet, self._fleet.snapshot(), known, gpus=False)

    def _gpu_nodes(self) -> list[str]:
        """Return the names of the nodes with GPUs."""
        pools = self._fleet.snapshot().pools.values()
        return sorted({name for pool in pools for name in pool.nodes})

    async def _node(self, request: web.Request) -> web.StreamResponse:
        _check_parameters(request.query, frozenset())
        name = request.match_info["name"]
        if name not in self._fleet.nodes:
            return _unknown_node(name)
        (view,) = node_views(self._fleet, self._fleet.snapshot(), [name], gpus=True)
        return json_answer(view)

    async def _gpus(self, request: web.Request) -> web.StreamResponse:
        _check_parameters(request.query, frozenset({"node"}))
        node = request.query.get("node")
        if node is not None and node not in self._fleet.nodes:
            return _unknown_node(node)
        names = self._gpu_nodes() if node is None else [node]
        return await stream_answer(request, "gpus", self._gpu_pieces(names))

    def _gpu_pieces(self, names: Iterable[str]) -> Iterable[list[GpuState]]:
        for some in chunks(names, PIECE_NODES):
            known = [name for name in some if name in self._fleet.nodes]
            by_node = gpus_of(self._fleet, self._fleet.snapshot(), known)
            yield [state for states in by_node.values() for state in states]

    async def _best(self, request: web.Request) -> web.StreamResponse:
        gpu_request, limit = self._read_best(request.query)
        decision, rejected = await self._rank(gpu_request)
        best = [decision.candidates[at] for at in decision.order[:limit]]
        pieces = (
            [verdict_view(verdict) for verdict in self._placer.explain_nodes(gpu_request, some)]
            for some in chunks(best, PIECE_VERDICTS)
        )
        rest = {"feasible": decision.feasible, "rejected": rejected}
        return await stream_answer(request, "best", pieces, rest)

    def _read_best(self, query: MultiMapping[str]) -> tuple[GpuRequest, int]:
        """Read the parameters of /v1/best as if they were a pod's.

        Raises:
            QueryError: which parameter, its value, and what is allowed.
        """
        _check_parameters(query, _BEST_PARAMETERS)
        count = _number(query, "gpus", default=1, low=1, high=MAX_GPUS)
        limit = _number(query, "limit", default=DEFAULT_BEST, low=1, high=MAX_BEST)
        resource = query.get("resource", self.resources.names[0])
        if not self.resources.matches(resource) or "*" in resource:
            allowed = ", ".join(self.resources.names)
            raise QueryError("resource", resource, f"must be a GPU resource: {allowed}")
        pod = {
            "metadata": {
                "annotations": {
                    annotation.value: query[name]
                    for name, annotation in _ANNOTATION_OF.items()
                    if name in query
                }
            },
            "spec": {"containers": [{"resources": {"limits": {resource: str(count)}}}]},
        }
        parsed = parse_request(pod, resources=self.resources, defaults=self._placer.policy)
        for problem in parsed.problems:
            name = {value.value: key for key, value in _ANNOTATION_OF.items()}[problem.annotation]
            raise QueryError(name, problem.value, f"must be {problem.allowed}")
        if parsed.request is None:
            raise QueryError("gpus", str(count), f"asks for no {resource}")
        return parsed.request, limit

    async def _rank(self, request: GpuRequest) -> tuple[Decision, dict[str, str]]:
        """Return the ranking that a pod would get, and why the other nodes are out."""
        open_nodes: list[str] = []
        rejected: dict[str, str] = {}
        pool = self._fleet.snapshot().pools.get(request.resource)
        overlay = self._fleet.ledger.overlays(without="").get(request.resource, {})
        for some in chunks(pool.nodes if pool else (), PIECE_RANKED):
            for node in some:
                if pool is None or node not in self._fleet.nodes:
                    continue
                row = pool.rows[pool.row_of[node]]
                assumed = sum(tenant.count for tenant in overlay.get(node, ()))
                free = row.allocatable - row.held - assumed
                reason = self._closed(node, request.resource, is_full=free < request.count)
                if reason:
                    rejected[node] = reason
                else:
                    open_nodes.append(node)
            await asyncio.sleep(0)
        decision = self._placer.rank(request, open_nodes)
        for at in np.flatnonzero(decision.codes).tolist():
            rejected[decision.candidates[at]] = Code(decision.codes[at]).text
        return decision, rejected

    def _closed(self, node: str, resource: str, *, is_full: bool) -> str:
        """Return why kube-scheduler would not ask about a node, "" where it would."""
        record = self._fleet.nodes[node]
        if record.is_unschedulable:
            return CORDONED
        if not record.is_ready:
            return NOT_READY
        tolerated = {TOLERATED_TAINT, resource}
        if any(taint.repels and taint.key not in tolerated for taint in record.taints):
            return TAINTED
        return NO_ROOM if is_full else ""

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        _check_parameters(query, frozenset({"limit", "pod", "brief"}))
        limit = _number(query, "limit", default=MAX_DECISIONS, low=1, high=MAX_DECISIONS)
        brief = _boolean(query, "brief")
        pod = query.get("pod")
        records = [
            record
            for record in self._placer.history
            if pod is None or pod in {record.pod.key, record.pod.uid, record.pod.name}
        ]
        pieces = ([decision_view(record, brief=brief)] for record in records[:limit])
        return await stream_answer(request, "decisions", pieces)

    async def _decision(self, request: web.Request) -> web.StreamResponse:
        _check_parameters(request.query, frozenset())
        text = request.match_info["number"]
        for record in self._placer.history:
            if str(record.number) == text:
                return json_answer(decision_view(record, brief=False))
        return error_answer(
            404, f"decision {text!r} is not remembered: GET /v1/decisions lists the last"
        )


def _refusing(handler: Handler) -> Handler:
    """Return the handler; a parameter that cannot be used is answered with what is allowed."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except QueryError as error:
            return error_answer(400, str(error))

    return handle


def _unknown_node(name: str) -> web.Response:
    return error_answer(404, f"node {name!r} is not known: GET /v1/nodes lists the nodes")


def _check_parameters(query: MultiMapping[str], known: frozenset[str]) -> None:
    """Refuse parameters that mean nothing here, and ones that are given twice.

    Raises:
        QueryError: which one.
    """
    for name in query:
        if name not in known:
            use = ", ".join(sorted(known)) or "none"
            raise QueryError(name[:SHOWN], query[name], f"is no parameter of this path: use {use}")
        if len(values := query.getall(name)) > 1:
            raise QueryError(name, values[1], "is given more than once: use one value")


def _boolean(query: Mapping[str, str], name: str) -> bool:
    """Read a parameter that is true or false; absent is false.

    Raises:
        QueryError: it is neither.
    """
    text = query.get(name, "false")
    try:
        return parse_boolean(text)
    except ValueError as error:
        raise QueryError(name, text, f"must be {BOOLEAN_ALLOWED}") from error


def _number(query: Mapping[str, str], name: str, *, default: int, low: int, high: int) -> int:
    """Read a whole number.

    Raises:
        QueryError: it is none, or out of bounds.
    """
    text = query.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise QueryError(name, text, f"must be a whole number from {low} to {high}")
    return int(text)
