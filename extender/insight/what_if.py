"""Answer POST /v1/explain and /v1/size: placement and memory of a pod that the caller sends.

A prediction includes which nodes kube-scheduler would send for the pod.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

import orjson
from aiohttp import web

from extender.answers import routes
from extender.answers.holding import MeasuredUse, Size
from extender.answers.pods import ProblemAnswer
from extender.core.decision.evaluation import serves_host
from extender.core.decision.verdicts import NodeVerdict
from extender.core.nodes.inventory import CORDON, NodeRecord, is_kept, selects, tolerates
from extender.core.nodes.node_selection import (
    ANYWHERE,
    REQUIRED,
    Selection,
    is_excessive,
    read_selection,
)
from extender.core.nodes.pod_groups import kin_of, owner_key, similarity_of
from extender.core.request.annotations import AnnotationProblem
from extender.core.request.gpu_resources import ResourceNames, excess_of
from extender.core.request.request import GpuRequest, parse_pod_ref, parse_request
from extender.core.steps import let_go
from extender.core.untyped import mapping_of, objects_of, text_of
from extender.fleet.fleet import Fleet
from extender.fleet.impossible_requests import request_problems
from extender.insight.explain_views import (
    Ranking,
    Wish,
    closed_nodes,
    full_nodes,
    kept_view,
    rejected_nodes,
    requested_node,
    short_nodes,
)
from extender.insight.views import Json, group_view, request_view
from extender.placement.placer import Placer, nearness_of
from extender.runtime.cooperative import run_in_steps
from extender.runtime.decoding import MalformedError, decode_with
from extender.server.json_api import chunks, document_answer, error_answer, json_answer, serve
from extender.server.redaction import VIEWER, sees

_PIECE_EXPLAINED: Final = 16
"""Nodes to explain between two yields to the event loop."""

NO_ROOM = "node(s) had too few free GPUs by kube-scheduler's count"
_NO_HOST = "node(s) had too little CPU, memory or ephemeral storage left"
STRANDED = (
    "node(s) had stranded GPUs: too little CPU, memory or ephemeral storage for what a GPU needs"
)
_CORDONED = "node(s) were unschedulable"
_NOT_READY = "node(s) were not ready"
TAINTED = "node(s) had taints that a plain GPU pod does not tolerate"
_TOLERATED_TAINT = "nvidia.com/gpu"
"""Key of the taint that keeps other pods off GPU nodes. The admission plugin
ExtendedResourceToleration adds a toleration for the taint named like the requested resource."""

_NOT_SELECTED: Final = "node(s) didn't match Pod's node affinity/selector"
_MOST_REQUIREMENTS: Final = 100
"""Limit of label requirements to evaluate; a pod with more is not evaluated by labels."""
_PIECE_NODES: Final = 512
"""Nodes to check between two yields to the event loop."""


_MAX_BODY: Final = 1 << 20
"""Size limit of a pod, as in the API server."""


async def _read_pod(request: web.Request) -> Mapping[str, object] | web.Response:
    """Read the Pod object in a request's body; return an error answer if it is invalid."""
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > _MAX_BODY:
            return error_answer(413, f"the pod is larger than {_MAX_BODY} bytes")
    try:
        pod = mapping_of(decode_with(orjson.loads, body))
    except MalformedError as error:
        return error_answer(400, f"the body is not JSON: {error}: send a Pod object")
    if not mapping_of(pod.get("spec")).get("containers"):
        return error_answer(400, "the body is not a pod: spec.containers must name its containers")
    if excess := excess_of(pod):
        return error_answer(400, f"the pod has {excess}")
    return pod


@dataclass(frozen=True, slots=True, kw_only=True)
class _RequestedSelection:
    """A pod's constraints on its nodes.

    Attributes:
        selection: constraints that the extender can evaluate.
        not_checked: fields of the pod that it cannot evaluate.
    """

    selection: Selection
    not_checked: tuple[str, ...]


def _read_requested_selection(pod: Mapping[str, object]) -> _RequestedSelection:
    """Parse a pod's constraints on its nodes; malformed fields count as absent.

    Label constraints are ignored if there are very many, because the work per node must stay
    bounded.
    """
    spec = mapping_of(pod.get("spec"))
    if is_excessive(pod):
        unjudged = [name for name in ("nodeSelector", "affinity", "tolerations") if spec.get(name)]
        return _RequestedSelection(selection=ANYWHERE, not_checked=(*unjudged, *_unjudged(spec)))
    selection = read_selection(pod)
    if len(selection.labels) + sum(1 for _ in selection.requirements) > _MOST_REQUIREMENTS:
        unjudged = [name for name in ("nodeSelector", "affinity") if spec.get(name)]
        selection = Selection(tolerations=selection.tolerations)
    else:
        unjudged = list(_unkept(selection, mapping_of(spec.get("affinity"))))
    return _RequestedSelection(selection=selection, not_checked=(*unjudged, *_unjudged(spec)))


def _unjudged(spec: Mapping[str, object]) -> list[str]:
    """Return the pod's fields that the extender never evaluates."""
    fields = ("topologySpreadConstraints", "nodeName", "volumes", "runtimeClassName")
    unjudged = [name for name in fields if spec.get(name)]
    containers = objects_of(spec.get("containers"))
    if any(port.get("hostPort") for one in containers for port in objects_of(one.get("ports"))):
        unjudged.append("hostPort")
    return [*unjudged, "quotas"]


def _unkept(selection: Selection, affinity: Mapping[str, object]) -> Iterator[str]:
    """Yield the terms of selector and affinity whose labels the extender does not store."""
    yield from (f"nodeSelector {key}" for key, _ in selection.labels if not is_kept(key))
    by_node = mapping_of(affinity.get("nodeAffinity"))
    is_more = affinity.keys() - {"nodeAffinity"} or by_node.keys() - {REQUIRED}
    if is_more or not all(is_kept(one.key) for one in selection.requirements):
        yield "affinity"


async def _open_nodes(
    fleet: Fleet, request: GpuRequest, selection: Selection
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the nodes that kube-scheduler would send, and the others by reason."""
    pool = fleet.snapshot().pools.get(request.resource)
    names: list[str] = []
    closed: dict[str, list[str]] = {}
    overlay = fleet.ledger.overlays(without="").get(request.resource, {})
    for some in chunks(pool.nodes if pool is not None else (), _PIECE_NODES):
        for name in some:
            record = fleet.nodes.get(name)
            if pool is None or record is None:
                continue
            row = pool.rows[pool.row_of[name]]
            assumed = sum(tenant.count for tenant in overlay.get(name, ()))
            is_full = row.allocatable - row.held - assumed < request.count
            reason = why_closed(record, request.resource, selection)
            reason = reason or (
                NO_ROOM if is_full else "" if serves_host(row, request) else _NO_HOST
            )
            if reason:
                closed.setdefault(reason, []).append(name)
            else:
                names.append(name)
        await asyncio.sleep(0)
    return names, closed


def why_closed(node: NodeRecord, resource: str, selection: Selection) -> str:
    """Return the reason why kube-scheduler itself would filter out a node, "" if none."""
    if node.is_unschedulable and not tolerates(selection, CORDON):
        return _CORDONED
    if not node.is_ready:
        return _NOT_READY
    if not selects(selection, node):
        return _NOT_SELECTED
    by_default = {_TOLERATED_TAINT, resource}  # ExtendedResourceToleration adds these
    for taint in node.taints:
        if taint.repels and taint.key not in by_default and not tolerates(selection, taint):
            return TAINTED
    return ""


class WhatIf:
    """Handler of POST /v1/explain.

    Args:
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
        pod = await _read_pod(request)
        if isinstance(pod, web.Response):
            return pod
        resources = self._resources()
        parsed = parse_request(pod, resources=resources, defaults=self._placer.policy)
        if parsed.request is None:
            return error_answer(400, _why_not_called(resources, is_disabled=parsed.is_disabled))
        ref = parse_pod_ref(pod)
        wanted = self._fleet.informed(parsed.request, parsed.kin)
        seen = await self._predict(wanted, pod, wish)
        unmet = request_problems(
            wanted, self._fleet.snapshot(), self._fleet.store, self._placer.policy
        )
        problems = [_problem(problem) for problem in (*parsed.problems, *unmet)]
        # Not redacted: the caller sent the pod.
        own: Json = {"pod": f"{ref.namespace or 'default'}/{ref.name}", "problems": problems}
        return await document_answer(request, seen | own)

    async def _predict(self, wanted: GpuRequest, pod: Mapping[str, object], wish: Wish) -> Json:
        """Predict a pod's placement without assuming or remembering it."""
        selection = _read_requested_selection(pod)
        names, closed = await _open_nodes(self._fleet, wanted, selection.selection)
        decision = await run_in_steps(self._placer.guess_in_steps(wanted, names))
        best = [decision.candidates[at] for at in decision.order[: self._placer.detailed].tolist()]
        if wish.node in names and wish.node not in best:
            best.append(wish.node)
        details: list[NodeVerdict] = []
        for some in chunks(best, _PIECE_EXPLAINED):
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
            "kept": kept_view(len(decision.candidates), len(set(names))),
            "nodes": nodes_view,
            "others": others,
            "others_left": left,
            "rejected": rejected_nodes(decision, wish.names),
            "closed": closed_nodes(closed, wish.names),
            "not_checked": list(selection.not_checked),
            "requested_node": requested_node(wish, decision, names, self._fleet.nodes, shut),
        }


def _why_not_called(resources: ResourceNames, *, is_disabled: bool) -> str:
    """Return the reason why kube-scheduler would not call the extender for a pod."""
    if is_disabled:
        return "the pod sets idlegpu.io/enabled: false: it is left to kube-scheduler"
    names = ", ".join(resources.names)
    return f"the pod requests no GPU: one of its containers must limit one of {names}"


def _problem(problem: AnnotationProblem) -> ProblemAnswer:
    return ProblemAnswer(**asdict(problem), message=problem.message)


class SizeRoute:
    """Handler of POST /v1/size."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[web.RouteDef]:
        """Return the route POST /v1/size."""
        return [serve(routes.SIZE, self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        pod = await _read_pod(request)
        if isinstance(pod, web.Response):
            return pod
        metadata = mapping_of(pod.get("metadata"))
        namespace = text_of(metadata.get("namespace")) or "default"
        kin = kin_of({**pod, "metadata": {**metadata, "namespace": namespace}})
        owner = request.query.get("owner")
        if owner:
            kin = (owner_key(namespace, owner, ""), *kin[1:])
        await VIEWER.get().learn({namespace})
        return json_answer(Size(measured=self._measured(kin) if sees(namespace) else None))

    def _measured(self, kin: tuple[str, ...]) -> MeasuredUse | None:
        """Return the measured use of the most similar pods; None without measurements."""
        found = self._fleet.measured_like(kin)
        if found is None:
            return None
        key, used = found
        return MeasuredUse(
            by=similarity_of(key), pods=len(used), memory_bytes=max(used), least_bytes=min(used)
        )
