"""Reduces ResourceClaims and ResourceSlices to which GPUs are held, and what these are.

Of other drivers' claims only this is kept: that they may be for GPUs. Objects may be anything, as
in `kube_records`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Final, NamedTuple

from extender.core.nodes.inventory import ClaimedDevice
from extender.core.untyped import int_of, mapping_of, objects_of, text_of

GPU_DRIVER: Final = "gpu.nvidia.com"
"""The DRA driver of NVIDIA's GPUs, as allocations and slices name it."""

_WITHOUT_GPUS: Final = frozenset(
    {
        "cni.dra.networking.x-k8s.io",
        "compute-domain.nvidia.com",
        "dra.cpu",
        "dra.net",
        "sriovnetwork.k8snetworkplumbingwg.io",
    }
)
"""Drivers that are known to hand out no GPUs; others may, as some that share GPUs do."""


class DeviceName(NamedTuple):
    """A device as an allocation names it; its driver is `GPU_DRIVER`.

    Attributes:
        pool: as a rule, the node's name.
        device: name in the pool's slices (`gpu-0`).
    """

    pool: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """A ResourceClaim to which GPUs are allocated, or what may be GPUs.

    Attributes:
        uid: `metadata.uid`.
        pods: UIDs of the pods that it is reserved for: all of them share its devices.
        devices: the GPUs, without those that are only looked at (`adminAccess`).
        has_unknown_driver: likewise, something is of a driver that may hand out GPUs or not.
    """

    uid: str
    pods: tuple[str, ...]
    devices: tuple[DeviceName, ...]
    has_unknown_driver: bool

    @property
    def pools(self) -> frozenset[str]:
        """The pools that the devices are of."""
        return frozenset(name.pool for name in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRecord:
    """A ResourceSlice of the GPU driver.

    Attributes:
        uid: `metadata.uid`.
        pool: the pool that it is a part of.
        generation: of the pool; of slices that name the same device, the latest one's counts.
        devices: the devices by name.
    """

    uid: str
    pool: str
    generation: int
    devices: Mapping[str, ClaimedDevice]


def reduce_claim(raw: Mapping[str, object]) -> ClaimRecord | None:
    """Return the record of a ResourceClaim, None where surely no pod holds a GPU by it."""
    uid = text_of(mapping_of(raw.get("metadata")).get("uid"))
    status = mapping_of(raw.get("status"))
    allocated = mapping_of(mapping_of(status.get("allocation")).get("devices"))
    results = [
        (text_of(result.get("driver")), result)
        for result in objects_of(allocated.get("results"))
        if result.get("adminAccess") is not True
    ]
    devices = tuple(
        DeviceName(intern(text_of(result.get("pool"))), intern(text_of(result.get("device"))))
        for driver, result in results
        if driver == GPU_DRIVER
    )
    is_unknown = any(driver != GPU_DRIVER and driver not in _WITHOUT_GPUS for driver, _ in results)
    pods = tuple(
        text_of(holder.get("uid"))
        for holder in objects_of(status.get("reservedFor"))
        if holder.get("resource") == "pods" and not holder.get("apiGroup")
    )
    if not (uid and pods and (devices or is_unknown)):
        return None
    return ClaimRecord(uid=uid, pods=pods, devices=devices, has_unknown_driver=is_unknown)


def reduce_slice(raw: Mapping[str, object]) -> SliceRecord | None:
    """Return the record of a ResourceSlice, None where it is of another driver."""
    uid = text_of(mapping_of(raw.get("metadata")).get("uid"))
    spec = mapping_of(raw.get("spec"))
    if not uid or spec.get("driver") != GPU_DRIVER:
        return None
    pool = mapping_of(spec.get("pool"))
    return SliceRecord(
        uid=uid,
        pool=intern(text_of(pool.get("name"))),
        generation=int_of(pool.get("generation")),
        devices={device.name: device for device in map(_device, objects_of(spec.get("devices")))},
    )


def _device(raw: Mapping[str, object]) -> ClaimedDevice:
    """Return what a device is by its attributes, as NVIDIA's driver names them."""
    attributes = mapping_of(raw.get("attributes"))
    profile = _text(attributes, "profile")
    uuid = _text(attributes, "parentUUID") if profile else _text(attributes, "uuid")
    name = intern(text_of(raw.get("name")))
    return ClaimedDevice(uuid=uuid, mig_profile=intern(profile), name=name)


def _text(attributes: Mapping[str, object], name: str) -> str:
    """Return an attribute's text, "" where it has none; the driver's domain may be left out."""
    found = attributes.get(name) or attributes.get(f"{GPU_DRIVER}/{name}")
    return text_of(mapping_of(found).get("string"))
