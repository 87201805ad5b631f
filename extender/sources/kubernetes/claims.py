"""Find the GPUs that pods hold through ResourceClaims: claims joined with NVIDIA's ResourceSlices.

Of claims for other drivers only one fact is stored: that they may be for GPUs. Any JSON object is
accepted, as in `records`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from sys import intern
from typing import Final, NamedTuple, TypeVar

from extender.core.nodes.inventory import ClaimedDevice
from extender.core.nodes.pod_groups import POD_GROUP, PodGroup
from extender.core.request.gpu_resources import GPU_DRIVER
from extender.core.untyped import int_of, mapping_of, objects_of, text_of
from extender.sources.kubernetes.objects import ObjectKind, Pacer, RecordFeed

_WITHOUT_GPUS: Final = frozenset(
    {
        "cni.dra.networking.x-k8s.io",
        "compute-domain.nvidia.com",
        "dra.cpu",
        "dra.net",
        "sriovnetwork.k8snetworkplumbingwg.io",
    }
)
"""DRA drivers that never allocate GPUs; unknown drivers may, for example those that share GPUs."""

_GROUPS_API: Final = "scheduling.k8s.io"
"""API group of the pod groups that a claim may be reserved for, from Kubernetes 1.36 on."""


class _DeviceName(NamedTuple):
    """Name of a device in an allocation of `GPU_DRIVER`.

    Attributes:
        pool: usually the node's name.
        device: name in the pool's slices (`gpu-0`).
    """

    pool: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClaimRecord:
    """A ResourceClaim with allocated devices that are GPUs, or may be GPUs.

    Attributes:
        pods: UIDs of the pods that it is reserved for: all of them share its devices.
        groups: keys of Kubernetes' own pod groups that it is reserved for: their pods share it.
        devices: the GPUs, without those for monitoring only (`adminAccess`).
        has_unknown_driver: a device belongs to a driver that may or may not allocate GPUs.
    """

    pods: tuple[str, ...]
    groups: tuple[str, ...]
    devices: tuple[_DeviceName, ...]
    has_unknown_driver: bool

    @property
    def holders(self) -> tuple[str, ...]:
        """Pods and groups, by UID and by key."""
        return (*self.pods, *self.groups)

    @property
    def pools(self) -> frozenset[str]:
        """Pools of the devices."""
        return frozenset(name.pool for name in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceRecord:
    """A ResourceSlice of the GPU driver.

    Attributes:
        generation: generation of the pool; if several slices name a device, the latest one counts.
    """

    pool: str
    generation: int
    devices: Mapping[str, ClaimedDevice]


def _reduce_claim(raw: Mapping[str, object]) -> _ClaimRecord | None:
    """Return the record of a ResourceClaim, None if certainly no pod holds a GPU through it."""
    metadata = mapping_of(raw.get("metadata"))
    uid, namespace = text_of(metadata.get("uid")), text_of(metadata.get("namespace"))
    status = mapping_of(raw.get("status"))
    allocated = mapping_of(mapping_of(status.get("allocation")).get("devices"))
    results = [
        (text_of(result.get("driver")), result)
        for result in objects_of(allocated.get("results"))
        if result.get("adminAccess") is not True
    ]
    devices = tuple(
        _DeviceName(intern(text_of(result.get("pool"))), intern(text_of(result.get("device"))))
        for driver, result in results
        if driver == GPU_DRIVER
    )
    is_unknown = any(driver != GPU_DRIVER and driver not in _WITHOUT_GPUS for driver, _ in results)
    pods = tuple(
        text_of(holder.get("uid"))
        for holder in objects_of(status.get("reservedFor"))
        if holder.get("resource") == "pods" and not holder.get("apiGroup")
    )
    groups = tuple(
        PodGroup(POD_GROUP, namespace, text_of(holder.get("name"))).key
        for holder in objects_of(status.get("reservedFor"))
        if holder.get("resource") == "podgroups" and holder.get("apiGroup") == _GROUPS_API
    )
    if not (uid and (pods or groups) and (devices or is_unknown)):
        return None
    return _ClaimRecord(pods=pods, groups=groups, devices=devices, has_unknown_driver=is_unknown)


def _reduce_slice(raw: Mapping[str, object]) -> _SliceRecord | None:
    """Return the record of a ResourceSlice, None if it belongs to another driver."""
    uid = text_of(mapping_of(raw.get("metadata")).get("uid"))
    spec = mapping_of(raw.get("spec"))
    if not uid or spec.get("driver") != GPU_DRIVER:
        return None
    pool = mapping_of(spec.get("pool"))
    return _SliceRecord(
        pool=intern(text_of(pool.get("name"))),
        generation=int_of(pool.get("generation")),
        devices={device.name: device for device in map(_device, objects_of(spec.get("devices")))},
    )


def _device(raw: Mapping[str, object]) -> ClaimedDevice:
    """Return a device's identity from its attributes, as NVIDIA's driver names them."""
    attributes = mapping_of(raw.get("attributes"))
    profile = _text(attributes, "profile")
    uuid = _text(attributes, "parentUUID") if profile else _text(attributes, "uuid")
    name = intern(text_of(raw.get("name")))
    return ClaimedDevice(uuid=uuid, mig_profile=intern(profile), name=name)


def _text(attributes: Mapping[str, object], name: str) -> str:
    """Return an attribute's text, "" if it is missing; the name may have the driver's domain."""
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
"""Part of the JSON text of each claim that is reserved for a pod."""

_SLICE_MARK: Final = GPU_DRIVER.encode()


_Value = TypeVar("_Value")


class ClaimIndex:
    """Join claims and slices to find the GPUs that a pod holds; unknown until both are listed.

    Args:
        notify: receives the UID of each pod whose GPUs may have changed.
        notify_group: receives the key of each pod group whose GPUs may have changed.
        notify_all: called when the GPUs of all pods may have changed; the caller also does this
            when the watch of claims recovers.
        is_current: returns whether the watch of claims works; if not, a pod may have an unknown
            claim.

    Attributes:
        claims: receives the claims.
        slices: receives the slices.
    """

    def __init__(
        self,
        *,
        notify: Callable[[str], None],
        notify_group: Callable[[str], None],
        notify_all: Callable[[Pacer], Awaitable[None]],
        is_current: Callable[[], bool],
    ) -> None:
        self._notify = notify
        self._notify_group = notify_group
        self._notify_all = notify_all
        self._is_current = is_current
        self._claims_by_holder: dict[str, tuple[_ClaimRecord, ...]] = {}
        self._claims_by_pool: dict[str, tuple[_ClaimRecord, ...]] = {}
        self._slices_by_pool: dict[str, tuple[_SliceRecord, ...]] = {}
        self.claims = RecordFeed(
            _reduce_claim, self._set_claim, mark=_CLAIM_MARK, on_listed=self._on_listed
        )
        self.slices = RecordFeed(
            _reduce_slice, self._set_slice, mark=_SLICE_MARK, on_listed=self._on_listed
        )

    @property
    def is_complete(self) -> bool:
        """Whether claims and slices have been listed."""
        return self.claims.is_listed and self.slices.is_listed

    def held_by(self, uid: str, group: str = "") -> tuple[ClaimedDevice, ...] | None:
        """Return the GPUs that a bound pod holds; None if they are unknown.

        kube-scheduler allocates and reserves a pod's claims before it binds the pod. If a pod has
        GPUs of NVIDIA's driver, its devices of unknown drivers are not GPUs, because only one
        driver allocates the GPUs of a node.

        Args:
            uid: UID of the pod, which has claims.
            group: key of its pod group, "" without one.
        """
        if not self.is_complete:
            return None
        by_holder = self._claims_by_holder
        claims = (*by_holder.get(uid, ()), *(by_holder.get(group, ()) if group else ()))
        names = dict.fromkeys(name for claim in claims for name in claim.devices)
        if names:
            return tuple(self._device(name) for name in names)
        if any(claim.has_unknown_driver for claim in claims) or not self._is_current():
            return None
        return ()

    def _device(self, name: _DeviceName) -> ClaimedDevice:
        """Return the device with a name.

        While a driver writes a new generation of its pool, a device that is not in it yet keeps its
        identity from the generation before.
        """
        slices = self._slices_by_pool.get(name.pool, ())
        for found in sorted(slices, key=lambda found: -found.generation):
            if name.device in found.devices:
                return found.devices[name.device]
        return ClaimedDevice(uuid="", name=name.device)

    def _set_claim(self, _: str, before: _ClaimRecord | None, record: _ClaimRecord | None) -> None:
        if before is not None:
            for holder in before.holders:
                _remove(self._claims_by_holder, holder, before)
            for pool in before.pools:
                _remove(self._claims_by_pool, pool, before)
        if record is not None:
            for holder in record.holders:
                _add(self._claims_by_holder, holder, record)
            for pool in record.pools:
                _add(self._claims_by_pool, pool, record)
        self._notify_pods_of(claim for claim in (before, record) if claim is not None)

    def _set_slice(self, _: str, before: _SliceRecord | None, record: _SliceRecord | None) -> None:
        if before is not None:
            _remove(self._slices_by_pool, before.pool, before)
        if record is not None:
            _add(self._slices_by_pool, record.pool, record)
        pools = dict.fromkeys(found.pool for found in (before, record) if found is not None)
        self._notify_pods_of(
            claim for pool in pools for claim in self._claims_by_pool.get(pool, ())
        )

    def _notify_pods_of(self, claims: Iterable[_ClaimRecord]) -> None:
        if self.is_complete:
            changed = tuple(claims)
            for pod in dict.fromkeys(pod for claim in changed for pod in claim.pods):
                self._notify(pod)
            for group in dict.fromkeys(group for claim in changed for group in claim.groups):
                self._notify_group(group)

    async def _on_listed(self, pacer: Pacer) -> None:
        """Report all pods after a list; corrections of single claims are reported before.

        If the watch of claims does not work, pods are not reported: the GPUs of pods without known
        claims would change from none to unknown.
        """
        if self.is_complete and self._is_current():
            await self._notify_all(pacer)


def _add(index: dict[str, tuple[_Value, ...]], key: str, value: _Value) -> None:
    index[key] = (*index.get(key, ()), value)


def _remove(index: dict[str, tuple[_Value, ...]], key: str, value: _Value) -> None:
    left = tuple(other for other in index.get(key, ()) if other is not value)
    if left:
        index[key] = left
    else:
        index.pop(key, None)
