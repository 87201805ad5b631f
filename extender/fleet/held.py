"""What of a node's devices pods hold, or may, as its rows have it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from extender.core.inventory import PodRecord
from extender.core.layout import resource_profile
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


def put_claimed(
    pod: PodRecord,
    tenants: Mapping[int, set[str]],
    info_of: Callable[[int], DeviceInfo | None],
) -> None:
    """Put a pod on the devices that it holds by claims.

    Of a MIG instance a claim tells card and profile: where the card has more of these than the pod
    holds, only the mapping says which it is. Mappings do not always tell instances of a card
    apart: of a pod that has nothing but what its claims tell, these have the last word.

    Args:
        pod: the pod.
        tenants: pods on each device of its node, by mapping and memory.
        info_of: what is known of a device.
    """
    rows: dict[tuple[str, str], list[int]] = {}
    for row in tenants:
        if (info := info_of(row)) is not None:
            rows.setdefault((info.uuid, resource_profile(info.mig_profile)), []).append(row)
    claimed = Counter(
        (device.uuid, resource_profile(device.mig_profile)) for device in pod.claimed or ()
    )
    found = {
        row
        for meant, count in claimed.items()
        if len(rows.get(meant, ())) == count
        for row in rows[meant]
    }
    is_complete = len(found) == claimed.total() and not pod.resources
    for row, on_it in tenants.items():
        if row in found:
            on_it.add(pod.key)
        elif is_complete:
            on_it.discard(pod.key)


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
