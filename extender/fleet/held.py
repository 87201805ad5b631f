"""What of a node's devices pods hold, or may, as its rows have it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from extender.core.expected import resource_profile
from extender.core.inventory import PodRecord
from extender.core.layout import may_claim
from extender.core.readings import DeviceInfo
from extender.core.snapshot import PoolRow

TenantsByRow = Mapping[int, tuple[str, ...]]
"""Pods (`namespace/name`) on each device of a node, by the device's row."""

HeldDevice = tuple[int, bool, bool, bool]
"""A device's row, and what `DeviceStore.set_tenancy` takes, in that order."""


def is_young(rows: Mapping[str, PoolRow]) -> bool:
    """Tell whether a node has pods that the readings do not cover yet."""
    return any(row.taken or any(row.assumed) for row in rows.values())


def is_renamed(pod: PodRecord, rows: Mapping[str, PoolRow]) -> bool:
    """Tell whether a pod asked for a resource that its node has by that name no more."""
    return bool(pod.resources) and rows.keys().isdisjoint(pod.resources)


def may_hold(pod: PodRecord, resource: str, rows: Mapping[str, PoolRow]) -> bool:
    """Tell whether a pod may hold devices of its node behind a resource, as far as it says itself.

    Args:
        pod: the pod.
        resource: one of the node's.
        rows: the node's rows by resource.
    """
    return (
        resource in pod.resources
        or is_renamed(pod, rows)
        or may_claim(pod, serves_claims=rows[resource].serves_claims)
    )


def put_claimed(
    pods: Sequence[PodRecord],
    tenants: Mapping[int, set[str]],
    info_of: Callable[[int], DeviceInfo | None],
) -> None:
    """Put pods on the devices that they hold by claims.

    Of a MIG instance a claim tells card and profile: where the card has more of these than the pod
    holds, only the mapping says which it is. Mappings do not always tell instances of a card
    apart: a pod that has nothing but what its claims tell is on no other kind of device, once all
    of these are found.

    Args:
        pods: the pods of a node; of others than those whose claims tell something nothing changes.
        tenants: pods on each device of the node, by mapping and memory.
        info_of: what is known of a device.
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
            if len(alike := rows.get(kind, ())) == count:
                for row in alike:
                    tenants[row].add(key)


def held_devices(
    pods: Sequence[PodRecord], tenants: TenantsByRow, rows: Mapping[str, PoolRow]
) -> Iterator[HeldDevice]:
    """Yield of each device of a node whether pods hold it, or may.

    It may stand behind several resources, and pods run on when theirs is renamed: by whatever name
    a pod holds it, it is held.
    """
    seen = {key for on_it in tenants.values() for key in on_it}
    found: dict[int, HeldDevice] = {}
    for resource, row in rows.items():
        is_clear = not any(
            pod.key not in seen and (resource in pod.resources or is_renamed(pod, rows))
            for pod in pods
        )
        for slot, used in zip(row.slots, row.used, strict=True):
            is_shown = bool(used or tenants.get(slot))
            is_unheld = row.is_agreed and not is_shown
            has_tenants = is_shown or (row.held > 0 and not row.is_agreed)
            told = slot, has_tenants, is_unheld, is_unheld and not row.taken and is_clear
            before = found.get(slot)
            found[slot] = told if before is None else _merged(before, told)
    yield from found.values()


def _merged(one: HeldDevice, other: HeldDevice) -> HeldDevice:
    """Return what two resources say of one device."""
    return one[0], one[1] or other[1], one[2] and other[2], one[3] and other[3]


def grounds(rows: Mapping[str, PoolRow]) -> list[tuple[object, ...]]:
    """Return what of a node's rows the devices' readings are read by."""
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
