"""What memory pods that declared none are still expected to load, long after they started.

A pod may fetch what it works on for minutes before it takes any memory. What it holds by then says
nothing of what it will hold: until it was seen to load, or had time enough, it counts with what is
expected of it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from extender.core.inventory import PodRecord
from extender.core.policy import Assumed
from extender.core.snapshot import PoolRow
from extender.fleet.held import TenantsByRow
from extender.fleet.pod_memory import LikePods
from extender.fleet.store import DeviceStore

LOADED: Final = 0.5
"""A pod has loaded once it was seen to take so much of what is expected: that is the most that any
pod like it took, rounded up, or an even share."""


@dataclass(slots=True, kw_only=True)
class _Late:
    """A pod that may still load.

    Attributes:
        uid: the pod's UID.
        rows: the devices that it is on, or may be.
        shares: how many it holds of them.
        expected_bytes: what it will likely take with all of them.
        loaded_bytes: what it was seen to take of that.
    """

    uid: str
    rows: tuple[int, ...]
    shares: int
    expected_bytes: float
    loaded_bytes: float

    @property
    def has_loaded(self) -> bool:
        """Whether it was seen to."""
        return self.loaded_bytes >= LOADED * self.expected_bytes


class LateLoads:
    """Attributes what devices show in use by pods without a declaration to those that load.

    What devices show more than before is of those of their pods that have not loaded yet, the
    oldest first.

    Args:
        store: the devices.
        like: what pods were measured to use.
        told: returns what a pod was last told to hold of a device, in bytes, NaN where untold.
        is_read_after: tells whether a device was read so many seconds after a pod's start.
    """

    def __init__(
        self,
        store: DeviceStore,
        like: LikePods,
        told: Callable[[PodRecord, int], float],
        is_read_after: Callable[[PodRecord, int, float], bool],
    ) -> None:
        self._store = store
        self._like = like
        self._told = told
        self._is_read_after = is_read_after
        self._late: dict[str, dict[str, _Late]] = {}
        self._shown: dict[str, dict[tuple[int, ...], float]] = {}

    def note(
        self,
        node: str,
        rows: Mapping[str, PoolRow],
        pods: Iterable[PodRecord],
        tenants: TenantsByRow,
        assumed: Assumed,
    ) -> None:
        """Take note of what a node's devices show by now.

        Args:
            node: the node.
            rows: its rows by resource, as they were last laid out.
            pods: those that hold its devices.
            tenants: pods that are known to hold each device.
            assumed: until when pods may load.
        """
        shared = {resource: row for resource, row in rows.items() if row.is_shared}
        undeclared = [pod for pod in pods if pod.memory_bytes is None] if shared else []
        undeclared.sort(key=lambda pod: (pod.bound_at or 0.0, pod.uid))
        found = (self._find(pod, shared, tenants, assumed) for pod in undeclared)
        late = {one.uid: one for one in found if one is not None}
        if not late:
            self.forget(node)
            return
        before, self._late[node] = self._shown.get(node, {}), late
        shown = {slots: self._undeclared(slots) for slots in {one.rows for one in late.values()}}
        self._shown[node] = shown
        for slots, now in shown.items():
            grown = max(now - before.get(slots, now), 0.0)
            on_them = [one for one in late.values() if one.rows == slots]
            for one in sorted(on_them, key=lambda one: one.has_loaded):
                taken = min(grown, max(one.expected_bytes - one.loaded_bytes, 0.0))
                one.loaded_bytes += taken
                grown -= taken
        for pod in undeclared:
            if pod.uid in late and not math.isnan(told := self._told_of(pod, tenants)):
                late[pod.uid].loaded_bytes = told

    def awaited(self, pod: PodRecord) -> float:
        """Return what a pod is expected to take with each share besides what it was seen to."""
        one = self._late.get(pod.node, {}).get(pod.uid)
        if one is None or one.has_loaded:
            return 0.0
        return (one.expected_bytes - one.loaded_bytes) / one.shares

    def has_any(self, node: str) -> bool:
        """Tell whether pods of a node may still load."""
        return node in self._late

    def forget(self, node: str) -> None:
        """Forget the pods of a node."""
        self._late.pop(node, None)
        self._shown.pop(node, None)

    def _find(
        self,
        pod: PodRecord,
        shared: Mapping[str, PoolRow],
        tenants: TenantsByRow,
        assumed: Assumed,
    ) -> _Late | None:
        """Return what is known of a pod that may still load, None of any other."""
        row = next((shared[resource] for resource in pod.resources if resource in shared), None)
        slots = _shown_on(pod, tenants) or (() if row is None else row.slots)
        if row is None or not slots:
            return None
        if all(self._is_read_after(pod, slot, assumed.loading_seconds) for slot in slots):
            return None
        shares, each = max(sum(pod.resources.values()), 1), self._like.of_others(pod)
        share_bytes = self._store.total_bytes(slots[0]) / row.replicas
        expected_bytes = shares * (share_bytes if each is None else each)
        before = self._late.get(pod.node, {}).get(pod.uid)
        if before is not None:
            loaded_bytes = before.loaded_bytes
        elif all(self._is_read_after(pod, slot, assumed.warm_up_seconds) for slot in slots):
            loaded_bytes = expected_bytes  # it may have, before we looked
        else:
            loaded_bytes = 0.0
        return _Late(
            uid=pod.uid,
            rows=slots,
            shares=shares,
            expected_bytes=expected_bytes,
            loaded_bytes=loaded_bytes,
        )

    def _told_of(self, pod: PodRecord, tenants: TenantsByRow) -> float:
        slots = _shown_on(pod, tenants)
        return sum(self._told(pod, slot) for slot in slots) if slots else math.nan

    def _undeclared(self, rows: Iterable[int]) -> float:
        return sum(map(self._store.undeclared_bytes, rows))


def _shown_on(pod: PodRecord, tenants: TenantsByRow) -> tuple[int, ...]:
    """Return the devices that a pod is known to hold."""
    return tuple(slot for slot, on_it in tenants.items() if pod.key in on_it)
