"""What of a node's devices pods hold, or may, as its rows have it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from extender.core.decision.allocation import may_claim
from extender.core.devices.expected_devices import resource_profile
from extender.core.devices.foreign_memory import WHOLE_DEVICE
from extender.core.devices.readings import DeviceInfo
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import PoolRow

TenantsByRow = Mapping[int, tuple[str, ...]]
"""Pods (`namespace/name`) on each device of a node, by the device's row."""


class DeviceUse(NamedTuple):
    """What pods hold of a device, or may; every field is a whole number, or a flag.

    Attributes:
        row: the device's row.
        has_tenants: pods hold it, or may.
        is_unheld: no pod is seen on it, and mapping and API agree.
        is_free_for_sure: besides, no pod is too young to be seen.
        declared_bytes: memory that its pods declared, `WHOLE_DEVICE` where one has all of it.
        has_undeclared: pods that did not declare may share it.
        is_filling: those of them that readings do not cover yet are the only such pods.
    """

    row: int
    has_tenants: bool
    is_unheld: bool
    is_free_for_sure: bool
    declared_bytes: int
    has_undeclared: bool
    is_filling: bool


def is_young(rows: Mapping[str, PoolRow]) -> bool:
    """Tell whether a node has pods that the readings do not cover yet, or that leave it."""
    return any(row.taken or row.leaving or any(row.assumed) for row in rows.values())


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


def device_uses(
    pods: Sequence[PodRecord], tenants: TenantsByRow, rows: Mapping[str, PoolRow]
) -> Iterator[DeviceUse]:
    """Yield of each device of a node whether pods hold it, or may.

    It may stand behind several resources, and pods run on when theirs is renamed: by whatever name
    a pod holds it, it is held.
    """
    seen = {key for on_it in tenants.values() for key in on_it}
    found: dict[int, DeviceUse] = {}
    for resource, row in rows.items():
        is_clear = not any(
            pod.key not in seen and (resource in pod.resources or is_renamed(pod, rows))
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
                is_filling=shares > 0 and shares == row.assumed[at],
            )
            before = found.get(slot)
            found[slot] = held if before is None else _merged(before, held)
    yield from found.values()


def _declared(row: PoolRow, at: int, *, is_free: bool) -> int:
    """Return the memory that pods declared of a device; all of it if one may hold all."""
    if row.is_shared:
        return int(row.declared_bytes[at])
    return 0 if is_free else WHOLE_DEVICE


def _merged(one: DeviceUse, other: DeviceUse) -> DeviceUse:
    """Return what two resources say of one device."""
    return DeviceUse(
        row=one.row,
        has_tenants=one.has_tenants or other.has_tenants,
        is_unheld=one.is_unheld and other.is_unheld,
        is_free_for_sure=one.is_free_for_sure and other.is_free_for_sure,
        declared_bytes=max(one.declared_bytes, other.declared_bytes),
        has_undeclared=one.has_undeclared or other.has_undeclared,
        is_filling=one.is_filling or other.is_filling,
    )


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
