"""Which GPUs pods hold through ResourceClaims: claims joined with slices of NVIDIA's driver."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from sys import intern
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from extender.core.nodes.inventory import ClaimedDevice
from extender.core.untyped import int_of, mapping_of, objects_of, text_of
from extender.sources.kubernetes.json_text import WatchChange
from extender.sources.kubernetes.object_cache import ObjectCache, Pace
from extender.sources.kubernetes.object_kinds import ObjectKind

# Reduces ResourceClaims and ResourceSlices to which GPUs are held, and what these are.
#
# Of other drivers' claims only this is kept: that they may be for GPUs. Objects may be anything, as
# in `kube_records`.

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


CLAIMS: Final = ObjectKind(
    resource="resourceclaims", path="/apis/resource.k8s.io/v1/resourceclaims", is_optional=True
)
SLICES: Final = ObjectKind(
    resource="resourceslices",
    path="/apis/resource.k8s.io/v1/resourceslices",
    field_selector=f"spec.driver={GPU_DRIVER}",
    is_optional=True,
)

_CLAIM_MARK: Final = b'"reservedFor"'
"""In the text of each claim that a pod holds."""

_SLICE_MARK: Final = GPU_DRIVER.encode()


class _Identified(Protocol):
    @property
    def uid(self) -> str: ...


Record = TypeVar("Record", bound=_Identified)
Value = TypeVar("Value")


class ClaimBook:
    """Joins claims and slices; before both were listed it knows nothing.

    Args:
        tell: is given the UID of each pod that may hold other GPUs than before.
        tell_all: likewise, of all pods; whoever made the book does so too when claims are heard of
            again.
        is_current: whether the claims are heard of now; where not, a pod may have one all the same.

    Attributes:
        claims: takes the claims.
        slices: takes the slices.
    """

    def __init__(
        self,
        *,
        tell: Callable[[str], None],
        tell_all: Callable[[Pace], Awaitable[None]],
        is_current: Callable[[], bool],
    ) -> None:
        self._tell = tell
        self._tell_all = tell_all
        self._is_current = is_current
        self._claims: dict[str, ClaimRecord] = {}
        self._claims_of: dict[str, tuple[ClaimRecord, ...]] = {}
        self._claims_in: dict[str, tuple[ClaimRecord, ...]] = {}
        self._slices: dict[str, SliceRecord] = {}
        self._slices_of: dict[str, tuple[SliceRecord, ...]] = {}
        self.claims = _Feed(_CLAIM_MARK, reduce_claim, self._set_claim, self._listed)
        self.slices = _Feed(_SLICE_MARK, reduce_slice, self._set_slice, self._listed)

    @property
    def is_complete(self) -> bool:
        """Whether claims and slices have been listed."""
        return self.claims.is_listed and self.slices.is_listed

    def held_by(self, uid: str) -> tuple[ClaimedDevice, ...] | None:
        """Return the GPUs that a bound pod holds, by its UID; None where that is not known.

        kube-scheduler allocates and reserves a pod's claims before it binds the pod. Beside GPUs of
        NVIDIA's driver, what an unknown driver hands out is taken for something else: two drivers
        do not hand out GPUs of one node.
        """
        if not self.is_complete:
            return None
        claims = self._claims_of.get(uid, ())
        names = dict.fromkeys(name for claim in claims for name in claim.devices)
        if names:
            return tuple(self._device(name) for name in names)
        if any(claim.has_unknown_driver for claim in claims) or not self._is_current():
            return None
        return ()

    def _device(self, name: DeviceName) -> ClaimedDevice:
        """Return what stands behind a name.

        While a driver writes a new generation of its pool, what is not in there yet is still what
        it was.
        """
        slices = self._slices_of.get(name.pool, ())
        for found in sorted(slices, key=lambda found: -found.generation):
            if name.device in found.devices:
                return found.devices[name.device]
        return ClaimedDevice(uuid="", name=name.device)

    def _set_claim(self, uid: str, record: ClaimRecord | None) -> None:
        before = self._claims.pop(uid, None)
        if before is not None:
            for pod in before.pods:
                _take_out(self._claims_of, pod, before)
            for pool in before.pools:
                _take_out(self._claims_in, pool, before)
        if record is not None:
            self._claims[uid] = record
            for pod in record.pods:
                _put_in(self._claims_of, pod, record)
            for pool in record.pools:
                _put_in(self._claims_in, pool, record)
        self._tell_pods_of(claim for claim in (before, record) if claim is not None)

    def _set_slice(self, uid: str, record: SliceRecord | None) -> None:
        before = self._slices.pop(uid, None)
        if before is not None:
            _take_out(self._slices_of, before.pool, before)
        if record is not None:
            self._slices[uid] = record
            _put_in(self._slices_of, record.pool, record)
        pools = dict.fromkeys(found.pool for found in (before, record) if found is not None)
        self._tell_pods_of(claim for pool in pools for claim in self._claims_in.get(pool, ()))

    def _tell_pods_of(self, claims: Iterable[ClaimRecord]) -> None:
        if self.is_complete:
            for pod in dict.fromkeys(pod for claim in claims for pod in claim.pods):
                self._tell(pod)

    async def _listed(self, pace: Pace) -> None:
        """Tell of all pods what a list says; of single ones its corrections were told already.

        Where claims are not heard of now, pods without any would be told less than before.
        """
        if self.is_complete and self._is_current():
            await self._tell_all(pace)


class _Feed(Generic[Record]):
    """Reduces claims, or slices, as they arrive.

    Args:
        mark: is in the text of every object that may be of interest.
        reduce: returns an object's record, None where it is of no interest.
        set_record: takes a UID and its record, None for one that is gone.
        listed: is called after each complete list.
    """

    def __init__(
        self,
        mark: bytes,
        reduce: Callable[[Mapping[str, object]], Record | None],
        set_record: Callable[[str, Record | None], None],
        listed: Callable[[Pace], Awaitable[None]],
    ) -> None:
        self._mark = mark
        self._reduce = reduce
        self._listed = listed
        self.is_listed = False
        self._object_cache: ObjectCache[Record] = ObjectCache(
            apply=lambda record: set_record(record.uid, record),
            remove=lambda uid: set_record(uid, None),
        )

    def may_matter(self, text: msgspec.Raw) -> bool:
        return self._mark in bytes(text)

    def idle_change(self, _: bytes) -> WatchChange | None:
        return None

    def begin_list(self) -> None:
        self._object_cache.begin_list()

    def add_listed(self, raw: Mapping[str, object]) -> None:
        self._object_cache.add_listed(_uid(raw), self._reduce(raw))

    def keep_listed(self, raw: Mapping[str, object]) -> None:
        self._object_cache.keep_listed(_uid(raw))

    async def end_list(self, pace: Pace) -> int:
        corrections = await self._object_cache.end_list(pace)
        self.is_listed = True
        await self._listed(pace)
        return corrections

    def abort_list(self) -> None:
        self._object_cache.abort_list()

    def put(self, raw: Mapping[str, object]) -> None:
        self._object_cache.put(_uid(raw), self._reduce(raw))

    def drop(self, raw: Mapping[str, object]) -> None:
        self._object_cache.drop(_uid(raw))


def _uid(raw: Mapping[str, object]) -> str:
    return text_of(mapping_of(raw.get("metadata")).get("uid"))


def _put_in(found: dict[str, tuple[Value, ...]], key: str, value: Value) -> None:
    """Add a value to those of a key."""
    found[key] = (*found.get(key, ()), value)


def _take_out(found: dict[str, tuple[Value, ...]], key: str, value: Value) -> None:
    """Take a value out of those of a key."""
    left = tuple(other for other in found.get(key, ()) if other is not value)
    if left:
        found[key] = left
    else:
        found.pop(key, None)
