"""The landing set: the devices of a node that the kubelet could hand to a pod.

The kubelet chooses the device, not kube-scheduler and not we. For whole devices it is any that is
free. For shared ones it is what the device plugin's policy picks. Where the device-to-pod mapping
and the API's count disagree, it is any: most likely those that are not in use, as far as the count
says that pods hold so many.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from extender.core.snapshot import AnyColumn, Batch, Flags, PoolRow, Ratios, Rows, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where a pod that asks for `count` devices could land; one row per node.

    Attributes:
        devices: per slot, whether the pod could get this device.
        size: devices in the set.
        needed: distinct devices of the set that the pod will get.
        taken: so many devices of the set are held already, and nobody knows which.
        unoffered: so many devices of the set the kubelet does not offer, and nobody knows which.
        certainty: how likely it is that the set is right; below 1 where what is in use had to tell
            what is held.
    """

    devices: Flags
    size: Rows
    needed: Rows
    taken: Rows
    unoffered: Rows
    certainty: Ratios


BY_USE: Final = 0.95
"""How likely the devices in use are those that pods hold, where no mapping tells: a tenant may
leave its device unused while a process outside Kubernetes uses a free one."""


_OF_FORMER_TENANT: Final = (
    *("utilization", "latest", "peak", "spread", "freshness", "stress", "is_in_use"),
    *("memory_used", "memory_free_bytes", "memory_freshness"),
)
"""What a reading of a device says of the pod that has left it."""


def count_freed(batch: Batch) -> Batch:
    """Return a batch in which devices are free that pods have just left, nobody knows which.

    Where more devices are in use, by readings from before, than pods hold, so many of them were
    just freed as pods have ended there. Which makes no difference: the calmest stand for them.
    """
    if not batch.just_freed.any():
        return batch
    return batch.memo.get("freed", lambda: _count_freed(batch))


def _count_freed(batch: Batch) -> Batch:
    telemetry = batch.telemetry
    in_use = batch.present & telemetry.is_in_use
    beyond = np.clip(in_use.sum(axis=1) - batch.held, 0, batch.just_freed)
    is_guessed = ~batch.is_agreed & ~batch.is_shared
    is_freed = _calmest(in_use, telemetry.peak, np.where(is_guessed, beyond, 0))
    fresh = np.maximum(telemetry.freshness, telemetry.memory_freshness)
    presumed = np.where(batch.is_presumed[:, None], fresh, 0.0)
    return replace(
        batch,
        just_freed=np.zeros_like(batch.just_freed),
        telemetry=replace(
            telemetry,
            presumed=_with(telemetry.presumed, is_freed, presumed[is_freed]),
            **{name: _with(getattr(telemetry, name), is_freed, 0) for name in _OF_FORMER_TENANT},
        ),
    )


def _with(column: AnyColumn, at: Flags, values: Ratios | int) -> AnyColumn:
    """Return a column with other values at some places."""
    changed = column.copy(order="K")
    changed[at] = values
    return changed


def _calmest(among: Flags, peak: Ratios, count: Rows) -> Flags:
    """Return per node so many of some devices: those that were the least busy lately."""
    order = np.argsort(np.where(among, peak, np.inf), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    found: Flags = among & (rank < count[:, None])
    return found


def landing_set(batch: Batch, count: Rows) -> Landing:
    """Return where a pod that asks for devices or replicas could land on each node.

    Args:
        batch: the nodes.
        count: how many it asks for: one for each node, or one for all.
    """
    offered, unoffered = _offered(batch, count)
    open_devices = offered & (batch.used < batch.replicas[:, None])
    free_whole = open_devices.sum(axis=1)
    # kube-scheduler says that the pod fits. Where our mapping leaves less room than that, or
    # less than the API's count does, the mapping is wrong or late: any device may be it.
    by_count = np.maximum(batch.allocatable - batch.held, count)
    is_late = ~batch.is_shared & (free_whole < np.minimum(by_count, offered.sum(axis=1)))
    is_open = ~batch.is_agreed | is_late | ~open_devices.any(axis=1)
    policy = _policy_choice(batch, offered, count)
    devices = np.where(
        is_open[:, None],
        offered,
        np.where(batch.is_shared[:, None], policy, open_devices),
    )
    # Where any device may be landed on, the ones that are held are among them.
    held_inside = np.where(is_open & ~batch.is_shared, batch.held, batch.taken)
    certainty = np.ones(len(batch))
    at = np.flatnonzero(~batch.is_agreed & ~batch.is_shared & (batch.held > 0))
    if at.size:
        held = _held_by_use(batch, offered, at)
        left = offered[at] & ~held
        known = held.sum(axis=1)
        has_room = (
            left.sum(axis=1) - (batch.held[at] - known) >= np.broadcast_to(count, len(batch))[at]
        )
        is_told = (known > 0) & has_room
        at, left, known = at[is_told], left[is_told], known[is_told]
        devices[at], certainty[at] = left, BY_USE
        held_inside[at] -= known
    size = devices.sum(axis=1)
    needed = np.minimum(count, size)
    taken = np.minimum(np.where(batch.is_shared, 0, held_inside), size)
    return Landing(
        devices=devices,
        size=size,
        needed=needed,
        taken=taken,
        unoffered=unoffered,
        certainty=certainty,
    )


def _held_by_use(batch: Batch, offered: Flags, at: Rows) -> Flags:
    """Return the devices of some nodes that pods hold, as far as what is in use tells.

    Of more devices in use than pods hold, some are free and used by others. Which is unknown: the
    busiest are, to be ready for the worst.
    """
    in_use = offered[at] & batch.telemetry.is_in_use[at]
    return _calmest(in_use, batch.telemetry.peak[at], batch.held[at])


def _offered(batch: Batch, count: Rows) -> tuple[Flags, Rows]:
    """Return the devices but for those that the kubelet surely does not offer.

    Where it offers fewer than there are, and no more are out than it leaves out, those are they.
    Ill health alone says so only of what was withdrawn: others may be left out for claims.

    Returns:
        The devices, and how many of them were withdrawn nevertheless: nobody knows which.
    """
    size = batch.present.sum(axis=1)
    withdrawn = batch.withdrawn // batch.replicas
    left_out = np.maximum(size + -batch.allocatable // batch.replicas, withdrawn)
    if not left_out.any():
        return batch.present, withdrawn
    telemetry = batch.telemetry
    is_withdrawn = (withdrawn > 0)[:, None] | ~telemetry.is_excluded
    out = batch.present & telemetry.is_out & is_withdrawn
    known = out.sum(axis=1)
    # kube-scheduler says that the pod fits: where it would not on the others, we are late.
    has_room = (size - known) * batch.replicas >= np.minimum(count, size * batch.replicas)
    is_known = (known <= left_out) & has_room
    unknown = np.maximum(withdrawn - np.where(is_known, known, 0), 0)
    return batch.present & ~(out & is_known[:, None]), unknown


def _policy_choice(batch: Batch, offered: Flags, count: Rows) -> Flags:
    """Return the shared devices that the device plugin would choose among.

    `distributed` takes the device with the fewest replicas in use, `packed` the one with the most
    that has room; a pod that asks for several replicas gets them one after the other. Devices
    that are tied all count.
    """
    if not batch.is_shared.any():
        return offered
    sign = np.where(batch.is_packed, -1, 1)[:, None]
    used = batch.used.copy(order="K")
    nodes = np.arange(len(batch))
    chosen = np.zeros_like(offered)
    most = np.minimum(count, batch.replicas * batch.present.sum(axis=1)).max()
    for drawn in range(int(most)):
        has_room = offered & (used < batch.replicas[:, None]) & (drawn < count)[:, None]
        rank = np.where(has_room, used * sign, np.iinfo(np.intp).max)
        chosen |= has_room & (rank == rank.min(axis=1)[:, None])
        used[nodes, rank.argmin(axis=1)] += 1
    return chosen


REMEMBERED_ROWS = 4096
"""Rows with assumed tenants that are not put together again for each decision of a burst."""


NONE_OUT: Final[Flags] = np.zeros(0, dtype=np.bool_)
"""Before anything is believed of any device, none is known to be out."""


def closed_slots(row: PoolRow, is_out: Flags) -> tuple[int, ...]:
    """Return the slots of shared devices that the kubelet has withdrawn, where it is known which.

    Args:
        row: the node's row.
        is_out: of each device of the telemetry, as `Telemetry` has it; it may know fewer.
    """
    if not (row.is_shared and row.withdrawn):
        return ()
    known = len(is_out)
    out = tuple(at for at, slot in enumerate(row.slots) if slot < known and is_out[slot])
    # As `_offered` has it: where more are out than are withdrawn, any of these may be offered.
    is_known = len(out) <= row.withdrawn // row.replicas and len(out) < len(row.slots)
    return out if is_known else ()


@lru_cache(maxsize=REMEMBERED_ROWS)
def assume(row: PoolRow, tenants: tuple[Tenant, ...], closed: tuple[int, ...] = ()) -> PoolRow:
    """Return `row` with `tenants` on it that the readings do not show.

    On whole devices they hold some of the free ones, nobody knows which; on shared devices each
    replica goes where the device plugin's policy puts it.

    Args:
        row: the node's row.
        tenants: the pods.
        closed: slots that none of them gets, not all.

    Example:
        >>> from extender.core.snapshot import empty_row
        >>> assume(empty_row((0, 1)), (Tenant(uid="a", count=1),)).taken
        1
    """
    if not tenants:
        return row
    if not row.is_shared:
        count = sum(tenant.count for tenant in tenants)
        return replace(row, held=row.held + count, taken=row.taken + count)
    used = list(row.used)
    assumed = list(row.assumed)
    assumed_shares = list(row.assumed_shares)
    guessed_bytes, kindred = list(row.guessed_bytes), list(row.kindred)
    declared_bytes = list(row.declared_bytes)
    undeclared = list(row.undeclared or (0,) * len(used))
    open_slots = [slot for slot in range(len(used)) if slot not in closed]
    for tenant in tenants:
        for _ in range(min(tenant.count, row.replicas * len(open_slots))):
            slot = _next_slot(used, open_slots, row)
            used[slot] += 1
            assumed[slot] += 1
            if tenant.memory_bytes is not None:
                declared_bytes[slot] += tenant.memory_bytes
                continue
            undeclared[slot] += 1
            if tenant.expected_bytes is None:
                assumed_shares[slot] += 1
            else:
                guessed_bytes[slot] += tenant.expected_bytes
                kindred[slot] += 1
    return replace(
        row,
        held=row.held + sum(tenant.count for tenant in tenants),
        used=tuple(used),
        assumed=tuple(assumed),
        assumed_shares=tuple(assumed_shares),
        guessed_bytes=tuple(guessed_bytes),
        kindred=tuple(kindred),
        declared_bytes=tuple(declared_bytes),
        undeclared=tuple(undeclared),
    )


def _next_slot(used: list[int], open_slots: list[int], row: PoolRow) -> int:
    """Return the slot of the device that the plugin's policy hands out next."""
    if row.is_packed:
        with_room = [slot for slot in open_slots if used[slot] < row.replicas]
        if with_room:
            return max(with_room, key=lambda slot: (used[slot], -slot))
    return min(open_slots, key=lambda slot: (used[slot], slot))
