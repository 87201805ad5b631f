"""Bundle the routes that explain: pending pods, idle holders, costs, decisions."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Final

from aiohttp import web

from extender.answers import routes
from extender.answers.explanation import ProblemAnswer
from extender.core.decision.verdicts import NodeVerdict
from extender.core.policy import Prices
from extender.core.prices import PriceList
from extender.core.request.annotations import AnnotationProblem
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import GpuRequest, parse_pod_ref, parse_request
from extender.core.steps import let_go
from extender.fleet.fleet import Fleet
from extender.fleet.known_targets import target_problems
from extender.insight.costs import CostRoutes
from extender.insight.explain import Explain
from extender.insight.explain_node import Wish, asked_node
from extender.insight.explain_views import (
    Ranking,
    closed_nodes,
    full_nodes,
    kept,
    rejected_nodes,
    short_nodes,
)
from extender.insight.holders import Holders
from extender.insight.last_active import Idleness
from extender.insight.pending import Pending
from extender.insight.pods import PodList
from extender.insight.replicas import ONE, Replicas
from extender.insight.size import SizeRoute
from extender.insight.usage import UsageRecord
from extender.insight.views import Json, group_view, request_view
from extender.insight.what_if import open_nodes, read_pod, read_requested_selection
from extender.placement.placer import Placer, nearness_of
from extender.runtime.cooperative import run_in_steps
from extender.runtime.metrics import Metrics
from extender.server.json_answers import document_answer, error_answer
from extender.server.query_parameters import serve
from extender.settings.config import Settings

# The route POST /v1/explain: predict the placement of a pod that does not exist.

_PIECE_EXPLAINED: Final = 16
"""Nodes to explain between two yields to the event loop."""


class _WhatIf:
    """Handler of POST /v1/explain.

    Args:
        fleet: state of the fleet.
        placer: ranks nodes.
        resources: returns the names of GPU resources.
    """

    def __init__(
        self, fleet: Fleet, placer: Placer, resources: Callable[[], ResourceNames]
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._resources = resources

    def routes(self) -> list[web.RouteDef]:
        """Return the route POST /v1/explain."""
        return [serve(routes.FORESEE, self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        wish = Wish.read(request.query)
        pod = await read_pod(request)
        if isinstance(pod, web.Response):
            return pod
        resources = self._resources()
        parsed = parse_request(pod, resources=resources, defaults=self._placer.policy)
        if parsed.request is None:
            return error_answer(400, _why_not_called(resources, is_disabled=parsed.is_disabled))
        ref = parse_pod_ref(pod)
        wanted = self._fleet.informed(parsed.request, parsed.kin)
        seen = await self._predict(wanted, pod, wish)
        targets = target_problems(wanted, self._fleet.snapshot(), self._fleet.store)
        problems = [_problem(problem) for problem in (*parsed.problems, *targets)]
        # Not redacted: the caller sent the pod.
        own: Json = {"pod": f"{ref.namespace or 'default'}/{ref.name}", "problems": problems}
        return await document_answer(request, seen | own)

    async def _predict(self, wanted: GpuRequest, pod: Mapping[str, object], wish: Wish) -> Json:
        """Predict a pod's placement without assuming or remembering it."""
        asked = read_requested_selection(pod)
        names, closed = await open_nodes(self._fleet, wanted, asked.selection)
        decision = await run_in_steps(self._placer.guess_in_steps(wanted, names))
        best = [decision.candidates[at] for at in decision.order[: self._placer.detailed].tolist()]
        if wish.node in names and wish.node not in best:
            best.append(wish.node)
        details: list[NodeVerdict] = []
        for start in range(0, len(best), _PIECE_EXPLAINED):
            some = best[start : start + _PIECE_EXPLAINED]
            details += self._placer.explain_nodes(wanted, some, nearness_of(decision, some))
            await asyncio.sleep(0)
        others, left = await run_in_steps(short_nodes(decision, best, wish.limit))
        names = [verdict.node for verdict in details]
        nodes_view = await run_in_steps(full_nodes(Ranking(decision=decision, details=details)))
        await run_in_steps(let_go(details))
        shut = "".join(reason for reason, nodes in closed.items() if wish.node in nodes)
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
                "group": decision.group and group_view(decision.group),
            },
            "filter": None,
            "kept": kept(decision, names),
            "nodes": nodes_view,
            "others": others,
            "others_left": left,
            "rejected": rejected_nodes(decision, wish.names),
            "closed": closed_nodes(closed, wish.names),
            "not_checked": list(asked.not_checked),
            "asked_node": asked_node(wish, decision, names, self._fleet.nodes, shut),
        }


def _why_not_called(resources: ResourceNames, *, is_disabled: bool) -> str:
    """Return the reason why kube-scheduler would not call the extender for a pod."""
    if is_disabled:
        return "the pod says idlegpu.io/enabled: false: it is left to kube-scheduler"
    names = ", ".join(resources.names)
    return f"the pod asks for no GPU: one of its containers must limit one of {names}"


def _problem(problem: AnnotationProblem) -> ProblemAnswer:
    return ProblemAnswer(**asdict(problem), message=problem.message)


_NO_PRICES: Final = Prices()


class ExplainRoutes:
    """The routes /v1/pending, /v1/pods, /v1/holders, /v1/costs and /v1/explain.

    Args:
        placer: ranks nodes, and remembers decisions.
        resources: returns the names of GPU resources.
        clock: seconds since the epoch.
        replicas: this replica and the others.
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
        self._what_if = _WhatIf(fleet, placer, resources)

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
