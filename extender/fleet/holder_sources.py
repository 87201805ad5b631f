"""Choose the source of the device holders: the agent of a node first, then other sources."""

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
        is_known: whether a source reports it.
        at: time of the report, seconds since the epoch.
        pods: pods by device; no pod holds a device that is not listed.
        uids: UID by pod, as far as the source knows it.
    """

    is_known: bool
    at: float
    pods: PodsByDevice
    uids: Mapping[str, str] = field(default_factory=dict)

    def is_of(self, pod: PodRecord) -> bool:
        """Return whether the report's pod of this name is this pod, not a former one."""
        uid = self.uids.get(pod.key)
        return (pod.bound_at or 0.0) <= self.at if uid is None else uid == pod.uid


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldersChange:
    """Difference between two mappings of all nodes.

    Attributes:
        is_availability_changed: whether the mapping became known or unknown.
        before: previous mapping.
        after: new mapping.
        devices: devices that include all differences.
    """

    is_availability_changed: bool
    before: PodsByDevice
    after: PodsByDevice
    devices: Collection[DeviceKey]

    def has_changed(self, device: DeviceKey) -> bool:
        """Return whether the pods of a device have changed."""
        return self.before.get(device) != self.after.get(device)


class HolderSources:
    """Latest device holders from each source.

    Args:
        preference_seconds: time for which an agent's report is preferred to newer mappings of
            other sources.
    """

    def __init__(self, preference_seconds: float = 0.0) -> None:
        self.preference_seconds = preference_seconds
        self._complete: PodsByDevice = {}
        self._is_known = False
        self._at = -inf
        self._own: dict[str, Holders] = {}

    def of(self, node: str) -> NodeDeviceHolders:
        """Return the device holders of a node."""
        own = self._own.get(node)
        if own is not None:
            return NodeDeviceHolders(is_known=True, at=own.at, pods=own.pods, uids=own.uids)
        return NodeDeviceHolders(is_known=self._is_known, at=self._at, pods=self._complete)

    def replace(self, readings: Readings, max_age_seconds: float) -> HoldersChange | None:
        """Apply the holders of all nodes from an answer.

        Args:
            readings: the answer. If its source cannot report them, the last mapping stays valid for
                `max_age_seconds`.
            max_age_seconds: age at which a mapping expires.

        Returns:
            The difference; None if the last mapping stays valid.
        """
        mapping = readings.tenants
        at = readings.at if readings.tenants_at is None else readings.tenants_at
        if mapping is None and at - self._at <= max_age_seconds:
            return None
        before, after, changed = self._complete, mapping or {}, readings.changed_tenants
        was_known, self._is_known = self._is_known, mapping is not None
        self._complete, self._at = after, at
        is_incremental = changed is not None and changed.since is before
        return HoldersChange(
            is_availability_changed=was_known is not self._is_known,
            before=before,
            after=after,
            devices=changed.devices
            if changed is not None and is_incremental
            else {**before, **after},
        )

    def is_own(self, node: str) -> bool:
        """Return whether the node's agent reports its holders."""
        return node in self._own

    def note_own(self, node: str, holders: Holders | None) -> bool:
        """Apply the holders from a node's agent; return whether they have changed."""
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

    def shift_back(self, seconds: float) -> None:
        """Shift all recorded times back after the clock was set back by this many seconds."""
        self._at -= seconds
        self._own = {
            node: replace(holders, at=holders.at - seconds) for node, holders in self._own.items()
        }

    def forget(self, node: str) -> None:
        """Forget a removed node."""
        self._own.pop(node, None)

    def expire(self, now: float, max_age_seconds: float) -> Iterator[str]:
        """Drop the reports of silent agents; yield their nodes.

        An agent's report expires early if another source has a newer mapping.
        """
        others_at = self._at if self._is_known else -inf
        for node, holders in list(self._own.items()):
            is_silent = now - holders.at > max_age_seconds
            if is_silent or others_at > holders.at + self.preference_seconds:
                del self._own[node]
                yield node
