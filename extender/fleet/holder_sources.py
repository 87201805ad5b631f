"""Which pods hold which devices: by the node's own agent where it says so, else by the others."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from extender.core.devices.readings import DeviceKey, Holders, Readings
from extender.core.nodes.inventory import PodRecord

PodsByDevice = Mapping[DeviceKey, tuple[str, ...]]
"""Pods (`namespace/name`) by device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDeviceHolders:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedHolders:
    """How a mapping of all nodes differs from the one before.

    Attributes:
        is_turned: it is known or unknown, unlike before.
        before: the one before.
        after: the new one.
        devices: all where they differ are among these.
    """

    is_turned: bool
    before: PodsByDevice
    after: PodsByDevice
    devices: Collection[DeviceKey]

    def is_other(self, device: DeviceKey) -> bool:
        """Tell whether other pods hold a device now."""
        return self.before.get(device) != self.after.get(device)


class HolderSources:
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

    def of(self, node: str) -> NodeDeviceHolders:
        """Return what is known of a node."""
        own = self._own.get(node)
        if own is not None:
            return NodeDeviceHolders(is_known=True, at=own.at, pods=own.pods, uids=own.uids)
        return NodeDeviceHolders(is_known=self._is_known, at=self._at, pods=self._complete)

    def replace(self, readings: Readings, max_age_seconds: float) -> ReplacedHolders | None:
        """Take over who holds what on all nodes, as an answer says.

        Args:
            readings: the answer. Where its source cannot tell, the last mapping holds as long as
                a value is fresh.
            max_age_seconds: so long.

        Returns:
            What has changed; None where the last one holds.
        """
        mapping = readings.tenants
        at = readings.at if readings.tenants_at is None else readings.tenants_at
        if mapping is None and at - self._at <= max_age_seconds:
            return None
        before, after, changed = self._complete, mapping or {}, readings.changed_tenants
        was_known, self._is_known = self._is_known, mapping is not None
        self._complete, self._at = after, at
        is_told = changed is not None and changed.since is before
        return ReplacedHolders(
            is_turned=was_known is not self._is_known,
            before=before,
            after=after,
            devices=changed.devices if changed is not None and is_told else {**before, **after},
        )

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

    def put_back(self, seconds: float) -> None:
        """Date all mappings back: the clock was put back by so much."""
        self._at -= seconds
        self._own = {
            node: replace(holders, at=holders.at - seconds) for node, holders in self._own.items()
        }

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
