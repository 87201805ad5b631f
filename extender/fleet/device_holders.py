"""Record which pods hold which devices, and to whom the devices' memory in use belongs.

The node's agent takes precedence over the other sources that report the holders. Readings show the
memory in use of the whole device, and rarely per pod. Declared memory counts for its pod whether in
use or not, so the unknown is the memory in use by others: processes outside Kubernetes and pods
that declared none. Each reading limits the growth of that part, and memory in use before a pod came
does not belong to the pod.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, NamedTuple

import numpy as np

from extender.core.decision.allocation import may_claim
from extender.core.devices.expected_devices import resource_profile
from extender.core.devices.readings import Column, DeviceInfo, DeviceKey, Holders, Readings
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Flags, PoolRow

_PodsByDevice = Mapping[DeviceKey, tuple[str, ...]]
"""Pods (`namespace/name`) by device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeDeviceHolders:
    """Device holders of one node: the pods that hold each device.

    Attributes:
        is_known: whether a source reports the holders.
        at: time of the report, seconds since the epoch.
        pods: pods by device; no pod holds a device that is not listed.
        uids: UID by pod, as far as the source knows it.
    """

    is_known: bool
    at: float
    pods: _PodsByDevice
    uids: Mapping[str, str] = field(default_factory=dict)

    def is_of(self, pod: PodRecord) -> bool:
        """Return whether the report's pod of this name is this pod, not a former one."""
        uid = self.uids.get(pod.key)
        return (pod.bound_at or 0.0) <= self.at if uid is None else uid == pod.uid


@dataclass(frozen=True, slots=True, kw_only=True)
class _HoldersChange:
    """Difference between two mappings of all nodes.

    Attributes:
        is_availability_changed: whether the mapping became known or unknown.
        devices: devices that include all differences.
    """

    is_availability_changed: bool
    before: _PodsByDevice
    after: _PodsByDevice
    devices: Collection[DeviceKey]

    def has_changed(self, device: DeviceKey) -> bool:
        """Return whether the pods of a device have changed."""
        return self.before.get(device) != self.after.get(device)


class HolderSources:
    """Latest device holders from each source.

    Attributes:
        preference_seconds: time for which an agent's report is preferred to newer mappings of
            other sources.
    """

    def __init__(self) -> None:
        self.preference_seconds = 0.0
        self._complete: _PodsByDevice = {}
        self._is_known = False
        self._at = -inf
        self._own: dict[str, Holders] = {}

    def of(self, node: str) -> _NodeDeviceHolders:
        """Return the device holders of a node."""
        own = self._own.get(node)
        if own is not None:
            return _NodeDeviceHolders(is_known=True, at=own.at, pods=own.pods, uids=own.uids)
        return _NodeDeviceHolders(is_known=self._is_known, at=self._at, pods=self._complete)

    def replace(self, readings: Readings, max_age_seconds: float) -> _HoldersChange | None:
        """Apply the holders of all nodes from an answer.

        Args:
            readings: the answer. If its source cannot report them, the last mapping stays valid for
                `max_age_seconds`.
            max_age_seconds: age at which a mapping expires.

        Returns:
            The difference; None if the last mapping stays valid.
        """
        mapping = readings.tenants
        at = readings.at if readings.tenants_at is None else readings.tenants_at
        if mapping is None and at - self._at <= max_age_seconds:
            return None
        before, after, changed = self._complete, mapping or {}, readings.changed_tenants
        was_known, self._is_known = self._is_known, mapping is not None
        self._complete, self._at = after, at
        is_incremental = changed is not None and changed.since is before
        return _HoldersChange(
            is_availability_changed=was_known is not self._is_known,
            before=before,
            after=after,
            devices=changed.devices
            if changed is not None and is_incremental
            else {**before, **after},
        )

    def is_own(self, node: str) -> bool:
        """Return whether the node's agent reports its holders."""
        return node in self._own

    def note_own(self, node: str, holders: Holders | None) -> bool:
        """Apply the holders from a node's agent; return whether they have changed."""
        before = self._own.get(node)
        if holders is None:
            self._own.pop(node, None)
            return before is not None
        self._own[node] = holders
        if before is None:
            return True
        return before.pods is not holders.pods and (
            before.pods != holders.pods or before.uids != holders.uids
        )

    def shift_back(self, seconds: float) -> None:
        """Shift all recorded times back after the clock was set back by this many seconds."""
        self._at -= seconds
        self._own = {
            node: replace(holders, at=holders.at - seconds) for node, holders in self._own.items()
        }

    def forget(self, node: str) -> None:
        """Forget a removed node."""
        self._own.pop(node, None)

    def expire(self, now: float, max_age_seconds: float) -> Iterator[str]:
        """Drop the reports of silent agents; yield their nodes.

        An agent's report expires early if another source has a newer mapping.
        """
        others_at = self._at if self._is_known else -inf
        for node, holders in list(self._own.items()):
            is_silent = now - holders.at > max_age_seconds
            if is_silent or others_at > holders.at + self.preference_seconds:
                del self._own[node]
                yield node


TenantsByRow = Mapping[int, tuple[str, ...]]
"""Pods (`namespace/name`) on each device of a node, by row."""


class DeviceUse(NamedTuple):
    """Use of a device by pods; every field is an integer or a flag.

    Attributes:
        has_tenants: pods hold it, or may hold it.
        is_unheld: no pod is reported on it, and mapping and API agree.
        is_free_for_sure: `is_unheld`, and no pod is too new to be reported.
        declared_bytes: memory that its pods declared, `WHOLE_DEVICE` if a pod has all of it.
        has_undeclared: pods without declared memory may share it.
        is_filling: readings cover none of the pods without declared memory yet.
    """

    row: int
    has_tenants: bool
    is_unheld: bool
    is_free_for_sure: bool
    declared_bytes: int
    has_undeclared: bool
    is_filling: bool


def has_unsettled_pods(rows: Mapping[str, PoolRow]) -> bool:
    """Return whether a node has pods that readings do not cover yet, or that are terminating."""
    return any(
        row.taken or row.leaving or any((*row.assumed, *row.assumed_shares, *row.kindred))
        for row in rows.values()
    )


def _is_renamed(pod: PodRecord, rows: Mapping[str, PoolRow]) -> bool:
    """Return whether the node no longer offers any resource that the pod requested."""
    return bool(pod.resources) and rows.keys().isdisjoint(pod.resources)


def may_hold(pod: PodRecord, resource: str, rows: Mapping[str, PoolRow]) -> bool:
    """Return whether a pod may hold devices of its node behind a resource, by its own requests.

    Args:
        resource: one of the node's resources.
        rows: the node's rows by resource.
    """
    return (
        resource in pod.resources
        or _is_renamed(pod, rows)
        or may_claim(pod, serves_claims=rows[resource].serves_claims)
    )


def add_claimed(
    pods: Sequence[PodRecord],
    tenants: Mapping[int, set[str]],
    info_of: Callable[[int], DeviceInfo | None],
) -> None:
    """Add pods to the devices that they hold by resource claims.

    For a MIG instance, a claim names card and profile. If the card has more such instances than the
    pod holds, only the mapping shows which ones. Mappings do not always distinguish the instances
    of a card. So once all claimed devices of a pod without other requests are reported, the pod is
    removed from devices of other kinds.

    Args:
        pods: pods of a node; only pods with claims have an effect.
        tenants: pods on each device of the node; updated in place.
        info_of: returns the identity of a device.
    """
    claims = {
        pod.key: Counter(
            (device.uuid, resource_profile(device.mig_profile)) for device in pod.claimed
        )
        for pod in pods
        if pod.claimed is not None and (pod.claimed or not pod.resources)
    }
    if not claims:
        return
    kinds: dict[int, tuple[str, str]] = {}
    rows: dict[tuple[str, str], list[int]] = {}
    for row in tenants:
        if (info := info_of(row)) is not None:
            kinds[row] = info.uuid, resource_profile(info.mig_profile)
            rows.setdefault(kinds[row], []).append(row)
    complete = {
        pod.key
        for pod in pods
        if pod.key in claims
        and not pod.resources
        and all(len(rows.get(kind, ())) >= count for kind, count in claims[pod.key].items())
    }
    for row, on_it in tenants.items():
        on_it.difference_update(
            {key for key in on_it & complete if kinds.get(row) not in claims[key]}
        )
    for key, claimed in claims.items():
        for kind, count in claimed.items():
            if len(same_kind := rows.get(kind, ())) == count:
                for row in same_kind:
                    tenants[row].add(key)


def device_uses(
    pods: Sequence[PodRecord], tenants: TenantsByRow, rows: Mapping[str, PoolRow]
) -> Iterator[DeviceUse]:
    """Yield the use of each device of a node.

    A device may be behind several resources, and pods keep running when their resource is renamed.
    So a device counts as held if a pod holds it through any resource.
    """
    seen = {key for on_it in tenants.values() for key in on_it}
    found: dict[int, DeviceUse] = {}
    for resource, row in rows.items():
        is_clear = not any(
            pod.key not in seen and (resource in pod.resources or _is_renamed(pod, rows))
            for pod in pods
        )
        for at, (slot, used) in enumerate(zip(row.slots, row.used, strict=True)):
            is_shown = bool(used or tenants.get(slot))
            is_unheld = row.is_agreed and not is_shown
            is_free = is_unheld and not row.taken and is_clear
            undeclared = row.undeclared[at] if row.undeclared else 0
            shares = row.assumed_shares[at] + row.kindred[at]
            held = DeviceUse(
                row=slot,
                has_tenants=is_shown or (row.held > 0 and not row.is_agreed),
                is_unheld=is_unheld,
                is_free_for_sure=is_free,
                declared_bytes=_declared(row, at, is_free=is_free),
                has_undeclared=row.is_shared and (undeclared > 0 or not (used or is_free)),
                is_filling=shares > 0 and shares >= row.assumed[at],
            )
            before = found.get(slot)
            found[slot] = held if before is None else _merged(before, held)
    yield from found.values()


def _declared(row: PoolRow, at: int, *, is_free: bool) -> int:
    """Return the memory that pods declared on a device, `WHOLE_DEVICE` if one may hold all."""
    if row.is_shared:
        return int(min(row.declared_bytes[at], WHOLE_DEVICE))
    return 0 if is_free else WHOLE_DEVICE


def _merged(one: DeviceUse, other: DeviceUse) -> DeviceUse:
    """Merge the use of one device behind two resources."""
    return DeviceUse(
        row=one.row,
        has_tenants=one.has_tenants or other.has_tenants,
        is_unheld=one.is_unheld and other.is_unheld,
        is_free_for_sure=one.is_free_for_sure and other.is_free_for_sure,
        declared_bytes=max(one.declared_bytes, other.declared_bytes),
        has_undeclared=one.has_undeclared or other.has_undeclared,
        is_filling=one.is_filling or other.is_filling,
    )


def estimate_inputs(rows: Mapping[str, PoolRow]) -> list[tuple[object, ...]]:
    """Return the parts of a node's rows that affect the estimates of its devices."""
    return [
        (
            row.is_agreed or row.held > 0,
            row.is_agreed,
            [count > 0 for count in row.used],
            row.withdrawn,
            row.replicas,
        )
        for row in rows.values()
    ]


WHOLE_DEVICE = 1 << 62
"""Declared memory of a pod that holds a whole device: all of it, of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Owners of the memory in use on each device at the last reading.

    Attributes:
        used: memory in use in bytes, NaN if unknown.
        others: the part of `used` outside pods that declared memory, NaN if unknown.
        foreign: the part of `others` that belongs to no pod, NaN if unknown.
    """

    used: Column
    others: Column
    foreign: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTenancy:
    """Pods that may use the memory of each device.

    Attributes:
        declared: memory declared by its pods in total, in bytes; infinite for a whole device, NaN
            while the device holders are unknown.
        has_undeclared: pods without declared memory may hold the device.
        is_filling: a pod without declared memory is not covered by readings yet, and may still
            grow.
        is_emptying: a pod without declared memory has left since the last reading.
        is_free: no pod can hold the device.
    """

    declared: Column
    has_undeclared: Flags
    is_filling: Flags
    is_emptying: Flags
    is_free: Flags


def account(
    before: Occupancy, tenancy: MemoryTenancy, used: Column, reported_foreign: Column
) -> Occupancy:
    """Update the owners of memory in use with a new reading.

    Memory in use beyond the declared total belongs to others. Any further growth belongs to pods
    that declared memory, which they may have just allocated, unless other pods have just come.

    Args:
        before: owners at the previous reading.
        tenancy: pods that may use the memory.
        used: memory in use now, in bytes.
        reported_foreign: foreign memory reported by the node agent, NaN if not reported.
    """
    is_whole = np.isinf(tenancy.declared)
    beyond = np.where(is_whole, np.nan, np.maximum(used - tenancy.declared, 0.0))
    others = np.fmax(_left(before, tenancy, used), beyond)
    reported = np.minimum(reported_foreign, used)
    is_reported = ~np.isnan(reported)
    estimated = np.where(tenancy.has_undeclared, np.minimum(before.foreign, others), others)
    foreign = np.where(is_reported, reported, estimated)
    # If all pods declared memory, others hold exactly the foreign memory that the agent reports.
    at_least = np.fmax(np.where(tenancy.has_undeclared, others, np.nan), np.fmax(reported, beyond))
    others = np.where(is_reported, at_least, others)
    return Occupancy(
        used=used,
        others=np.where(tenancy.is_free, used, others),
        foreign=np.where(tenancy.is_free, used, foreign),
    )


_NEARLY_ALL: Final = 0.1
"""If the freed memory differs from the foreign memory by less than this ratio, the foreign
processes have ended. The tolerance covers small changes of processes that stay."""


def _left(before: Occupancy, tenancy: MemoryTenancy, used: Column) -> Column:
    """Return how much of the others' memory at the previous reading is still in use."""
    declared_use = before.used - before.others
    change = used - before.used
    # A process releases all its memory at once: the remaining use shows whose memory it was. Pods
    # that declared memory may release any part of theirs, and take it again.
    is_others = np.abs(used - declared_use) < np.where(
        tenancy.has_undeclared, np.abs(used - before.others), _NEARLY_ALL * before.others
    )
    is_others |= (-change > declared_use) | tenancy.is_emptying
    after = np.where(is_others, np.maximum(before.others + change, 0.0), before.others)
    grown = np.where(tenancy.is_filling, before.others + change, before.others)
    return np.minimum(np.where(change < 0, after, grown), used)
