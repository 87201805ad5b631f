"""What pods release that leave a node: what they declared, and what they were seen to hold."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import numpy as np

from extender.core.decision.allocation import shares_of
from extender.core.devices.readings import Column, DeviceKey
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Leaving, PoolRow
from extender.core.policy import Freshness
from extender.fleet.device_holders import TenantsByRow, may_hold
from extender.fleet.store import DeviceStore

# Pods that ended on whole devices of nodes where no source tells who holds which.
#
# Which devices they left is unknown; how many is not: those are free, whatever was read of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """One pod's end.

    Attributes:
        resource: of which it held devices.
        count: how many.
        at: when it ended, seconds since the epoch.
        is_clean: none of those that may be it was used while no pod can have held it.
        read_at: when the devices were first measured after that, None before.
    """

    resource: str
    count: int
    at: float
    is_clean: bool
    read_at: float | None = None


class UnseenEnds:
    """Such ends by node, until two readings since say what is in use.

    Args:
        store: the devices.
    """

    def __init__(self, store: DeviceStore) -> None:
        self._store = store
        self._ends: dict[str, tuple[_End, ...]] = {}

    def __contains__(self, node: str) -> bool:
        return node in self._ends

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        self._ends.pop(node, None)

    def put_back(self, seconds: float) -> None:
        """Date all ends back: the clock was put back by so much."""
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
        """Note that a pod has ended.

        Args:
            pod: the pod.
            resource: what it asked for, by a name that its node has.
            rows: the devices that may have been its own: those that no other pod is known to hold.
            at: when, seconds since the epoch.
        """
        store = self._store
        had_use = [store.is_foreign(row) or store.was_used(row) for row in rows]
        in_use = [store.is_in_use(row) for row in rows]
        end = _End(
            resource=resource,
            count=pod.resources[resource],
            at=at,
            is_clean=not any(had and has for had, has in zip(had_use, in_use, strict=True)),
        )
        self._ends[pod.node] = (*self._ends.get(pod.node, ()), end)
        own = [row for row in rows if not store.is_foreign(row)]
        store.start_afresh(own, at, is_freed=False, is_use_known=True)

    def expire(self, node: str, now: float, freshness: Freshness) -> None:
        """Let go of ends that two readings have followed, or that are too long ago to count."""
        if node not in self._ends:
            return
        told = [self._store.told_at(row) for row in self._store.rows_of_node(node)]
        read_at = min((at for at in told if at is not None), default=0.0)
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

    def counted(self, node: str, resource: str, row: PoolRow) -> PoolRow:
        """Return a node's row with the devices counted that such pods have left."""
        ends = [end for end in self._ends.get(node, ()) if end.resource == resource]
        if not ends or row.is_shared:
            return row
        return replace(
            row,
            just_freed=sum(end.count for end in ends),
            is_presumed=all(end.is_clean for end in ends),
        )


LATE_SECONDS: Final = 60.0
"""So long after a pod's end readings may still show its memory: drivers give it back late, and
exporters repeat values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Release:
    """What a pod releases of a device.

    Attributes:
        used: memory in use that is its own, in bytes.
        others: the part of that which counts among others'.
    """

    used: float = 0.0
    others: float = 0.0

    def plus(self, other: "_Release") -> "_Release":
        """Return both."""
        return _Release(used=self.used + other.used, others=self.others + other.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """What a pod that has ended left on a device.

    Attributes:
        own: what it held.
        rest: what was in use besides.
        was_foreign: foreign use was seen on the device before it came.
        was_active: so was use or any activity.
    """

    own: _Release
    rest: _Release
    was_foreign: bool
    was_active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gone:
    """A pod that has just ended.

    Attributes:
        at: when, seconds since the epoch.
        left: by device, what of it may still show.
    """

    at: float
    left: dict[int, _Left]


class Departures:
    """Works out what devices are once pods are gone, and remembers those that have just ended.

    Args:
        store: the devices.
        rows: each node's rows by resource, as they are laid out.
        held: by node and pod (UID), the devices that it is known to hold, in their order.

    Attributes:
        told: returns what a pod (UID) was last seen to hold of a shared device, None where nobody
            told.
    """

    def __init__(
        self,
        store: DeviceStore,
        rows: Mapping[str, Mapping[str, PoolRow]],
        held: Mapping[str, Mapping[str, tuple[int, ...]]],
    ) -> None:
        self._store = store
        self._rows = rows
        self._held = held
        self._gone: dict[str, dict[str, _Gone]] = {}
        self.told: Callable[[str, DeviceKey], int | None] = lambda _uid, _device: None

    def end(
        self, pod: PodRecord, rows: Sequence[int], at: float, *, staying: Column | None = None
    ) -> None:
        """Take a pod off devices that it held; what was its own of their memory is released.

        Args:
            pod: the pod.
            rows: the devices.
            at: when it ended, seconds since the epoch.
            staying: ratio of each device's load that its other tenants keep; None where no other
                pod holds them.
        """
        is_last = staying is None
        self._note(pod, rows, at, is_last=is_last)
        told = np.array([self.told_of(pod, row) for row in rows])
        has_declared = pod.memory_bytes is not None
        declared = [self.declared(pod, row) if has_declared else math.nan for row in rows]
        self._store.release(rows, np.array(declared), told, is_last=is_last)
        if staying is None:
            self._store.start_afresh(rows, at, is_freed=True)
        else:
            self._store.start_afresh(rows, at, is_freed=False, held_since=-inf, staying=staying)

    def declared(self, pod: PodRecord, row: int) -> int:
        """Return what a pod declared of a device that it holds, for all its shares of it."""
        return (pod.memory_bytes or 0) * self._shares(pod, row)

    def _shares(self, pod: PodRecord, row: int) -> int:
        """Return how many shares a pod holds of a device, as they are laid out."""
        rows = self._held.get(pod.node, {}).get(pod.uid, ())
        if row not in rows:
            return 1
        return shares_of(sum(pod.resources.values()), len(rows))[rows.index(row)]

    def _is_last_undeclared(self, pod: PodRecord, slot: int) -> bool:
        """Tell whether no other pod on a shared device, as it is laid out, declared nothing."""
        rows = self._rows.get(pod.node, {}).values()
        return pod.memory_bytes is None and all(
            row.undeclared[row.slots.index(slot)] <= self._shares(pod, slot)
            for row in rows
            if row.undeclared and slot in row.slots
        )

    def _note(self, pod: PodRecord, rows: Iterable[int], at: float, *, is_last: bool) -> None:
        """Remember what a pod held that ends, before that is taken for released."""
        gone = self._gone.setdefault(pod.node, {}).setdefault(pod.uid, _Gone(at=at, left={}))
        for row in rows:
            used, others, _ = self._store.occupancy(row)
            of_pod = (
                self._all_of(row)
                if is_last
                else self._releases([pod], row, all_undeclared=self._is_last_undeclared(pod, row))
            )
            rest = _Release(used=used - of_pod.used, others=others - of_pod.others)
            gone.left[row] = _Left(
                own=of_pod,
                rest=rest,
                was_foreign=self._store.was_used(row),
                was_active=self._store.was_active(row),
            )

    def put_back(self, seconds: float) -> None:
        """Date all ends back: the clock was put back by so much."""
        for gone in self._gone.values():
            for uid, pod in gone.items():
                gone[uid] = replace(pod, at=pod.at - seconds)

    def forget(self, node: str) -> None:
        """Forget the pods of a node that is gone."""
        self._gone.pop(node, None)

    def forget_late(self, node: str, now: float) -> None:
        """Forget the pods of a node that readings cannot show any more, or do not."""
        gone = self._gone.get(node, {})
        for uid, pod in list(gone.items()):
            for row in [row for row in pod.left if self._is_released(pod, row)]:
                del pod.left[row]
            if now - pod.at > LATE_SECONDS or not pod.left:
                del gone[uid]
        if not gone:
            self._gone.pop(node, None)

    def _is_released(self, pod: _Gone, row: int) -> bool:
        """Tell whether a reading since its end shows no more than what was in use besides."""
        rest, read_at = pod.left[row].rest, self._store.told_at(row)
        return (
            read_at is not None and read_at > pod.at and self._store.occupancy(row)[0] <= rest.used
        )

    def has_gone(self, node: str) -> bool:
        """Tell whether pods of a node have just ended."""
        return node in self._gone

    def leaving(
        self,
        rows: tuple[PoolRow, PoolRow],
        tenants: TenantsByRow,
        pods: Collection[PodRecord],
        *,
        hidden: int = 0,
        node: str = "",
    ) -> Leaving:
        """Return what devices are once some pods are gone.

        Args:
            rows: the node's row with these pods, and without.
            tenants: pods that are known to hold each device.
            pods: those that leave.
            hidden: so many more devices they may hold; which ones is unknown.
            node: of which those that have just ended count too.
        """
        before, after = rows
        if before.slots != after.slots:
            before = after  # other devices than before: nothing is known of who held them
        gone = self._gone.get(node, {}).values()
        freed, released, ended, foreign, active = [], [], [], [], []
        for at, row in enumerate(after.slots):
            is_last = not after.used[at] and before.used[at] > 0
            lost = before.used[at] - after.used[at]
            release = self._released(rows, at, tenants, pods) if lost > 0 else _Release()
            left = [one.left[row] for one in gone if row in one.left]
            late = [self._late(one, row) for one in left]
            is_freed = is_last or (not after.used[at] and any(is_all for _, is_all in late))
            for one, _ in late:
                release = release.plus(one)
            freed.append(is_freed)
            released.append(release)
            ended.append(is_freed and not is_last)
            # Since the end readings may show memory that is given back late.
            of_left = is_freed and any(one.was_foreign for one in left)
            foreign.append(self._store.was_used(row) if is_last else of_left)
            of_left = is_freed and any(one.was_active for one in left)
            active.append(self._store.was_active(row) if is_last else of_left)
        for at in self._likeliest(after, freed, hidden):
            freed[at], released[at] = True, self._all_of(after.slots[at])
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

    def _released(
        self,
        rows: tuple[PoolRow, PoolRow],
        at: int,
        tenants: TenantsByRow,
        pods: Collection[PodRecord],
    ) -> _Release:
        """Return what pods that leave release of one device."""
        before, after = rows
        row = after.slots[at]
        if not after.used[at]:
            return self._all_of(row)
        shown = [pod for pod in pods if pod.key in tenants.get(row, ())]
        undeclared = [one.undeclared[at] if one.undeclared else 0 for one in rows]
        all_undeclared = undeclared[0] > 0 and not undeclared[1]
        if shown:
            return self._releases(shown, row, all_undeclared=all_undeclared)
        used, others, foreign = self._store.occupancy(row)
        declared = before.declared_bytes[at] - after.declared_bytes[at]
        of_others = max(others - foreign, 0.0) if all_undeclared else 0.0
        return _Release(used=min(declared, max(used - others, 0.0)) + of_others, others=of_others)

    def _releases(self, pods: Iterable[PodRecord], row: int, *, all_undeclared: bool) -> _Release:
        """Return what pods release of a device on which others stay.

        That is nothing of what is not known to be their own. Where no pod stays that declared
        nothing, all that is in use of others and not foreign can only be theirs.
        """
        used, others, foreign = self._store.occupancy(row)
        own, of_others, untold, is_untold = 0.0, 0.0, 0.0, False
        for pod in pods:
            declared, told = self.declared(pod, row), self.told_of(pod, row)
            if math.isnan(told):
                untold += declared
                is_untold |= pod.memory_bytes is None
            else:
                own += min(told, declared)
                of_others += max(told - declared, 0.0)
        own += min(untold, max(used - others - own, 0.0))
        at_most = max(others - foreign, 0.0)
        if all_undeclared and is_untold:
            of_others = max(of_others, at_most)
        return _Release(used=min(own + of_others, used), others=min(of_others, at_most))

    def _all_of(self, row: int) -> _Release:
        """Return what the last pod of a device releases: all that was not there before the pods."""
        used, others, foreign = self._store.occupancy(row)
        return _Release(used=max(used - foreign, 0.0), others=max(others - foreign, 0.0))

    def told_of(self, pod: PodRecord, row: int) -> float:
        """Return what a pod was last seen to hold of a device, in bytes, NaN if unknown."""
        info = self._store.info(row)
        told = None if info is None else self.told(pod.uid, info.key)
        return math.nan if told is None else told

    def _late(self, left: _Left, row: int) -> tuple[_Release, bool]:
        """Return what of a pod that has ended still shows, and whether nothing else does."""
        held, rest = left.own, left.rest
        used, others, _ = self._store.occupancy(row)
        shown = max(used - rest.used, 0.0)
        late = _Release(
            used=min(held.used, shown), others=min(held.used, max(others - rest.others, 0.0))
        )
        return late, shown <= held.used

    def _likeliest(self, row: PoolRow, freed: Sequence[bool], count: int) -> Iterable[int]:
        """Return so many of the devices that nobody is known to hold: of most that is in use.

        What was used while no pod can have held it is none of them.
        """
        may_be = [
            at
            for at, used in enumerate(row.used)
            if not (used or freed[at] or self._store.counts_as_foreign(row.slots[at]))
        ]
        if count >= len(may_be):
            return may_be
        return sorted(may_be, key=lambda at: -self._all_of(row.slots[at]).used)[:count]


def count_hidden(
    pods: Iterable[PodRecord],
    resource: str,
    rows: Mapping[str, PoolRow],
    tenants: TenantsByRow,
) -> int:
    """Return how many devices behind a resource pods may hold, though not which ones.

    Args:
        pods: the pods.
        resource: one of the node's.
        rows: the node's rows by resource.
        tenants: pods that are known to hold each device.
    """
    shown = {key for on_it in tenants.values() for key in on_it}
    row, count = rows[resource], 0
    for pod in pods:
        if pod.key in shown:
            continue
        if resource in pod.resources:
            # Shared devices of pods that nobody shows are guessed already.
            count += 0 if row.is_shared else pod.resources[resource]
        elif may_hold(pod, resource, rows):
            count += len(row.slots)
    return count
