"""The fleet: takes what the sources say as it comes, and gives the next snapshot when asked."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

from extender.core.assumed import Assumption, Ledger
from extender.core.inventory import NodeRecord, PodRecord
from extender.core.policy import Policy
from extender.core.readings import History, Readings
from extender.core.signals import believe, believe_again
from extender.core.snapshot import PoolRow, Snapshot, Telemetry
from extender.fleet.failures import FailureLog
from extender.fleet.layouts import NodeLayouts
from extender.fleet.pools import build_pools, renew_pools
from extender.fleet.steps import Steps, finish
from extender.fleet.store import DeviceStore

RENEW_SECONDS = 1.0
"""Beliefs fade with time even when nothing new arrives: they are renewed this often at most."""

PIECE_NODES = 32
"""Nodes that are laid out before others may have their turn: a few milliseconds' work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """What a source last said, for people.

    Attributes:
        at: when it last answered, seconds since the epoch.
        devices: how many devices it saw.
        unmatched_series: series whose labels named no node.
        unmatched_example: labels of one of them, "" where there is none.
        disagreements: devices of which its own signals say contradictory things.
    """

    at: float
    devices: int
    unmatched_series: int
    unmatched_example: str
    disagreements: int


class Fleet:
    """Nodes, pods, devices and assumed pods, merged into snapshots.

    Everything here runs on the event loop's thread and never awaits, so it needs no locks.

    Args:
        policy: the settings of the decision.
        clock: seconds since the epoch.
        in_steps: somebody calls `settle_in_steps` again and again. Where many nodes have changed
            at once, a snapshot then leaves them to that, and shows them as they were; nodes where
            pods came or went it lays out itself.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], *, in_steps: bool = False
    ) -> None:
        self.policy = policy
        self.ledger = Ledger()
        self.sources: dict[str, SourceState] = {}
        self.store = DeviceStore(policy)
        self._clock = clock
        self._nodes: dict[str, NodeRecord] = {}
        self._pods: dict[str, PodRecord] = {}
        self._pods_of_node: dict[str, dict[str, PodRecord]] = {}
        self._layouts = NodeLayouts(policy, self.store)
        self._failures = FailureLog(policy.early_failures)
        self._in_steps = in_steps
        self._dirty: set[str] = set()
        self._late: set[str] = set()
        self._changed: set[str] = set()
        self._is_reshaped = True
        self._is_believed = False
        self._believed_at = 0.0
        self._snapshot: Snapshot | None = None

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
        if self._nodes.get(record.name) != record:
            self._nodes[record.name] = record
            self._late.add(record.name)

    def remove_node(self, name: str) -> None:
        """Forget a node that is gone, and its devices."""
        if self._nodes.pop(name, None) is not None:
            self._layouts.forget(name)
            self._dirty.discard(name)
            self._late.discard(name)
            self._changed.discard(name)
            self._failures.forget(name)
            self.store.forget_node(name)
            self._is_reshaped = True

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Take over a complete list of GPU pods."""
        listed = {record.uid: record for record in records}
        now = self._clock()
        for uid in self._pods.keys() - listed.keys():
            self.remove_pod(uid, now)
        for record in listed.values():
            self.apply_pod(record)

    def apply_pod(self, record: PodRecord) -> None:
        """Take over a pod that was added or changed."""
        before = self._pods.get(record.uid)
        if before == record:
            return
        self._pods[record.uid] = record
        self._assume_nominated(before, record)
        if before is not None and before.holds_devices and not record.holds_devices:
            self._end_tenancy(before, record.ended_at or self._clock())
        if record.holds_devices:
            self._pods_of_node.setdefault(record.node, {})[record.uid] = record
        if record.node:
            self._dirty.add(record.node)
        if record.node and record.is_failed_early:
            self._failures.note(record.node, record.uid, record.ended_at or self._clock())
            self._is_believed = False

    def _assume_nominated(self, before: PodRecord | None, record: PodRecord) -> None:
        """Keep what is assumed of a pod in step with its binding and nomination.

        That it cannot be scheduled is news once: as long as it is said of the last attempt, it
        says nothing of the one under way.
        """
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
                    expires_at=None,
                )
            )
        else:
            assumed = self.ledger.get(record.uid)
            is_news = record.is_unscheduled and not (before and before.is_unscheduled)
            if assumed and (is_news or assumed.expires_at is None):
                self.ledger.drop(record.uid)

    def remove_pod(self, uid: str, at: float) -> None:
        """Forget a pod that was deleted."""
        self.ledger.drop(uid)
        record = self._pods.pop(uid, None)
        if record is not None and record.holds_devices:
            self._end_tenancy(record, at)

    def _end_tenancy(self, record: PodRecord, at: float) -> None:
        """Free the devices of a pod that has ended."""
        self._settle([record.node])
        others = self._pods_of_node.get(record.node, {})
        others.pop(record.uid, None)
        if not others:
            self._pods_of_node.pop(record.node, None)
        self._layouts.end_tenancy(record, at, has_others=bool(others))
        self._dirty.add(record.node)

    # --- what the sources say -----------------------------------------------------------------

    def apply_readings(self, readings: Readings) -> None:
        """Take over one answer of a source, at once."""
        finish(self.readings_in_steps(readings))

    def readings_in_steps(self, readings: Readings) -> Steps[None]:
        """Take over one answer of a source in steps; whoever asks between them gets an answer.

        Only one answer may be under way at a time.
        """
        now = self._clock()
        if self.sources:
            # Who holds what must be known before a reading is believed to show foreign use.
            yield from self.settle_in_steps()
        applied = yield from self.store.apply_in_steps(readings, now)
        self._late |= applied.changed_nodes | self._layouts.young
        yield
        self._late |= yield from self._layouts.map_tenants(readings.tenants, readings.at)
        self._late |= self.store.forget(now)
        self.sources[readings.source] = SourceState(
            at=readings.at,
            devices=len(readings.devices),
            unmatched_series=readings.unmatched_series,
            unmatched_example=readings.unmatched_example,
            disagreements=int(applied.disagree.sum()),
        )
        self._is_believed = False
        yield
        yield from self.settle_in_steps()

    def apply_history(self, history: History) -> None:
        """Fill the windows with past readings, once at start: after the first readings."""
        finish(self.history_in_steps(history))

    def history_in_steps(self, history: History) -> Steps[None]:
        """Fill the windows likewise, in steps."""
        yield from self.settle_in_steps()
        yield from self.store.history_in_steps(history)
        self._is_believed = False

    @property
    def is_settled(self) -> bool:
        """Whether every node is laid out as it is now."""
        return not (self._dirty or self._late)

    def settle_in_steps(self) -> Steps[None]:
        """Lay out the nodes that have changed, some at a time."""
        while not self.is_settled:
            self._settle(islice(self._dirty or self._late, PIECE_NODES))
            yield

    # --- what others ask ----------------------------------------------------------------------

    @property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """Nodes by name."""
        return self._nodes

    @property
    def pods(self) -> Mapping[str, PodRecord]:
        """GPU pods by UID."""
        return self._pods

    def pods_on(self, node: str) -> tuple[PodRecord, ...]:
        """Return the pods that hold devices of a node."""
        return tuple(self._pods_of_node.get(node, {}).values())

    def tenants_of(self, row: int) -> tuple[str, ...]:
        """Return the pods that are known to hold a device."""
        info = self.store.info(row)
        return self._layouts.tenants_on(info.node).get(row, ()) if info else ()

    def early_failures(self, node: str) -> int:
        """Return how many pods died soon after their start on a node, as far as remembered."""
        return self._failures.count(node)

    def snapshot(self) -> Snapshot:
        """Return the fleet as it is now; the same object as long as nothing has changed."""
        now = self._clock()
        self.ledger.expire(now)
        # Who was placed must count at once; what nodes are and what readings show may wait.
        self._settle(self._dirty)
        if not self._in_steps or len(self._late) <= PIECE_NODES:
            self._settle(self._late)
        current = self._snapshot
        if current is None or not self._is_current(now):
            current = self._snapshot = self._next_snapshot(current, now)
        return current

    def lay_out_without(self, node: str, victims: frozenset[str]) -> dict[str, PoolRow]:
        """Return a node's rows as they would be with some pods (UIDs) gone."""
        return self._layouts.lay_out_without(self._nodes[node], self.pods_on(node), victims)

    def is_shown(self, uid: str) -> bool:
        """Tell whether some source shows which devices a pod holds."""
        pod = self._pods.get(uid)
        tenants = self._layouts.tenants_on(pod.node).values() if pod else ()
        return pod is not None and any(pod.key in on_it for on_it in tenants)

    def _is_current(self, now: float) -> bool:
        """Tell whether nothing has changed since the last snapshot, and nothing has faded much."""
        is_changed = self._changed or self._is_reshaped
        return not is_changed and self._is_fresh(now)

    def _is_fresh(self, now: float) -> bool:
        """Tell whether what was last believed of the devices still holds."""
        return self._is_believed and now - self._believed_at < RENEW_SECONDS

    def _next_snapshot(self, before: Snapshot | None, now: float) -> Snapshot:
        """Return a new snapshot, made from the old one where that still holds."""
        version = before.version + 1 if before else 1
        rows = self._layouts.rows
        changed = {name: rows[name] for name in self._changed}
        telemetry = self._patched_telemetry(before, now)
        if before is not None and telemetry is not None:
            nodes, pools = before.nodes, renew_pools(before.pools, changed, telemetry, None)
        else:
            telemetry, _ = believe(self.store.evidence(), self.policy, now)
            suspicion = self._failures.suspicion(now)
            nodes = before.nodes if before and not self._is_reshaped else frozenset(self._nodes)
            self._is_believed, self._believed_at = True, now
            if before is None or self._is_reshaped:
                pools = build_pools(rows, telemetry, suspicion, before.pools if before else {})
            else:
                pools = renew_pools(before.pools, changed, telemetry, suspicion)
            pools = {
                resource: replace(pool, base=version, patched=())
                for resource, pool in pools.items()
            }
        self._changed, self._is_reshaped = set(), False
        return Snapshot(
            version=version,
            at=now,
            nodes=nodes,
            pools=MappingProxyType(pools),
            telemetry=telemetry,
            models=self._layouts.models,
        )

    def _patched_telemetry(self, before: Snapshot | None, now: float) -> Telemetry | None:
        """Return the last telemetry with the changed nodes' devices believed anew.

        None where all devices must be: most changes are one pod's, on one node.
        """
        if before is None or self._is_reshaped or not self._is_fresh(now):
            return None
        if self.store.capacity != len(before.telemetry.utilization):
            return None
        rows = self.store.rows_on(self._changed)
        return believe_again(before.telemetry, rows, self.store.evidence(rows), self.policy, now)

    def _settle(self, names: Iterable[str]) -> None:
        """Lay out those of these nodes that have changed."""
        now = self._clock()
        for name in set(names):
            if name not in self._dirty and name not in self._late:
                continue
            self._dirty.discard(name)
            self._late.discard(name)
            if name in self._nodes:
                pods = self.pods_on(name)
                self._is_reshaped |= self._layouts.settle(self._nodes[name], pods, now)
                self._changed.add(name)
        surplus, self._layouts.surplus = self._layouts.surplus, []
        self.store.drop(surplus)
