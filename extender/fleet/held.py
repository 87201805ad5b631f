"""What of a node's devices pods hold, or may, as its rows have it."""

from collections.abc import Iterator, Mapping, Sequence

from extender.core.inventory import PodRecord
from extender.core.snapshot import PoolRow

TenantsByRow = Mapping[int, tuple[str, ...]]
"""Pods (`namespace/name`) on each device of a node, by the device's row."""

HeldDevice = tuple[int, bool, bool, bool]
"""A device's row, and what `DeviceStore.set_tenancy` takes, in that order."""


def is_young(rows: Mapping[str, PoolRow]) -> bool:
    """Tell whether a node has pods that the readings do not cover yet."""
    return any(row.taken or any(row.assumed) for row in rows.values())


def held_devices(
    pods: Sequence[PodRecord], tenants: TenantsByRow, rows: Mapping[str, PoolRow]
) -> Iterator[HeldDevice]:
    """Yield of each device of a node whether pods hold it, or may."""
    seen = {key for on_it in tenants.values() for key in on_it}
    for resource, row in rows.items():
        is_clear = not any(pod.key not in seen and resource in pod.resources for pod in pods)
        for slot, used in zip(row.slots, row.used, strict=True):
            is_unheld = row.is_agreed and not used
            has_tenants = bool(used) or (row.held > 0 and not row.is_agreed)
            yield slot, has_tenants, is_unheld, is_unheld and not row.taken and is_clear
