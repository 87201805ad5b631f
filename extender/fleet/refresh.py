"""Estimate all devices for the next snapshot, in cooperative steps between answers."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import islice
from types import MappingProxyType

from extender.core.decision.health_causes import renumber
from extender.core.decision.signals import estimate
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.seen_requests import NONE_SEEN, SeenRequests
from extender.core.nodes.snapshot import Pool, Snapshot, Telemetry
from extender.core.policy import Policy
from extender.core.steps import Steps
from extender.fleet.pools import (
    RowsByNode,
    build_pools,
    fits_pools,
    with_estimates,
    with_rows,
    written_batch,
)
from extender.fleet.store import DeviceStore

_PIECE_NODES = 250
"""Nodes whose devices are estimated per cooperative step: about a millisecond."""


class Refresh:
    """Build a snapshot with new estimates of all devices and the pools of all nodes.

    Args:
        before: snapshot to replace.
        policy: settings of the decision.
        now: seconds since the epoch.
        capacity: number of device rows.
    """

    def __init__(self, before: Snapshot, policy: Policy, now: float, capacity: int) -> None:
        self._before = before
        self._policy = policy
        self._now = now
        self._telemetry = Telemetry.missing(capacity)
        self.changed: set[str] = set()
        """Nodes whose allocations have changed since the refresh began."""
        self.to_estimate: set[str] = set()
        """Nodes to estimate once more: the inputs of their estimates have changed since the refresh
        began."""

    def steps(
        self,
        store: DeviceStore,
        suspicion: Mapping[str, float],
        version: int,
        reshaped: tuple[RowsByNode, frozenset[str]] | None,
    ) -> Steps[Snapshot]:
        """Build the next snapshot.

        Args:
            store: devices and their readings.
            suspicion: share of certainty that a node loses for early failures, by node.
            version: version of the pools.
            reshaped: rows of all nodes, and the names of all nodes, if nodes or devices were added
                or removed since the previous snapshot; None otherwise.
        """
        names = iter(store.nodes)
        while some := list(islice(names, _PIECE_NODES)):
            self._estimate(store, some)
            yield
        before = self._before
        nodes, node_index = before.nodes, before.node_index
        if reshaped is None:
            pools = yield from self._pools_with_estimates(suspicion)
        else:
            rows, nodes = reshaped
            pools = yield from build_pools(rows, self._telemetry, suspicion, before.pools)
            listed = {resource: pool.nodes for resource, pool in pools.items()}
            node_index = yield from NodeIndex.in_steps(nodes, listed, before.node_index)
        pools = {resource: replace(pool, version=version) for resource, pool in pools.items()}
        return replace(
            before,
            at=self._now,
            nodes=nodes,
            node_index=node_index,
            pools=MappingProxyType(pools),
            telemetry=self._telemetry,
        )

    def _pools_with_estimates(self, suspicion: Mapping[str, float]) -> Steps[dict[str, Pool]]:
        """Return the previous pools with the new estimates."""
        pools = {}
        for resource, pool in self._before.pools.items():
            batch = written_batch(pool)
            yield
            telemetry = yield from self._telemetry.take_in_steps(batch.slots)
            pools[resource] = with_estimates(pool, batch, telemetry, suspicion)
            yield
        return pools

    def is_valid_under(self, policy: Policy) -> bool:
        """Return whether the result is still valid: the policy has not changed."""
        return policy is self._policy

    def _estimate(self, store: DeviceStore, nodes: Iterable[str]) -> None:
        """Estimate all devices of the given nodes; an estimate may depend on sibling devices."""
        rows = store.rows_on(nodes)
        rows = rows[rows < len(self._telemetry.utilization)]  # later ones were added meanwhile
        part, _ = estimate(store.evidence(rows), self._policy, self._now)
        part = replace(part, cause=renumber(part.cause, rows))
        for column in fields(part):
            getattr(self._telemetry, column.name)[rows] = getattr(part, column.name)


def with_requests(made: Snapshot, seen: Mapping[str, SeenRequests]) -> Snapshot:
    """Return a snapshot of a new version with the requests seen so far, by resource."""
    pools = {
        resource: replace(pool, seen=seen.get(resource, NONE_SEEN))
        for resource, pool in made.pools.items()
    }
    return replace(made, pools=MappingProxyType(pools))


def with_current_rows(made: Snapshot, rows: RowsByNode, version: int) -> Snapshot:
    """Return a snapshot that was built in steps, with the current allocations.

    The caller then estimates the nodes again whose inputs changed meanwhile.

    Args:
        made: the snapshot.
        rows: current rows of the nodes that changed while it was built.
        version: version of the returned snapshot.
    """
    pools, capacity = {}, len(made.telemetry.utilization)
    fitting = {
        node: of_node
        for node, of_node in rows.items()
        if fits_pools(made.pools, node, of_node, capacity)
    }
    for resource, pool in made.pools.items():
        changed = {
            pool.row_of[node]: of_node[resource]
            for node, of_node in fitting.items()
            if resource in of_node
        }
        after = with_rows(pool.rows, changed)
        pools[resource] = replace(pool, rows=after, dirty=tuple(changed)) if changed else pool
    return replace(made, version=version, pools=MappingProxyType(pools))
