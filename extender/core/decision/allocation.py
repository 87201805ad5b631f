"""Allocate a node's devices to its pods: build the node's row in a resource's pool."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter, sub
from typing import Final

from extender.core.decision.landing import assume, closed_slots
from extender.core.devices.expected_devices import Expected, ExpectedDevice, resource_profile
from extender.core.devices.topology import Alignment, Place, device_sets
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import ClaimedDevice, PodRecord
from extender.core.nodes.snapshot import NO_LIMIT, Flags, PoolRow, Tenant
from extender.core.policy import Assumed, SharedPolicy

Guesses = dict[tuple[tuple[int, ...], str, bool], tuple[int, ...]]
"""Replicas of each slot that a pod is assumed to hold, for pods that no source shows on a device.

The key: the node's slots, the pod's UID, and whether only ended init containers requested them."""

_MAX_COUNTS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTenancy:
    """Inputs that decide which pods hold which devices.

    Attributes:
        is_mapped: some source reports device holders.
        shared_policy: the device plugin's choice among shared devices.
        is_out: `Telemetry.is_out` by device row; may be shorter than the highest device row.
        assumed: durations for which a pod counts as not yet visible in readings, or as loading.
        started_at: returns a pod's start on the clock of the readings.
        works_since: returns the latest start of a pod's GPU containers on the same clock.
        expected: returns the measured memory use of similar pods per device in bytes, None without
            such a pod.
        guessed: devices that pods are assumed to hold; `allocate` adds its own assumptions. None to
            remember none.
    """

    is_mapped: bool
    shared_policy: SharedPolicy
    is_out: Flags
    assumed: Assumed
    started_at: Callable[[PodRecord], float | None] = attrgetter("started_at")
    works_since: Callable[[PodRecord], float | None] = attrgetter("works_since")
    expected: Callable[[PodRecord], int | None] = lambda _: None
    guessed: Guesses | None = None


def may_claim(pod: PodRecord, *, serves_claims: bool) -> bool:
    """Return whether a pod may hold devices of a resource through ResourceClaims.

    If its claims are unreadable, their device type is unknown. A claim created for a GPU class is
    for a GPU. Any other claim may be for a GPU only if ResourceClaims serve GPUs here. Otherwise
    the device plugin manages every GPU, and the claim is for something else, such as a network
    card.

    Args:
        serves_claims: whether ResourceClaims may hold devices of the node behind the resource.
    """
    if pod.claimed is not None:
        return bool(pod.claimed)
    return pod.has_gpu_claims or (pod.has_claims and serves_claims)


def allocate(
    expected: Expected,
    devices: Sequence[ExpectedDevice],
    pods: Iterable[PodRecord],
    tenancy: DeviceTenancy,
    *,
    allocatable: int,
    capacity: int,
    free: HostResources | None = None,
    zone_id: int = 0,
) -> PoolRow:
    """Build one node's row in the pool of one resource.

    Args:
        expected: the devices expected behind the resource.
        devices: the devices in telemetry.
        pods: pods that are bound to the node and have not ended.
        tenancy: inputs that decide which pods hold which devices.
        allocatable: devices or replicas that the kubelet offers.
        capacity: devices or replicas that the node has.
        free: CPU, memory and storage of the node that no pod requests, None if unknown.
        zone_id: number of the node's zone.
    """
    slots_of = _slots_by_pod(devices)
    # More devices than the device plugin offers are left for claims.
    serves_claims = expected.is_by_claims or len(devices) > expected.count
    # The plain resource may count MIG instances of any profile.
    plain = {resource_profile(device.mig_profile) for device in devices}
    profiles = {expected.mig_profile} if expected.mig_profile else plain
    holds = tuple(
        _hold(pod, slots_of.get(pod.key, ()), expected, profiles, serves_claims=serves_claims)
        for pod in pods
    )
    loads = [_Load() for _ in devices]
    claimed: set[int] = set()
    for hold in holds:
        for slot, replicas in hold.shown.items():
            if hold.is_by_claims:
                if slot in claimed:
                    continue  # pods that share a claim hold its device once
                claimed.add(slot)
            if not expected.is_shared:
                loads[slot].used += replicas
                continue
            is_covered = _is_covered(hold.pod, devices[slot], tenancy)
            is_measured = _is_measured(hold.pod, devices[slot], tenancy)
            loads[slot].used += replicas
            loads[slot].assumed += 0 if is_covered else replicas
            loads[slot].add_memory(hold.pod, replicas, tenancy, is_measured=is_measured)
            if is_covered and _is_loading(hold.pod, devices[slot], tenancy):
                loads[slot].loading += replicas
    unseen = [hold for hold in holds if hold.unseen]
    # Shared devices are counted by their replicas instead.
    hidden = 0 if expected.is_shared else _count_hidden(holds, expected, profiles)
    row = PoolRow(
        slots=tuple(device.row for device in devices),
        used=_counts(tuple(min(load.used, expected.replicas) for load in loads)),
        assumed=_counts(tuple(load.assumed for load in loads)),
        assumed_shares=_counts(tuple(load.assumed_shares for load in loads)),
        declared_bytes=tuple(load.declared_bytes for load in loads),
        guessed_bytes=tuple(load.guessed_bytes for load in loads),
        kindred=_counts(tuple(load.kindred for load in loads)),
        replicas=expected.replicas,
        allocatable=allocatable,
        withdrawn=max(capacity - allocatable, 0),
        held=sum(hold.held for hold in holds) + len(claimed) * expected.replicas + hidden,
        taken=hidden,
        is_shared=expected.is_shared,
        is_packed=tenancy.shared_policy is SharedPolicy.PACKED,
        is_mps=expected.is_mps,
        is_agreed=not any(hold.is_contradicted for hold in holds)
        and all(load.used <= expected.replicas for load in loads)
        and _may_be_unseen([hold.pod for hold in unseen if not hold.is_of_init], devices, tenancy),
        is_reconfiguring=expected.is_reconfiguring,
        serves_claims=serves_claims,
        model_id=next((device.model_id for device in devices if device.model_id), 0),
        zone_id=zone_id,
        free_millicores=NO_LIMIT if free is None else max(free.millicores, 0),
        free_bytes=NO_LIMIT if free is None else max(free.memory_bytes, 0),
        free_storage_bytes=NO_LIMIT if free is None else max(free.storage_bytes, 0),
        undeclared=_counts(tuple(load.undeclared for load in loads)),
    )
    if not expected.is_shared:
        row = _with_topology(row, [device.place for device in devices], expected.alignment)
    row = _with_unseen(row, unseen, devices, tenancy, loads)
    return replace(row, loading=_counts(tuple(load.loading for load in loads)))


@lru_cache(maxsize=_MAX_COUNTS)
def _counts(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return one object for equal counts: most nodes have the same."""
    return counts


def _with_topology(
    row: PoolRow, places: Sequence[Place | None], by_labels: Alignment | None
) -> PoolRow:
    """Add the sets of devices and the kubelet's alignment to a row; labels count before agents."""
    sets = device_sets(places)
    if not sets.joined and not sets.numa:
        return row
    by_agent = next((place.alignment for place in places if place and place.alignment), None)
    alignment = by_agent if by_labels is None else by_labels
    return replace(row, joined=sets.joined, numa=sets.numa, alignment=int(alignment or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    """Devices of one pod behind the resource.

    Attributes:
        shown: by slot, replicas that the device holders show.
        held: devices or replicas of `shown`; 0 if held through ResourceClaims.
        unseen: further devices or replicas that it holds by the API server's count.
        is_of_init: `unseen` covers only requests of init containers, which no holder data shows.
        idle: part of `unseen` that only init containers requested, which have ended.
        is_by_claims: everything in `shown` is held through ResourceClaims.
        is_contradicted: the device holders show more devices than the pod requested, or miss
            devices that it holds through ResourceClaims.
    """

    pod: PodRecord
    shown: Mapping[int, int]
    held: int = 0
    unseen: int = 0
    is_of_init: bool = False
    idle: int = 0
    is_by_claims: bool = False
    is_contradicted: bool = False


def _hold(
    pod: PodRecord,
    slots: Sequence[int],
    expected: Expected,
    profiles: set[str],
    *,
    serves_claims: bool,
) -> _Hold:
    """Combine device holders, ResourceClaims and the API server's count into a pod's devices.

    Args:
        slots: slots where device holders or claims show the pod.
        expected: the devices expected behind the resource.
        profiles: MIG profiles of these devices in the spelling of resource names, "" for whole
            cards.
        serves_claims: whether ResourceClaims may hold devices outside the count.
    """
    count = pod.resources.get(expected.resource, 0)
    known = len(_claimed_behind(pod, profiles)) if pod.claimed else 0
    # If claims serve the resource, its count includes them; else they come on top of it.
    besides = 0 if expected.is_by_claims else known
    if not count or (besides and len(slots) <= besides):
        # A claim holds a whole device outside the resource's count. The device holders may be
        # late, so they matter only if they show more devices than the claims.
        shown = dict.fromkeys(slots, expected.replicas) if pod.has_claims else {}
        may_have_one = pod.claimed is None and may_claim(pod, serves_claims=serves_claims)
        is_hidden = len(slots) < max(known, may_have_one)
        return _Hold(
            pod=pod, shown=shown, unseen=count, is_by_claims=True, is_contradicted=is_hidden
        )
    if not expected.is_shared:
        count += besides
    shown = dict.fromkeys(slots, 1)
    lasting = count if pod.lasting is None else pod.lasting.get(expected.resource, 0)
    if expected.is_shared and slots:
        # With fewer devices than replicas, the other replicas are on the same devices.
        shown = dict(zip(slots, shares_of(lasting, len(slots)), strict=True))
        if not lasting and pod.started_at is not None:  # only ended init containers requested them
            pod = replace(pod, memory_bytes=0)
    held = min(sum(shown.values()), count)
    return _Hold(
        pod=pod,
        shown=shown,
        held=held,
        unseen=count - held,
        is_of_init=held >= lasting,
        idle=0 if pod.started_at is None else count - max(held, lasting),
        is_contradicted=len(slots) > count,
    )


def shares_of(count: int, devices: int) -> list[int]:
    """Distribute a pod's shares over the devices that it holds.

    Args:
        count: requested shares; at least one per device.
        devices: number of devices.

    Example:
        >>> shares_of(5, 2)
        [3, 2]
    """
    each, rest = divmod(max(count, devices), devices)
    return [each + (at < rest) for at in range(devices)]


def _claimed_behind(pod: PodRecord, profiles: set[str]) -> list[ClaimedDevice]:
    """Return the claimed devices of a pod that belong, or may belong, to a resource."""
    return [
        device
        for device in pod.claimed or ()
        if not device.uuid or resource_profile(device.mig_profile) in profiles
    ]


def _count_hidden(holds: Iterable[_Hold], expected: Expected, profiles: set[str]) -> int:
    """Count whole devices held through claims that no slot shows.

    Pods that share a claim hold its device once. If only claims serve devices, an unreadable claim
    that may be for a GPU counts as one device, so that its device does not look free.
    """
    names: set[str] = set()
    shown: set[int] = set()
    guessed = 0
    for hold in holds:
        if hold.is_by_claims and hold.pod.claimed:
            behind = _claimed_behind(hold.pod, profiles)
            names.update(device.name for device in behind)
            shown.update(hold.shown)
        elif hold.is_by_claims and expected.is_by_claims and hold.is_contradicted:
            guessed += 1
    return max(len(names) - len(shown), 0) + guessed


def _slots_by_pod(devices: Sequence[ExpectedDevice]) -> dict[str, list[int]]:
    """Return each pod's slots according to the device holders."""
    slots: dict[str, list[int]] = {}
    for slot, device in enumerate(devices):
        for tenant in device.tenants:
            slots.setdefault(tenant, []).append(slot)
    return slots


@dataclass(slots=True)
class _Load:
    """Tenants of one device, summed up pod by pod."""

    used: int = 0
    assumed: int = 0
    assumed_shares: int = 0
    loading: int = 0
    declared_bytes: float = 0.0
    guessed_bytes: float = 0.0
    kindred: int = 0
    undeclared: int = 0

    def add_memory(
        self, pod: PodRecord, replicas: int, tenancy: DeviceTenancy, *, is_measured: bool
    ) -> None:
        """Add the memory of a pod on a shared device: declared for life, else until measured."""
        if pod.memory_bytes is not None:
            self.declared_bytes += pod.memory_bytes * replicas
            return
        self.undeclared += replicas
        if is_measured:
            return
        expected = tenancy.expected(pod)
        if expected is None:
            self.assumed_shares += replicas
        else:
            self.guessed_bytes += expected  # for all its shares of the device
            self.kindred += replicas


def _with_unseen(
    row: PoolRow,
    unseen: Sequence[_Hold],
    devices: Sequence[ExpectedDevice],
    tenancy: DeviceTenancy,
    loads: Sequence[_Load],
) -> PoolRow:
    """Add the devices that the device holders do not show to the row.

    Pods with assumed devices come first, then the others by age. Age alone does not show which pod
    is new, because the API's times are whole seconds.
    """
    closed = closed_slots(row, tenancy.is_out)
    guessed: Guesses = {} if tenancy.guessed is None else tenancy.guessed
    unseen = sorted(unseen, key=lambda hold: (hold.pod.bound_at or 0.0, hold.pod.uid))
    for hold in sorted(unseen, key=lambda hold: (row.slots, hold.pod.uid, False) not in guessed):
        pod, after = hold.pod, row
        for is_idle, count in ((False, hold.unseen - hold.idle), (True, hold.idle)):
            key = (row.slots, pod.uid, is_idle)
            tenant = Tenant(
                uid=pod.uid,
                count=count,
                memory_bytes=0 if is_idle else pod.memory_bytes,
                expected_bytes=tenancy.expected(pod),
                placed=guessed.get(key, ()),
            )
            earlier, after = after, assume(after, (tenant,), closed) if count else after
            guessed[key] = tuple(map(sub, after.used, earlier.used))
        if row.is_shared and all(_is_covered(pod, device, tenancy) for device in devices):
            # The readings have caught up with its load; only which device it holds is unknown.
            if any(_is_loading(pod, device, tenancy) for device in devices):
                for load, now, before in zip(loads, after.used, row.used, strict=True):
                    load.loading += now - before
            after = replace(after, assumed=row.assumed)
        if row.is_shared and all(_is_measured(pod, device, tenancy) for device in devices):
            after = replace(
                after,
                assumed_shares=row.assumed_shares,
                guessed_bytes=row.guessed_bytes,
                kindred=row.kindred,
            )
        row = after
    return row


def _is_covered(pod: PodRecord, device: ExpectedDevice, tenancy: DeviceTenancy) -> bool:
    """Return whether the device's newest reading is late enough to show the pod's load."""
    return _is_read_after(tenancy.started_at(pod), device, tenancy.assumed.warm_up_seconds)


def _is_measured(pod: PodRecord, device: ExpectedDevice, tenancy: DeviceTenancy) -> bool:
    """Return whether the device's newest reading is late enough to show the pod's memory.

    A restarted container takes its memory again.
    """
    return _is_read_after(tenancy.works_since(pod), device, tenancy.assumed.warm_up_seconds)


def _is_loading(pod: PodRecord, device: ExpectedDevice, tenancy: DeviceTenancy) -> bool:
    """Return whether a pod may still load its data at the device's newest reading.

    A restarted container loads its data again.
    """
    return not _is_read_after(tenancy.works_since(pod), device, tenancy.assumed.loading_seconds)


def _is_read_after(at: float | None, device: ExpectedDevice, seconds: float) -> bool:
    """Return whether the newest reading is at least `seconds` after a start."""
    if at is None or device.measured_at is None:
        return False
    return device.measured_at >= at + seconds


def _may_be_unseen(
    pods: Sequence[PodRecord], devices: Sequence[ExpectedDevice], tenancy: DeviceTenancy
) -> bool:
    """Return whether these pods are too young to appear among the device holders."""
    if not pods:
        return True
    if not tenancy.is_mapped:
        return False
    return not any(all(_is_covered(pod, device, tenancy) for device in devices) for pod in pods)
