"""Track assumed pods: placed in an answer, and not yet bound according to the API server."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from extender.core.nodes.host_resources import NONE, HostResources
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Tenant

_MOST_PODS: Final = 20_000
"""Maximum number of assumed pods: kube-scheduler binds some hundred per second."""

_MOST_ON_NODE: Final = 1_000
"""Maximum number of assumed pods per node: kubelets run 110 by default."""

_MOST_RESOURCES: Final = 64
"""Maximum number of resources among assumed pods: each decision copies one mapping per resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A pod that is being placed.

    Attributes:
        key: `namespace/name`.
        node: the node that we ranked first, or the pod's nominated node.
        resources: requested (resource, count) pairs.
        memory_bytes: declared memory per device, None if not declared.
        expected_bytes: measured memory use of similar pods, None without such a pod.
        host: requested CPU, memory and storage of the node.
        rank: order of nominated pods, by priority and age; a pod does not count those after it.
        expires_at: expiry, seconds since the epoch; None for a nominated pod, which counts until it
            is bound, deleted or nominated elsewhere.
        last_refusal: kube-scheduler's message of the previous failed attempt, None without one
            or if unknown.
    """

    uid: str
    key: str
    node: str
    resources: tuple[tuple[str, int], ...]
    memory_bytes: int | None
    expires_at: float | None
    last_refusal: str | None = None
    expected_bytes: int | None = None
    host: HostResources = NONE
    rank: tuple[int, float, str] = (0, 0.0, "")

    @property
    def priority(self) -> int:
        """Priority of a nominated pod."""
        return -self.rank[0]

    def is_ended_by(self, before: PodRecord | None, record: PodRecord) -> bool:
        """Return whether an update of the unbound pod ends the assumption.

        An "unschedulable" message ends it only if the message differs from the previous attempt's,
        because the watch may deliver the old message late. If the previous message is unknown, only
        a first message ends it.

        Args:
            before: the pod's record before the update, None if it is new.
            record: the pod's record after the update.
        """
        if self.expires_at is None:
            return True
        if not record.is_unscheduled:
            return False
        if self.last_refusal is None:
            return before is None or not before.is_unscheduled
        return record.message != self.last_refusal


_Overlays = Mapping[str, Mapping[str, tuple[Tenant, ...]]]
"""Assumed tenants by resource and node."""


class Ledger:
    """Assumed pods by UID. Only the event loop's thread changes it, never across an await."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Assumption] = {}
        # Updated incrementally, because every decision reads it.
        self._overlays: dict[str, dict[str, tuple[Tenant, ...]]] = {}
        self._nominated: defaultdict[int, set[str]] = defaultdict(set)  # UIDs by priority
        self._gone: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def assume(self, assumption: Assumption) -> None:
        """Add an assumption, replacing an earlier one of the same pod.

        A tentative assumption is ignored if the pod is gone, or if the ledger is full.
        """
        if assumption.uid in self._gone and assumption.expires_at is not None:
            return
        before = self._by_uid.get(assumption.uid)
        self.drop(assumption.uid)
        is_same = (
            before is not None
            and before.node == assumption.node
            and before.resources == assumption.resources
        )
        if not is_same and assumption.expires_at is not None and self._is_full(assumption):
            return
        self._by_uid[assumption.uid] = assumption
        if assumption.expires_at is None:
            self._nominated[assumption.priority].add(assumption.uid)
        for resource, tenant in _tenants(assumption):
            nodes = self._overlays.setdefault(resource, {})
            nodes[assumption.node] = (*nodes.get(assumption.node, ()), tenant)

    def _is_full(self, assumption: Assumption) -> bool:
        """Return whether the ledger has more pods than kube-scheduler can have placed in time."""
        resources = {*self._overlays, *(resource for resource, _ in assumption.resources)}
        if len(self._by_uid) >= _MOST_PODS or len(resources) > _MOST_RESOURCES:
            return True
        return any(
            len(self._overlays.get(resource, {}).get(assumption.node, ())) >= _MOST_ON_NODE
            for resource, _ in assumption.resources
        )

    def drop(self, uid: str) -> None:
        """Remove a pod that is bound, deleted or unschedulable."""
        assumption = self._by_uid.get(uid)
        if assumption is not None:
            self._drop_all([assumption])

    def _drop_all(self, assumptions: Iterable[Assumption]) -> None:
        """Remove assumed pods, in time proportional to their number."""
        gone: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for assumption in assumptions:
            del self._by_uid[assumption.uid]
            self._nominated[assumption.priority].discard(assumption.uid)
            for resource, _ in assumption.resources:
                gone[resource, assumption.node].add(assumption.uid)
        for (resource, node), uids in gone.items():
            _remove(self._overlays[resource], node, uids)
            if not self._overlays[resource]:
                del self._overlays[resource]

    def end(self, uid: str, until: float) -> None:
        """Remove a deleted pod, and ignore tentative assumptions of it until a given time.

        A request for the pod, or a message from another replica, may still arrive after its
        deletion, while a new pod has its name.

        Args:
            until: time after which no answer about the pod can arrive, seconds since the epoch.
        """
        self.drop(uid)
        self._gone[uid] = until

    def shift_back(self, seconds: float) -> None:
        """Shift all times back, after the clock was set back by `seconds`."""
        self._gone = {uid: until - seconds for uid, until in self._gone.items()}
        for uid, assumption in self._by_uid.items():
            if assumption.expires_at is not None:
                expires_at = assumption.expires_at - seconds
                self._by_uid[uid] = replace(assumption, expires_at=expires_at)

    def prolong(self, uids: Iterable[str], until: float) -> None:
        """Extend the expiry of tentative pods to at least a given time, seconds since the epoch."""
        for uid in uids:
            assumption = self._by_uid.get(uid)
            if assumption is not None and (assumption.expires_at or until) < until:
                self._by_uid[uid] = replace(assumption, expires_at=until)

    def drop_later(self, uid: str, uids: AbstractSet[str]) -> None:
        """Remove the tentative pods in `uids` that were assumed after another pod.

        Args:
            uid: UID of this other pod; if it is not assumed, nothing is removed.
            uids: UIDs of the pods to remove.
        """
        order = list(self._by_uid)
        later = order[order.index(uid) + 1 :] if uid in self._by_uid else []
        found = (self._by_uid[other] for other in later if other in uids)
        self._drop_all([each for each in found if each.expires_at is not None])

    def expire(self, now: float) -> None:
        """Remove expired tentative pods and expired records of deleted pods."""
        while self._gone and self._gone[gone := next(iter(self._gone))] <= now:
            del self._gone[gone]
        self._drop_all(
            [
                assumption
                for assumption in self._by_uid.values()
                if assumption.expires_at is not None and assumption.expires_at <= now
            ]
        )

    def get(self, uid: str) -> Assumption | None:
        """Return the assumption of a pod, None without one."""
        return self._by_uid.get(uid)

    def overlays(self, *, without: str, priority: int | None = None) -> _Overlays:
        """Return the assumed tenants by resource and node, without one pod.

        As in kube-scheduler, nominated pods of a lower priority do not count for it. If it is
        nominated, the pods that are nominated to its node after it do not count either: otherwise
        pods that do not all fit would refuse the node to each other.

        The result is a copy and does not change later.

        Args:
            without: UID of the pod that is being placed; it must not count against itself.
            priority: its priority, None if unknown: then all nominated pods count.
        """
        overlays = {resource: nodes.copy() for resource, nodes in self._overlays.items()}
        ignored = self._nominated_below(priority)
        own = self._by_uid.get(without)
        if own is not None:
            ignored.add(without)
            for resource, _ in own.resources:
                tenants = (self._by_uid[one.uid] for one in overlays[resource][own.node])
                ignored.update(one.uid for one in tenants if _is_nominated_after(one, own))
        for assumption in map(self._by_uid.__getitem__, ignored):
            for resource, _ in assumption.resources:
                _remove(overlays[resource], assumption.node, {assumption.uid})
        return {resource: nodes for resource, nodes in overlays.items() if nodes}

    def _nominated_below(self, priority: int | None) -> set[str]:
        """Return the UIDs of nominated pods with a lower priority than a pod."""
        if priority is None:
            return set()
        lower = (uids for other, uids in self._nominated.items() if other < priority)
        return set(chain.from_iterable(lower))


def _is_nominated_after(other: Assumption, own: Assumption) -> bool:
    is_nominated = own.expires_at is None and other.expires_at is None
    return is_nominated and other.rank > own.rank


def _tenants(assumption: Assumption) -> Iterator[tuple[str, Tenant]]:
    """Yield the pod as a tenant of each requested resource."""
    for resource, count in assumption.resources:
        yield (
            resource,
            Tenant(
                uid=assumption.uid,
                count=count,
                memory_bytes=assumption.memory_bytes,
                expected_bytes=assumption.expected_bytes,
                host=assumption.host,
            ),
        )


def _remove(nodes: dict[str, tuple[Tenant, ...]], node: str, uids: AbstractSet[str]) -> None:
    left = tuple(tenant for tenant in nodes[node] if tenant.uid not in uids)
    if left:
        nodes[node] = left
    else:
        del nodes[node]
