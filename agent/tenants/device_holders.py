"""Resolve the kubelet's device ids, and cache which containers hold each device.

The formats of all known device plugins are resolved. The cache also keeps when devices were freed.
"""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agent.report.contract import Problem, Tenant
from agent.tenants.kubelet import Allocation, DeviceClaim, PodResources, PodResourcesError

DeviceKey = tuple[str, str]
"""(UUID of the card, GPU instance id or "" for a whole card), as in the report."""

_SHARE: Final = "::"
_UUID: Final = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_SHARE_SUFFIX: Final = re.compile(rf"((?:GPU|MIG)-{_UUID})[-_]+(.+)", re.IGNORECASE)
"""Other vendors' device plugins append the share to the UUID: `GPU-…-0`, `GPU-…-_-0`."""
_LEGACY_MIG: Final = re.compile(rf"MIG-(GPU-{_UUID})/(\d+)/\d+", re.IGNORECASE)
_MINOR: Final = re.compile(r"nvidia(\d{1,9})(?:/gi(\d+))?(?:/(vgpu\d+))?", re.IGNORECASE)
_CLAIM_DEVICE: Final = re.compile(r"gpu-(\d{1,9})(-mig-.+)?", re.IGNORECASE)
"""Name of a claimed GPU, with up to nine digits: `int` fails for thousands of digits."""

logger = logging.getLogger(__name__)

_FAILURES_BETWEEN_LOGS: Final = 100

_LIST_SECONDS: Final = 5.0
"""Interval of `List` calls."""

_MIN_INTERVAL_SECONDS: Final = 1.0
"""Minimum interval of `List` calls after `request_refresh`."""

_ALLOCATABLE_SECONDS: Final = 60.0
"""Interval of `GetAllocatableResources` calls."""

_STALE_SECONDS: Final = 60.0
"""Age from which an answer is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIds:
    """All identifiers of one device.

    Attributes:
        key: identity of the device.
        mig_uuids: UUIDs of the MIG devices on it, () for a whole card.
        index: number of the card: the minor number of `/dev/nvidia<n>` if known, else NVML's index.
    """

    key: DeviceKey
    mig_uuids: tuple[str, ...] = ()
    index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceMatch:
    """The devices that a device id refers to.

    Attributes:
        keys: one device, or several if the id is ambiguous (a card with MIG instances).
        share: name of the time-slicing or MPS share, "" for a whole device.
    """

    keys: tuple[DeviceKey, ...]
    share: str = ""


class DeviceIndex:
    """Index of a node's devices by every id that the kubelet may use.

    Example:
        >>> index = DeviceIndex([DeviceIds(key=("GPU-1", ""), index=0)])
        >>> index.find("GPU-1::3")
        _DeviceMatch(keys=(('GPU-1', ''),), share='3')
        >>> index.find("nvidia0/vgpu1")
        _DeviceMatch(keys=(('GPU-1', ''),), share='vgpu1')
    """

    def __init__(self, devices: Iterable[DeviceIds]) -> None:
        self._by_uuid: defaultdict[str, list[DeviceKey]] = defaultdict(list)
        self._by_index: defaultdict[int, list[DeviceKey]] = defaultdict(list)
        for device in devices:
            for name in (device.key[0], *device.mig_uuids):
                self._by_uuid[name.lower()].append(device.key)
            if device.index is not None:
                self._by_index[device.index].append(device.key)

    def find(self, device_id: str, claim: DeviceClaim | None = None) -> _DeviceMatch | None:
        """Resolve a device id, or the device of a ResourceClaim; None if no device matches."""
        if claim is not None:
            return self._find_claim_device(claim)
        name, _, share = device_id.partition(_SHARE)
        keys = self._keys(name)
        if keys:
            return _DeviceMatch(keys=keys, share=share)
        if minor := _MINOR.fullmatch(name):
            return _match(self._of_index(minor[1], minor[2]), minor[3] or share)
        if suffixed := _SHARE_SUFFIX.fullmatch(name):
            return _match(self._keys(suffixed[1]), suffixed[2])
        return None

    def _keys(self, name: str) -> tuple[DeviceKey, ...]:
        if old := _LEGACY_MIG.fullmatch(name):
            return tuple(key for key in self._by_uuid.get(old[1].lower(), ()) if key[1] == old[2])
        return tuple(self._by_uuid.get(name.lower(), ()))

    def _of_index(self, index: str, instance: str | None) -> tuple[DeviceKey, ...]:
        keys = self._by_index.get(int(index), ())
        return tuple(key for key in keys if instance is None or key[1] == instance)

    def _find_claim_device(self, claim: DeviceClaim) -> _DeviceMatch | None:
        """Resolve a claim's device by the DRA driver's name for it (`gpu-0`), or by its CDI names.

        The name of a MIG device encodes profile and placement, which NVML does not report. So it
        matches every instance of the card.
        """
        for name in (claim.device, *(cdi.partition("=")[2] for cdi in claim.cdi_devices)):
            if keys := self._keys(name):
                return _DeviceMatch(keys=keys)
            if found := _CLAIM_DEVICE.fullmatch(name):
                keys = self._of_index(found[1], None)
                return _match(tuple(key for key in keys if bool(key[1]) == bool(found[2])), "")
        return None


def _match(keys: tuple[DeviceKey, ...], share: str) -> _DeviceMatch | None:
    return _DeviceMatch(keys=keys, share=share) if keys else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderSnapshot:
    """The holders of each device at one time.

    Attributes:
        at: time of the kubelet call, by the caller's clock.
        holders: containers by device; () for a free device. An ambiguous claim counts on every
            device that it may refer to. A device that is absent may be held or free.
        freed_at: time at which a holder of the device was first seen to be gone.
        replicas: shares that the kubelet offers of each device, 1 for a whole one; a device that is
            absent is not offered, or that is unknown.
    """

    at: float
    holders: Mapping[DeviceKey, tuple[Tenant, ...]]
    freed_at: Mapping[DeviceKey, float]
    replicas: Mapping[DeviceKey, int]


class DeviceHolders:
    """Calls the kubelet periodically, and keeps its last answer.

    Everything runs on the event loop's thread.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, kubelet: PodResources, *, clock: Callable[[], float]) -> None:
        self._kubelet = kubelet
        self._clock = clock
        self._allocations: tuple[Allocation, ...] = ()
        self._allocatable: tuple[str, ...] | None = None
        self._listed_at: float | None = None
        self._list_due = self._allocatable_due = float("-inf")
        self._called_at = float("-inf")
        self._is_refresh_requested = False
        self._previous_pods: dict[DeviceKey, frozenset[tuple[str, str]]] = {}
        self._freed_at: dict[DeviceKey, float] = {}
        self._snapshot_key: tuple[float, tuple[DeviceIds, ...]] | None = None
        self._snapshot: HolderSnapshot | None = None
        self._failures = 0
        self.problem: Problem | None = Problem(
            code="PodResources", text="the kubelet has not answered yet"
        )
        """Problem of the last kubelet call, or None if it succeeded."""

    def request_refresh(self) -> None:
        """Request an early kubelet call: the last answer does not explain a process or a load."""
        self._is_refresh_requested = True

    def close(self) -> None:
        """Close the connection to the kubelet."""
        self._kubelet.close()

    async def refresh(self) -> None:
        """Call the kubelet if a call is due; store a failure in `problem` instead of raising it."""
        now = self._clock()
        earliest = self._called_at + _MIN_INTERVAL_SECONDS
        due = min(earliest, self._list_due) if self._is_refresh_requested else self._list_due
        if self._called_at <= now < due:  # a call is also due if the clock was set back
            return
        self._called_at = now
        self._list_due = now + _LIST_SECONDS
        try:
            self._allocations = await self._kubelet.list()
        except PodResourcesError as error:
            self._record_failure(error)
            return
        self._listed_at = now
        self._is_refresh_requested = False
        if self._failures:
            logger.info("kubelet answers again", extra={"failures": self._failures})
        self._failures = 0
        self.problem = None
        await self._refresh_allocatable(now)

    def snapshot(self, devices: Iterable[DeviceIds]) -> HolderSnapshot | None:
        """Return the holders of these devices; None without an answer, or with a stale one.

        A device that the kubelet neither offers nor has allocated belongs to a plugin with unknown
        id format, or to claims that the kubelet does not list: its holders are unknown.
        """
        if self._listed_at is None or self._clock() - self._listed_at > _STALE_SECONDS:
            return None
        device_ids = tuple(devices)
        snapshot_key = (self._listed_at, device_ids)
        if self._snapshot is None or self._snapshot_key != snapshot_key:
            index = DeviceIndex(device_ids)
            holders = self._holders(index, device_ids)
            self._record_freed(holders)
            self._snapshot_key = snapshot_key
            self._snapshot = HolderSnapshot(
                at=self._listed_at,
                holders=MappingProxyType(holders),
                freed_at=MappingProxyType(dict(self._freed_at)),
                replicas=MappingProxyType(self._replicas(index)),
            )
        return self._snapshot

    async def _refresh_allocatable(self, now: float) -> None:
        if now < self._allocatable_due:
            return
        try:
            self._allocatable = await self._kubelet.allocatable()
        except PodResourcesError as error:
            self._allocatable = None  # without the list, every device counts as allocatable
            logger.debug("cannot list allocatable devices", extra={"error": str(error)})
        self._allocatable_due = now + _ALLOCATABLE_SECONDS

    def _record_failure(self, error: PodResourcesError) -> None:
        if self._failures % _FAILURES_BETWEEN_LOGS == 0:
            logger.warning(
                "cannot list device holders",
                extra={"error": str(error), "failures": self._failures + 1},
            )
        self._failures += 1
        self.problem = Problem(code="PodResources", text=str(error))

    def _holders(
        self, index: DeviceIndex, device_ids: tuple[DeviceIds, ...]
    ) -> dict[DeviceKey, tuple[Tenant, ...]]:
        shares: defaultdict[tuple[DeviceKey, tuple[str, str, str]], set[str]] = defaultdict(set)
        sees_claims = False
        for allocation in self._allocations:
            match = index.find(allocation.device_id, allocation.claim)
            if match is None:
                continue
            sees_claims |= allocation.claim is not None
            holder = (allocation.namespace, allocation.pod, allocation.container)
            for key in match.keys:
                shares[key, holder].add(match.share)
        holders: defaultdict[DeviceKey, list[Tenant]] = defaultdict(list)
        for (key, (namespace, pod, container)), replicas in shares.items():
            tenant = Tenant(
                namespace=namespace,
                pod=pod,
                container=container,
                replicas=tuple(sorted(replicas - {""})),
            )
            holders[key].append(tenant)
        allocatable = self._allocatable_keys(index, device_ids, sees_claims=sees_claims)
        return {key: tuple(holders.get(key, ())) for key in {*holders, *allocatable}}

    def _allocatable_keys(
        self, index: DeviceIndex, device_ids: tuple[DeviceIds, ...], *, sees_claims: bool
    ) -> set[DeviceKey]:
        if self._allocatable is None or sees_claims:
            return {device.key for device in device_ids}
        matches = map(index.find, self._allocatable)
        allocatable = {key for one in matches if one is not None for key in one.keys}
        if any(device.key not in allocatable for device in device_ids):
            self._allocatable_due = min(self._allocatable_due, self._called_at + _LIST_SECONDS)
        return allocatable

    def _replicas(self, index: DeviceIndex) -> dict[DeviceKey, int]:
        matches = map(index.find, self._allocatable or ())
        return dict(Counter(match.keys[0] for match in matches if match and len(match.keys) == 1))

    def _record_freed(self, holders: Mapping[DeviceKey, tuple[Tenant, ...]]) -> None:
        now = self._listed_at or self._clock()
        for key, tenants in holders.items():
            pods = frozenset((one.namespace, one.pod) for one in tenants)
            if self._previous_pods.get(key, pods) - pods:
                self._freed_at[key] = now
            self._previous_pods[key] = pods
