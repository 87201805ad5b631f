"""What would happen to a pod that is not there: which nodes kube-scheduler would ask us about."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from extender.core.inventory import NodeRecord, Taint
from extender.core.request import GpuRequest
from extender.core.untyped import mapping_of, objects_of, text_of
from extender.fleet.fleet import Fleet
from extender.observe.api import CORDONED, NO_ROOM, NOT_READY, TAINTED, TOLERATED_TAINT

NOT_SELECTED: Final = "node(s) didn't match Pod's node affinity/selector"
PIECE_NODES: Final = 512
"""Nodes that are told open or closed between two turns of the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a pod says of the nodes that it may go to.

    Attributes:
        labels: `nodeSelector`, those of its labels that we keep of nodes.
        tolerations: key, effect and value of each; "" for any key or effect, None for any value.
        not_checked: parts of the pod that we cannot judge.
    """

    labels: Mapping[str, str]
    tolerations: frozenset[tuple[str, str, str | None]]
    not_checked: tuple[str, ...]


def read_selection(pod: Mapping[str, object], nodes: Mapping[str, NodeRecord]) -> Selection:
    """Read what a pod says of its nodes; anything at all is taken.

    A label of `nodeSelector` that no node is known to have may be one that we do not keep: it is
    not judged.
    """
    spec = mapping_of(pod.get("spec"))
    wanted = {key: text_of(value) for key, value in mapping_of(spec.get("nodeSelector")).items()}
    # A pod may name as many as it likes: no work may grow with nodes and with what a pod names.
    known = {label for node in nodes.values() for label in node.labels}
    kept = wanted.keys() & known
    unjudged = [f"nodeSelector {key}" for key in sorted(wanted.keys() - kept)]
    fields = ("affinity", "topologySpreadConstraints", "nodeName", "volumes", "runtimeClassName")
    unjudged += [name for name in fields if spec.get(name)]
    containers = objects_of(spec.get("containers"))
    asked = {
        name
        for container in containers
        for kind in ("requests", "limits")
        for name in mapping_of(mapping_of(container.get("resources")).get(kind))
        if name in {"cpu", "memory", "ephemeral-storage"}
    }
    unjudged += sorted(asked)
    if any(port.get("hostPort") for one in containers for port in objects_of(one.get("ports"))):
        unjudged.append("hostPort")
    return Selection(
        labels={key: wanted[key] for key in kept},
        tolerations=frozenset(_tolerations(objects_of(spec.get("tolerations")))),
        not_checked=(*unjudged, "quotas"),
    )


async def open_nodes(
    fleet: Fleet, request: GpuRequest, selection: Selection
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the nodes that kube-scheduler would ask about, and the others by reason."""
    pool = fleet.snapshot().pools.get(request.resource)
    names: list[str] = []
    closed: dict[str, list[str]] = {}
    overlay = fleet.ledger.overlays(without="").get(request.resource, {})
    nodes = iter(pool.nodes if pool is not None else ())
    while some := list(islice(nodes, PIECE_NODES)):
        for name in some:
            record = fleet.nodes.get(name)
            if pool is None or record is None:
                continue
            row = pool.rows[pool.row_of[name]]
            assumed = sum(tenant.count for tenant in overlay.get(name, ()))
            is_full = row.allocatable - row.held - assumed < request.count
            reason = _closed(record, request.resource, selection) or (NO_ROOM if is_full else "")
            if reason:
                closed.setdefault(reason, []).append(name)
            else:
                names.append(name)
        await asyncio.sleep(0)
    return names, closed


def _closed(node: NodeRecord, resource: str, selection: Selection) -> str:
    """Return why kube-scheduler would not ask about a node, "" where it would."""
    if node.is_unschedulable:
        return CORDONED
    if not node.is_ready:
        return NOT_READY
    if any(node.labels.get(key) != value for key, value in selection.labels.items()):
        return NOT_SELECTED
    repelling = [taint for taint in node.taints if taint.repels]
    by_default = {TOLERATED_TAINT, resource}
    for taint in repelling:
        if taint.key not in by_default and not _tolerates(selection.tolerations, taint):
            return TAINTED
    return ""


def _tolerations(
    tolerations: Iterable[Mapping[str, object]],
) -> Iterator[tuple[str, str, str | None]]:
    """Yield key, effect and value of each toleration that means anything."""
    for toleration in tolerations:
        key, effect = text_of(toleration.get("key")), text_of(toleration.get("effect"))
        if toleration.get("operator") == "Exists":
            yield key, effect, None
        elif key:
            yield key, effect, text_of(toleration.get("value"))


def _tolerates(tolerations: Collection[tuple[str, str, str | None]], taint: Taint) -> bool:
    """Tell whether a pod tolerates a taint, as Kubernetes does."""
    return any(
        (key, effect, value) in tolerations
        for key, value in ((taint.key, taint.value), (taint.key, None), ("", None))
        for effect in ("", taint.effect)
    )
