"""Which pods hold the devices of a node behind one of its resources."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from extender.core.expected import Device, Expected, resource_profile
from extender.core.host_resources import HostResources
from extender.core.inventory import ClaimedDevice, PodRecord
from extender.core.landing import assume, closed_slots
from extender.core.policy import Assumed, SharedPolicy
from extender.core.snapshot import NO_LIMIT, Flags, PoolRow, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """What is known of who holds devices.

    Attributes:
        is_mapped: some source tells which pods hold which devices.
        shared_policy: which shared device the device plugin hands out.
        is_out: of each device of the telemetry, as `Telemetry` has it; it may know fewer.
        assumed: until when pods count as not shown, or as getting ready.
        started_at: returns when a pod started, by a clock that readings are measured by.
        works_since: likewise, when what works on its devices last did.
        expected: returns what pods like one were measured to use of a device's memory, in bytes,
            None where none was.
    """

    is_mapped: bool
    shared_policy: SharedPolicy
    is_out: Flags
    assumed: Assumed
    started_at: Callable[[PodRecord], float | None] = attrgetter("started_at")
    works_since: Callable[[PodRecord], float | None] = attrgetter("works_since")
    expected: Callable[[PodRecord], int | None] = lambda _: None


def may_claim(pod: PodRecord, *, serves_claims: bool) -> bool:
    """Tell whether a pod may hold devices behind a resource through ResourceClaims.

    Where its claims cannot be read, neither the pod nor the node says what one is for. A claim that
    was made for a GPU class is for a GPU. Any other may be where ResourceClaims serve GPUs;
    elsewhere the device plugin has every GPU, and the claim is for something else (a network card).

    Args:
        pod: the pod.
        serves_claims: whether ResourceClaims may take devices of the node behind the resource.
    """
    if pod.claimed is not None:
        return bool(pod.claimed)
    return pod.has_gpu_claims or (pod.has_claims and serves_claims)


def lay_out(
    expected: Expected,
    devices: Sequence[Device],
    pods: Iterable[PodRecord],
    tenancy: Tenancy,
    *,
    allocatable: int,
    capacity: int,
    free: HostResources | None = None,
    zone_id: int = 0,
) -> PoolRow:
    """Return one node's row in the pool of one resource.

    Args:
        expected: what the API server says stands behind the resource.
        devices: the devices behind it.
        pods: pods that are bound to the node and have not ended.
        tenancy: what is known of who holds devices.
        allocatable: devices or replicas that the kubelet offers.
        capacity: devices or replicas that the node has.
        free: CPU and memory of the node that no pod requests, None where unknown.
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
            loads[slot].add(hold.pod, replicas, tenancy, is_covered=is_covered)
            if is_covered and _is_loading(hold.pod, devices[slot], tenancy):
                loads[slot].loading += replicas
    unseen = [hold for hold in holds if hold.unseen]
    # Of shared devices nobody asks how many are held: it is their replicas that count.
    hidden = 0 if expected.is_shared else _count_hidden(holds, expected, profiles)
    row = PoolRow(
        slots=tuple(device.row for device in devices),
        used=tuple(min(load.used, expected.replicas) for load in loads),
        assumed=tuple(load.assumed for load in loads),
        assumed_shares=tuple(load.assumed_shares for load in loads),
        declared_bytes=tuple(load.declared_bytes for load in loads),
        guessed_bytes=tuple(load.guessed_bytes for load in loads),
        kindred=tuple(load.kindred for load in loads),
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
        undeclared=tuple(load.undeclared for load in loads),
    )
    row = _with_unseen(row, unseen, devices, tenancy, loads)
    return replace(row, loading=tuple(load.loading for load in loads))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hold:
    """What one pod holds behind the resource.

    Attributes:
        pod: the pod.
        shown: by slot, replicas that the mapping shows.
        held: devices or replicas of `shown`; 0 where it has these through ResourceClaims.
        unseen: devices or replicas that it holds besides, by the API's count.
        is_of_init: these are what only its init containers asked for: no mapping shows them.
        is_by_claims: all that is shown it has through ResourceClaims.
        is_contradicted: the mapping shows more devices than the pod asked for, or cannot show
            those that it has through ResourceClaims.
    """

    pod: PodRecord
    shown: Mapping[int, int]
    held: int = 0
    unseen: int = 0
    is_of_init: bool = False
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
    """Return what a pod holds, by mapping and claims, and by the API's count.

    Args:
        pod: the pod.
        slots: where mapping or claims show it.
        expected: what stands behind the resource.
        profiles: MIG profiles of that, as resources write them, "" for whole cards.
        serves_claims: whether ResourceClaims may take devices that the count does not tell.
    """
    count = pod.resources.get(expected.resource, 0)
    known = len(_claimed_behind(pod, profiles)) if pod.claimed else 0
    # A resource that claims serve is counted with them; what the plugin hands out, besides.
    besides = 0 if expected.is_by_claims else known
    if not count or (besides and len(slots) <= besides):
        # A claim holds its device whole, and no count of the resource tells. The mapping may be
        # late: it tells of more only where it shows more than the claims.
        shown = dict.fromkeys(slots, expected.replicas) if pod.has_claims else {}
        may_have_one = pod.claimed is None and may_claim(pod, serves_claims=serves_claims)
        is_hidden = len(slots) < max(known, may_have_one)
        return _Hold(
            pod=pod, shown=shown, unseen=count, is_by_claims=True, is_contradicted=is_hidden
        )
    if not expected.is_shared:
        count += besides
    shown = dict.fromkeys(slots, 1)
    if expected.is_shared and slots:
        # The mapping may show fewer devices than replicas: the rest is on them too.
        shown = dict(zip(slots, shares_of(count, len(slots)), strict=True))
    held = min(sum(shown.values()), count)
    lasting = count if pod.lasting is None else pod.lasting.get(expected.resource, 0)
    return _Hold(
        pod=pod,
        shown=shown,
        held=held,
        unseen=count - held,
        is_of_init=held >= lasting,
        is_contradicted=len(slots) > count,
    )


def shares_of(count: int, devices: int) -> list[int]:
    """Return how many of a pod's shares are on each of the devices that it is shown on.

    Args:
        count: shares that it asked for; one of each device at least.
        devices: how many they are.

    Example:
        >>> shares_of(5, 2)
        [3, 2]
    """
    each, rest = divmod(max(count, devices), devices)
    return [each + (at < rest) for at in range(devices)]


def _claimed_behind(pod: PodRecord, profiles: set[str]) -> list[ClaimedDevice]:
    """Return the devices that a pod is known to have by claims behind a resource, or may have."""
    return [
        device
        for device in pod.claimed or ()
        if not device.uuid or resource_profile(device.mig_profile) in profiles
    ]


def _count_hidden(holds: Iterable[_Hold], expected: Expected, profiles: set[str]) -> int:
    """Return how many whole devices pods have by claims beside those that are shown.

    Pods that share a claim have its device once. Where claims alone hand out devices, one that is
    not known and may be for a GPU counts as one: what it took must not look free.
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


def _slots_by_pod(devices: Sequence[Device]) -> dict[str, list[int]]:
    """Return the slots that the mapping shows each pod on."""
    slots: dict[str, list[int]] = {}
    for slot, device in enumerate(devices):
        for tenant in device.tenants:
            slots.setdefault(tenant, []).append(slot)
    return slots


@dataclass(slots=True)
class _Load:
    """What pods hold of one device, summed up as they are counted."""

    used: int = 0
    assumed: int = 0
    assumed_shares: int = 0
    loading: int = 0
    declared_bytes: float = 0.0
    guessed_bytes: float = 0.0
    kindred: int = 0
    undeclared: int = 0

    def add(self, pod: PodRecord, replicas: int, tenancy: Tenancy, *, is_covered: bool) -> None:
        """Count a pod on a shared device; its load is assumed until the readings cover it.

        The memory that it declared is its own for its whole life.
        """
        self.used += replicas
        self.assumed += 0 if is_covered else replicas
        if pod.memory_bytes is not None:
            self.declared_bytes += pod.memory_bytes * replicas
            return
        self.undeclared += replicas
        if is_covered:
            return
        expected = tenancy.expected(pod)
        if expected is None:
            self.assumed_shares += replicas
        else:
            self.guessed_bytes += expected * replicas
            self.kindred += replicas


def _with_unseen(
    row: PoolRow,
    unseen: Sequence[_Hold],
    devices: Sequence[Device],
    tenancy: Tenancy,
    loads: Sequence[_Load],
) -> PoolRow:
    """Put what pods hold unseen by the mapping onto the row, the oldest pod's first."""
    closed = closed_slots(row, tenancy.is_out)
    for hold in sorted(unseen, key=lambda hold: (hold.pod.bound_at or 0.0, hold.pod.uid)):
        pod = hold.pod
        tenant = Tenant(
            uid=pod.uid,
            count=hold.unseen,
            memory_bytes=pod.memory_bytes,
            expected_bytes=tenancy.expected(pod),
        )
        after = assume(row, (tenant,), closed)
        if row.is_shared and all(_is_covered(pod, device, tenancy) for device in devices):
            # The readings have caught up with its load; only which device it holds is unknown.
            if any(_is_loading(pod, device, tenancy) for device in devices):
                for load, now, before in zip(loads, after.used, row.used, strict=True):
                    load.loading += now - before
            after = replace(
                after,
                assumed=row.assumed,
                assumed_shares=row.assumed_shares,
                guessed_bytes=row.guessed_bytes,
                kindred=row.kindred,
            )
        row = after
    return row


def _is_covered(pod: PodRecord, device: Device, tenancy: Tenancy) -> bool:
    """Tell whether the device's readings were measured late enough to show the pod's load."""
    return _is_read_after(tenancy.started_at(pod), device, tenancy.assumed.warm_up_seconds)


def _is_loading(pod: PodRecord, device: Device, tenancy: Tenancy) -> bool:
    """Tell whether a pod may still fetch what it works on, as far as the device's readings go.

    A container that starts again fetches it again.
    """
    return not _is_read_after(tenancy.works_since(pod), device, tenancy.assumed.loading_seconds)


def _is_read_after(at: float | None, device: Device, seconds: float) -> bool:
    """Tell whether the device's readings were measured so long after a start."""
    if at is None or device.measured_at is None:
        return False
    return device.measured_at >= at + seconds


def _may_be_unseen(pods: Sequence[PodRecord], devices: Sequence[Device], tenancy: Tenancy) -> bool:
    """Tell whether the mapping may well not show these pods yet: they are too young."""
    if not pods:
        return True
    if not tenancy.is_mapped:
        return False
    return not any(all(_is_covered(pod, device, tenancy) for device in devices) for pod in pods)
