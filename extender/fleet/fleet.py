"""The fleet: takes what the sources say as it comes, and gives the next snapshot when asked."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType

from extender.core.devices.readings import DeviceKey, History, Own, Readings
from extender.core.nodes.assumed_pods import Assumption, Ledger
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.nodes.node_index import EMPTY_ROLL, NodeIndex
from extender.core.nodes.pod_owners import Kin
from extender.core.nodes.snapshot import Leaving, Snapshot
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.core.steps import Steps, finish
from extender.fleet.allocation import AllocationChange, NodeAllocations, is_allocated_by
from extender.fleet.clocks import PodClocks
from extender.fleet.failures import FailureLog
from extender.fleet.pod_memory import Share
from extender.fleet.pods import KnownPods
from extender.fleet.registry import Applied
from extender.fleet.snapshots import Snapshots
from extender.fleet.source_state import SourceState
from extender.fleet.staged_policy import StagedPolicy
from extender.fleet.store import DeviceStore

STEP_SECONDS = 1.0
"""A clock that goes back by more was put back."""

PIECE_NODES = 8
"""Nodes that are laid out before others may have their turn: a millisecond or two."""

DRAFT_ROUNDS = 3
"""So often nodes that change while all are drafted under other settings are drafted again."""


class Fleet:
    """Nodes, pods, devices and assumed pods, merged into snapshots.

    Everything here runs on the event loop's thread and never awaits, so it needs no locks.

    Args:
        policy: the settings of the decision.
        clock: seconds since the epoch.
        in_steps: somebody calls `settle_in_steps` and `refresh_in_steps` again and again. Where
            many nodes have changed at once, or readings are new, a snapshot then leaves that to
            them, and shows things as they were; nodes where pods came or went it lays out itself.

    Attributes:
        on_change: is called when pods came to a node or left it; by whoever places one, too.
        on_waiting: is called with each GPU pod that comes and is on no node yet.
        contested: readings of devices that were not taken from a node on which they are not seen.
        unbound_pods: GPU pods that are on no node and have not ended, by UID; to be read only.
        namespaces: where there are GPU pods; likewise.
        pod_changes: how often they have changed; likewise.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], *, in_steps: bool = False
    ) -> None:
        self.policy = policy
        self.ledger = Ledger()
        self.sources: dict[str, SourceState] = {}
        self.store = DeviceStore(policy)
        self.on_change: Callable[[], None] = lambda: None
        self.on_waiting: Callable[[PodRecord], None] = lambda _: None
        self.contested = 0
        self._known = KnownPods()
        self.unbound_pods = self._known.unbound
        self.namespaces = self._known.namespaces
        self.pod_memory = self._known.memory
        self.pod_changes = self._known.changes
        self._clock = clock
        self._latest_at = -math.inf
        self._nodes: dict[str, NodeRecord] = {}
        self._pods_of_node: dict[str, dict[str, PodRecord]] = {}
        self._layouts = NodeAllocations(policy, self.store)
        self._failures = FailureLog(policy.early_failures, self.store.had_fault)
        self._in_steps = in_steps
        self._gained, self._dirty, self._late = set[str](), set[str](), set[str]()
        self._ended: set[str] = set()
        self._shares: dict[str, Sequence[Share]] = {}
        self._snapshots = Snapshots(
            self.store, self._layouts, self._failures, clock, in_steps=in_steps
        )
        self._layouts.is_out = self._snapshots.is_out
        self._clocks = PodClocks()
        self._layouts.started_at = self._clocks.started_at
        self._layouts.works_since = self._clocks.works_since
        self._layouts.departures.told = self.pod_memory.last

    # --- what the API server says -------------------------------------------------------------

    def replace_nodes(self, records: Iterable[NodeRecord]) -> None:
        """Take over a complete list of nodes."""
        listed = {record.name: record for record in records}
        for name in self._nodes.keys() - listed.keys():
            self.remove_node(name)
        for record in listed.values():
            self.apply_node(record)

    def apply_node(self, record: NodeRecord) -> None:
        """Take over a node that was added or changed."""
        before, self._nodes[record.name] = self._nodes.get(record.name), record
        self._layouts.offers.note(before, record, self._clock())
        if before is None or not before.offers_as(record):
            self._late.add(record.name)

    def remove_node(self, name: str) -> None:
        """Forget a node that is gone, and its devices."""
        if self._nodes.pop(name, None) is not None:
            self._layouts.forget(name, self._clock())
            self._shares.pop(name, None)
            self._unmark(name)
            self._failures.forget(name)
            self.store.forget_node(name)
            self._snapshots.forget(name)

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Take over a complete list of GPU pods."""
        listed = {record.uid: record for record in records}
        now = self._clock()
        for uid in self.pods.keys() - listed.keys():
            self.remove_pod(uid, now)
        for record in listed.values():
            self.apply_pod(record)

    def apply_pod(self, record: PodRecord) -> None:
        """Take over a pod that was added or changed."""
        before, now = self.pods.get(record.uid), self._clock()
        record = self._clocks.correct(before, record, now)
        if before == record:
            return
        self._known.put(record)
        self._clocks.note(before, record, now)
        self._assume_nominated(before, record)
        if before is not None and before.holds_devices and not record.holds_devices:
            self._end_tenancy(before, self._clocks.ended_at(record, now))
        if record.holds_devices:
            self._pods_of_node.setdefault(record.node, {})[record.uid] = record
        if not record.node:
            if before is None:
                self.on_waiting(record)
            return
        if record.holds_devices and not (before is not None and before.holds_devices):
            self._gained.add(record.node)
        self._dirty.add(record.node)
        self.on_change()
        if record.is_failed_early:
            self._failures.note(record, record.failed_at or now)
            self._snapshots.doubt()

    def apply_host_use(self, node: str, requested: HostResources) -> None:
        """Take over what all pods of a node request of its CPU and memory."""
        if self._layouts.note_requested(node, requested):
            self._late.add(node)

    def _assume_nominated(self, before: PodRecord | None, record: PodRecord) -> None:
        """Keep what is assumed of a pod in step with its binding and nomination."""
        if record.node or record.phase.is_terminal:
            self.ledger.drop(record.uid)
        elif record.nominated_node:
            self.ledger.assume(
                Assumption(
                    uid=record.uid,
                    key=record.key,
                    node=record.nominated_node,
                    resources=tuple(record.resources.items()),
                    memory_bytes=record.memory_bytes,
                    expected_bytes=self.expected_bytes(record),
                    expires_at=None,
                )
            )
        else:
            assumed = self.ledger.get(record.uid)
            if assumed and assumed.is_ended_by(before, record):
                self.ledger.drop(record.uid)

    def remove_pod(self, uid: str, at: float) -> None:
        """Forget a pod that was deleted."""
        self.ledger.end(uid, self._clock() + self.policy.assumed.tentative_seconds)
        record = self.pods.get(uid)
        self._clocks.forget(uid)
        if record is not None and record.holds_devices:
            # What it was seen to hold is asked for then.
            self._end_tenancy(record, at)
        self._known.pop(uid)

    def _end_tenancy(self, record: PodRecord, at: float) -> None:
        """Free the devices of a pod that has ended."""
        self._settle([record.node])
        others = self._pods_of_node.get(record.node, {})
        others.pop(record.uid, None)
        if not others:
            self._pods_of_node.pop(record.node, None)
        self._layouts.end_tenancy(record, at, has_others=bool(others))
        self._ended.add(record.node)
        self._dirty.add(record.node)
        self.on_change()

    # --- what the sources say -----------------------------------------------------------------

    def apply_readings(self, readings: Readings) -> None:
        """Take over one answer of a source, at once."""
        finish(self.readings_in_steps(readings))

    def readings_in_steps(self, readings: Readings) -> Steps[None]:
        """Take over one answer of a source in steps; whoever asks between them gets an answer.

        Only one answer may be under way at a time.
        """
        now, own = self._time(), readings.own
        if self.sources:
            # Who holds what must be known before a reading is believed to show foreign use.
            yield from self.settle_in_steps()
        applied = yield from self.store.apply_in_steps(readings, now)
        if (later := self._time()) < now:  # what came after the step is still dated before it
            self.store.put_back(0.0, later)
        self._late |= applied.changed_nodes
        yield
        if own is not None:
            self._note_own(readings, own, applied)
            yield from self.settle_in_steps()
            for node in self._shares.keys() & own.nodes:
                # They came just before what they are part of.
                self._layouts.note_shares(node, self.pods_on(node), self._shares.pop(node))
            return
        self._late |= self._layouts.young | self._layouts.expire_loading(now)
        self._late |= yield from self._layouts.map_tenants(readings)
        self._late |= self._layouts.note_divided(readings.divided)
        self._late |= self.store.forget(now)
        self.sources[readings.source] = SourceState(
            at=readings.at,
            devices=len(readings.devices),
            unmatched_series=readings.unmatched_series,
            unmatched_example=readings.unmatched_example,
            disagreements=int(applied.disagree.sum()),
        )
        self._snapshots.doubt()
        yield
        yield from self.settle_in_steps()
        yield from self._note_told(readings)

    def _note_told(self, readings: Readings) -> Steps[None]:
        """Take over what a source tells of pods' memory, some nodes in each step."""
        by_node: dict[str, list[tuple[DeviceKey, str, int]]] = {}
        for device, pod, held in readings.shares:
            row = self.store.row_of(device)
            info = None if row is None else self.store.info(row)
            if info is not None:
                by_node.setdefault(info.node, []).append((device, pod, held))
        yield
        for done, (node, told) in enumerate(by_node.items(), 1):
            uids = {pod.key: pod.uid for pod in self.pods_on(node)}
            shares = [(device, uids[pod], held) for device, pod, held in told if pod in uids]
            self.pod_memory.note_last(shares)
            self._layouts.note_shares(node, self.pods_on(node), shares)
            if done % PIECE_NODES == 0:
                yield

    def _note_own(self, readings: Readings, own: Own, applied: Applied) -> None:
        """Take over what sources on some nodes say of these alone."""
        self._late |= self._layouts.map_own(own.holders)
        self._late |= self._layouts.sharing.note_replicas(own.replicas)
        self._late |= self._layouts.young.intersection(own.nodes)
        self._snapshots.note_news([node for node in own.news if node in self._layouts.rows])
        self.contested += applied.contested
        self.sources[readings.source] = SourceState(
            at=readings.at,
            devices=own.devices,
            unmatched_series=0,
            unmatched_example="",
            disagreements=self.store.disagreements(readings.source),
        )

    def note_shares(self, node: str, shares: Sequence[Share], at: float) -> None:
        """Take over what pods (UIDs) of a node hold of the memory of shared devices.

        Args:
            node: the node.
            shares: each pod on each shared device once.
            at: when that was so, seconds since the epoch.
        """
        self.pod_memory.note(node, shares, at)
        self._layouts.note_shares(node, self.pods_on(node), shares)
        self._shares[node] = shares

    def hold(self, source: str, seconds: float) -> None:
        """Believe a source on the nodes themselves for so long before another's newer word."""
        self.store.hold(source, seconds)
        self._layouts.hold_own(seconds)

    def look_after_silent(self) -> None:
        """Go by other sources where one on a node is silent, and forget devices that none shows."""
        now = self._time()
        self._late |= self._layouts.expire_own(now) | self.store.forget(now)
        self._late |= self._layouts.expire_loading(now)

    def apply_history(self, history: History) -> None:
        """Fill the windows with past readings, once at start: after the first readings."""
        finish(self.history_in_steps(history))

    def history_in_steps(self, history: History) -> Steps[None]:
        """Fill the windows likewise, in steps."""
        yield from self.settle_in_steps()
        yield from self.store.history_in_steps(history)
        self._snapshots.doubt()

    @property
    def is_settled(self) -> bool:
        """Whether every node is laid out as it is now."""
        return not (self._dirty or self._late)

    def settle_in_steps(self) -> Steps[None]:
        """Lay out the nodes that have changed, some at a time."""
        while not self.is_settled:
            self._settle(islice(self._dirty or self._late, PIECE_NODES))
            yield
            if self._snapshots.is_far_behind:
                self._snapshots.get(self._nodes, self.policy, self._clock())
                yield

    def refresh_in_steps(
        self, prepare: Callable[[Snapshot], Steps[None]] | None = None
    ) -> Steps[None]:
        """Believe all devices anew in steps, if it is time; snapshots show it from the last one on.

        Only one renewal, or one answer of a source, may be under way at a time.

        Args:
            prepare: is given the snapshot to come, to do with it what takes long.
        """
        yield from self._snapshots.refresh_in_steps(self._nodes, self.snapshot, prepare)

    # --- settings -----------------------------------------------------------------------------

    def adopt_in_steps(self, policy: Policy) -> Steps[None]:
        """Decide by other settings from the last step on, and by those of before until then.

        No snapshot is made by half of each. What is known, held and assumed stays. No readings
        had best be taken over meanwhile: they cost the nodes that they change another step.
        """
        draft = StagedPolicy(self._layouts, policy)
        if is_allocated_by(policy) != is_allocated_by(self.policy):
            yield from self.settle_in_steps()
            for _ in range(DRAFT_ROUNDS):
                names = iter(draft.outdated())
                while some := list(islice(names, PIECE_NODES)):
                    known = [name for name in some if name in self._nodes]
                    draft.add((self._nodes[name], self.pods_on(name)) for name in known)
                    yield
                if len(draft.outdated()) <= PIECE_NODES:
                    break
            if self._snapshots.current is not None:
                yield from draft.patch(self._snapshots.current.pools)
        yield from self.store.adopt_in_steps(policy)
        self._adopt(policy, draft)

    def _adopt(self, policy: Policy, draft: StagedPolicy) -> None:
        """Put other settings in force, and what was drafted under them."""
        is_drafted = is_allocated_by(policy) != is_allocated_by(self.policy)
        self.policy = policy
        self._failures.adopt(policy.early_failures)
        outdated = draft.put_in_force(self.store)
        self._snapshots.outdate()
        if not is_drafted:
            return
        for name in outdated:
            if name in self._nodes:
                self._dirty.add(name)
                self._snapshots.touch(name, is_doubted=True)
        if self._snapshots.current is not None:
            pools = draft.pools_for(self._snapshots.current.pools)
            if pools is None:
                self._snapshots.reshape()
            else:
                self._snapshots.current = replace(
                    self._snapshots.current, pools=MappingProxyType(dict(pools))
                )

    # --- what others ask ----------------------------------------------------------------------

    @property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """Nodes by name."""
        return self._nodes

    @property
    def pods(self) -> Mapping[str, PodRecord]:
        """GPU pods by UID."""
        return self._known.by_uid

    def pods_on(self, node: str) -> tuple[PodRecord, ...]:
        """Return the pods that hold devices of a node."""
        return tuple(self._pods_of_node.get(node, {}).values())

    def tenants_of(self, row: int) -> tuple[str, ...]:
        """Return the pods that are known to hold a device."""
        info = self.store.info(row)
        return self._layouts.tenants_on(info.node).get(row, ()) if info else ()

    def expected_bytes(self, record: PodRecord) -> int | None:
        """Return what pods like one were measured to use, None if none was or it declared it."""
        return self._layouts.like.of(record)

    def informed(self, request: GpuRequest, kin: Kin) -> GpuRequest:
        """Return a request with what is known of pods that are like the one that asks.

        Args:
            request: what a pod asks for.
            kin: its keys.
        """
        if not kin:
            return request
        avoided = self._failures.of_owner(kin[0], self._clock())
        expected = None
        if request.memory_bytes is None:
            expected = self._layouts.like.expected(kin)
        if not avoided and expected is None:
            return request
        return replace(request, avoided=avoided, expected_bytes=expected)

    def early_failures(self, node: str) -> int:
        """Return of how many owners the pods that died early on a node count against it."""
        return self._failures.count(node)

    @property
    def node_index(self) -> NodeIndex:
        """The nodes by number as they are in the latest snapshot."""
        return EMPTY_ROLL if self._snapshots.current is None else self._snapshots.current.node_index

    @property
    def offered(self) -> Collection[str]:
        """The resources that nodes offer as they are in the latest snapshot."""
        return () if self._snapshots.current is None else self._snapshots.current.pools.keys()

    def snapshot(self) -> Snapshot:
        """Return the fleet as it is now; the same object as long as nothing has changed."""
        now = self._time()
        self.ledger.expire(now)
        # Who was placed must count at once; who is gone, what nodes are and what readings show may
        # wait where that concerns many.
        if self._gained:
            self._settle(self._gained)
        for changed in (self._dirty, self._late):
            if changed and (not self._in_steps or len(changed) <= PIECE_NODES):
                self._settle(changed)
        return self._snapshots.get(self._nodes, self.policy, now)

    def snapshot_of_all(self) -> Snapshot:
        """Return the fleet with all nodes and devices that there are; it may take long."""
        finish(self.settle_in_steps())
        self._snapshots.outdate()
        return self.snapshot()

    def leaving(self, node: str, victims: frozenset[str]) -> dict[str, Leaving]:
        """Return what a node's devices would be with some pods (UIDs) gone, by resource."""
        return self._layouts.leaving(self._nodes[node], self.pods_on(node), victims)

    def is_shown(self, uid: str) -> bool:
        """Tell whether some source shows which devices a pod holds."""
        if (pod := self.pods.get(uid)) is None:
            return False
        return any(pod.key in on_it for on_it in self._layouts.tenants_on(pod.node).values())

    def _time(self) -> float:
        """Return the time, seconds since the epoch; notice if the clock was put back."""
        now, before = self._clock(), self._latest_at
        self._latest_at = now
        if now < before - STEP_SECONDS:
            # Else all that was noted would be new, and all that is would be old, for so long.
            seconds = before - now
            self.store.put_back(seconds, now)
            self.ledger.put_back(seconds)
            self._layouts.put_back(seconds)
            self._failures.put_back(seconds)
            self._clocks.put_back(seconds)
            self._snapshots.doubt()
        return now

    def _settle(self, names: Iterable[str]) -> None:
        """Lay out those of these nodes that have changed."""
        now = self._clock()
        for name in [name for name in names if name in self._dirty or name in self._late]:
            self._unmark(name)
            if name in self._nodes:
                change = self._layouts.settle(self._nodes[name], self.pods_on(name), now)
                if change is AllocationChange.DEVICES:
                    self._snapshots.reshape()
                is_doubted = change >= AllocationChange.BELIEFS or name in self._ended
                if change or is_doubted:
                    self._snapshots.touch(name, is_doubted=is_doubted)
            self._ended.discard(name)
        # Emptied, a set is as slow to walk through as it was when it was full.
        self._gained, self._dirty = self._gained or set(), self._dirty or set()
        self._late = self._late or set()
        surplus, self._layouts.surplus = self._layouts.surplus, []
        self.store.drop(surplus)

    def _unmark(self, name: str) -> None:
        """Note that a node needs not be laid out."""
        for changed in (self._gained, self._dirty, self._late):
            changed.discard(name)
