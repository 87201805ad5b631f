"""Track the pods of each group, and compute the devices that a group still needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.core.decision.group_fit import GroupNeed, Topology
from extender.core.nodes.assumed_pods import Ledger
from extender.core.nodes.inventory import NodeRecord, PodRecord, selects, tolerates
from extender.core.nodes.node_selection import ANYWHERE, Selection
from extender.core.nodes.pod_groups import PodGroup
from extender.core.nodes.snapshot import Flags, Pool, Snapshot
from extender.core.policy import Assumed, GroupPolicy, Policy
from extender.core.request.request import GpuRequest

_PASSING_TAINTS: Final = "node.kubernetes.io/"
"""Prefix of taints that Kubernetes sets and removes by itself: cordon, not ready, pressure."""

_MOST_SELECTIONS: Final = 64
"""Node selections whose nodes are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Members:
    """Pods of one group as the API server shows them, without the pod that is being placed.

    Attributes:
        placed: pods by node, bound or assumed.
        waiting: devices requested by the pods that are not placed.
        counts: devices of the resource requested by each of these pods that requests any.
        others: number of these pods that request other GPU resources alone.
        are_alike: whether the pods that are not placed may go to the same nodes as the pod that is
            being placed, as far as known.
    """

    placed: Mapping[str, int]
    waiting: int
    counts: tuple[int, ...]
    others: int
    are_alike: bool


class PodGroups:
    """Pods by group. Pods without a group cost nothing here.

    Args:
        pods: GPU pods by UID.
        ledger: assumed pods.
    """

    def __init__(self, pods: Mapping[str, PodRecord], ledger: Ledger) -> None:
        self._pods = pods
        self._ledger = ledger
        self._uids: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}
        self._topologies: dict[tuple[str, tuple[str, ...]], tuple[tuple[str, ...], Topology]] = {}
        self._may_go: dict[tuple[str, Selection], tuple[tuple[str, ...], Flags]] = {}

    def note(self, before: PodRecord | None, record: PodRecord | None) -> None:
        """Apply the change of a pod's record, None if it does not exist."""
        if before is not None and before.group is not None:
            key = before.group.key
            uids = self._uids.get(key, set())
            uids.discard(before.uid)
            if not uids:
                self._uids.pop(key, None)
        if record is not None and record.group is not None and not record.phase.is_terminal:
            self._uids.setdefault(record.group.key, set()).add(record.uid)

    def note_size(self, key: str, size: int | None) -> None:
        """Set the size of a pod group from its API object; None if no object states a size."""
        if size is None:
            self._sizes.pop(key, None)
        else:
            self._sizes[key] = size

    def stated_size(self, group: PodGroup) -> int | None:
        """Return the size of a group by its pods or its object, None if neither states it."""
        return group.size or self._sizes.get(group.size_key) or group.least

    def note_node(self, before: NodeRecord | None, record: NodeRecord | None) -> None:
        """Drop the caches if a node's labels or taints have changed; None if it does not exist."""
        if _selectable(before) != _selectable(record):
            self._topologies.clear()
            self._may_go.clear()

    def members(self, key: str) -> frozenset[str]:
        """Return the UIDs of a group's pods that have not ended."""
        return frozenset(self._uids.get(key, ()))

    def tentative_seconds(self, uid: str, assumed: Assumed) -> float:
        """Return the seconds for which an unbound pod counts after the extender's answer."""
        record = self._pods.get(uid)
        is_reverted = record is not None and record.group is not None and record.group.is_reverted
        return assumed.simulated_seconds if is_reverted else assumed.tentative_seconds

    def note_request(self, uid: str, group: PodGroup | None, *, until: float) -> None:
        """Record a request of kube-scheduler for the next pod of a group.

        If the pod is assumed already, kube-scheduler has reverted the group and tries it again, so
        pods assumed after this one are dropped. The group's other assumed pods still count. Groups
        that kube-scheduler never reverts do not change.

        Args:
            until: time until which the group's pods count, seconds since the epoch.
        """
        if group is None or not group.is_reverted:
            return
        others = self.members(group.key)
        self._ledger.drop_later(uid, others)
        self._ledger.prolong(others, until)

    def note_bound(self, record: PodRecord, *, until: float) -> None:
        """Record that a pod is bound: kube-scheduler then also binds the other pods of its group.

        Args:
            until: time until which the other pods count, seconds since the epoch.
        """
        if record.group is not None and record.group.is_reverted:
            self._ledger.prolong(self.members(record.group.key), until)

    def need(
        self,
        uid: str,
        request: GpuRequest,
        snapshot: Snapshot,
        nodes: Mapping[str, NodeRecord],
        policy: Policy,
    ) -> GroupNeed | None:
        """Return the needs of a pod's group; None without a group, or if the pod is alone in it.

        Args:
            uid: UID of the pod that is being placed.
            nodes: nodes by name.
        """
        group, pool = request.group, snapshot.pools.get(request.resource)
        if group is None or pool is None or not policy.group_topology:
            return None
        members = self._members(group.key, uid, request.resource)
        known = len(members.counts) + members.others + 1
        stated = self.stated_size(group)
        size = max(stated or 0, known)
        if size == 1:
            return None
        counts = sorted((*members.counts, request.count))
        missing = size - known  # they do not exist yet
        is_judged = (
            request.group_policy is GroupPolicy.REQUIRE
            and members.are_alike
            and not (known == 1 and group.has_leader)
        )
        declared = stated if is_judged else None
        return GroupNeed(
            name=group.title,
            size=size,
            placed=members.placed,
            rest=members.waiting + (1 + missing) * request.count,
            total=None if declared is None else sum(counts[:declared]) + missing * counts[0],
            is_uniform=counts[0] == counts[-1],
            topology=self._topology(pool, nodes, policy.group_topology),
            may_go=None if declared is None else self._may_go_to(pool, uid, request, nodes),
        )

    def _members(self, key: str, uid: str, resource: str) -> _Members:
        """Return the pods of a group except the pod that is being placed."""
        placed: dict[str, int] = {}
        counts: list[int] = []
        waiting = others = 0
        own, are_alike = self._pods.get(uid), True
        for record in (self._pods[other] for other in self._uids.get(key, ()) if other != uid):
            count = record.resources.get(resource, 0)
            if record.is_deleting:
                continue
            if not count:
                others += 1
                continue
            counts.append(count)
            assumed = self._ledger.get(record.uid)
            node = record.node or (assumed.node if assumed is not None else "")
            if node:
                placed[node] = placed.get(node, 0) + 1
            else:
                waiting += count
                are_alike &= own is None or _demands(own) == _demands(record)
        return _Members(
            placed=placed, waiting=waiting, counts=tuple(counts), others=others, are_alike=are_alike
        )

    def _topology(
        self, pool: Pool, nodes: Mapping[str, NodeRecord], labels: tuple[str, ...]
    ) -> Topology:
        """Return the domains of a pool's nodes."""
        found = self._topologies.get((pool.resource, labels))
        if found is None or found[0] is not pool.nodes:
            records = [nodes.get(name) for name in pool.nodes]
            made = Topology.of(
                {
                    label: [(record and record.label(label)) or "" for record in records]
                    for label in labels
                }
            )
            found = self._topologies[pool.resource, labels] = (pool.nodes, made)
        return found[1]

    def _may_go_to(
        self, pool: Pool, uid: str, request: GpuRequest, nodes: Mapping[str, NodeRecord]
    ) -> Flags:
        """Return per row of a pool whether labels, lasting taints and targets admit the pod.

        If the pod's node selection is unknown, every node admits it.
        """
        record = self._pods.get(uid)
        selection = (record and record.selection) or ANYWHERE
        key = (pool.resource, selection)
        found = self._may_go.get(key)
        if found is None or found[0] is not pool.nodes:
            if len(self._may_go) >= _MOST_SELECTIONS:
                self._may_go.clear()
            admits = [_admits(selection, nodes.get(name)) for name in pool.nodes]
            found = self._may_go[key] = (pool.nodes, np.array(admits, dtype=np.bool_))
        if request.target_nodes is None:
            return found[1]
        return found[1] & np.isin(pool.nodes, list(request.target_nodes))


def _demands(pod: PodRecord) -> tuple[object, ...]:
    """Return the fields of a waiting pod that limit the nodes it could go to."""
    return pod.selection, pod.wishes, pod.memory_bytes


def _selectable(node: NodeRecord | None) -> tuple[object, ...]:
    """Return the fields of a node on which topologies and node selections depend."""
    return (node.labels, node.other_labels, node.hostname, node.taints) if node else ()


def _admits(selection: Selection, node: NodeRecord | None) -> bool:
    """Return whether a pod could go to a node once the node is ready and not cordoned."""
    if node is None:
        return True
    lasting = (taint for taint in node.taints if taint.repels)
    return selects(selection, node) and all(
        taint.key.startswith(_PASSING_TAINTS) or tolerates(selection, taint) for taint in lasting
    )
