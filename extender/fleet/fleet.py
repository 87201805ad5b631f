"""Hold the state of the fleet: apply the data of all sources, and build snapshots."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from extender.core.decision.evaluation import Overlay
from extender.core.decision.group_fit import GroupNeed
from extender.core.devices.readings import (
    DeviceInfo,
    DeviceKey,
    ForeignProcess,
    History,
    Own,
    Readings,
)
from extender.core.nodes.assumed_pods import Assumption, Ledger
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.nodes.node_index import EMPTY_NODE_INDEX, NodeIndex
from extender.core.nodes.pod_groups import Kin
from extender.core.nodes.seen_requests import RequestTable
from extender.core.nodes.snapshot import Leaving, Snapshot
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest, required_models
from extender.core.steps import Steps, finish
from extender.fleet.allocation import AllocationChange, NodeAllocations
from extender.fleet.failures import FailureLog
from extender.fleet.groups import PodGroups
from extender.fleet.impossible_requests import aim, rows_by_index
from extender.fleet.intake import SourceState
from extender.fleet.pods import KnownPods, PodClocks, Share
from extender.fleet.registry import Applied
from extender.fleet.snapshots import Snapshots
from extender.fleet.store import DeviceStore
from extender.runtime.topic import Topic

_STEP_SECONDS = 1.0
"""The clock was set back if it goes back by more than this."""

_PIECE_NODES = 8
"""Nodes allocated per cooperative step, a millisecond or two."""


_PIECE_SHARES = 2048
"""Shares of devices that are looked up per cooperative step, a millisecond or two."""


class Fleet:
    """Nodes, pods, devices and assumed pods, merged into snapshots.

    Everything here runs on the event loop's thread and never awaits, so it needs no locks.

    Args:
        clock: seconds since the epoch.
        in_steps: whether a task calls `settle_in_steps` and `refresh_in_steps` continuously. Then
            that task applies changes of many nodes and new readings, and a snapshot shows the state
            before. A snapshot always includes added and removed pods.

    Attributes:
        changed: published when pods were added to a node or removed from it.
        pod_waiting: published for each new GPU pod that is not bound.
        contested: number of readings refused because another node reports the device.
        unbound_pods: GPU pods that are not bound and have not ended, by UID; read only.
        namespaces: number of GPU pods by namespace; read only.
        pod_changes: counter of pod changes; read only.
        groups: pods by group.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], *, in_steps: bool = False
    ) -> None:
        self.policy = policy
        self.ledger = Ledger()
        self.sources: dict[str, SourceState] = {}
        self.store = DeviceStore(policy)
        self.changed: Topic[[]] = Topic()
        self.pod_waiting: Topic[[PodRecord]] = Topic()
        self.contested = 0
        self._known = KnownPods()
        self.unbound_pods = self._known.unbound
        self.namespaces = self._known.namespaces
        self.pod_memory = self._known.memory
        self.pod_changes = self._known.changes
        self.groups = PodGroups(self._known.by_uid, self.ledger)
        self._clock = clock
        self._latest_at = -math.inf
        self._nodes: dict[str, NodeRecord] = {}
        self._pods_of_node: dict[str, dict[str, PodRecord]] = {}
        self._clocks = PodClocks()
        self._allocations = NodeAllocations(
            policy,
            self.store,
            clocks=self._clocks,
            pod_memory=self.pod_memory,
            is_out=lambda: self._snapshots.is_out(),  # noqa: PLW0108 - they are built later
        )
        self._failures = FailureLog(policy.early_failures, self.store.had_fault)
        self._requests = RequestTable()
        self._in_steps = in_steps
        self._gained, self._dirty, self._late = set[str](), set[str](), set[str]()
        self._ended: set[str] = set()
        self._shares: dict[str, Sequence[Share]] = {}
        self._foreign: dict[str, Mapping[DeviceKey, tuple[ForeignProcess, ...]]] = {}
        self._snapshots = Snapshots(
            self.store,
            self._allocations,
            self._failures,
            clock,
            requests=self._requests,
            in_steps=in_steps,
        )

    # --- API server -----------------------------------------------------------------------------

    def replace_nodes(self, records: Iterable[NodeRecord]) -> None:
        """Replace all nodes."""
        listed = {record.name: record for record in records}
        for name in self._nodes.keys() - listed.keys():
            self.remove_node(name)
        for record in listed.values():
            self.apply_node(record)

    def apply_node(self, record: NodeRecord) -> None:
        """Add or update a node."""
        before, self._nodes[record.name] = self._nodes.get(record.name), record
        self.groups.note_node(before, record)
        self._allocations.offers.note(before, record, self._clock())
        if before is None or not before.offers_as(record):
            self._late.add(record.name)

    def remove_node(self, name: str) -> None:
        """Remove a node and its devices."""
        record = self._nodes.pop(name, None)
        if record is not None:
            self.groups.note_node(record, None)
            self._allocations.forget(name, self._clock())
            self._shares.pop(name, None)
            self._foreign.pop(name, None)
            self._ended.discard(name)
            self._unmark(name)
            self._ended.discard(name)
            self._failures.forget(name)
            self.store.forget_node(name)
            self._snapshots.forget(name)
            if not self._nodes:
                self._requests.clear()
                self._allocations.similar_pods.clear()

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Replace all GPU pods."""
        listed = {record.uid: record for record in records}
        now = self._clock()
        for uid in self.pods.keys() - listed.keys():
            self.remove_pod(uid, now)
        for record in listed.values():
            self.apply_pod(record)

    def apply_pod(self, record: PodRecord) -> None:
        """Add or update a pod."""
        before, now = self.pods.get(record.uid), self._clock()
        record = self._clocks.correct(before, record, now)
        if before == record:
            return
        self._known.put(record)
        self.groups.note(before, record)
        self._clocks.note(before, record, now)
        self._assume_nominated(before, record)
        if before is not None and before.holds_devices and not record.holds_devices:
            self._end_tenancy(before, self._clocks.ended_at(record, now))
        if record.holds_devices:
            self._pods_of_node.setdefault(record.node, {})[record.uid] = record
        if not record.node:
            if before is None:
                self._requests.note(record, required_models(record))
                self.pod_waiting.publish(record)
            return
        if record.holds_devices and not (before is not None and before.holds_devices):
            self.groups.note_bound(record, until=now + self.policy.assumed.tentative_seconds)
            self._gained.add(record.node)
        self._dirty.add(record.node)
        self.changed.publish()
        if record.is_failed_early:
            self._failures.note(record, record.failed_at or now)
            self._snapshots.mark_stale()

    def apply_group_size(self, key: str, size: int | None) -> None:
        """Set the size of a pod group from its API object; None if no object states a size."""
        self.groups.note_size(key, size)

    def apply_host_use(self, node: str, requested: HostResources) -> None:
        """Update the sum of CPU, memory and storage that all pods of a node request."""
        if self._allocations.note_requested(node, requested):
            self._late.add(node)

    def _assume_nominated(self, before: PodRecord | None, record: PodRecord) -> None:
        """Update the assumption about a pod after its binding or nomination changed."""
        if record.node or record.phase.is_terminal:
            self.ledger.drop(record.uid)
        elif record.nominated_node:
            self.ledger.assume(
                Assumption(
                    uid=record.uid,
                    key=record.key,
                    node=record.nominated_node,
                    resources=tuple(record.resources.items()),
                    memory_bytes=self.memory_on(record.nominated_node, record),
                    expected_bytes=self.expected_bytes(record),
                    host=record.host,
                    rank=(-record.priority, record.created_at, record.uid),
                    expires_at=None,
                )
            )
        else:
            assumed = self.ledger.get(record.uid)
            if assumed and assumed.is_ended_by(before, record):
                self.ledger.drop(record.uid)

    def remove_pod(self, uid: str, at: float) -> None:
        """Remove a deleted pod."""
        self.ledger.end(uid, self._clock() + self.policy.assumed.tentative_seconds)
        record = self.pods.get(uid)
        self._clocks.forget(uid)
        if record is not None and record.holds_devices:
            self._end_tenancy(record, at)  # needs the memory that the pod was seen to use
        self.groups.note(self._known.pop(uid), None)

    def _end_tenancy(self, record: PodRecord, at: float) -> None:
        record = self._declared(record, record.node)
        self._settle([record.node])
        others = self._pods_of_node.get(record.node, {})
        others.pop(record.uid, None)
        if not others:
            self._pods_of_node.pop(record.node, None)
        self._allocations.end_tenancy(record, at, has_others=bool(others))
        self._ended.add(record.node)
        self._dirty.add(record.node)
        self.changed.publish()

    # --- sources --------------------------------------------------------------------------------

    def apply_readings(self, readings: Readings) -> None:
        """Apply one answer of a source at once."""
        finish(self.readings_in_steps(readings))

    def readings_in_steps(self, readings: Readings) -> Steps[None]:
        """Apply one answer of a source in cooperative steps.

        Only one answer may be in progress at a time.
        """
        now, own = self._time(), readings.own
        # The holders come first: what a pod uses that the answer is the first to show is not
        # foreign.
        if own is None:
            self._late |= yield from self._allocations.apply_holders(readings)
        else:
            self._late |= self._allocations.apply_own_holders(own.holders)
        if self.sources:
            yield from self.settle_in_steps()
        applied = yield from self.store.apply_in_steps(readings, now)
        if (later := self._time()) < now:  # the clock was set back meanwhile
            self.store.shift_back(0.0, later)
        self._late |= applied.changed_nodes
        yield
        if own is not None:
            self._note_own(readings, own, applied)
            yield from self.settle_in_steps()
            for node in self._shares.keys() & own.nodes:
                # The shares of a report arrive just before the report itself.
                self._allocations.note_shares(node, self.pods_on(node), self._shares.pop(node))
            return
        self._late |= self._allocations.unsettled | self._allocations.expire_loading(now)
        divided = iter(readings.divided)
        while some := list(islice(divided, _PIECE_SHARES)):
            self._late |= self._allocations.note_divided(some)
            yield
        self._late |= self.store.forget(now)
        self.sources[readings.source] = SourceState(
            at=readings.at,
            devices=len(readings.devices),
            unmatched_series=readings.unmatched_series,
            unmatched_example=readings.unmatched_example,
            disagreements=int(applied.disagree.sum()),
        )
        self._snapshots.mark_stale()
        yield
        yield from self.settle_in_steps()
        yield from self._apply_shares(readings)

    def _apply_shares(self, readings: Readings) -> Steps[None]:
        """Apply the memory use that a source reports per pod, in cooperative steps."""
        by_node: dict[str, list[tuple[DeviceKey, str, int]]] = {}
        for done, (device, pod, held) in enumerate(readings.shares, 1):
            if done % _PIECE_SHARES == 0:
                yield
            row = self.store.row_of(device)
            info = None if row is None else self.store.info(row)
            if info is not None:
                by_node.setdefault(info.node, []).append((device, pod, held))
        yield
        for done, (node, of_node) in enumerate(by_node.items(), 1):
            uids = {pod.key: pod.uid for pod in self.pods_on(node)}
            shares = [(device, uids[pod], held) for device, pod, held in of_node if pod in uids]
            self.pod_memory.note_last(shares)
            self._allocations.note_shares(node, self.pods_on(node), shares)
            if done % _PIECE_NODES == 0:
                yield

    def _note_own(self, readings: Readings, own: Own, applied: Applied) -> None:
        """Apply the agents' reports about their own nodes."""
        # A node may have been removed since its report came.
        replicas = {node: one for node, one in own.replicas.items() if node in self._nodes}
        self._late |= self._allocations.sharing.note_replicas(replicas)
        self._late |= self._allocations.unsettled.intersection(own.nodes)
        self._snapshots.note_readings([node for node in own.news if node in self._allocations.rows])
        self.contested += applied.contested
        self.sources[readings.source] = SourceState(
            at=readings.at,
            devices=own.devices,
            unmatched_series=0,
            unmatched_example="",
            disagreements=self.store.disagreements(readings.source),
        )

    def note_shares(self, node: str, shares: Sequence[Share], at: float) -> None:
        """Apply the memory that the pods of a node use on shared devices.

        Args:
            shares: memory by device and pod UID, without duplicates.
            at: time of the measurement, seconds since the epoch.
        """
        self.pod_memory.note(node, shares, at)
        self._allocations.note_shares(node, self.pods_on(node), shares)
        self._shares[node] = shares

    def note_foreign(
        self, node: str, processes: Mapping[DeviceKey, tuple[ForeignProcess, ...]]
    ) -> None:
        """Replace the foreign processes of a node, by device; for display only."""
        if processes:
            self._foreign[node] = processes
        else:
            self._foreign.pop(node, None)

    def prefer(self, source: str, seconds: float) -> None:
        """Prefer the agents' readings to newer ones of another source for this many seconds."""
        self.store.prefer(source, seconds)
        self._allocations.prefer_own(seconds)

    def expire_silent(self) -> None:
        """Fall back to other sources where an agent is silent; drop unreported devices."""
        now = self._time()
        self._late |= self._allocations.expire_own(now) | self.store.forget(now)
        self._late |= self._allocations.expire_loading(now)

    def history_in_steps(self, history: History) -> Steps[None]:
        """Fill the windows with past readings, in steps; call once, after the first readings."""
        yield from self.settle_in_steps()
        yield from self.store.history_in_steps(history)
        self._snapshots.mark_stale()

    @property
    def is_settled(self) -> bool:
        """Whether the allocation of every node is up to date."""
        return not (self._dirty or self._late)

    def settle_in_steps(self) -> Steps[None]:
        """Recompute the allocations of changed nodes, in cooperative steps."""
        while not self.is_settled:
            self._settle(islice(self._dirty or self._late, _PIECE_NODES))
            yield
            if self._snapshots.is_far_behind:
                self._snapshots.get(self._nodes, self.policy, self._clock())
                yield

    def refresh_in_steps(
        self, prepare: Callable[[Snapshot], Steps[None]] | None = None
    ) -> Steps[None]:
        """Estimate all devices again in steps, if it is time; the last step publishes the result.

        Only one refresh, or one answer of a source, may be in progress at a time.

        Args:
            prepare: called with the coming snapshot, for slow preparation.
        """
        yield from self._snapshots.refresh_in_steps(self._nodes, self.snapshot, prepare)

    # --- settings -----------------------------------------------------------------------------

    def adopt_in_steps(self, policy: Policy) -> Steps[None]:
        """Switch to another policy; readings, allocations and assumptions stay.

        If it changes allocations, the nodes are allocated again in the steps after the switch.
        """
        yield from self.store.adopt_in_steps(policy)
        before, self.policy = self.policy, policy
        self._failures.adopt(policy.early_failures)
        self._allocations.adopt(policy)
        self._snapshots.discard_estimates()
        if _allocation_settings(policy) != _allocation_settings(before):
            self._late |= self._nodes.keys()
            yield from self.settle_in_steps()

    # --- queries --------------------------------------------------------------------------------

    @property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """Nodes by name."""
        return self._nodes

    @property
    def pods(self) -> Mapping[str, PodRecord]:
        """GPU pods by UID."""
        return self._known.by_uid

    def pods_on(self, node: str) -> tuple[PodRecord, ...]:
        """Return the pods that hold devices of a node, with memory shares converted to bytes."""
        pods = tuple(self._pods_of_node.get(node, {}).values())
        if not any(pod.memory_share for pod in pods):
            return pods
        return tuple(self._declared(pod, node) for pod in pods)

    def largest_card(self) -> int:
        """Return the memory of the cluster's largest card in bytes, 0 if unknown."""
        return int(self.snapshot().telemetry.memory_total_bytes.max(initial=0.0))

    def memory_on(self, node: str, pod: GpuRequest | PodRecord) -> int | None:
        """Return the memory per device that a pod requires on a node, None if unknown."""
        if not pod.memory_share:
            return pod.memory_bytes or None
        rows = self._allocations.rows.get(node, {})
        of_pod = (row.slots for resource, row in rows.items() if resource in dict(pod.resources))
        devices = [*chain.from_iterable(of_pod)] or self.store.rows_on([node])
        shared = int(pod.memory_share * self.store.largest_bytes(devices))
        return max(shared, pod.memory_bytes or 0) or None

    def _declared(self, pod: PodRecord, node: str) -> PodRecord:
        return replace(pod, memory_bytes=self.memory_on(node, pod)) if pod.memory_share else pod

    def tenants_of(self, row: int) -> tuple[str, ...]:
        """Return the keys of the pods that are known to hold a device."""
        info = self.store.info(row)
        return self._allocations.tenants_on(info.node).get(row, ()) if info else ()

    def foreign_on(self, info: DeviceInfo) -> tuple[ForeignProcess, ...]:
        """Return the foreign processes that the agent reports on a device, most memory first."""
        return self._foreign.get(info.node, {}).get(info.key, ())

    def gpus_of(self, record: PodRecord) -> tuple[int, ...]:
        """Return the indices of a pod's GPUs, as sources report them; () if none does."""
        found = {
            index
            for index, rows in rows_by_index(record.node, self.store).items()
            if any(record.key in self.tenants_of(row) for row in rows)
        }
        return tuple(sorted(found))

    def expected_bytes(self, record: PodRecord) -> int | None:
        """Return the memory that similar pods were measured to use.

        None if no similar pod was measured, or if the pod declares its memory.
        """
        return self._allocations.similar_pods.of(record)

    def measured_like(self, kin: Kin) -> tuple[str, list[int]] | None:
        """Return the memory of the most similar pods in bytes, and the key that they share."""
        return self._allocations.similar_pods.measured(kin)

    def informed(self, request: GpuRequest, kin: Kin) -> GpuRequest:
        """Add the fleet's knowledge to a request: nodes to avoid, expected memory, targets.

        Args:
            kin: keys of similar pods: owner, images, requests.
        """
        if request.targets:
            request = replace(request, targets=aim(request, self.snapshot(), self.store))
        if not kin:
            return request
        avoided = self._failures.of_owner(kin[0], self._clock())
        expected = None
        if request.memory_bytes is None and not request.memory_share:
            expected = self._allocations.similar_pods.expected(kin)
        if not avoided and expected is None:
            return request
        return replace(request, avoided=avoided, expected_bytes=expected)

    def group_need(self, uid: str, request: GpuRequest, snapshot: Snapshot) -> GroupNeed | None:
        """Return the needs of a pod's group, None if the pod is in none."""
        if request.group is None:
            return None
        return self.groups.need(uid, request, snapshot, self._nodes, self.policy)

    def overlays_for(self, uid: str) -> Mapping[str, Overlay]:
        """Return the tentative tenants that count for a pod, by resource and node."""
        record = self.pods.get(uid)
        priority = None if record is None else record.priority
        return self.ledger.overlays(without=uid, priority=priority)

    def early_failures(self, node: str) -> int:
        """Return the number of owners whose early failures count against a node."""
        return self._failures.count(node)

    @property
    def node_index(self) -> NodeIndex:
        """Node index of the latest snapshot."""
        return (
            EMPTY_NODE_INDEX
            if self._snapshots.current is None
            else self._snapshots.current.node_index
        )

    @property
    def offered(self) -> Collection[str]:
        """Resources that nodes offer in the latest snapshot."""
        return () if self._snapshots.current is None else self._snapshots.current.pools.keys()

    def snapshot(self) -> Snapshot:
        """Return the current snapshot; the same object as long as nothing has changed."""
        now = self._time()
        self.ledger.expire(now)
        # A placed pod must count at once. Ended pods, changed nodes and readings may wait if they
        # concern many nodes.
        if self._gained:
            self._settle(self._gained)
        for changed in (self._dirty, self._late):
            if changed and (not self._in_steps or len(changed) <= _PIECE_NODES):
                self._settle(changed)
        return self._snapshots.get(self._nodes, self.policy, now)

    def snapshot_of_all(self) -> Snapshot:
        """Return a snapshot with all pending changes applied; this may take long."""
        finish(self.settle_in_steps())
        self._snapshots.discard_estimates()
        return self.snapshot()

    def leaving(self, node: str, victims: frozenset[str]) -> dict[str, Leaving]:
        """Return the state of a node's devices without some pods (UIDs), by resource."""
        return self._allocations.leaving(self._nodes[node], self.pods_on(node), victims)

    def is_shown(self, uid: str) -> bool:
        """Return whether a source reports which devices a pod holds."""
        if (pod := self.pods.get(uid)) is None:
            return False
        return any(pod.key in on_it for on_it in self._allocations.tenants_on(pod.node).values())

    def _time(self) -> float:
        """Return the seconds since the epoch; shift recorded times if the clock was set back."""
        now, before = self._clock(), self._latest_at
        self._latest_at = now
        if now < before - _STEP_SECONDS:
            # Otherwise noted times would lie in the future for as long as the step.
            seconds = before - now
            self.store.shift_back(seconds, now)
            self.ledger.shift_back(seconds)
            self._allocations.shift_back(seconds)
            self._failures.shift_back(seconds)
            self._clocks.shift_back(seconds)
            self._snapshots.mark_stale()
        return now

    def _settle(self, names: Iterable[str]) -> None:
        """Recompute the allocations of the changed nodes, in an order that all replicas share."""
        now = self._clock()
        for name in sorted(name for name in names if name in self._dirty or name in self._late):
            self._unmark(name)
            if name in self._nodes:
                change = self._allocations.settle(self._nodes[name], self.pods_on(name), now)
                if change is AllocationChange.DEVICES:
                    self._snapshots.mark_reshaped()
                needs_estimate = change >= AllocationChange.ESTIMATES or name in self._ended
                if change or needs_estimate:
                    self._snapshots.mark_changed(name, needs_estimate=needs_estimate)
            self._ended.discard(name)
        # Replace emptied sets: iterating over one is as slow as when it was full.
        self._gained, self._dirty = self._gained or set(), self._dirty or set()
        self._late = self._late or set()
        surplus, self._allocations.surplus = self._allocations.surplus, []
        self.store.drop(surplus)

    def _unmark(self, name: str) -> None:
        """Remove a node from the set of changed nodes."""
        for changed in (self._gained, self._dirty, self._late):
            changed.discard(name)


def _allocation_settings(policy: Policy) -> tuple[object, ...]:
    """Return the settings on which allocations depend."""
    return policy.assumed, policy.shared_policy, policy.prices
