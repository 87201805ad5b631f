"""Which pods hold which devices: by the node's own agent where it says so, else by the others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from extender.core.inventory import PodRecord
from extender.core.readings import DeviceKey, Holders

PodsByDevice = Mapping[DeviceKey, tuple[str, ...]]
"""Pods (`namespace/name`) by device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMapping:
    """Which pods hold the devices of one node.

    Attributes:
        is_known: some source tells it.
        at: when that was so, seconds since the epoch.
        pods: by device; what is not listed nobody holds.
        uids: UID by pod, for those of which the source knows it.
    """

    is_known: bool
    at: float
    pods: PodsByDevice
    uids: Mapping[str, str] = field(default_factory=dict)

    def is_of(self, pod: PodRecord) -> bool:
        """Tell whether the pod's name in here means this pod, and not one before it."""
        uid = self.uids.get(pod.key)
        return (pod.bound_at or 0.0) <= self.at if uid is None else uid == pod.uid


class Mappings:
    """The latest word of each source on who holds what.

    Args:
        hold_seconds: what a node's own agent said counts for so long before a newer word of others.
    """

    def __init__(self, hold_seconds: float = 0.0) -> None:
        self.hold_seconds = hold_seconds
        self._complete: PodsByDevice = {}
        self._is_known = False
        self._at = -inf
        self._own: dict[str, Holders] = {}

    def of(self, node: str) -> NodeMapping:
        """Return what is known of a node."""
        own = self._own.get(node)
        if own is not None:
            return NodeMapping(is_known=True, at=own.at, pods=own.pods, uids=own.uids)
        return NodeMapping(is_known=self._is_known, at=self._at, pods=self._complete)

    def replace(
        self, mapping: PodsByDevice | None, at: float, max_age_seconds: float
    ) -> tuple[bool, PodsByDevice, PodsByDevice] | None:
        """Take over who holds what on all nodes.

        Args:
            mapping: None where the source cannot tell: then the last one holds as long as a value
                is fresh.
            at: when the source was asked, seconds since the epoch.
            max_age_seconds: so long.

        Returns:
            Whether it is now known or unknown unlike before, and the mapping before and after;
            None where the last one holds.
        """
        if mapping is None and at - self._at <= max_age_seconds:
            return None
        before, after = self._complete, mapping or {}
        was_known, self._is_known = self._is_known, mapping is not None
        self._complete, self._at = after, at
        return was_known is not self._is_known, before, after

    def is_own(self, node: str) -> bool:
        """Tell whether the node's agent says it."""
        return node in self._own

    def note_own(self, node: str, holders: Holders | None) -> bool:
        """Take over what a node's agent says; tell whether anything has changed."""
        before = self._own.get(node)
        if holders is None:
            self._own.pop(node, None)
            return before is not None
        self._own[node] = holders
        if before is None:
            return True
        return before.pods is not holders.pods and (
            before.pods != holders.pods or before.uids != holders.uids
        )

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        self._own.pop(node, None)

    def expire(self, now: float, max_age_seconds: float) -> Iterator[str]:
        """Let go of what agents said that are silent; yield their nodes.

        Where others know better that is soon, else when the values would not be fresh any more.
        """
        others_at = self._at if self._is_known else -inf
        for node, holders in list(self._own.items()):
            is_silent = now - holders.at > max_age_seconds
            if is_silent or others_at > holders.at + self.hold_seconds:
                del self._own[node]
                yield node
