"""Parse a pod that a caller sends, and predict kube-scheduler's candidate nodes for it."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

import orjson
from aiohttp import web

from extender.core.decision.evaluation import serves_host
from extender.core.nodes.inventory import NodeRecord
from extender.core.nodes.labels import is_kept
from extender.core.nodes.node_affinity import CORDON, selects, tolerates
from extender.core.nodes.node_selection import (
    ANYWHERE,
    REQUIRED,
    Selection,
    is_excessive,
    read_selection,
)
from extender.core.request.gpu_resources import excess_of
from extender.core.request.request import GpuRequest
from extender.core.untyped import mapping_of, objects_of
from extender.fleet.fleet import Fleet
from extender.runtime.decoding import MalformedError, decode_with
from extender.server.json_answers import error_answer

NO_ROOM = "node(s) had too few free GPUs by kube-scheduler's count"
_NO_HOST = "node(s) had too little CPU, memory or ephemeral storage left"
STRANDED = (
    "node(s) had stranded GPUs: too little CPU, memory or ephemeral storage for what a GPU needs"
)
CORDONED = "node(s) were unschedulable"
NOT_READY = "node(s) were not ready"
TAINTED = "node(s) had taints that a plain GPU pod does not tolerate"
TOLERATED_TAINT = "nvidia.com/gpu"
"""Key of the taint that keeps other pods off GPU nodes. The admission plugin
ExtendedResourceToleration adds a toleration for the taint named like the requested resource."""


NOT_SELECTED: Final = "node(s) didn't match Pod's node affinity/selector"
MOST_REQUIREMENTS: Final = 100
"""Limit of label requirements to evaluate; a pod with more is not evaluated by labels."""
_PIECE_NODES: Final = 512
"""Nodes to check between two yields to the event loop."""


_MAX_BODY: Final = 1 << 20
"""Size limit of a pod, as in the API server."""


async def read_pod(request: web.Request) -> Mapping[str, object] | web.Response:
    """Read the Pod object in a request's body; return an error answer if it is invalid."""
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > _MAX_BODY:
            return error_answer(413, f"the pod is larger than {_MAX_BODY} bytes")
    try:
        pod = mapping_of(decode_with(orjson.loads, body))
    except MalformedError as error:
        return error_answer(400, f"the body is no JSON: {error}: send a Pod object")
    if not mapping_of(pod.get("spec")).get("containers"):
        return error_answer(400, "the body is no pod: spec.containers must name its containers")
    if excess := excess_of(pod):
        return error_answer(400, f"the pod has {excess}")
    return pod


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSelection:
    """A pod's constraints on its nodes.

    Attributes:
        selection: constraints that the extender can evaluate.
        not_checked: fields of the pod that it cannot evaluate.
    """

    selection: Selection
    not_checked: tuple[str, ...]


def read_requested_selection(pod: Mapping[str, object]) -> RequestedSelection:
    """Parse a pod's constraints on its nodes; malformed fields count as absent.

    Label constraints are ignored if there are very many, because the work per node must stay
    bounded.
    """
    spec = mapping_of(pod.get("spec"))
    if is_excessive(pod):
        unjudged = [name for name in ("nodeSelector", "affinity", "tolerations") if spec.get(name)]
        return RequestedSelection(selection=ANYWHERE, not_checked=(*unjudged, *_unjudged(spec)))
    selection = read_selection(pod)
    if len(selection.labels) + sum(1 for _ in selection.requirements) > MOST_REQUIREMENTS:
        unjudged = [name for name in ("nodeSelector", "affinity") if spec.get(name)]
        selection = Selection(tolerations=selection.tolerations)
    else:
        unjudged = list(_unkept(selection, mapping_of(spec.get("affinity"))))
    return RequestedSelection(selection=selection, not_checked=(*unjudged, *_unjudged(spec)))


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


async def open_nodes(
    fleet: Fleet, request: GpuRequest, selection: Selection
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the nodes that kube-scheduler would send, and the others by reason."""
    pool = fleet.snapshot().pools.get(request.resource)
    names: list[str] = []
    closed: dict[str, list[str]] = {}
    overlay = fleet.ledger.overlays(without="").get(request.resource, {})
    nodes = iter(pool.nodes if pool is not None else ())
    while some := list(islice(nodes, _PIECE_NODES)):
        for name in some:
            record = fleet.nodes.get(name)
            if pool is None or record is None:
                continue
            row = pool.rows[pool.row_of[name]]
            assumed = sum(tenant.count for tenant in overlay.get(name, ()))
            is_full = row.allocatable - row.held - assumed < request.count
            reason = _closed(record, request.resource, selection)
            reason = reason or (
                NO_ROOM if is_full else "" if serves_host(row, request) else _NO_HOST
            )
            if reason:
                closed.setdefault(reason, []).append(name)
            else:
                names.append(name)
        await asyncio.sleep(0)
    return names, closed


def _closed(node: NodeRecord, resource: str, selection: Selection) -> str:
    """Return the reason why kube-scheduler itself would filter out a node, "" if none."""
    if node.is_unschedulable and not tolerates(selection, CORDON):
        return CORDONED
    if not node.is_ready:
        return NOT_READY
    if not selects(selection, node):
        return NOT_SELECTED
    by_default = {TOLERATED_TAINT, resource}  # ExtendedResourceToleration adds these
    for taint in node.taints:
        if taint.repels and taint.key not in by_default and not tolerates(selection, taint):
            return TAINTED
    return ""
