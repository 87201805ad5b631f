"""Pods that we answered for and that the API server does not show as bound yet."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from extender.core.inventory import PodRecord
from extender.core.snapshot import Tenant

MOST_PODS: Final = 20_000
"""Pods that are assumed at once: kube-scheduler binds some hundred a second."""

MOST_ON_NODE: Final = 1_000
"""Pods that are assumed on one node: kubelets run 110 unless told otherwise."""

MOST_RESOURCES: Final = 64
"""Resources that assumed pods ask for together: each decision copies what is assumed of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A pod that is being placed.

    Attributes:
        uid: the pod's UID.
        key: `namespace/name`.
        node: the node that we ranked first, or that the pod is nominated to.
        resources: (resource, count) that it asks for.
        memory_bytes: room that it takes of each device, None where it did not say.
        expected_bytes: what pods like it were measured to take, None where none was.
        expires_at: when it stops counting, seconds since the epoch; None for a nominated pod,
            which counts until it is bound, deleted or nominated elsewhere.
        last_word: why kube-scheduler had found no node for the pod the time before, None where it
            had not said so, or that is unknown.
    """

    uid: str
    key: str
    node: str
    resources: tuple[tuple[str, int], ...]
    memory_bytes: int | None
    expires_at: float | None
    last_word: str | None = None
    expected_bytes: int | None = None

    def is_ended_by(self, before: PodRecord | None, record: PodRecord) -> bool:
        """Tell whether it is over, by what the API server shows of the pod on no node.

        That no node was found for it is said of the attempt under way only if it differs from what
        was said before that: the watch may be late with that too. Where that is unknown, what is
        said for the first time counts.

        Args:
            before: what it showed before, None where that was nothing.
            record: what it shows now.
        """
        if self.expires_at is None:
            return True
        if not record.is_unscheduled:
            return False
        if self.last_word is None:
            return before is None or not before.is_unscheduled
        return record.message != self.last_word


Overlays = Mapping[str, Mapping[str, tuple[Tenant, ...]]]
"""Assumed tenants by resource and node."""


class Ledger:
    """The assumed pods, by UID. Only the event loop's thread changes it, never across an await."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Assumption] = {}
        # Kept as pods come and go: each decision asks for it, and a burst assumes hundreds.
        self._overlays: dict[str, dict[str, tuple[Tenant, ...]]] = {}
        self._gone: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def assume(self, assumption: Assumption) -> None:
        """Count a pod on a node; an earlier assumption of the same pod is replaced.

        A pod that is gone counts nowhere, unless its node is the API server's word.
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
        for resource, tenant in _tenants(assumption):
            nodes = self._overlays.setdefault(resource, {})
            nodes[assumption.node] = (*nodes.get(assumption.node, ()), tenant)

    def _is_full(self, assumption: Assumption) -> bool:
        """Tell whether more is assumed than kube-scheduler can have placed meanwhile."""
        resources = {*self._overlays, *(resource for resource, _ in assumption.resources)}
        if len(self._by_uid) >= MOST_PODS or len(resources) > MOST_RESOURCES:
            return True
        return any(
            len(self._overlays.get(resource, {}).get(assumption.node, ())) >= MOST_ON_NODE
            for resource, _ in assumption.resources
        )

    def drop(self, uid: str) -> None:
        """Stop counting a pod: it is bound, gone, or cannot be scheduled."""
        assumption = self._by_uid.get(uid)
        if assumption is not None:
            self._drop_all([assumption])

    def _drop_all(self, assumptions: Iterable[Assumption]) -> None:
        """Stop counting pods, in time that grows with their number alone."""
        gone: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for assumption in assumptions:
            del self._by_uid[assumption.uid]
            for resource, _ in assumption.resources:
                gone[resource, assumption.node].add(assumption.uid)
        for (resource, node), uids in gone.items():
            _remove(self._overlays[resource], node, uids)
            if not self._overlays[resource]:
                del self._overlays[resource]

    def end(self, uid: str, until: float) -> None:
        """Stop counting a pod that is gone, and let no answer bring it back.

        A pod that is deleted while kube-scheduler places it is asked about, or told of by another
        replica, once more; one of the same name may be in its place by then.

        Args:
            uid: the pod's UID.
            until: no answer about it comes later, seconds since the epoch.
        """
        self.drop(uid)
        self._gone[uid] = until

    def put_back(self, seconds: float) -> None:
        """Let all times come earlier: the clock was put back by so much."""
        self._gone = {uid: until - seconds for uid, until in self._gone.items()}
        for uid, assumption in self._by_uid.items():
            if assumption.expires_at is not None:
                expires_at = assumption.expires_at - seconds
                self._by_uid[uid] = replace(assumption, expires_at=expires_at)

    def expire(self, now: float) -> None:
        """Drop tentative pods whose time is up, and forget those gone for long."""
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
        """Return what is assumed of a pod."""
        return self._by_uid.get(uid)

    def overlays(self, *, without: str) -> Overlays:
        """Return the assumed tenants by resource and node; a pod never counts against itself.

        What is returned does not change afterwards.

        Args:
            without: UID of the pod that is asked about.
        """
        overlays = {resource: nodes.copy() for resource, nodes in self._overlays.items()}
        own = self._by_uid.get(without)
        if own is not None:
            for resource, _ in own.resources:
                _remove(overlays[resource], own.node, {without})
        return {resource: nodes for resource, nodes in overlays.items() if nodes}


def _tenants(assumption: Assumption) -> Iterator[tuple[str, Tenant]]:
    """Yield what a pod is to each resource that it asks for."""
    for resource, count in assumption.resources:
        yield (
            resource,
            Tenant(
                uid=assumption.uid,
                count=count,
                memory_bytes=assumption.memory_bytes,
                expected_bytes=assumption.expected_bytes,
            ),
        )


def _remove(nodes: dict[str, tuple[Tenant, ...]], node: str, uids: AbstractSet[str]) -> None:
    """Take pods off a node."""
    left = tuple(tenant for tenant in nodes[node] if tenant.uid not in uids)
    if left:
        nodes[node] = left
    else:
        del nodes[node]
