"""Compute the devices behind each GPU resource of a node, according to the API server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from extender.core.devices.readings import NO_INSTANCES
from extender.core.devices.topology import Alignment, Place, alignment_on
from extender.core.nodes.inventory import NodeRecord
from extender.core.quantity import MIB
from extender.core.untyped import number_of

_WHOLE_RESOURCE = "nvidia.com/gpu"
"""Resource assumed for a node whose allocatable lists no GPU resource (DRA)."""

_GKE_STRATEGY = "cloud.google.com/gke-gpu-sharing-strategy"
_GKE_CLIENTS = "cloud.google.com/gke-max-shared-clients-per-gpu"
"""GKE's labels for shared GPUs: sharing strategy, and maximum number of containers per GPU."""

_GKE_PARTITION = "cloud.google.com/gke-gpu-partition-size"
"""GKE's label for nodes whose GPU resource counts MIG instances: their profile."""

_INSTANCE_GPUS = "karpenter.k8s.aws/instance-gpu-count"
_INSTANCE_MEMORY = "karpenter.k8s.aws/instance-gpu-memory"
"""Karpenter's labels: number of cards of the instance type, and memory of each card in MiB."""

_MOST_MIB = 16 << 20
"""Largest memory of a device in MiB; a label with more is wrong."""

_NO_SHARES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDevice:
    """One device of a node, as input of the allocation.

    Attributes:
        mig_profile: profile of a MIG instance, "" for a whole card.
        tenants: pods (`namespace/name`) that hold it according to the device holders.
        measured_at: time of its newest reading, None without one.
        model_id: row of its model in the snapshot's models.
        place: position in its node, None if unknown.
    """

    row: int
    mig_profile: str = ""
    tenants: tuple[str, ...] = ()
    measured_at: float | None = None
    model_id: int = 0
    place: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Devices that a node should have behind one resource.

    Attributes:
        resource: the resource's name.
        count: number of physical devices.
        replicas: shares per device; 1 for whole devices.
        memory_bytes: memory per device from node labels, None without a label.
        mig_profile: MIG profile in the spelling of resource names, "" for whole cards.
        is_shared: whether the resource counts replicas.
        is_mps: whether MPS caps each replica's memory.
        is_by_claims: whether DRA serves the devices, so that no resource count includes them.
        _is_reconfiguring: whether the node's operator is changing its GPUs or their driver.
        alignment: the kubelet's alignment of devices by the node's labels, None without labels.
    """

    resource: str
    count: int
    replicas: int = 1
    memory_bytes: int | None = None
    mig_profile: str = ""
    is_shared: bool = False
    is_mps: bool = False
    is_by_claims: bool = False
    is_reconfiguring: bool = False
    alignment: Alignment | None = None


def resource_profile(mig_profile: str) -> str:
    """Return a MIG profile in the spelling of resource names.

    Example:
        >>> resource_profile("1g.10gb+me.all")
        '1g.10gb.me.all'
    """
    return mig_profile.replace("+", ".")


def expected_devices(
    node: NodeRecord,
    seen: Mapping[str, int],
    *,
    by_kubelet: Mapping[str, int] = _NO_SHARES,
    is_divided: bool = False,
) -> tuple[Expected, ...]:
    """Return the devices expected behind each GPU resource of a node.

    Args:
        seen: number of devices in telemetry by MIG profile, "" for whole cards.
        by_kubelet: shares per device by MIG profile, as the node agent reports from the kubelet.
        is_divided: whether there is evidence that the devices in telemetry are all of them although
            the node offers more: several pods on one device, or a pod's device id that names a
            share.
    """
    offers = {
        resource: max(node.capacity.get(resource, 0), node.allocatable.get(resource, 0))
        for resource in sorted({*node.allocatable, *node.capacity})
    }
    expected = tuple(
        _expect(node, resource, offered, seen, by_kubelet, is_divided=is_divided)
        for resource, offered in offers.items()
        if offered
    )
    if expected:
        return expected
    return tuple(
        Expected(
            resource=f"nvidia.com/mig-{profile}" if profile else _WHOLE_RESOURCE,
            count=count,
            mig_profile=profile,
            is_by_claims=True,
            alignment=Alignment.NONE,  # the Topology Manager does not know devices of claims
            is_reconfiguring=_is_reconfiguring(node.labels),
        )
        for profile, count in sorted(seen.items())
        if profile != NO_INSTANCES
    )


def _expect(
    node: NodeRecord,
    resource: str,
    offered: int,
    seen: Mapping[str, int],
    by_kubelet: Mapping[str, int],
    *,
    is_divided: bool,
) -> Expected:
    """Return the devices expected behind one resource with the offered count."""
    plain = resource.rsplit("/", 1)[-1].removesuffix(".shared")
    profile = plain.removeprefix("mig-") if plain.startswith("mig-") else ""
    prefix = f"nvidia.com/{plain}" if profile else "nvidia.com/gpu"
    profiles = _profiles_behind(node, profile, seen)
    count = sum(seen.get(name, 0) for name in profiles)
    labels = node.labels
    # The kubelet's device ids are newer than labels.
    label = (
        max((by_kubelet.get(name, 0) for name in profiles), default=0)
        or _number(labels.get(f"{prefix}.replicas"))
        or _number(labels.get(_GKE_CLIENTS))
    )
    physical = _number(labels.get(f"{prefix}.count"))
    if not physical and not profile:
        physical = _number(labels.get(_INSTANCE_GPUS))
    strategy = labels.get(f"{prefix}.sharing-strategy") or labels.get(_GKE_STRATEGY)
    is_shared = resource.endswith(".shared") or plain.startswith("vgpu")
    is_divided |= is_shared or strategy in _SHARING
    is_divided |= labels.get(f"{prefix}.product", "").endswith(_SHARED_PRODUCT)
    replicas = _replicas(label, physical, offered, count, is_divided=is_divided)
    memory_mib = _number(labels.get(f"{prefix}.memory"))
    if not memory_mib and profiles == ("",):
        memory_mib = _number(labels.get(_INSTANCE_MEMORY))
    if memory_mib is not None and memory_mib > _MOST_MIB:
        memory_mib = None
    return Expected(
        resource=resource,
        count=-(-offered // replicas),
        replicas=replicas,
        memory_bytes=memory_mib * MIB if memory_mib else None,
        mig_profile=profile,
        is_shared=replicas > 1 or is_shared,
        is_mps=strategy == "mps",
        alignment=alignment_on(node.labels),
        is_reconfiguring=_is_reconfiguring(node.labels),
    )


_SHARING = frozenset({"time-slicing", "time-sharing", "mps"})
"""Sharing strategies in node labels, including GKE's."""


_SHARED_PRODUCT = "-SHARED"
"""Suffix that GFD adds to the model of GPUs shared under their plain resource name."""


def _replicas(
    label: int | None, physical: int | None, offered: int, seen: int, *, is_divided: bool
) -> int:
    """Return the number of shares per device.

    Labels can be a minute late, so the value that matches both the offered and the seen count wins.
    Without a label, a lower seen count means that telemetry misses devices, unless `is_divided`.

    Args:
        label: shares per device from a label or the kubelet.
        physical: number of devices from a label.
        offered: devices or shares that the kubelet offers.
        is_divided: whether there is evidence of shares.
    """
    by_count = _divided(offered, physical)
    by_sight = _divided(offered, seen) if is_divided else None
    if label and offered % label == 0:
        if offered // label in {seen, physical}:
            return label
        if offered in {seen, physical}:
            return 1  # no longer shared
        if label == 1 and is_divided:
            return by_count or by_sight or 1  # shared before the label
        return by_count if by_count and seen in {0, physical} else label
    return by_count or by_sight or 1


def _divided(offered: int, devices: int | None) -> int | None:
    """Return the offered count per device, or None if it does not divide evenly."""
    return offered // devices if devices and offered % devices == 0 else None


def _profiles_behind(node: NodeRecord, profile: str, seen: Mapping[str, int]) -> tuple[str, ...]:
    """Return the MIG profiles of the devices behind a resource.

    With the MIG strategy `single` the plain GPU resource counts MIG instances.
    """
    if profile:
        return (profile,)
    is_single = (
        node.labels.get("nvidia.com/mig.strategy") == "single" or _GKE_PARTITION in node.labels
    )
    if is_single and not seen.get(""):
        return tuple(name for name in seen if name not in {"", NO_INSTANCES})
    return ("",)


def _number(text: str | None) -> int | None:
    """Parse a label's whole number; None if missing or not a number."""
    return number_of(text or "")


def devices_behind(
    node: NodeRecord, expected: Expected, devices: Sequence[ExpectedDevice]
) -> tuple[ExpectedDevice, ...]:
    """Return the node's devices that belong to one of its resources."""
    seen: dict[str, int] = {}
    for device in devices:
        profile = resource_profile(device.mig_profile)
        seen[profile] = seen.get(profile, 0) + 1
    profiles = _profiles_behind(node, expected.mig_profile, seen)
    return tuple(device for device in devices if resource_profile(device.mig_profile) in profiles)


_MIG_STATE_LABEL = "nvidia.com/mig.config.state"
_MIG_STATES_IN_CHANGE = frozenset({"pending", "rebooting"})
"""States in which the MIG manager takes GPUs away from new pods."""

_UPGRADE_STATE_LABEL = "nvidia.com/gpu-driver-upgrade-state"
_UPGRADE_STATES_AT_REST = frozenset({"", "upgrade-done", "upgrade-required", "uncordon-required"})
"""States of the GPU operator's driver upgrade in which the driver works and stays. A node with
`upgrade-required` only queues, in a large cluster for hours. A node with `uncordon-required` has
its new driver, and is cordoned until that state ends."""


def _is_reconfiguring(labels: Mapping[str, str]) -> bool:
    """Return whether the node's operator is changing its GPUs or their driver.

    Example:
        >>> _is_reconfiguring({"nvidia.com/mig.config.state": "pending"})
        True
    """
    return (
        labels.get(_MIG_STATE_LABEL) in _MIG_STATES_IN_CHANGE
        or labels.get(_UPGRADE_STATE_LABEL, "") not in _UPGRADE_STATES_AT_REST
    )
