"""Resolve the kubelet's device ids, in the formats of all known plugins, to the node's devices."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agent.tenants.podresources import DeviceClaim

DeviceKey = tuple[str, str]
"""(UUID of the card, GPU instance id or "" for a whole card), as in the report."""

_SHARE: Final = "::"
_UUID: Final = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_SHARE_SUFFIX: Final = re.compile(rf"((?:GPU|MIG)-{_UUID})[-_]+(.+)", re.IGNORECASE)
"""Other vendors' device plugins append the share to the UUID: `GPU-…-0`, `GPU-…-_-0`."""
_LEGACY_MIG: Final = re.compile(rf"MIG-(GPU-{_UUID})/(\d+)/\d+", re.IGNORECASE)
_MINOR: Final = re.compile(r"nvidia(\d+)(?:/gi(\d+))?(?:/(vgpu\d+))?", re.IGNORECASE)
_CLAIM_DEVICE: Final = re.compile(r"gpu-(\d+)(-mig-.+)?", re.IGNORECASE)


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
class DeviceMatch:
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
        DeviceMatch(keys=(('GPU-1', ''),), share='3')
        >>> index.find("nvidia0/vgpu1")
        DeviceMatch(keys=(('GPU-1', ''),), share='vgpu1')
    """

    def __init__(self, devices: Iterable[DeviceIds]) -> None:
        self._by_uuid: defaultdict[str, list[DeviceKey]] = defaultdict(list)
        self._by_index: defaultdict[int, list[DeviceKey]] = defaultdict(list)
        for device in devices:
            for name in (device.key[0], *device.mig_uuids):
                self._by_uuid[name.lower()].append(device.key)
            if device.index is not None:
                self._by_index[device.index].append(device.key)

    def find(self, device_id: str, claim: DeviceClaim | None = None) -> DeviceMatch | None:
        """Resolve a device id, or the device of a ResourceClaim; None if no device matches."""
        if claim is not None:
            return self._find_claim_device(claim)
        name, _, share = device_id.partition(_SHARE)
        keys = self._keys(name)
        if keys:
            return DeviceMatch(keys=keys, share=share)
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

    def _find_claim_device(self, claim: DeviceClaim) -> DeviceMatch | None:
        """Resolve a claim's device by the DRA driver's name for it (`gpu-0`), or by its CDI names.

        The name of a MIG device encodes profile and placement, which NVML does not report. So it
        matches every instance of the card.
        """
        for name in (claim.device, *(cdi.partition("=")[2] for cdi in claim.cdi_devices)):
            if keys := self._keys(name):
                return DeviceMatch(keys=keys)
            if found := _CLAIM_DEVICE.fullmatch(name):
                keys = self._of_index(found[1], None)
                return _match(tuple(key for key in keys if bool(key[1]) == bool(found[2])), "")
        return None


def _match(keys: tuple[DeviceKey, ...], share: str) -> DeviceMatch | None:
    return DeviceMatch(keys=keys, share=share) if keys else None
