"""Allocate each node's devices to its resources and pods, and again after each change of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from enum import IntEnum
from itertools import chain, compress, islice
from math import inf
from zlib import crc32

import numpy as np

from extender.core.decision.allocation import DeviceTenancy, Guesses, allocate
from extender.core.devices.expected_devices import (
    Expected,
    ExpectedDevice,
    devices_behind,
    expected_devices,
    resource_profile,
)
from extender.core.devices.readings import DeviceKey, Holders, Readings
from extender.core.nodes.host_resources import NONE, HostResources
from extender.core.nodes.inventory import ZONE, NodeRecord, PodRecord
from extender.core.nodes.snapshot import Flags, Leaving, PoolRow
from extender.core.policy import Policy
from extender.core.prices import price_milli
from extender.core.steps import Steps
from extender.fleet.departures import Departures, UnattributedEnds, count_unreported
from extender.fleet.device_holders import (
    HolderSources,
    TenantsByRow,
    add_claimed,
    device_uses,
    estimate_inputs,
    has_unsettled_pods,
    may_hold,
)
from extender.fleet.offers import ModelNumbers, OfferChanges, ShareEvidence
from extender.fleet.pods import PodClocks, PodMemory, Share, SimilarPods
from extender.fleet.store import DeviceStore

_MAX_DEVICES = 256
"""Maximum number of devices of a node behind one resource, and of unreported ones behind all: 16
cards of 7 instances each, and a reserve. A kubelet that reports a million devices must not cost a
million rows."""

_ZONES = 1 << 12
"""Range of the numbers of zones. Two zones with the same number count as one, and choosing nodes
then draws from both together. A table of all zones seen would grow with each new label value."""

_PIECE_KEYS = 8192
"""Devices whose tenants are compared per cooperative step: a few milliseconds."""


class AllocationChange(IntEnum):
    """What changed with a node's new allocation; each value includes the lower ones."""

    NOTHING = 0
    ROWS = 1
    """Holders have changed, but no input of the devices' estimates."""
    ESTIMATES = 2
    """Inputs of the devices' estimates have changed."""
    DEVICES = 3
    """The node has other devices."""


class NodeAllocations:
    """Each node's row in the pool of each of its resources, and the pods on each device.

    A pod keeps its devices for its lifetime. Sources sometimes lose a pod, and some name only one
    of the pods that share a device. So a pod that was reported on a device stays there until a
    source reports it on another device. A pod that no source reports also stays on the shared
    devices that it is assumed to hold, also when another pod ends.

    Args:
        clocks: corrected times of pods.
        pod_memory: memory that pods were last seen to use.
        is_out: returns which devices are estimated to be out of order, as in `Telemetry.is_out`.

    Attributes:
        offers: when nodes began to offer fewer devices, or came back.
        sharing: which nodes share their devices among pods.
        similar_pods: memory that pods were measured to use, for similar pods.
    """

    def __init__(
        self,
        policy: Policy,
        store: DeviceStore,
        *,
        clocks: PodClocks,
        pod_memory: PodMemory,
        is_out: Callable[[], Flags],
    ) -> None:
        self._policy = policy
        self._store = store
        self._is_out = is_out
        self._clocks = clocks
        self._models = ModelNumbers()
        self._holder_sources = HolderSources()
        self._nodes: dict[str, NodeRecord] = {}
        self._rows: dict[str, dict[str, PoolRow]] = {}
        self._current_tenants: dict[str, TenantsByRow] = {}
        self._held: dict[str, dict[str, tuple[int, ...]]] = {}
        self._unsettled: set[str] = set()
        self._loaded_at: dict[str, float] = {}
        self._ended: dict[str, dict[str, float]] = {}
        self._guessed: dict[str, Guesses] = {}
        self._unattributed_ends = UnattributedEnds(store)
        self._requested: dict[str, HostResources] = {}
        self.offers = OfferChanges()
        self._departures = Departures(store, self._rows, self._held, self._guessed, pod_memory.last)
        self.sharing = ShareEvidence(store)
        self.similar_pods = SimilarPods()
        self.surplus: list[int] = []
        """Rows that are not needed any more; the caller of `settle` frees them."""

    @property
    def rows(self) -> Mapping[str, Mapping[str, PoolRow]]:
        """Latest rows by node and resource."""
        return self._rows

    @property
    def unsettled(self) -> frozenset[str]:
        """Nodes with pods that no reading covers; the next readings allocate them again."""
        return frozenset(self._unsettled)

    @property
    def models(self) -> tuple[str, ...]:
        """Normalized model names; a row's `model_id` is an index into them."""
        return self._models.names

    def tenants_on(self, node: str) -> TenantsByRow:
        """Return the pods that are known to hold each device of a node."""
        return self._current_tenants.get(node, {})

    def apply_holders(self, readings: Readings) -> Steps[set[str]]:
        """Apply the device holders of an answer; return the nodes whose holders may have changed.

        If the source cannot report them, its last mapping stays valid while a reading is fresh.
        """
        replaced = self._holder_sources.replace(readings, self._policy.freshness.max_age_seconds)
        if replaced is None:
            return set()
        if replaced.is_availability_changed:
            return {name for name in self._rows if not self._holder_sources.is_own(name)}
        nodes: set[str] = set()
        keys = iter(replaced.devices)
        while some := list(islice(keys, _PIECE_KEYS)):
            rows = (self._store.row_of(key) for key in some if replaced.has_changed(key))
            infos = (self._store.info(row) for row in rows if row is not None)
            nodes |= {info.node for info in infos if info is not None}
            yield
        return {name for name in nodes if not self._holder_sources.is_own(name)}

    def apply_own_holders(self, holders: Mapping[str, Holders | None]) -> set[str]:
        """Apply the device holders that agents report for their nodes.

        Args:
            holders: by node; None if the agent cannot report them.

        Returns:
            The nodes whose holders have changed.
        """
        noted = self._holder_sources.note_own
        return {name for name, reported in holders.items() if noted(name, reported)}

    def note_requested(self, node: str, requested: HostResources) -> bool:
        """Record the CPU, memory and storage that all pods request of a node.

        If the node is not allocated yet, they count from its first allocation.

        Returns:
            Whether the node must be allocated again.
        """
        if requested == NONE:
            self._requested.pop(node, None)
        else:
            self._requested[node] = requested
        return bool(self._rows.get(node))

    def expire_own(self, now: float) -> set[str]:
        """Use other sources for nodes whose agents are silent; return these nodes."""
        return set(self._holder_sources.expire(now, self._policy.freshness.max_age_seconds))

    def shift_back(self, seconds: float) -> None:
        """Shift all recorded times back after the clock was set back by this many seconds."""
        for dated in (self._holder_sources, self._unattributed_ends, self.offers, self._departures):
            dated.shift_back(seconds)
        for ended in self._ended.values():
            ended.update({key: at - seconds for key, at in ended.items()})
        self._loaded_at.update(dict.fromkeys(self._loaded_at, 0.0))

    def prefer_own(self, seconds: float) -> None:
        """Prefer agents to newer mappings of other sources for this many seconds."""
        self._holder_sources.preference_seconds = seconds

    def settle(self, node: NodeRecord, pods: Sequence[PodRecord], now: float) -> AllocationChange:
        """Allocate a node's devices and record their holders; return the extent of the change."""
        name = node.name
        self._forget_ended(name, now)
        self._unattributed_ends.expire(name, now, self._policy.freshness)
        tenants = self._tenants(name, pods)
        self.sharing.note(node, pods, tenants)
        if replaced := self._replaced(node, tenants):
            self.surplus.extend(replaced)
            tenants = {row: on_it for row, on_it in tenants.items() if row not in replaced}
        self._departures.expire_ended(name, now)
        before, after = self._rows.get(name), self._rows_of(node, pods, tenants)
        is_same_node = self._nodes.get(name) is node
        self._nodes[name] = node
        self._rows[name] = after
        has_new_tenant = self._note_tenants(name, pods, tenants, now)
        self._note_tenancy(pods, tenants, after)
        used = {slot for row in after.values() for slot in row.slots}
        self.surplus.extend(self._store.surplus(name, used))
        is_unsettled = (
            has_unsettled_pods(after)
            or name in self._unattributed_ends
            or self.offers.is_recent(name, now, self._policy.freshness)
        )
        (self._unsettled.add if is_unsettled else self._unsettled.discard)(name)
        self._note_loading(name, pods, now)
        self._record_use(pods, tenants)
        if before is None or _slots(before) != _slots(after):
            return AllocationChange.DEVICES
        if has_new_tenant or not is_same_node or estimate_inputs(before) != estimate_inputs(after):
            return AllocationChange.ESTIMATES
        return AllocationChange.ROWS if before != after else AllocationChange.NOTHING

    def forget(self, node: str, now: float) -> None:
        """Forget a removed node; it may come back with fewer devices."""
        self.offers.forget(node, now, self._policy.freshness)
        self._nodes.pop(node, None)
        self._rows.pop(node, None)
        self._current_tenants.pop(node, None)
        self._held.pop(node, None)
        self._unsettled.discard(node)
        self._loaded_at.pop(node, None)
        self._ended.pop(node, None)
        self._guessed.pop(node, None)
        self._unattributed_ends.forget(node)
        self._holder_sources.forget(node)
        self._departures.forget(node)
        self.sharing.forget(node)

    def leaving(
        self, node: NodeRecord, pods: Sequence[PodRecord], victims: AbstractSet[str]
    ) -> dict[str, Leaving]:
        """Return the state of a node's devices without some pods (UIDs), by resource."""
        name, left = node.name, [pod for pod in pods if pod.uid not in victims]
        guessed = dict(self._guessed.get(name, {}))
        self._allocate(node, pods, self._tenants(name, pods), guessed)
        after = self._allocate(node, left, self._tenants(name, left), guessed)
        tenants, before = self.tenants_on(name), self._rows.get(name, {})
        gone = [pod for pod in pods if pod.uid in victims]
        return {
            resource: self._departures.leaving(
                (before.get(resource, row), row),
                tenants,
                gone,
                unreported_devices=count_unreported(gone, resource, after, tenants),
            )
            for resource, row in after.items()
        }

    def adopt(self, policy: Policy) -> None:
        """Allocate by another policy from now on."""
        self._policy = policy

    def end_tenancy(self, pod: PodRecord, at: float, *, has_others: bool) -> None:
        """Release the devices of an ended pod; earlier readings then count for no pod.

        If it is unknown which devices the pod held, it may have held those that it was assumed on,
        and any device that no other pod is known to hold, except devices with foreign use from
        before the pod.

        Args:
            at: when it ended, seconds since the epoch.
            has_others: whether other pods hold devices of its node.
        """
        if pod.node not in self._nodes:  # removed before its pods, as by an autoscaler
            return
        self._ended.setdefault(pod.node, {})[pod.key] = at
        current = self.tenants_on(pod.node)
        if not has_others:
            self._record_use([pod], current)
        shown = [row for row, tenants in current.items() if pod.key in tenants]
        if shown:
            self._departures.end_on(pod, shown, at, current)
            return
        rows, assumed = self._rows.get(pod.node, {}), self._departures.assumed_shares
        likely = {
            resource: [slot for slot in row.slots if not current.get(slot) or assumed(pod, slot)]
            for resource, row in rows.items()
            if may_hold(pod, resource, rows)
        }
        is_foreign = self._store.is_foreign
        if self._holder_sources.of(pod.node).is_known or not has_others:
            any_of = [slot for slot in chain.from_iterable(likely.values()) if not is_foreign(slot)]
            self._departures.end_on(pod, any_of, at, current)
            return
        kept = 1 - 1 / max(len(self._held.get(pod.node, ())), 2)
        for resource, slots in likely.items():
            own = [slot for slot in slots if not is_foreign(slot)]
            if rows[resource].is_shared:
                held = [slot for slot in slots if assumed(pod, slot)]
                self._departures.end(pod, held, at, staying=np.full(len(held), kept))
                rest = [slot for slot in own if slot not in held]
                self._store.restart_history(rest, at, is_freed=False, held_since=-inf, staying=kept)
            elif resource in pod.resources:
                self._unattributed_ends.note(pod, resource, slots, at)
            else:
                self._store.restart_history(own, at, is_freed=False)

    def note_shares(self, node: str, pods: Sequence[PodRecord], shares: Iterable[Share]) -> None:
        """Apply the memory that pods use of shared devices.

        A device counts only if the memory of all its pods is reported.

        Args:
            pods: pods that hold devices of it.
            shares: memory by device and pod, without duplicates.
        """
        reported: dict[int, dict[str, int]] = {}
        for device, uid, count in shares:
            row = self._store.row_of(device)
            if row is not None:
                reported.setdefault(row, {})[uid] = count
        by_key = {pod.key: pod for pod in pods}
        for row, of_pods in reported.items():
            for pod in pods:
                if pod.uid in of_pods and self._is_measured(pod, row):
                    self.similar_pods.note(pod, of_pods[pod.uid])
            on_it = [by_key[key] for key in self.tenants_on(node).get(row, ()) if key in by_key]
            if on_it and all(pod.uid in of_pods for pod in on_it):
                declared = self._departures.declared
                held = [(of_pods[pod.uid], declared(pod, row)) for pod in on_it]
                self._store.note_shares(row, held)

    def _tenants(self, name: str, pods: Sequence[PodRecord]) -> TenantsByRow:
        """Return the pods on each device of a node, from mapping, earlier reports and claims."""
        mapping = self._holder_sources.of(name)
        keys = {pod.key for pod in pods if mapping.is_of(pod)}
        ended = self._ended.get(name, {})
        # A name without UID may mean an ended pod of that name, until a later reading.
        reused = {key: ended[key] for key in keys if key in ended and key not in mapping.uids}
        found: dict[int, set[str]] = {}
        for row in self._store.rows_of_node(name):
            info = self._store.info(row)
            found[row] = keys.intersection(mapping.pods.get(info.key, ())) if info else set()
            if reused:
                read_at = self._store.reported_at(row) or 0.0
                found[row] -= {key for key, ended_at in reused.items() if read_at <= ended_at}
        seen = set().union(*found.values())
        held = self._held.get(name, {})
        for pod in pods:
            for row in () if pod.key in seen else held.get(pod.uid, ()):
                if row in found:
                    found[row].add(pod.key)
        # Claims come last: they correct what was reported before they were known.
        add_claimed(pods, found, self._store.info)
        return {row: tuple(sorted(tenants)) for row, tenants in found.items()}

    def _replaced(self, node: NodeRecord, tenants: TenantsByRow) -> set[int]:
        since = self.offers.since(node.name)
        if since == -inf and self._store.is_shown_whole(tuple(tenants)):
            return set()
        model = self._models.on(node)
        devices = tuple(self._device(row, on_it, model) for row, on_it in tenants.items())
        behind = (
            ([device.row for device in devices_behind(node, expected, devices)], expected.count)
            for expected in self._expected(node, devices)
        )
        return {row for rows, count in behind for row in self._store.replaced(rows, count, since)}

    def _forget_ended(self, name: str, now: float) -> None:
        """Forget ended pods once no valid reading of their devices is older than their end."""
        ended, oldest = self._ended.get(name, {}), now - self._policy.freshness.max_age_seconds
        for key in [key for key, at in ended.items() if at < oldest]:
            del ended[key]

    def _rows_of(
        self, node: NodeRecord, pods: Sequence[PodRecord], tenants: TenantsByRow
    ) -> dict[str, PoolRow]:
        """Return a node's rows, each with the state after its terminating pods are gone."""
        before, by_uid = self._guessed.pop(node.name, {}), {pod.uid: pod for pod in pods}
        guessed: Guesses = {key: placed for key, placed in before.items() if key[1] in by_uid}
        rows = self._allocate(node, pods, tenants, guessed)
        # A mapping soon shows new pods. Until then each allocation assumes their devices again,
        # beside the pods that it shows.
        is_mapped = self._holder_sources.of(node.name).is_known
        current = {row.slots for row in rows.values()}
        kept = {
            key: placed
            for key, placed in guessed.items()
            if key[0] in current
            and (not is_mapped or self._is_measured(by_uid[key[1]], *compress(key[0], placed)))
        }
        if kept:
            self._guessed[node.name] = kept
        leaving = [pod for pod in pods if pod.is_deleting]
        if not leaving and not self._departures.has_ended_pods(node.name):
            return rows
        after = rows
        if leaving:
            left = [pod for pod in pods if not pod.is_deleting]
            after = self._allocate(node, left, self._tenants(node.name, left), guessed)
        return {
            resource: replace(
                row,
                leaving=self._departures.leaving(
                    (row, after[resource]),
                    tenants,
                    leaving,
                    unreported_devices=count_unreported(leaving, resource, after, tenants),
                    node=node.name,
                ),
            )
            if resource in after and after[resource].slots == row.slots
            else row
            for resource, row in rows.items()
        }

    def _allocate(
        self, node: NodeRecord, pods: Sequence[PodRecord], tenants: TenantsByRow, guessed: Guesses
    ) -> dict[str, PoolRow]:
        """Return a node's row in the pool of each of its resources."""
        model = self._models.on(node)
        devices = tuple(self._device(row, on_it, model) for row, on_it in tenants.items())
        tenancy = DeviceTenancy(
            is_mapped=self._holder_sources.of(node.name).is_known,
            shared_policy=self._policy.shared_policy,
            is_out=self._is_out(),
            assumed=self._policy.assumed,
            started_at=self._clocks.started_at,
            works_since=self._clocks.works_since,
            expected=self.similar_pods.of,
            guessed=guessed,
        )
        is_counted = bool(node.capacity or node.allocatable)
        free = node.host and node.host.less(self._requested.get(node.name, NONE))
        rows, most = {}, _MAX_DEVICES
        for expected in self._expected(node, devices):
            resource = expected.resource
            everything = expected.count * expected.replicas
            behind = self._complete(node, expected, devices, most)
            most = max(most - len(behind), 1)
            row = allocate(
                expected,
                behind,
                pods,
                tenancy,
                allocatable=node.allocatable.get(resource, 0) if is_counted else everything,
                capacity=node.capacity.get(resource, 0),
                free=free,
                zone_id=_zone_id(node.labels.get(ZONE, "")),
            )
            model = self._models.to_land_on(node.name, row, behind, expected.count)
            price = price_milli(self._policy.prices, self.models[model], node)
            if (model, price) != (row.model_id, row.price):
                row = replace(row, model_id=model, price=price)
            rows[resource] = self._unattributed_ends.with_freed_devices(node.name, resource, row)
        return rows

    def _record_use(self, pods: Sequence[PodRecord], tenants: TenantsByRow) -> None:
        """Record the memory of pods that are alone on a shared device.

        Nothing is recorded until all pods of the node are reported: some sources name only one pod
        per device.
        """
        name = pods[0].node if pods else ""
        rows = [row for row in self._rows.get(name, {}).values() if row.is_shared]
        by_key = {pod.key: pod for pod in pods}
        if not rows or by_key.keys() - set().union(*tenants.values()):
            return
        for slot in (slot for row in rows for slot in row.slots):
            on_it = tenants.get(slot, ())
            if len(on_it) == 1 and self._is_measured(by_key[on_it[0]], slot):
                used, _, foreign = self._store.occupancy(slot)
                self.similar_pods.note(by_key[on_it[0]], int(used - foreign))

    def _is_measured(self, pod: PodRecord, *rows: int) -> bool:
        """Return whether the readings of devices cover the whole use of a pod on them."""
        started_at = self._clocks.started_at(pod)
        times = [self._store.reported_at(row) for row in rows]
        if started_at is None:
            return False
        since = started_at + self._policy.assumed.warm_up_seconds
        return all(at is not None and at >= since for at in times)

    def expire_loading(self, now: float) -> set[str]:
        """Return the nodes whose pods have had enough time to load."""
        return {name for name, until in self._loaded_at.items() if until <= now}

    def _note_loading(self, name: str, pods: Sequence[PodRecord], now: float) -> None:
        """Record until when the first pod of a node may still be loading."""
        self._loaded_at.pop(name, None)
        if any(any(row.loading) for row in self._rows[name].values()):
            seconds = self._policy.assumed.loading_seconds
            starts = [at for pod in pods if (at := self._clocks.works_since(pod)) is not None]
            # Readings are late: a pod that has loaded may not be measured yet.
            late = now - seconds - self._policy.freshness.max_age_seconds
            first = min((at for at in starts if at > late), default=late)
            self._loaded_at[name] = first + seconds

    def note_divided(self, devices: Iterable[DeviceKey]) -> set[str]:
        """Record devices that pods share; return the nodes that were not known to share devices."""
        return self.sharing.note_divided(devices, self._nodes)

    def _expected(self, node: NodeRecord, seen: Sequence[ExpectedDevice]) -> tuple[Expected, ...]:
        """Return the devices that the node must have behind each resource."""
        return expected_devices(
            node,
            Counter(resource_profile(device.mig_profile) for device in seen),
            by_kubelet=self.sharing.replicas_on(node.name),
            is_divided=self.sharing.is_divided(node),
        )

    def _device(self, row: int, tenants: tuple[str, ...], model_id: int) -> ExpectedDevice:
        info = self._store.info(row)
        if info and info.model:
            model_id = self._models.number(info.model, info.node)
        return ExpectedDevice(
            row=row,
            mig_profile=info.mig_profile if info else "",
            tenants=tenants,
            measured_at=self._store.reported_at(row),
            model_id=model_id,
            place=info.place if info else None,
        )

    def _complete(
        self, node: NodeRecord, expected: Expected, devices: tuple[ExpectedDevice, ...], most: int
    ) -> tuple[ExpectedDevice, ...]:
        """Return the devices behind a resource, with placeholders up to `most` of them."""
        behind = devices_behind(node, expected, devices)[:_MAX_DEVICES]
        self._store.set_label_total([device.row for device in behind], expected.memory_bytes)
        missing = min(expected.count, most) - len(behind)
        if missing <= 0:
            return behind
        label_model = self._models.on(node)
        rows = self._store.placeholders(
            node.name, expected.resource, missing, expected.memory_bytes
        )
        self._store.set_lost(rows, is_lost=bool(behind))
        return (*behind, *(ExpectedDevice(row=row, model_id=label_model) for row in rows))

    def _note_tenants(
        self, name: str, pods: Sequence[PodRecord], tenants: TenantsByRow, now: float
    ) -> bool:
        """Record the holders of each device; return whether a device has a new tenant.

        The history of a device with a new tenant starts afresh.
        """
        has_new_tenant = False
        bound_at = {
            pod.key: now if pod.bound_at is None else min(pod.bound_at, now) for pod in pods
        }
        before = self._current_tenants.get(name, {})
        for row, on_it in tenants.items():
            was_on_it = before.get(row, ())
            if new := [bound_at[key] for key in on_it if key not in was_on_it]:
                is_used_on = bool(was_on_it) or self._store.is_foreign(row)
                held_since = -inf if is_used_on else min(new)
                self._store.restart_history((row,), max(new), is_freed=False, held_since=held_since)
                has_new_tenant = True
        known = self._held.get(name, {})
        if came := {pod.key for pod in pods if pod.uid not in known}:
            since = min(bound_at[key] for key in came)
            slots = {slot for row in self._rows[name].values() for slot in row.slots}
            is_shown = came.issubset(set().union(*tenants.values()))
            held = {row for row, on_it in tenants.items() if not came.isdisjoint(on_it)}
            self._store.forget_past_use([*slots], since, held if is_shown else slots)
        self._current_tenants[name] = tenants
        self._held[name] = {
            pod.uid: tuple(row for row, on_it in tenants.items() if pod.key in on_it)
            for pod in pods
        }
        return has_new_tenant

    def _note_tenancy(
        self, pods: Sequence[PodRecord], tenants: TenantsByRow, rows: Mapping[str, PoolRow]
    ) -> None:
        """Record for each device whether pods hold it, or may hold it."""
        # Resources that the kubelet offers come last: a device may be behind a former name, too.
        for row in sorted(rows.values(), key=lambda row: row.allocatable > 0):
            self._store.set_withdrawn(row.slots, -(-row.withdrawn // row.replicas))
        self._store.set_tenancy(list(device_uses(pods, tenants, rows)))


def _zone_id(zone: str) -> int:
    """Return the number of a zone: the same in every replica, and 0 for none."""
    return crc32(zone.encode(errors="replace")) % _ZONES


def _slots(rows: Mapping[str, PoolRow]) -> dict[str, tuple[int, ...]]:
    return {resource: row.slots for resource, row in rows.items()}
