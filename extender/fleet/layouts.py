"""What each node offers and who holds it: laid out anew whenever one of them has changed."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from itertools import islice

from extender.core.evaluation import normalize_model
from extender.core.expected import (
    Device,
    Expected,
    devices_behind,
    expected_devices,
    resource_profile,
)
from extender.core.inventory import NodeRecord, PodRecord
from extender.core.landing import NONE_OUT
from extender.core.layout import Tenancy, lay_out
from extender.core.policy import Policy
from extender.core.readings import Holders, Readings
from extender.core.snapshot import Flags, PoolRow
from extender.core.steps import Steps
from extender.fleet.held import (
    HeldDevice,
    TenantsByRow,
    grounds,
    held_devices,
    is_young,
    may_hold,
    put_claimed,
)
from extender.fleet.mapping import Mappings
from extender.fleet.store import DeviceStore

MAX_DEVICES = 256
"""Devices of a node behind one resource that are told apart: 16 cards of 7 instances each, and
room to spare. A kubelet that says it has a million devices must not cost a million rows."""

PIECE_KEYS = 8192
"""Devices whose tenants are compared before others may have their turn: few milliseconds."""


class Change(IntEnum):
    """What has changed when a node was laid out anew; each may have the ones before it in it."""

    NOTHING = 0
    ROWS = 1
    """Who holds what, but nothing that the devices' readings are read by."""
    BELIEFS = 2
    """What the devices' readings are read by."""
    DEVICES = 3
    """There are other devices."""


class NodeLayouts:
    """Each node's row in the pool of each of its resources, and the pods on each device.

    A pod keeps its devices as long as it lives. So one that the mapping has shown once is held to
    be there still while the mapping shows it nowhere: sources lose it now and then, and some name
    only one of the pods that share a device.

    Args:
        policy: the settings of the decision.
        store: the devices.

    Attributes:
        is_out: returns which devices are believed to be out, as `Telemetry` has it.
    """

    def __init__(self, policy: Policy, store: DeviceStore) -> None:
        self._policy = policy
        self._store = store
        self.is_out: Callable[[], Flags] = lambda: NONE_OUT
        self._models: dict[str, int] = {"": 0}
        self._model_ids: dict[str, int] = {}
        self._mappings = Mappings()
        self._nodes: dict[str, NodeRecord] = {}
        self._rows: dict[str, dict[str, PoolRow]] = {}
        self._live: dict[str, TenantsByRow] = {}
        self._held: dict[str, dict[str, tuple[int, ...]]] = {}
        self._young: set[str] = set()
        self._ended: dict[str, dict[str, float]] = {}
        self.surplus: list[int] = []
        """Rows of stand-ins that stand for nothing any more, and of devices that others have taken
        the place of; whoever lays out frees them."""

    @property
    def rows(self) -> Mapping[str, Mapping[str, PoolRow]]:
        """Rows by node and resource, as they were last laid out."""
        return self._rows

    @property
    def young(self) -> frozenset[str]:
        """Nodes with pods that the readings do not cover yet: the next ones may."""
        return frozenset(self._young)

    @property
    def models(self) -> tuple[str, ...]:
        """Model names, normalized; a row's `model_id` points here."""
        return tuple(self._models)

    def tenants_on(self, node: str) -> TenantsByRow:
        """Return the pods that are known to hold the devices of a node."""
        return self._live.get(node, {})

    def map_tenants(self, readings: Readings) -> Steps[set[str]]:
        """Take over which pods hold which devices; return the nodes that this concerns.

        Where the source cannot tell, the last mapping holds as long as a value is fresh.
        """
        replaced = self._mappings.replace(readings, self._policy.freshness.max_age_seconds)
        if replaced is None:
            return set()
        if replaced.is_turned:
            return {name for name in self._rows if not self._mappings.is_own(name)}
        nodes: set[str] = set()
        keys = iter(replaced.devices)
        while some := list(islice(keys, PIECE_KEYS)):
            rows = (self._store.row_of(key) for key in some if replaced.is_other(key))
            infos = (self._store.info(row) for row in rows if row is not None)
            nodes |= {info.node for info in infos if info is not None}
            yield
        return {name for name in nodes if not self._mappings.is_own(name)}

    def map_own(self, holders: Mapping[str, Holders | None]) -> set[str]:
        """Take over who holds the devices of some nodes, as their agents say.

        Args:
            holders: by node; None where the agent cannot tell.

        Returns:
            The nodes where that is not as it was.
        """
        noted = self._mappings.note_own
        return {name for name, told in holders.items() if noted(name, told)}

    def expire_own(self, now: float) -> set[str]:
        """Go by others where a node's agent is silent; return these nodes."""
        return set(self._mappings.expire(now, self._policy.freshness.max_age_seconds))

    def hold_own(self, seconds: float) -> None:
        """Let a node's agent count for so long before a newer word of others."""
        self._mappings.hold_seconds = seconds

    def settle(self, node: NodeRecord, pods: Sequence[PodRecord], now: float) -> Change:
        """Lay a node out and note who holds its devices; tell what has changed by that."""
        name = node.name
        self._forget_ended(name, now)
        tenants = self._tenants(name, pods)
        if replaced := self._replaced(node, tenants):
            self.surplus.extend(replaced)
            tenants = {row: on_it for row, on_it in tenants.items() if row not in replaced}
        before, after = self._rows.get(name), self._lay_out(node, pods, tenants, self._policy)
        is_same_node = self._nodes.get(name) is node
        self._nodes[name] = node
        self._rows[name] = after
        is_afresh = self._note_tenants(name, pods, tenants, now)
        self._note_tenancy(pods, tenants, after)
        used = {slot for row in after.values() for slot in row.slots}
        self.surplus.extend(self._store.surplus(name, used))
        (self._young.add if is_young(after) else self._young.discard)(name)
        if before is None or _slots(before) != _slots(after):
            return Change.DEVICES
        if is_afresh or not is_same_node or grounds(before) != grounds(after):
            return Change.BELIEFS
        return Change.ROWS if before != after else Change.NOTHING

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        self._nodes.pop(node, None)
        self._rows.pop(node, None)
        self._live.pop(node, None)
        self._held.pop(node, None)
        self._young.discard(node)
        self._ended.pop(node, None)
        self._mappings.forget(node)

    def lay_out_without(
        self, node: NodeRecord, pods: Sequence[PodRecord], victims: frozenset[str]
    ) -> dict[str, PoolRow]:
        """Return a node's rows as they would be with some of its pods (UIDs) gone."""
        left = [pod for pod in pods if pod.uid not in victims]
        return self._lay_out(node, left, self._tenants(node.name, left), self._policy)

    def draft(
        self, node: NodeRecord, pods: Sequence[PodRecord], policy: Policy
    ) -> tuple[dict[str, PoolRow], list[HeldDevice]]:
        """Return a node's rows and who holds its devices as they would be under other settings."""
        tenants = self._tenants(node.name, pods)
        rows = self._lay_out(node, pods, tenants, policy)
        return rows, list(held_devices(pods, tenants, rows))

    def adopt(
        self, policy: Policy, rows: Mapping[str, dict[str, PoolRow]], young: AbstractSet[str]
    ) -> None:
        """Go by other settings from now on.

        Args:
            policy: the settings.
            rows: rows of nodes as they are laid out under them, by node and resource.
            young: those of these nodes with pods that the readings do not cover yet.
        """
        self._policy = policy
        self._rows.update(rows)
        self._young = (self._young - rows.keys()) | young

    def end_tenancy(self, pod: PodRecord, at: float, *, has_others: bool) -> None:
        """Free the devices of a pod that has ended: what was read before is nobody's.

        Where nobody knows which it held, it may be any that nobody else is known to hold; but not
        one that was in use already when no pod can have held it.

        Args:
            pod: the pod.
            at: when it ended, seconds since the epoch.
            has_others: other pods hold devices of its node.
        """
        self._ended.setdefault(pod.node, {})[pod.key] = at
        live = self.tenants_on(pod.node)
        shown = [row for row, tenants in live.items() if pod.key in tenants]
        if shown:
            freed = [row for row in shown if live[row] == (pod.key,)]
            self._store.start_afresh(freed, at, is_freed=True)
            self._store.start_afresh(set(shown) - set(freed), at, is_freed=False)
            return
        rows = self._rows.get(pod.node, {})
        unheld = [
            slot
            for resource, row in rows.items()
            for slot in row.slots
            if may_hold(pod, resource, rows)
            and not live.get(slot)
            and not self._store.is_foreign(slot)
        ]
        is_freed = self._mappings.of(pod.node).is_known or not has_others
        self._store.start_afresh(unheld, at, is_freed=is_freed)

    def _tenants(self, name: str, pods: Sequence[PodRecord]) -> TenantsByRow:
        """Return which of the pods each device of the node has, by mapping, memory and claims."""
        mapping = self._mappings.of(name)
        keys = {pod.key for pod in pods if mapping.is_of(pod)}
        ended = self._ended.get(name, {})
        # A name without its UID may be that of a pod before: until its device is read after that.
        reused = {key: ended[key] for key in keys if key in ended and key not in mapping.uids}
        found: dict[int, set[str]] = {}
        for row in self._store.rows_of_node(name):
            info = self._store.info(row)
            found[row] = keys.intersection(mapping.pods.get(info.key, ())) if info else set()
            if reused:
                read_at = self._store.told_at(row) or 0.0
                found[row] -= {key for key, ended_at in reused.items() if read_at <= ended_at}
        seen = set().union(*found.values())
        held = self._held.get(name, {})
        for pod in pods:
            for row in () if pod.key in seen else held.get(pod.uid, ()):
                if row in found:
                    found[row].add(pod.key)
        # Claims come last: they correct what was shown before they were known.
        put_claimed(pods, found, self._store.info)
        return {row: tuple(sorted(tenants)) for row, tenants in found.items()}

    def _replaced(self, node: NodeRecord, tenants: TenantsByRow) -> set[int]:
        """Return the devices of a node in whose place there are others, as many as it must have."""
        if self._store.is_shown_whole(tuple(tenants)):
            return set()
        devices = tuple(self._device(row, on_it) for row, on_it in tenants.items())
        behind = (
            ([device.row for device in devices_behind(node, expected, devices)], expected.count)
            for expected in expected_devices(node, _seen(devices))
        )
        return {row for rows, count in behind for row in self._store.replaced(rows, count)}

    def _forget_ended(self, name: str, now: float) -> None:
        """Forget the pods whose devices' readings from before their end are too old to count."""
        ended, oldest = self._ended.get(name, {}), now - self._policy.freshness.max_age_seconds
        for key in [key for key, at in ended.items() if at < oldest]:
            del ended[key]

    def _lay_out(
        self,
        node: NodeRecord,
        pods: Sequence[PodRecord],
        tenants: TenantsByRow,
        policy: Policy,
    ) -> dict[str, PoolRow]:
        """Return one node's row in the pool of each of its resources."""
        devices = tuple(self._device(row, on_it) for row, on_it in tenants.items())
        tenancy = Tenancy(
            is_mapped=self._mappings.of(node.name).is_known,
            warm_up_seconds=policy.assumed.warm_up_seconds,
            shared_policy=policy.shared_policy,
            is_out=self.is_out(),
        )
        is_counted = bool(node.capacity or node.allocatable)
        rows = {}
        for expected in expected_devices(node, _seen(devices)):
            resource = expected.resource
            everything = expected.count * expected.replicas
            rows[resource] = lay_out(
                expected,
                self._complete(node, expected, devices),
                pods,
                tenancy,
                allocatable=node.allocatable.get(resource, 0) if is_counted else everything,
                capacity=node.capacity.get(resource, 0),
            )
        return rows

    def _device(self, row: int, tenants: tuple[str, ...]) -> Device:
        """Return a device as the layout needs it."""
        info = self._store.info(row)
        return Device(
            row=row,
            mig_profile=info.mig_profile if info else "",
            tenants=tenants,
            measured_at=self._store.told_at(row),
            model_id=self._model_id(info.model) if info else 0,
        )

    def _complete(
        self, node: NodeRecord, expected: Expected, devices: tuple[Device, ...]
    ) -> tuple[Device, ...]:
        """Return the devices behind a resource, with stand-ins for those that no source shows."""
        behind = devices_behind(node, expected, devices)[:MAX_DEVICES]
        self._store.set_label_total([device.row for device in behind], expected.memory_bytes)
        missing = min(expected.count, MAX_DEVICES) - len(behind)
        if missing <= 0:
            return behind
        label_model = self._model_id(node.labels.get("nvidia.com/gpu.product", ""))
        rows = self._store.stand_ins(node.name, expected.resource, missing, expected.memory_bytes)
        self._store.set_lost(rows, is_lost=bool(behind))
        stand_ins = [Device(row=row, model_id=label_model) for row in rows]
        return (*behind, *stand_ins)

    def _model_id(self, model: str) -> int:
        if model not in self._model_ids:
            words = normalize_model(model)
            self._model_ids[model] = self._models.setdefault(words, len(self._models))
        return self._model_ids[model]

    def _note_tenants(
        self, name: str, pods: Sequence[PodRecord], tenants: TenantsByRow, now: float
    ) -> bool:
        """Remember who holds each device; one with a new tenant starts afresh: tell if any did."""
        is_afresh = False
        bound_at = {pod.key: now if pod.bound_at is None else pod.bound_at for pod in pods}
        before = self._live.get(name, {})
        for row, on_it in tenants.items():
            new = set(on_it) - set(before.get(row, ()))
            if new:
                self._store.start_afresh((row,), max(bound_at[key] for key in new), is_freed=False)
                is_afresh = True
        self._live[name] = tenants
        self._held[name] = {
            pod.uid: tuple(row for row, on_it in tenants.items() if pod.key in on_it)
            for pod in pods
        }
        return is_afresh

    def _note_tenancy(
        self, pods: Sequence[PodRecord], tenants: TenantsByRow, rows: Mapping[str, PoolRow]
    ) -> None:
        """Note of each device whether pods hold it, or may."""
        # Of devices that the kubelet offers, a name by which it offers none is a former one.
        for row in sorted(rows.values(), key=lambda row: row.allocatable > 0):
            self._store.set_withdrawn(row.slots, -(-row.withdrawn // row.replicas))
        for slot, has_tenants, is_unheld, is_free_for_sure in held_devices(pods, tenants, rows):
            self._store.set_tenancy(
                slot,
                has_tenants=has_tenants,
                is_unheld=is_unheld,
                is_free_for_sure=is_free_for_sure,
            )


def is_laid_out_by(policy: Policy) -> tuple[object, ...]:
    """Return which of the settings shape a node's layout."""
    return policy.assumed.warm_up_seconds, policy.shared_policy


def _seen(devices: Sequence[Device]) -> Counter[str]:
    """Return how many devices telemetry sees, by MIG profile as resources write it."""
    return Counter(resource_profile(device.mig_profile) for device in devices)


def _slots(rows: Mapping[str, PoolRow]) -> dict[str, tuple[int, ...]]:
    return {resource: row.slots for resource, row in rows.items()}
