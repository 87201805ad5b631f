"""Pods that ended on whole devices of nodes where no source tells who holds which.

Which devices they left is unknown; how many is not: those are free, whatever was read of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import PoolRow
from extender.core.policy import Freshness
from extender.fleet.store import DeviceStore


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
