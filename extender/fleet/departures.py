"""Compute the devices and the memory that pods release when they end."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import numpy as np

from extender.core.decision.allocation import Guesses, shares_of
from extender.core.devices.readings import Column, DeviceKey
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Leaving, PoolRow
from extender.core.policy import Freshness
from extender.fleet.device_holders import TenantsByRow, may_hold
from extender.fleet.store import DeviceStore

_LATE_SECONDS: Final = 60.0
"""Time after a pod's end during which readings may still show its memory. Drivers free it late, and
exporters repeat values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnattributedEnd:
    """End of one pod.

    Attributes:
        resource: resource that it held.
        count: number of its devices.
        at: when it ended, seconds since the epoch.
        is_clean: whether no device that it may have held had foreign use.
        read_at: first measurement of the devices after the end, None without one.
    """

    resource: str
    count: int
    at: float
    is_clean: bool
    read_at: float | None = None


class UnattributedEnds:
    """Ends of pods with whole devices on nodes where no source reports device holders.

    The number of freed devices is known, but not their identity. This number counts as free,
    regardless of the last readings, until two newer readings show which devices are in use.
    """

    def __init__(self, store: DeviceStore) -> None:
        self._store = store
        self._ends: dict[str, tuple[_UnattributedEnd, ...]] = {}

    def __contains__(self, node: str) -> bool:
        return node in self._ends

    def forget(self, node: str) -> None:
        """Forget a removed node."""
        self._ends.pop(node, None)

    def shift_back(self, seconds: float) -> None:
        """Shift all recorded times back after the clock was set back by this many seconds."""
        self._ends = {
            node: tuple(
                replace(
                    end,
                    at=end.at - seconds,
                    read_at=None if end.read_at is None else end.read_at - seconds,
                )
                for end in ends
            )
            for node, ends in self._ends.items()
        }

    def note(self, pod: PodRecord, resource: str, rows: Sequence[int], at: float) -> None:
        """Record that a pod has ended.

        Args:
            resource: resource that it requested and its node still offers.
            rows: devices that it may have held: no other pod is known to hold them.
            at: when it ended, seconds since the epoch.
        """
        store = self._store
        had_use = [store.is_foreign(row) or store.was_used(row) for row in rows]
        in_use = [store.is_in_use(row) for row in rows]
        end = _UnattributedEnd(
            resource=resource,
            count=pod.resources[resource],
            at=at,
            is_clean=not any(had and has for had, has in zip(had_use, in_use, strict=True)),
        )
        self._ends[pod.node] = (*self._ends.get(pod.node, ()), end)
        own = [row for row in rows if not store.is_foreign(row)]
        store.restart_history(own, at, is_freed=False, is_use_known=True)

    def expire(self, node: str, now: float, freshness: Freshness) -> None:
        """Forget ends that two readings have followed, or that are too old."""
        if node not in self._ends:
            return
        times = [self._store.reported_at(row) for row in self._store.rows_of_node(node)]
        read_at = min((at for at in times if at is not None), default=0.0)
        if any(end.read_at is None and read_at > end.at for end in self._ends[node]):
            # The first reading may show memory that is freed late: the next one alone clears it.
            rows = self._store.rows_of_node(node)
            self._store.soften_use([row for row in rows if not self._store.is_foreign(row)])
        left = tuple(
            replace(end, read_at=read_at) if end.read_at is None and read_at > end.at else end
            for end in self._ends[node]
            if now - end.at <= freshness.max_age_seconds
            and (end.read_at is None or read_at <= end.read_at)
        )
        if left:
            self._ends[node] = left
        else:
            del self._ends[node]

    def with_freed_devices(self, node: str, resource: str, row: PoolRow) -> PoolRow:
        """Return a node's row in which the devices of these ended pods are free."""
        ends = [end for end in self._ends.get(node, ()) if end.resource == resource]
        if not ends or row.is_shared:
            return row
        return replace(
            row,
            just_freed=sum(end.count for end in ends),
            is_presumed=all(end.is_clean for end in ends),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Release:
    """Memory that a pod releases on a device.

    Attributes:
        used: memory in use, in bytes.
        others: part of `used` that exceeds the pods' declarations, in bytes.
    """

    used: float = 0.0
    others: float = 0.0

    def plus(self, other: "_Release") -> "_Release":
        """Return the sum of two releases."""
        return _Release(used=self.used + other.used, others=self.others + other.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldDevice:
    """State of a device that an ended pod held.

    Attributes:
        key: identity of the device, None if unknown.
        own: memory of the pod.
        rest: other memory in use.
        was_foreign: whether the device had foreign use before the pod.
        was_active: whether it had foreign use or any activity before the pod.
    """

    key: DeviceKey | None
    own: _Release
    rest: _Release
    was_foreign: bool
    was_active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndedPod:
    """A pod that has just ended.

    Attributes:
        at: when it ended, seconds since the epoch.
        devices: devices whose readings may still show the pod, by row.
    """

    at: float
    devices: dict[int, _HeldDevice]


class Departures:
    """Computes the state of devices without some pods, and remembers pods that have just ended.

    Args:
        rows: latest rows by node and resource.
        held: devices that each pod is known to hold, by node and pod UID.
        guessed: shares that pods are assumed to hold, by node.
        last_used: returns the memory that a pod (UID) was last seen to use on a device, None if
            unknown.
    """

    def __init__(
        self,
        store: DeviceStore,
        rows: Mapping[str, Mapping[str, PoolRow]],
        held: Mapping[str, Mapping[str, tuple[int, ...]]],
        guessed: Mapping[str, Guesses],
        last_used: Callable[[str, DeviceKey], int | None],
    ) -> None:
        self._store = store
        self._rows = rows
        self._held = held
        self._guessed = guessed
        self._ended_pods: dict[str, dict[str, _EndedPod]] = {}
        self._last_used = last_used

    def end(
        self, pod: PodRecord, rows: Sequence[int], at: float, *, staying: Column | None = None
    ) -> None:
        """Release a pod's devices and the memory that it used on them.

        Args:
            at: when it ended, seconds since the epoch.
            staying: ratio of each device's load that its other tenants cause; None if no other pod
                holds the devices.
        """
        is_last = staying is None
        self._remember(pod, rows, at, is_last=is_last)
        seen = np.array([self._seen_bytes(pod, row) for row in rows])
        has_declared = pod.memory_bytes is not None
        declared = [self.declared(pod, row) if has_declared else math.nan for row in rows]
        # Floats: the memory of a million shares does not fit 64 bits.
        of_shares = np.array(declared, dtype=np.float64)
        self._store.release(rows, of_shares, seen, is_last=is_last)
        if staying is None:
            self._store.restart_history(rows, at, is_freed=True)
        else:
            self._store.restart_history(rows, at, is_freed=False, held_since=-inf, staying=staying)

    def declared(self, pod: PodRecord, row: int) -> int:
        """Return the memory that a pod declared for all its shares of a device."""
        return (pod.memory_bytes or 0) * self._shares(pod, row)

    def end_on(
        self, pod: PodRecord, slots: Iterable[int], at: float, tenants: TenantsByRow
    ) -> None:
        """Release the devices that a pod held, or may have held.

        A device stays in use while other pods hold it or are assumed on it: some sources name only
        one of the pods that share a device.

        Args:
            pod: the pod.
            slots: the devices.
            at: when it ended, seconds since the epoch.
            tenants: pods that are known to hold each device.
        """
        rows = [row for row in self._rows.get(pod.node, {}).values() if row.is_shared]
        freed, shared, staying = [], [], []
        for slot in slots:
            shown = tenants.get(slot, ())
            used = (row.used[row.slots.index(slot)] for row in rows if slot in row.slots)
            own = self.assumed_shares(pod, slot)
            own += self._shares(pod, slot) if pod.key in shown else 0
            count = max(len(shown), 1 + max(used, default=0) - own)
            if count == 1:
                freed.append(slot)
            elif own:
                shared.append(slot)
                staying.append(1 - 1 / count)
        self.end(pod, freed, at)
        # The pod's own part of the load is unknown: assume an even share.
        self.end(pod, shared, at, staying=np.array(staying))

    def assumed_shares(self, pod: PodRecord, row: int, *, is_lasting: bool = False) -> int:
        """Return the number of shares of a device that a pod is assumed to hold.

        Args:
            is_lasting: whether to leave out shares that only ended init containers requested.
        """
        guessed = self._guessed.get(pod.node, {})
        return sum(
            placed[slots.index(row)]
            for slots in {one.slots for one in self._rows.get(pod.node, {}).values()}
            for is_idle in ((False,) if is_lasting else (False, True))
            if row in slots and (placed := guessed.get((slots, pod.uid, is_idle)))
        )

    def _shares(self, pod: PodRecord, row: int) -> int:
        """Return the number of shares of a device that a pod holds, or is assumed to hold."""
        rows = self._held.get(pod.node, {}).get(pod.uid, ())
        if row not in rows:
            return max(self.assumed_shares(pod, row, is_lasting=True), 1)
        lasting = pod.resources if pod.lasting is None else pod.lasting
        return shares_of(sum(lasting.values()), len(rows))[rows.index(row)]

    def _is_last_undeclared(self, pod: PodRecord, slot: int) -> bool:
        """Return whether the pod is the only pod without declared memory on a shared device."""
        rows = self._rows.get(pod.node, {}).values()
        return pod.memory_bytes is None and all(
            row.undeclared[row.slots.index(slot)] <= self._shares(pod, slot)
            for row in rows
            if row.undeclared and slot in row.slots
        )

    def _remember(self, pod: PodRecord, rows: Iterable[int], at: float, *, is_last: bool) -> None:
        """Record the devices and the memory of an ending pod before they are released."""
        ended = self._ended_pods.setdefault(pod.node, {}).setdefault(
            pod.uid, _EndedPod(at=at, devices={})
        )
        for row in rows:
            used, others, _ = self._store.occupancy(row)
            of_pod = (
                self._release_of_last(row)
                if is_last
                else self._release_of_some(
                    [pod], row, all_undeclared=self._is_last_undeclared(pod, row)
                )
            )
            rest = _Release(used=used - of_pod.used, others=others - of_pod.others)
            ended.devices[row] = _HeldDevice(
                key=self._key(row),
                own=of_pod,
                rest=rest,
                was_foreign=self._store.was_used(row),
                was_active=self._store.was_active(row),
            )

    def shift_back(self, seconds: float) -> None:
        """Shift all recorded times back after the clock was set back by this many seconds."""
        for ended_pods in self._ended_pods.values():
            for uid, pod in ended_pods.items():
                ended_pods[uid] = replace(pod, at=pod.at - seconds)

    def forget(self, node: str) -> None:
        """Forget the pods of a removed node."""
        self._ended_pods.pop(node, None)

    def expire_ended(self, node: str, now: float) -> None:
        """Forget ended pods of a node that readings no longer show."""
        ended_pods = self._ended_pods.get(node, {})
        for uid, pod in list(ended_pods.items()):
            for row in [row for row in pod.devices if self._is_released(pod, row)]:
                del pod.devices[row]
            if now - pod.at > _LATE_SECONDS or not pod.devices:
                del ended_pods[uid]
        if not ended_pods:
            self._ended_pods.pop(node, None)

    def _is_released(self, pod: _EndedPod, row: int) -> bool:
        """Return whether a reading since the pod's end shows only the other memory in use.

        True also if the row belongs to another device by now.
        """
        device, read_at = pod.devices[row], self._store.reported_at(row)
        if self._key(row) != device.key:
            return True
        used, _, _ = self._store.occupancy(row)
        return read_at is not None and read_at > pod.at and used <= device.rest.used

    def _key(self, row: int) -> DeviceKey | None:
        info = self._store.info(row)
        return None if info is None else info.key

    def has_ended_pods(self, node: str) -> bool:
        """Return whether pods of a node have just ended."""
        return node in self._ended_pods

    def leaving(
        self,
        rows: tuple[PoolRow, PoolRow],
        tenants: TenantsByRow,
        pods: Collection[PodRecord],
        *,
        unreported_devices: int = 0,
        node: str = "",
    ) -> Leaving:
        """Return the state of devices without some pods.

        Args:
            rows: the node's row with these pods, and without them.
            tenants: pods that are known to hold each device.
            pods: pods that leave.
            unreported_devices: number of further, unknown devices that they may hold.
            node: node whose recently ended pods count, too; "" for none.
        """
        before, after = rows
        if before.slots != after.slots:
            before = after  # the devices have changed: their former holders are unknown
        ended_pods = self._ended_pods.get(node, {}).values()
        freed, released, ended, foreign, active = [], [], [], [], []
        for at, row in enumerate(after.slots):
            is_last = not after.used[at] and before.used[at] > 0
            lost = before.used[at] - after.used[at]
            release = self._release_on(rows, at, tenants, pods) if lost > 0 else _Release()
            held = [one.devices[row] for one in ended_pods if row in one.devices]
            still_shown = [self._still_shown(one, row) for one in held]
            is_freed = is_last or (not after.used[at] and any(is_all for _, is_all in still_shown))
            for one, _ in still_shown:
                release = release.plus(one)
            freed.append(is_freed)
            released.append(release)
            ended.append(is_freed and not is_last)
            # Readings since the end may show memory that is freed late.
            was_before = is_freed and any(one.was_foreign for one in held)
            foreign.append(self._store.was_used(row) if is_last else was_before)
            was_before = is_freed and any(one.was_active for one in held)
            active.append(self._store.was_active(row) if is_last else was_before)
        for at in self._most_likely_held(after, freed, unreported_devices):
            freed[at], released[at] = True, self._release_of_last(after.slots[at])
            foreign[at] = self._store.was_used(after.slots[at])
            active[at] = self._store.was_active(after.slots[at])
        return Leaving(
            row=after,
            freed=tuple(freed),
            released_bytes=tuple(one.used for one in released),
            released_others=tuple(one.others for one in released),
            ended=tuple(ended),
            foreign=tuple(foreign),
            active=tuple(active),
        )

    def _release_on(
        self,
        rows: tuple[PoolRow, PoolRow],
        at: int,
        tenants: TenantsByRow,
        pods: Collection[PodRecord],
    ) -> _Release:
        """Return the memory that leaving pods release on one device."""
        before, after = rows
        row = after.slots[at]
        if not after.used[at]:
            return self._release_of_last(row)
        shown = [pod for pod in pods if pod.key in tenants.get(row, ())]
        undeclared = [one.undeclared[at] if one.undeclared else 0 for one in rows]
        # Some sources name only one of the pods that share a device.
        shares = sum(self._shares(pod, row) for pod in shown)
        declared = sum(self.declared(pod, row) for pod in shown)
        return self._release_of_some(
            shown,
            row,
            all_undeclared=undeclared[0] > 0 and not undeclared[1],
            has_others=before.used[at] - after.used[at] > shares,
            declared_by_others=max(
                before.declared_bytes[at] - after.declared_bytes[at] - declared, 0.0
            ),
        )

    def _release_of_some(
        self,
        pods: Iterable[PodRecord],
        row: int,
        *,
        all_undeclared: bool,
        has_others: bool = False,
        declared_by_others: float = 0.0,
    ) -> _Release:
        """Return the memory that pods release on a device that other pods keep.

        Only memory that is known to belong to these pods counts. If no other pod without declared
        memory stays, all undeclared memory that is not foreign belongs to them.

        Args:
            pods: the leaving pods that are shown on the device.
            row: the device.
            all_undeclared: whether they include all pods without declared memory.
            has_others: whether further leaving pods are assumed on the device.
            declared_by_others: memory that these declared of the device, in bytes.
        """
        used, others, foreign = self._store.occupancy(row)
        own, of_others, unreported, is_unreported = 0.0, 0.0, declared_by_others, has_others
        for pod in pods:
            declared, seen = self.declared(pod, row), self._seen_bytes(pod, row)
            if math.isnan(seen):
                unreported += declared
                is_unreported |= pod.memory_bytes is None
            else:
                own += min(seen, declared)
                of_others += max(seen - declared, 0.0)
        own += min(unreported, max(used - others - own, 0.0))
        at_most = max(others - foreign, 0.0)
        if all_undeclared and is_unreported:
            of_others = max(of_others, at_most)
        return _Release(used=min(own + of_others, used), others=min(of_others, at_most))

    def _release_of_last(self, row: int) -> _Release:
        """Return the memory that the last pod of a device releases: all that is not foreign."""
        used, others, foreign = self._store.occupancy(row)
        return _Release(used=max(used - foreign, 0.0), others=max(others - foreign, 0.0))

    def _seen_bytes(self, pod: PodRecord, row: int) -> float:
        """Return the bytes that a pod was last seen to use on a device; NaN if unknown."""
        key = self._key(row)
        seen = None if key is None else self._last_used(pod.uid, key)
        return math.nan if seen is None else seen

    def _still_shown(self, device: _HeldDevice, row: int) -> tuple[_Release, bool]:
        """Return the memory that an ended pod still uses, and whether no other memory shows."""
        own, rest = device.own, device.rest
        used, others, _ = self._store.occupancy(row)
        shown = max(used - rest.used, 0.0)
        still_shown = _Release(
            used=min(own.used, shown), others=min(own.used, max(others - rest.others, 0.0))
        )
        return still_shown, shown <= own.used

    def _most_likely_held(self, row: PoolRow, freed: Sequence[bool], count: int) -> Iterable[int]:
        """Return the devices that unreported pods most likely hold: most memory in use first.

        Devices with foreign use are left out.
        """
        candidates = [
            at
            for at, used in enumerate(row.used)
            if not (used or freed[at] or self._store.counts_as_foreign(row.slots[at]))
        ]
        if count >= len(candidates):
            return candidates
        return sorted(candidates, key=lambda at: -self._release_of_last(row.slots[at]).used)[:count]


def count_unreported(
    pods: Iterable[PodRecord], resource: str, rows: Mapping[str, PoolRow], tenants: TenantsByRow
) -> int:
    """Return the number of devices behind a resource whose holders no source reports.

    Args:
        resource: one of the node's resources.
        rows: the node's rows by resource.
        tenants: pods that are known to hold each device.
    """
    shown = {key for on_it in tenants.values() for key in on_it}
    row, count = rows[resource], 0
    for pod in pods:
        if pod.key in shown:
            continue
        if resource in pod.resources:
            # For shared devices, the allocation already guesses the devices of unreported pods.
            count += 0 if row.is_shared else pod.resources[resource]
        elif may_hold(pod, resource, rows):
            count += len(row.slots)
    return count
