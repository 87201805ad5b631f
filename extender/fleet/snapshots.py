"""Build each snapshot from the previous one.

A few changed nodes become dirty rows of the pools (`pools.update_pools`). Other changes, such as
new readings of many devices, or added and removed nodes, take a refresh (`_Refresh`): all devices
are estimated again, and each pool begins a new version. A refresh runs in cooperative steps between
requests; nodes that change meanwhile are dirty rows of its result.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from itertools import islice
from math import inf
from types import MappingProxyType

from extender.core.decision.health import renumber
from extender.core.decision.landing import NONE_OUT
from extender.core.decision.signals import estimate, estimate_again
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.seen_requests import NONE_SEEN, RequestTable, SeenRequests
from extender.core.nodes.snapshot import Flags, Pool, Snapshot, Telemetry
from extender.core.policy import Policy
from extender.core.steps import Steps, finish
from extender.fleet.allocation import NodeAllocations
from extender.fleet.failures import FailureLog
from extender.fleet.pools import (
    RowsByNode,
    build_pools,
    fits_pools,
    refresh_pools,
    update_pools,
    with_estimates,
    with_rows,
    written_batch,
)
from extender.fleet.store import DeviceStore

_REFRESH_SECONDS = 10.0
"""Interval between refreshes without new readings. Estimates fade with time, over minutes."""

_NEW_READINGS_SECONDS = 1.0
"""Interval between refreshes while more nodes have new readings than are estimated one by one."""

_MAX_READ_NODES = 32
"""Maximum number of nodes with new readings that are estimated one by one between two refreshes.
Each one is a dirty row for cached evaluations."""

_PIECE_NODES = 256
"""Nodes that become dirty rows per cooperative step: about a millisecond."""

_ESTIMATED_NODES = 250
"""Nodes whose devices a refresh estimates per cooperative step: about a millisecond."""

_OVERDUE_SECONDS = 30.0
"""Age of the estimates at which a query refreshes them itself instead of waiting for the task."""


class Snapshots:
    """Owner of the latest snapshot and of the changes since.

    Args:
        failures: pods that failed early.
        requests: requests of the pods seen so far.
        clock: seconds since the epoch.
        in_steps: whether a task calls `refresh_in_steps` continuously.

    Attributes:
        current: latest snapshot, None before the first one.
        changed: nodes whose allocations have changed since then.
        to_estimate: changed nodes whose devices must be estimated again.
    """

    def __init__(
        self,
        store: DeviceStore,
        allocations: NodeAllocations,
        failures: FailureLog,
        clock: Callable[[], float],
        *,
        requests: RequestTable,
        in_steps: bool,
    ) -> None:
        self.current: Snapshot | None = None
        self.changed: set[str] = set()
        self.to_estimate: set[str] = set()
        self._store = store
        self._allocations = allocations
        self._failures = failures
        self._requests = requests
        self._clock = clock
        self._in_steps = in_steps
        self._policy = Policy()
        self._is_up_to_date = False
        self._estimated_at = -inf
        self._has_new_readings = False
        self._read_nodes = 0
        self._versions = 0
        self._shape, self._snapshot_shape = 1, 0
        self._outdated: set[str] = set()
        """Nodes whose inputs changed after a refresh had estimated their devices."""
        self._refresh: _Refresh | None = None

    def is_out(self) -> Flags:
        """Return which devices are estimated to be out of order, as in `Telemetry.is_out`."""
        return NONE_OUT if self.current is None else self.current.telemetry.is_out

    @property
    def _is_reshaped(self) -> bool:
        """Whether nodes or devices were added or removed since the latest snapshot."""
        return self._shape != self._snapshot_shape

    @property
    def is_far_behind(self) -> bool:
        """Whether so many nodes have changed that the next snapshot should be built now."""
        has_snapshot = self._in_steps and self.current is not None
        return has_snapshot and len(self.changed) >= _PIECE_NODES

    def mark_reshaped(self) -> None:
        """Record that nodes or devices were added or removed."""
        self._shape += 1

    def mark_stale(self) -> None:
        """Record that the estimates are out of date."""
        self._is_up_to_date = False

    def note_readings(self, nodes: Collection[str]) -> None:
        """Schedule new estimates for nodes with new readings; few nodes are estimated at once."""
        if not self._in_steps or self._read_nodes + len(nodes) > _MAX_READ_NODES:
            self._has_new_readings = True
            self._is_up_to_date &= self._in_steps
            return
        self._read_nodes += len(nodes)
        for node in nodes:
            self.mark_changed(node, needs_estimate=True)

    def mark_changed(self, node: str, *, needs_estimate: bool) -> None:
        """Record that the allocation of a node has changed.

        Args:
            needs_estimate: whether the inputs of its devices' estimates have changed.
        """
        self.changed.add(node)
        if needs_estimate:
            self.to_estimate.add(node)

    def forget(self, node: str) -> None:
        """Forget a removed node."""
        self.changed.discard(node)
        self.to_estimate.discard(node)
        self._outdated.discard(node)
        self.mark_reshaped()

    def discard_estimates(self) -> None:
        """Discard all estimates."""
        self._is_up_to_date, self._estimated_at = False, -inf

    def get(self, nodes: Iterable[str], policy: Policy, now: float) -> Snapshot:
        """Return the current snapshot; the same object as long as nothing has changed.

        If a task refreshes snapshots in steps, added and removed nodes and devices appear with the
        next refresh. Until then an added node is unknown, and kube-scheduler does not ask about a
        removed one.
        """
        is_reshaped = self._is_reshaped and not self._in_steps
        if self.current is None or self.changed or is_reshaped or not self._is_fresh(now):
            self.current = self._next(nodes, policy, now)
        return self.current

    def refresh_in_steps(
        self,
        nodes: Iterable[str],
        latest: Callable[[], Snapshot],
        prepare: Callable[[Snapshot], Steps[None]] | None,
    ) -> Steps[None]:
        """Estimate all devices again in cooperative steps, if it is time.

        Args:
            nodes: names of all nodes.
            latest: returns the current snapshot.
            prepare: called with the coming snapshot, for slow preparation.
        """
        before, now = latest(), self._clock()
        pause = (
            _NEW_READINGS_SECONDS
            if self._has_new_readings or self._is_reshaped
            else _REFRESH_SECONDS
        )
        if self._is_up_to_date and self._is_younger_than(pause, now):
            return
        self._versions += 1
        # Changes from here on count for the next refresh.
        self._is_up_to_date = True
        had_new_readings, self._has_new_readings = self._has_new_readings, False
        self._read_nodes = 0
        shape, snapshot_shape = self._shape, self._snapshot_shape
        reshaped = (
            (dict(self._allocations.rows), frozenset(nodes)) if shape != snapshot_shape else None
        )
        refresh = _Refresh(before, self._policy, now, self._store.capacity)
        self._refresh = refresh
        is_done = False
        try:
            suspicion = yield from self._failures.suspicion_in_steps(now)
            made = yield from refresh.steps(self._store, suspicion, self._versions, reshaped)
            made = _with_requests(made, self._requests.publish())
            if prepare is not None:
                yield from prepare(made)
            current = latest()
            # A query that could not wait may have built a whole snapshot meanwhile.
            is_done = refresh.policy is self._policy and snapshot_shape == self._snapshot_shape
        finally:
            self._refresh = None
            self._is_up_to_date &= is_done
            self._has_new_readings |= had_new_readings and not is_done
        if is_done:
            rows = self._allocations.rows
            allocated = {name: rows[name] for name in refresh.changed if name in rows}
            self.current = _with_current_rows(made, allocated, current.version + 1)
            self._outdated |= refresh.to_estimate
            self._estimated_at, self._snapshot_shape = now, shape
        yield from self._estimate_outdated(latest)

    def _estimate_outdated(self, latest: Callable[[], Snapshot]) -> Steps[None]:
        """Estimate nodes that changed during a refresh again, some per cooperative step."""
        while self._outdated:
            for _ in range(min(_PIECE_NODES, len(self._outdated))):
                self.mark_changed(self._outdated.pop(), needs_estimate=True)
            if self._outdated:
                yield
                latest()
                yield

    def _is_fresh(self, now: float) -> bool:
        """Return whether the latest estimates are still valid."""
        if self._in_steps:
            return self._is_younger_than(_OVERDUE_SECONDS, now)
        return self._is_up_to_date and self._is_younger_than(_REFRESH_SECONDS, now)

    def _is_younger_than(self, seconds: float, now: float) -> bool:
        """Return whether the estimates are younger than this; False if the clock was set back."""
        return 0 <= now - self._estimated_at < seconds

    def _next(self, nodes: Iterable[str], policy: Policy, now: float) -> Snapshot:
        """Build the next snapshot, from the current one if that is still valid."""
        self._policy = policy
        if self._refresh is not None:
            self._refresh.changed |= self.changed
            self._refresh.to_estimate |= self.to_estimate
        changed, to_estimate = self.changed, self.to_estimate
        self.changed, self.to_estimate = set(), set()
        if self.current is None or not self._is_updatable(self.current, now):
            return self._build(nodes, changed, now)
        return self._update(self.current, changed, to_estimate, now)

    def _is_updatable(self, before: Snapshot, now: float) -> bool:
        """Return whether the changes since a snapshot can become dirty rows of it."""
        if self._in_steps:
            return self._is_fresh(now)
        is_same = self._store.capacity == len(before.telemetry.utilization)
        return is_same and not self._is_reshaped and self._is_fresh(now)

    def _update(
        self, before: Snapshot, changed: Iterable[str], to_estimate: Collection[str], now: float
    ) -> Snapshot:
        """Return a snapshot with the allocations of changed nodes, some of them estimated again.

        Nodes that the snapshot does not contain, or that have too many devices for its arrays, do
        not change.
        """
        rows, capacity = self._allocations.rows, len(before.telemetry.utilization)
        fitting = {
            name: rows[name]
            for name in changed
            if name in rows and fits_pools(before.pools, name, rows[name], capacity)
        }
        telemetry, estimated = before.telemetry, fitting.keys() & to_estimate
        if estimated:
            again = self._store.rows_on(estimated)
            evidence = self._store.evidence(again)
            telemetry = estimate_again(telemetry, again, evidence, self._policy, now)
        pools = update_pools(before.pools, fitting, estimated, telemetry)
        return replace(
            before,
            version=before.version + 1,
            at=now,
            pools=MappingProxyType(pools),
            telemetry=telemetry,
            models=self._allocations.models,
        )

    def _build(self, nodes: Iterable[str], changed: Iterable[str], now: float) -> Snapshot:
        """Build a snapshot in which all devices are estimated again, at once."""
        before, rows = self.current, self._allocations.rows
        telemetry, _ = estimate(self._store.evidence(), self._policy, now)
        suspicion = self._failures.suspicion(now)
        self._is_up_to_date, self._estimated_at = True, now
        if before is None or self._is_reshaped:
            names = frozenset(nodes)
            known = before.pools if before else {}
            pools = finish(build_pools(rows, telemetry, suspicion, known))
            node_index = NodeIndex(
                names, {resource: pool.nodes for resource, pool in pools.items()}
            )
        else:
            names, node_index = before.nodes, before.node_index
            of_changed = {name: rows[name] for name in changed}
            pools = refresh_pools(before.pools, of_changed, telemetry, suspicion)
        self._versions += 1
        self._snapshot_shape = self._shape
        seen = self._requests.publish()
        pools = {
            resource: replace(pool, version=self._versions, seen=seen.get(resource, NONE_SEEN))
            for resource, pool in pools.items()
        }
        return Snapshot(
            version=before.version + 1 if before else 1,
            at=now,
            nodes=names,
            node_index=node_index,
            pools=MappingProxyType(pools),
            telemetry=telemetry,
            models=self._allocations.models,
        )


class _Refresh:
    """Build a snapshot with new estimates of all devices and the pools of all nodes.

    Args:
        before: snapshot to replace.
        capacity: number of device rows.
    """

    def __init__(self, before: Snapshot, policy: Policy, now: float, capacity: int) -> None:
        self._before = before
        self.policy = policy
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
            suspicion: share of certainty that a node loses for early failures, by node.
            version: version of the pools.
            reshaped: rows of all nodes, and the names of all nodes, if nodes or devices were added
                or removed since the previous snapshot; None otherwise.
        """
        names = iter(store.nodes)
        while some := list(islice(names, _ESTIMATED_NODES)):
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
        pools = {}
        for resource, pool in self._before.pools.items():
            batch = written_batch(pool)
            yield
            telemetry = yield from self._telemetry.take_in_steps(batch.slots)
            pools[resource] = with_estimates(pool, batch, telemetry, suspicion)
            yield
        return pools

    def _estimate(self, store: DeviceStore, nodes: Iterable[str]) -> None:
        """Estimate all devices of the given nodes; an estimate may depend on sibling devices."""
        rows = store.rows_on(nodes)
        rows = rows[rows < len(self._telemetry.utilization)]  # later ones were added meanwhile
        part, _ = estimate(store.evidence(rows), self.policy, self._now)
        part = replace(part, cause=renumber(part.cause, rows))
        for column in fields(part):
            getattr(self._telemetry, column.name)[rows] = getattr(part, column.name)


def _with_requests(made: Snapshot, seen: Mapping[str, SeenRequests]) -> Snapshot:
    """Return a snapshot of a new version with the requests seen so far, by resource."""
    pools = {
        resource: replace(pool, seen=seen.get(resource, NONE_SEEN))
        for resource, pool in made.pools.items()
    }
    return replace(made, pools=MappingProxyType(pools))


def _with_current_rows(made: Snapshot, rows: RowsByNode, version: int) -> Snapshot:
    """Return a snapshot that was built in steps, with the current allocations.

    The caller then estimates the nodes again whose inputs changed meanwhile.

    Args:
        rows: current rows of the nodes that changed while it was built.
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
