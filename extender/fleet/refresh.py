"""The next snapshot in the making: all devices believed anew, in steps, beside the answers."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import islice
from types import MappingProxyType

from extender.core.decision.health_causes import renumber
from extender.core.decision.signals import estimate
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.snapshot import Pool, Snapshot, Telemetry
from extender.core.policy import Policy
from extender.core.steps import Steps
from extender.fleet.pools import (
    RowsByNode,
    build_pools,
    fits_pools,
    refreshed,
    with_late_rows,
    with_rows,
)
from extender.fleet.store import DeviceStore

PIECE_NODES = 250
"""Nodes whose devices are believed in one step: about a millisecond's work."""


class Refresh:
    """All devices, believed anew, and pools of the nodes that there are.

    Args:
        before: the snapshot that is to be replaced.
        policy: the settings.
        now: seconds since the epoch.
        capacity: rows of devices that there are.
    """

    def __init__(self, before: Snapshot, policy: Policy, now: float, capacity: int) -> None:
        self._before = before
        self._policy = policy
        self._now = now
        self._telemetry = Telemetry.missing(capacity)
        self.changed: set[str] = set()
        """Nodes that were laid out anew since the begin."""
        self.doubted: set[str] = set()
        """Nodes whose devices are to be believed anew again: that rests on other things by now."""

    def steps(
        self,
        store: DeviceStore,
        suspicion: Mapping[str, float],
        base: int,
        reshaped: tuple[RowsByNode, frozenset[str]] | None,
    ) -> Steps[Snapshot]:
        """Return the snapshot to come.

        Args:
            store: the devices.
            suspicion: share of its certainty that a node loses, by node.
            base: of the pools.
            reshaped: every node's rows, and the names of all nodes, where nodes or devices came or
                went since the snapshot before; None where they are those that it shows.
        """
        names = iter(store.nodes)
        while some := list(islice(names, PIECE_NODES)):
            self._estimate(store, some)
            yield
        before = self._before
        nodes, node_index = before.nodes, before.node_index
        if reshaped is None:
            pools = yield from self._renewed(suspicion)
        else:
            rows, nodes = reshaped
            pools = yield from build_pools(rows, self._telemetry, suspicion, before.pools)
            listed = {resource: pool.nodes for resource, pool in pools.items()}
            node_index = yield from NodeIndex.in_steps(nodes, listed, before.node_index)
        pools = {resource: replace(pool, base=base) for resource, pool in pools.items()}
        return replace(
            before,
            at=self._now,
            nodes=nodes,
            node_index=node_index,
            pools=MappingProxyType(pools),
            telemetry=self._telemetry,
        )

    def _renewed(self, suspicion: Mapping[str, float]) -> Steps[dict[str, Pool]]:
        """Return the pools as they were, of devices that are believed anew."""
        pools = {}
        for resource, pool in self._before.pools.items():
            batch = with_late_rows(pool)
            yield
            telemetry = yield from self._telemetry.take_in_steps(batch.slots)
            pools[resource] = refreshed(pool, batch, telemetry, suspicion)
            yield
        return pools

    def fits(self, policy: Policy) -> bool:
        """Tell whether what was made can still take the place of what there is."""
        return policy is self._policy

    def _estimate(self, store: DeviceStore, nodes: Iterable[str]) -> None:
        """Believe the devices of some nodes: all of each, for one may speak for its siblings."""
        rows = store.rows_on(nodes)
        rows = rows[rows < len(self._telemetry.utilization)]  # others came after the begin
        part, _ = estimate(store.evidence(rows), self._policy, self._now)
        part = replace(part, cause=renumber(part.cause, rows))
        for column in fields(part):
            getattr(self._telemetry, column.name)[rows] = getattr(part, column.name)


def with_rows_now(made: Snapshot, rows: RowsByNode, version: int) -> Snapshot:
    """Return a snapshot that was made in steps, with who holds what as it is by now.

    What is believed of the nodes of which that rests on other things by now is patched by whoever
    takes it over.

    Args:
        made: the snapshot.
        rows: rows of the nodes that were laid out anew meanwhile, as they are by now.
        version: of what is returned.
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
        pools[resource] = replace(pool, rows=after, patched=tuple(changed)) if changed else pool
    return replace(made, version=version, pools=MappingProxyType(pools))
