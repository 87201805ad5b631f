"""Compute the landing set: the devices of a node that the kubelet could allocate to a pod.

The kubelet chooses the device, not kube-scheduler and not the extender. For whole devices it may
take any free one. For shared devices it follows the device plugin's policy. If the device holders
and the API server's count disagree, it may take any device: most likely one that is not in use, as
long as the count confirms that number of holders. The certainty is the probability that all devices
of the pod are good; docs/decision.md explains it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Final

import numpy as np

from extender.core.nodes.snapshot import (
    NO_LIMIT,
    AnyColumn,
    Batch,
    Flags,
    Leaving,
    PoolRow,
    Ratios,
    Rows,
    Telemetry,
    Tenant,
    batch_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Landing set of a pod that requests `count` devices; one row per node.

    Attributes:
        devices: per slot, whether the pod could get this device.
        size: number of devices in the set.
        needed: number of distinct devices that the pod will get.
        replicas: number of devices or replicas that the pod will get.
        taken: number of devices in the set that are allocated, without knowing which.
        unoffered: number of devices in the set that the kubelet does not offer, without knowing
            which.
        certainty: probability that the set is right; below 1 if the device holders were guessed
            from devices in use.
    """

    devices: Flags
    size: Rows
    needed: Rows
    replicas: Rows
    taken: Rows
    unoffered: Rows
    certainty: Ratios


_BY_USE: Final = 0.95
"""Probability that the devices in use are the allocated ones, without known device holders. A
tenant may leave its device unused while a process outside Kubernetes uses a free one."""


_OF_FORMER_TENANT: Final = (
    *("utilization", "latest", "peak", "next_hour", "freshness", "stress", "is_in_use"),
    *("memory_used", "memory_free_bytes", "memory_freshness"),
)
"""Telemetry columns that describe the former tenant of a freed device."""


def count_freed(batch: Batch) -> Batch:
    """Return a batch that treats devices of pods that have just ended as free.

    If readings show more devices in use than pods hold, the ended pods have freed the surplus. It
    is unknown which devices these are, so the calmest are chosen: any choice gives the same
    probability.
    """
    if not batch.just_freed.any():
        return batch
    return batch.shared_results.get("freed", lambda: _count_freed(batch))


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
    changed = column.copy(order="K")
    changed[at] = values
    return changed


def _calmest(among: Flags, peak: Ratios, count: Rows) -> Flags:
    """Select `count` of the flagged devices per node, those with the lowest recent utilization."""
    order = np.argsort(np.where(among, peak, np.inf), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    found: Flags = among & (rank < count[:, None])
    return found


def landing_set(batch: Batch, count: Rows) -> Landing:
    """Compute the landing set of each node for a pod that requests devices or replicas.

    Args:
        count: devices that the pod requests: one value per node, or one value for all nodes.
    """
    offered, unoffered = _offered(batch, count)
    open_devices = offered & (batch.used < batch.replicas[:, None])
    free_whole = open_devices.sum(axis=1)
    # kube-scheduler found room for the pod. If the device holders leave fewer free devices than
    # that, or than the API server's count, they are wrong or late: any device may be free.
    by_count = np.maximum(batch.allocatable - batch.held, count)
    is_late = ~batch.is_shared & (free_whole < np.minimum(by_count, offered.sum(axis=1)))
    is_open = ~batch.is_agreed | is_late | ~open_devices.any(axis=1)
    policy = _policy_choice(batch, offered, count)
    devices = np.where(
        is_open[:, None], offered, np.where(batch.is_shared[:, None], policy, open_devices)
    )
    # If any device may be landed on, the allocated ones are among them.
    held_inside = np.where(is_open & ~batch.is_shared, batch.held, batch.taken)
    certainty = np.ones(len(batch))
    at = np.flatnonzero(~batch.is_agreed & ~batch.is_shared)
    if at.size:
        held = _held_by_use(batch, offered, at)
        left = offered[at] & ~held
        known = held.sum(axis=1)
        has_room = (
            left.sum(axis=1) - (batch.held[at] - known) >= np.broadcast_to(count, len(batch))[at]
        )
        is_useful = (known > 0) & has_room
        at, left, known = at[is_useful], left[is_useful], known[is_useful]
        devices[at], certainty[at] = left, _BY_USE
        held_inside[at] -= known
    size = devices.sum(axis=1)
    needed = np.minimum(count, size)
    taken = np.minimum(np.where(batch.is_shared, 0, held_inside), size)
    return Landing(
        devices=devices,
        size=size,
        needed=needed,
        replicas=np.where(batch.is_shared, count, needed),
        taken=taken,
        unoffered=unoffered,
        certainty=certainty,
    )


def _held_by_use(batch: Batch, offered: Flags, at: Rows) -> Flags:
    """Guess the allocated devices of some nodes from the devices in use.

    If more devices are in use than pods hold, some of them are free and in foreign use. The calmest
    count as allocated, so that the free ones are assumed to be the busiest: the worst case.
    """
    in_use = offered[at] & batch.telemetry.is_in_use[at]
    return _calmest(in_use, batch.telemetry.peak[at], batch.held[at])


def _offered(batch: Batch, count: Rows) -> tuple[Flags, Rows]:
    """Return the present devices without those that the kubelet certainly does not offer.

    If the kubelet offers fewer devices than the node has, and at most as many devices are out as it
    withholds, the devices that are out are the withdrawn ones. Ill health alone is not proof unless
    the kubelet withdrew devices: devices may also be left out for ResourceClaims.

    Returns:
        The devices, and the number of further withdrawn devices, without knowing which.
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
    # kube-scheduler found room for the pod: if the other devices have none, our data is late.
    has_room = (size - known) * batch.replicas >= np.minimum(count, size * batch.replicas)
    is_known = (known <= left_out) & has_room
    unknown = np.maximum(withdrawn - np.where(is_known, known, 0), 0)
    return batch.present & ~(out & is_known[:, None]), unknown


def _policy_choice(batch: Batch, offered: Flags, count: Rows) -> Flags:
    """Return the shared devices that the device plugin may allocate next.

    `distributed` takes the device with the fewest replicas in use, `packed` the fullest device that
    has room. Several replicas are allocated one after the other. All tied devices are included.
    """
    if not batch.is_shared.any():
        return offered
    sign = np.where(batch.is_packed, -1, 1)[:, None]
    used = batch.used.copy(order="K")
    nodes = np.arange(len(batch))
    chosen = np.zeros_like(offered)
    left = np.minimum(count, batch.replicas * batch.present.sum(axis=1))
    while (left > 0).any():
        has_room = offered & (used < batch.replicas[:, None]) & (left > 0)[:, None]
        rank = np.where(has_room, used * sign, np.iinfo(np.intp).max)
        chosen |= has_room & (rank == rank.min(axis=1)[:, None])
        device = rank.argmin(axis=1)
        # A packed device stays the fullest one until it is full.
        filled = np.minimum(batch.replicas - used[nodes, device], left)
        drawn = np.where(batch.is_packed & has_room.any(axis=1), filled, 1)
        used[nodes, device] += drawn
        left = left - drawn
    return chosen


_REMEMBERED_ROWS = 4096
"""Cache size of `assume`: rows with assumed tenants, reused between the decisions of a burst."""


NONE_OUT: Final[Flags] = np.zeros(0, dtype=np.bool_)
"""Initial `is_out` flags, before any telemetry exists."""


def closed_slots(row: PoolRow, is_out: Flags) -> tuple[int, ...]:
    """Return the slots of shared devices that the kubelet has withdrawn, or () if they are unknown.

    Args:
        row: the node's row.
        is_out: `Telemetry.is_out` by device row; may be shorter than the highest device row.
    """
    if not (row.is_shared and row.withdrawn):
        return ()
    known = len(is_out)
    out = tuple(at for at, slot in enumerate(row.slots) if slot < known and is_out[slot])
    # As in `_offered`: if more devices are out than withdrawn, any of them may be offered.
    is_known = len(out) <= row.withdrawn // row.replicas and len(out) < len(row.slots)
    return out if is_known else ()


@lru_cache(maxsize=_REMEMBERED_ROWS)
def assume(row: PoolRow, tenants: tuple[Tenant, ...], closed: tuple[int, ...] = ()) -> PoolRow:
    """Return a pool row with assumed tenants added: pods that readings do not show yet.

    On whole devices the tenants hold some of the free ones, without knowing which. On shared
    devices each replica goes to the device that the device plugin's policy selects.

    Args:
        row: the node's row.
        tenants: the pods to add.
        closed: slots that no tenant gets; must leave at least one slot open.
    """
    if not tenants:
        return row
    count = sum(tenant.count for tenant in tenants)
    row = replace(
        row,
        held=row.held + count,
        free_millicores=_left(row.free_millicores, (one.host.millicores for one in tenants)),
        free_bytes=_left(row.free_bytes, (one.host.memory_bytes for one in tenants)),
        free_storage_bytes=_left(
            row.free_storage_bytes, (one.host.storage_bytes for one in tenants)
        ),
    )
    if not row.is_shared:
        return replace(row, taken=row.taken + count)
    used = list(row.used)
    assumed = list(row.assumed)
    assumed_shares = list(row.assumed_shares)
    guessed_bytes, kindred = list(row.guessed_bytes), list(row.kindred)
    declared_bytes = list(row.declared_bytes)
    undeclared = list(row.undeclared or (0,) * len(used))
    open_slots = [slot for slot in range(len(used)) if slot not in closed]
    for tenant in tenants:
        for slot, count in _allocated(used, open_slots, row, tenant):
            used[slot] += count
            assumed[slot] += count
            if tenant.memory_bytes is not None:
                declared_bytes[slot] += tenant.memory_bytes * count
                continue
            undeclared[slot] += count
            if tenant.expected_bytes is None:
                assumed_shares[slot] += count
            else:
                guessed_bytes[slot] += tenant.expected_bytes  # for all its shares of the device
                kindred[slot] += count
    return replace(
        row,
        used=tuple(used),
        assumed=tuple(assumed),
        assumed_shares=tuple(assumed_shares),
        guessed_bytes=tuple(guessed_bytes),
        kindred=tuple(kindred),
        declared_bytes=tuple(declared_bytes),
        undeclared=tuple(undeclared),
    )


def _left(free: int, requested: Iterable[int]) -> int:
    """Return what is left of a resource of the node, `NO_LIMIT` if that is unknown."""
    return free if free == NO_LIMIT else max(free - sum(requested), 0)


def _allocated(
    used: Sequence[int], open_slots: Sequence[int], row: PoolRow, tenant: Tenant
) -> list[tuple[int, int]]:
    """Return the slots whose devices a tenant gets, and its number of replicas of each.

    All replicas of a level are allocated together, because a node may offer millions of them.
    """
    count = min(tenant.count, row.replicas * len(open_slots))
    after = {slot: used[slot] for slot in open_slots}
    placed = zip(tenant.placed, used, strict=False)
    if sum(tenant.placed) <= count and all(more + now <= row.replicas for more, now in placed):
        for slot in after.keys() & range(len(tenant.placed)):
            after[slot] += tenant.placed[slot]
            count -= tenant.placed[slot]
    if row.is_packed:
        for slot in sorted(open_slots, key=lambda slot: (-after[slot], slot)):
            more = min(max(row.replicas - after[slot], 0), count)
            after[slot] += more
            count -= more
    while count > 0:
        least = min(after.values())
        lowest = [slot for slot in open_slots if after[slot] == least]
        step = min((level - least for level in after.values() if level > least), default=count)
        each, rest = divmod(min(count, step * len(lowest)), len(lowest))
        for at, slot in enumerate(lowest):
            after[slot] += each + (at < rest)
        count -= each * len(lowest) + rest
    return [(slot, level - used[slot]) for slot, level in after.items() if level > used[slot]]


def batch_after(
    leaving: Leaving,
    tenants: tuple[Tenant, ...],
    telemetry: Telemetry,
    suspicion: Ratios,
    *,
    is_presumed_idle: bool,
) -> Batch:
    """Build a one-row batch of a node as if some pods had left and readings showed it.

    Only the memory of these pods is released. Foreign use from before they came stays. Readings of
    a device after its pods ended show its true activity, but their memory may be released later.

    Args:
        leaving: the node without these pods.
        tenants: tentative tenants of the node.
        suspicion: suspicion of the node, an array with one element.
        is_presumed_idle: whether freed devices count as idle, because they are freed for this pod,
            unless they were in use or active before the leaving pods came; else they count as
            unknown.
    """
    row = assume(leaving.row, tenants, closed_slots(leaving.row, telemetry.is_out))
    batch = batch_rows((row,), telemetry, suspicion)
    seen = batch.telemetry
    freed = np.array([leaving.freed], dtype=np.bool_)
    size = seen.memory_total_bytes
    used = seen.memory_used * size
    released = np.minimum(np.array([leaving.released_bytes]), used)
    others = np.maximum(seen.others_bytes - np.array([leaving.released_others]), 0.0)
    # A freed device has no reading yet; memory in use by others is known from before.
    used = np.where(freed, others, used - released)
    free = np.where(freed, size - others, seen.memory_free_bytes + released)
    was_foreign = np.array([leaving.foreign], dtype=np.bool_)
    was_active = was_foreign | np.array([leaving.active], dtype=np.bool_)
    is_read = np.array([leaving.ended], dtype=np.bool_) & (seen.freshness > 0)
    unread = freed & ~is_read
    # Memory that pods release late looks foreign meanwhile.
    is_late = freed & (released > 0) & ~was_foreign
    after = replace(
        seen,
        utilization=np.where(unread, 0.0, seen.utilization),
        latest=np.where(unread, 0.0, seen.latest),
        next_hour=np.where(unread, 0.0, seen.next_hour),
        # Such use is not foreign, so the mean of the last minutes does not count.
        peak=np.where(
            unread, 0.0, np.where(is_late, np.minimum(seen.peak, seen.latest), seen.peak)
        ),
        presumed=np.where(unread, 0.0, seen.presumed),
        freshness=np.where(unread, is_presumed_idle & ~was_active, seen.freshness),
        memory_used=used / np.where(size > 0, size, np.inf),
        memory_free_bytes=free,
        memory_freshness=np.where(freed, size > 0, seen.memory_freshness),
        others_bytes=others,
        is_foreign=np.where(unread, was_foreign, seen.is_foreign & ~is_late),
        is_in_use=seen.is_in_use & ~freed,
    )
    return replace(batch, telemetry=after)


_MOST: Final = 256
"""Maximum number of devices that one node offers of a resource."""

_JUST: Final = 1e-9
"""Tolerance at a bound, so that rounding cannot move a probability across it."""


class Band(IntEnum):
    """Likelihood that a pod lands on good devices."""

    UNLIKELY = 0
    UNKNOWN = 1
    LIKELY = 2


LEAST: Final = {Band.UNKNOWN: 1 / 3, Band.LIKELY: 2 / 3}
"""Lower bound of each band: mean probability per device."""

_LEAST_OF_ALL: Final = {
    band: each ** np.arange(_MOST + 1) * (1 - _JUST) for band, each in LEAST.items()
}
"""Lower bound of each band by number of devices: probability that all are good."""

STEPS: Final = 16
"""Steps of certainty: differences below half a step have no effect."""


def _count_choices() -> Ratios:
    """Return Pascal's triangle: entry (n, k) is the number of choices of k from n devices."""
    choices = np.zeros((_MOST + 1, _MOST + 1))
    choices[:, 0] = 1.0
    for row in range(1, _MOST + 1):
        choices[row, 1:] = choices[row - 1, 1:] + choices[row - 1, :-1]
    return choices


_CHOICES: Final = _count_choices()


def chance_of_all(chances: Ratios, offered: Rows, needed: Rows) -> Ratios:
    """Return per node the probability that all devices allocated to a pod are good.

    The kubelet takes `needed` of the `offered` devices at random. The probability is the elementary
    symmetric polynomial of the devices' probabilities, divided by the number of choices.

    Args:
        chances: probability that each device is good, 0 if the pod cannot get it; one column per
            slot.
        offered: number of devices that may be allocated; devices beyond `chances` count as bad.
        needed: number of devices that are allocated.
    """
    most = int(needed.max(initial=0))
    if most <= 1:
        together = chances.sum(axis=1)
    else:
        # Row k: sum over all choices of k devices so far of the product of their chances.
        sums = np.zeros((most + 1, len(chances)))
        sums[0] = 1.0
        for slot in range(chances.shape[1]):
            sums[1:] += sums[:-1] * chances[:, slot]
        together = np.take_along_axis(sums, needed[None], axis=0)[0]
    chance = together / np.maximum(_CHOICES[offered, needed], 1.0)
    return np.where((needed > 0) & (needed <= offered), np.minimum(chance, 1.0), 0.0)


def bands(chance: Ratios, needed: Rows) -> Rows:
    """Return the band of each node, by the mean probability per device."""
    found: Rows = (chance >= _LEAST_OF_ALL[Band.UNKNOWN][needed]).astype(np.intp)
    found += chance >= _LEAST_OF_ALL[Band.LIKELY][needed]
    return np.where(needed > 0, found, Band.UNLIKELY)


def certainty(chance: Ratios, band: Rows, needed: Rows) -> Ratios:
    """Return the certainty that ranks nodes within a band.

    Likely band: the probability that all devices are good. Other bands: its mean per device,
    because with several unknown devices the product vanishes and all nodes would tie.
    """
    at = np.flatnonzero((band < Band.LIKELY) & (needed > 1) & (chance > 0))
    if not at.size:
        return chance
    result = chance.copy()
    result[at] = chance[at] ** (1 / needed[at])
    return result


def steps_of(certain: Ratios) -> Ratios:
    """Round certainty to whole steps, 0 to `STEPS`.

    Example:
        >>> steps_of(np.array([1.0, 0.98, 0.95, 0.5, 0.0])).tolist()
        [16.0, 16.0, 15.0, 8.0, 0.0]
    """
    return np.floor(certain * STEPS + 0.5 - _JUST)
