"""Finds the devices that the kubelet means by its device ids, whichever plugin made them up."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agent.podresources import DeviceClaim

DeviceKey = tuple[str, str]
"""(UUID of the card, GPU instance id or "" for a whole card), as in the report."""

_SHARE: Final = "::"
_UUID: Final = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_OWN_SUFFIX: Final = re.compile(rf"((?:GPU|MIG)-{_UUID})[-_]+(.+)", re.IGNORECASE)
"""Plugins of others number shares of a card in their own way: `GPU-…-0`, `GPU-…-_-0`."""
_OLD_MIG: Final = re.compile(rf"MIG-(GPU-{_UUID})/(\d+)/\d+", re.IGNORECASE)
_MINOR: Final = re.compile(r"nvidia(\d+)(?:/gi(\d+))?(?:/(vgpu\d+))?", re.IGNORECASE)
_CLAIMED: Final = re.compile(r"gpu-(\d+)(-mig-.+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """What a device is called.

    Attributes:
        key: its identity.
        mig_uuids: of the MIG devices on it; () for a whole card.
        index: number of its card: NVML's index, or better the minor number of `/dev/nvidia<n>`.
    """

    key: DeviceKey
    mig_uuids: tuple[str, ...] = ()
    index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """What a device id means.

    Attributes:
        keys: the device; several where the id leaves open which of them (a card with instances).
        share: name of the share of it, "" where it is not shared.
    """

    keys: tuple[DeviceKey, ...]
    share: str = ""


class DeviceNames:
    """The devices of a node by every name that the kubelet may use.

    Example:
        >>> names = DeviceNames([KnownDevice(key=("GPU-1", ""), index=0)])
        >>> names.find("GPU-1::3")
        Meant(keys=(('GPU-1', ''),), share='3')
        >>> names.find("nvidia0/vgpu1")
        Meant(keys=(('GPU-1', ''),), share='vgpu1')
    """

    def __init__(self, devices: Iterable[KnownDevice]) -> None:
        self._by_uuid: defaultdict[str, list[DeviceKey]] = defaultdict(list)
        self._by_index: defaultdict[int, list[DeviceKey]] = defaultdict(list)
        for device in devices:
            for name in (device.key[0], *device.mig_uuids):
                self._by_uuid[name.lower()].append(device.key)
            if device.index is not None:
                self._by_index[device.index].append(device.key)

    def find(self, device_id: str, claim: DeviceClaim | None = None) -> Meant | None:
        """Return what an id means, None where it is no device of ours."""
        if claim is not None:
            return self._find_claimed(claim)
        name, _, share = device_id.partition(_SHARE)
        keys = self._keys(name)
        if keys:
            return Meant(keys=keys, share=share)
        if minor := _MINOR.fullmatch(name):
            return _meant(self._of_index(minor[1], minor[2]), minor[3] or share)
        if suffixed := _OWN_SUFFIX.fullmatch(name):
            return _meant(self._keys(suffixed[1]), suffixed[2])
        return None

    def _keys(self, name: str) -> tuple[DeviceKey, ...]:
        if old := _OLD_MIG.fullmatch(name):
            return tuple(key for key in self._by_uuid.get(old[1].lower(), ()) if key[1] == old[2])
        return tuple(self._by_uuid.get(name.lower(), ()))

    def _of_index(self, index: str, instance: str | None) -> tuple[DeviceKey, ...]:
        keys = self._by_index.get(int(index), ())
        return tuple(key for key in keys if instance is None or key[1] == instance)

    def _find_claimed(self, claim: DeviceClaim) -> Meant | None:
        """Look a claim's device up by the driver's name for it (`gpu-0`), or by its CDI names.

        The name of an instance tells its profile and placement, which the driver's library does
        not: any instance of that card may be meant.
        """
        for name in (claim.device, *(cdi.partition("=")[2] for cdi in claim.cdi_devices)):
            if keys := self._keys(name):
                return Meant(keys=keys)
            if found := _CLAIMED.fullmatch(name):
                keys = self._of_index(found[1], None)
                return _meant(tuple(key for key in keys if bool(key[1]) == bool(found[2])), "")
        return None


def _meant(keys: tuple[DeviceKey, ...], share: str) -> Meant | None:
    return Meant(keys=keys, share=share) if keys else None
