"""Routes of the JSON API: nodes, GPUs, the best nodes for a pod, and GPU pods with their cost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

import msgspec
import numpy as np
from aiohttp import web
from multidict import MultiMapping

from extender.answers import routes
from extender.answers.decisions import Best, BestNode, ModelCount
from extender.answers.fleet import Defrag, Gpu, Gpus, Node, Nodes, SourceSummary
from extender.core.decision.decision import Decision
from extender.core.decision.evaluation import are_accepted
from extender.core.decision.filtering import Code
from extender.core.nodes.node_selection import Selection
from extender.core.policy import Prices
from extender.core.prices import PriceList
from extender.core.request.annotations import Annotation
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import GpuRequest, parse_request
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.fleet.intake import SourceState
from extender.insight.decisions import DecisionRoutes
from extender.insight.explain import Explain
from extender.insight.holders import Holders, Idleness
from extender.insight.pending import Pending
from extender.insight.pods import PodList
from extender.insight.replicas import ONE, Replicas
from extender.insight.stranded import HostPods, TypicalNeeds, count_stranded, find_needs, find_plans
from extender.insight.usage import CostRoutes, UsageRecord
from extender.insight.views import gpus_of, node_views, node_with_gpus, verdict_view
from extender.insight.what_if import NO_ROOM, STRANDED, SizeRoute, WhatIf, why_closed
from extender.placement.placer import Placer
from extender.runtime.cooperative import run_in_steps, yield_to_loop
from extender.runtime.metrics import Metrics
from extender.server.json_api import (
    QueryError,
    chunks,
    error_answer,
    json_answer,
    read_number,
    serve,
    stream_answer,
    unknown_node,
)
from extender.server.redaction import NO_NAMESPACE, of_pod, redactable
from extender.settings.config import Settings

_PIECE_NODES = 32
"""Nodes to encode between two yields to the event loop: a few milliseconds' work."""
_PIECE_RANKED = 512
"""Nodes to check for kube-scheduler's own filters between two yields to the event loop."""
_PIECE_COUNTED = 128
"""Nodes whose GPUs are counted between two yields to the event loop: a millisecond's work."""
_PIECE_VERDICTS = 16
"""Nodes to explain between two yields to the event loop."""

_ANNOTATION_OF = {
    "memory": Annotation.GPU_MEMORY,
    "model": Annotation.PREFER_MODELS,
    "strategy": Annotation.STRATEGY,
    "max_utilization": Annotation.MAX_UTILIZATION,
    "max_memory": Annotation.MAX_MEMORY,
    "require_idle": Annotation.REQUIRE_IDLE,
}
_ALL_SCHEDULERS: Final = Selection(tolerations=frozenset({("idlegpu.io/scheduler", "", None)}))
"""Tolerates the taint that reserves nodes for one scheduler."""


class FleetRoutes:
    """Handlers of /v1/nodes, /v1/gpus, /v1/best, /v1/defrag and the decisions.

    Args:
        placer: ranks nodes, and remembers decisions.
        resources: returns the names of GPU resources.
        decisions: routes of the decisions; None for this replica's decisions only.
        unreadable: returns namespace and name of malformed objects, by resource.
        host_pods: returns the CPU, memory and storage of the pods with a node.
    """

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        resources: Callable[[], ResourceNames],
        decisions: DecisionRoutes | None = None,
        unreadable: Callable[[], Mapping[str, Sequence[tuple[str, str]]]] = dict,
        host_pods: HostPods = dict,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._resources = resources
        self.decisions = decisions or DecisionRoutes(placer.history)
        self._unreadable = unreadable
        self._host_pods = host_pods

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for nodes, GPUs, the best nodes and decisions."""
        return [
            serve(routes.NODES, self._nodes),
            serve(routes.NODE, self._node),
            serve(routes.GPUS, self._gpus),
            serve(routes.BEST, self._best),
            serve(routes.DEFRAG, self._defrag),
            *self.decisions.routes(),
        ]

    async def _nodes(self, request: web.Request) -> web.StreamResponse:
        sources = {name: _source_view(state) for name, state in self._fleet.sources.items()}
        unreadable = {
            resource: [_object_view(*names) for names in objects]
            for resource, objects in self._unreadable().items()
        }
        answer = Nodes(nodes=[], sources=sources, unreadable=unreadable)
        return await stream_answer(request, answer, "nodes", self._node_pieces())

    def _node_pieces(self) -> Iterable[list[Node]]:
        """Yield batches of nodes, each from the snapshot at the time it is built."""
        for names in chunks(self._gpu_nodes(), _PIECE_NODES):
            known = [name for name in names if name in self._fleet.nodes]
            yield [node for node, _ in node_views(self._fleet, self._fleet.snapshot(), known)]

    def _gpu_nodes(self) -> list[str]:
        pools = self._fleet.snapshot().pools.values()
        return sorted({name for pool in pools for name in pool.nodes})

    async def _node(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._fleet.nodes:
            return error_answer(404, unknown_node(name, self._fleet.nodes))
        return json_answer(node_with_gpus(self._fleet, self._fleet.snapshot(), name))

    async def _gpus(self, request: web.Request) -> web.StreamResponse:
        node = request.query.get("node")
        if node is not None and node not in self._fleet.nodes:
            return error_answer(404, unknown_node(node, self._fleet.nodes))
        names = self._gpu_nodes() if node is None else [node]
        return await stream_answer(request, Gpus(gpus=[]), "gpus", self._gpu_pieces(names))

    def _gpu_pieces(self, names: Iterable[str]) -> Iterable[list[Gpu]]:
        for some in chunks(names, _PIECE_NODES):
            known = [name for name in some if name in self._fleet.nodes]
            by_node = gpus_of(self._fleet, self._fleet.snapshot(), known)
            yield [state for states in by_node.values() for state in states]

    async def _best(self, request: web.Request) -> web.StreamResponse:
        gpu_request, limit = self._read_best(request.query)
        resource = gpu_request.resource
        needs = await run_in_steps(find_needs(self._fleet, self._host_pods()))
        decision, rejected = await self._rank(gpu_request, needs)
        best = [decision.candidates[at] for at in decision.order[:limit]]
        pieces = (
            [
                BestNode(
                    **msgspec.structs.asdict(verdict_view(verdict)),
                    stranded=self._stranded_on(verdict.node, resource, needs),
                )
                for verdict in self._placer.explain_nodes(gpu_request, some)
            ]
            for some in chunks(best, _PIECE_VERDICTS)
        )
        answer = Best(
            best=[],
            feasible=decision.feasible,
            rejected=rejected,
            models=await run_in_steps(self._count_models(gpu_request, needs)),
        )
        return await stream_answer(request, answer, "best", pieces)

    async def _defrag(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        gpus = read_number(query, routes.DEFRAG, "gpus")
        limit = read_number(query, routes.DEFRAG, "limit")
        resource = self._read_resource(query)
        pool = self._fleet.snapshot().pools.get(resource)
        most = max((row.allocatable for row in (pool.rows if pool else ())), default=0)
        if not most:
            raise QueryError("resource", resource, "is offered by no node")
        if gpus > most:
            raise QueryError("gpus", str(gpus), f"must be at most {most}: no node offers more")
        found = await run_in_steps(
            find_plans(
                self._fleet,
                resource,
                gpus,
                is_open=lambda node: (
                    not why_closed(self._fleet.nodes[node], resource, _ALL_SCHEDULERS)
                ),
                host_pods=self._host_pods,
            )
        )
        return json_answer(
            Defrag(
                resource=resource,
                gpus=gpus,
                ready=list(found.ready[:limit]),
                plans=[plan.view() for plan in found.plans[:limit]],
                total=len(found.plans),
            )
        )

    def _stranded_on(self, node: str, resource: str, needs: TypicalNeeds) -> int:
        """Return the stranded GPUs of a node, 0 if it is gone."""
        pool, record = self._fleet.snapshot().pools.get(resource), self._fleet.nodes.get(node)
        if pool is None or record is None or node not in pool.row_of:
            return 0
        return count_stranded(record, resource, pool.rows[pool.row_of[node]], needs)

    def _count_models(
        self, request: GpuRequest, needs: TypicalNeeds
    ) -> Steps[dict[str, ModelCount]]:
        """Count the held, free and stranded GPUs of each model that a request names, in steps."""
        snapshot = self._fleet.snapshot()
        pool = snapshot.pools.get(request.resource)
        if pool is None:
            return {}
        found: dict[str, ModelCount] = {}
        for model in (*request.required_models, *request.preferred_models):
            is_it = are_accepted(snapshot.models, [model])[pool.batch.model_id]
            gpus = free = stranded = 0
            for some in chunks(np.flatnonzero(is_it).tolist(), _PIECE_COUNTED):
                yield
                for at in some:
                    row, record = pool.rows[at], self._fleet.nodes.get(pool.nodes[at])
                    gpus += row.allocatable
                    free += max(row.allocatable - row.held, 0)
                    if record is not None:
                        stranded += count_stranded(record, pool.resource, row, needs)
            found[model] = ModelCount(
                gpus=gpus, held=gpus - free, free=free - stranded, stranded=stranded
            )
        return found

    def _read_resource(self, query: MultiMapping[str]) -> str:
        """Parse the name of a GPU resource; absent means the first one of the setting."""
        resources = self._resources()
        resource = query.get("resource", resources.names[0])
        if not resources.matches(resource) or "*" in resource:
            allowed = ", ".join(resources.names)
            raise QueryError("resource", resource, f"must be a GPU resource: {allowed}")
        return resource

    def _read_best(self, query: MultiMapping[str]) -> tuple[GpuRequest, int]:
        """Parse the parameters of /v1/best with the parser of a pod's annotations."""
        count = read_number(query, routes.BEST, "gpus")
        limit = read_number(query, routes.BEST, "limit")
        resources, resource = self._resources(), self._read_resource(query)
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
        parsed = parse_request(pod, resources=resources, defaults=self._placer.policy)
        for problem in parsed.problems:
            name = {value.value: key for key, value in _ANNOTATION_OF.items()}[problem.annotation]
            raise QueryError(name, problem.value, f"must be {problem.allowed}")
        if parsed.request is None:
            raise QueryError("gpus", str(count), f"requests no {resource}")
        return parsed.request, limit

    async def _rank(
        self, request: GpuRequest, needs: TypicalNeeds
    ) -> tuple[Decision, dict[str, str]]:
        """Return the ranking for a pod, and the reason for each rejected node."""
        open_nodes: list[str] = []
        rejected: dict[str, str] = {}
        pool = self._fleet.snapshot().pools.get(request.resource)
        overlay = self._fleet.ledger.overlays(without="").get(request.resource, {})
        for some in chunks(pool.nodes if pool else (), _PIECE_RANKED):
            for node in some:
                if pool is None or node not in self._fleet.nodes:
                    continue
                row = pool.rows[pool.row_of[node]]
                assumed = sum(tenant.count for tenant in overlay.get(node, ()))
                free = row.allocatable - row.held - assumed
                record = self._fleet.nodes[node]
                reason = why_closed(record, request.resource, _ALL_SCHEDULERS)
                reason = reason or (NO_ROOM if free < request.count else "")
                stranded = count_stranded(record, request.resource, row, needs)
                if not reason and free - stranded < request.count:
                    reason = STRANDED
                if reason:
                    rejected[node] = reason
                else:
                    open_nodes.append(node)
            await yield_to_loop()
        decision = await run_in_steps(self._placer.guess_in_steps(request, open_nodes))
        for at in np.flatnonzero(decision.codes).tolist():
            rejected[decision.candidates[at]] = Code(decision.codes[at]).text
        return decision, rejected


def _source_view(state: SourceState) -> SourceSummary:
    """Return a source's state; an unmatched series may contain a pod's name, so it is redacted."""
    example = redactable(NO_NAMESPACE, state.unmatched_example, "")
    return SourceSummary(**asdict(state) | {"unmatched_example": example})


def _object_view(namespace: str, name: str) -> str | None:
    """Return an object's name, redacted like the pods of its namespace."""
    return of_pod(namespace, f"{namespace}/{name}") if namespace else name


_NO_PRICES: Final = Prices()


class PodRoutes:
    """The routes /v1/pending, /v1/pods, /v1/holders, /v1/costs, /v1/usage, /v1/size, /v1/explain.

    Args:
        placer: ranks nodes, and remembers decisions.
        resources: returns the names of GPU resources.
        clock: seconds since the epoch.
        prices: prices of a GPU-hour.
        metrics: metrics to update; None for none.
    """

    def __init__(
        self,
        placer: Placer,
        resources: Callable[[], ResourceNames],
        clock: Callable[[], float],
        *,
        replicas: Replicas = ONE,
        prices: Prices = _NO_PRICES,
        metrics: Metrics | None = None,
    ) -> None:
        fleet = placer.fleet
        self.idleness = Idleness(fleet, clock)
        self.pending = Pending(fleet, placer.history, clock, replicas)
        self.holders = Holders(fleet, self.idleness, clock)
        self._pods = PodList(fleet, self.holders, self.pending, clock)
        self._costs = CostRoutes(self.holders, clock)
        self.usage = UsageRecord(fleet, self.holders, clock, metrics)
        self.set_prices(prices.entries, prices.spot_share)
        self.explain = Explain(fleet, placer, self.pending, replicas=replicas)
        self._size = SizeRoute(fleet)
        self._what_if = WhatIf(fleet, placer, resources)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for pending pods, holders, costs and explanations."""
        parts = (
            self.pending, self.holders, self._costs, self.explain, self._what_if, self._size,
            self.usage, self._pods,
        )  # fmt: skip
        return [route for part in parts for route in part.routes()]

    def peer_routes(self) -> list[web.RouteDef]:
        """Return the routes at which other replicas query explanations and latest decisions."""
        return [*self.explain.peer_routes(), *self.pending.last.peer_routes()]

    def adopt(self, settings: Settings) -> None:
        """Apply new settings."""
        self.set_prices(settings.prices, settings.spot_share)

    def set_prices(self, prices: Mapping[str, float], spot_share: float = 1.0) -> None:
        """Replace the price list."""
        self.holders.prices = PriceList(prices, spot_share)

    async def run(self) -> None:
        """Watch the GPUs' activity until cancelled."""
        await self.idleness.run()
