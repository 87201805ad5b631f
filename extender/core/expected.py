"""Which devices a node must have behind each of its GPU resources, by what the API server says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from extender.core.inventory import NodeRecord
from extender.core.reconfiguring import is_reconfiguring

WHOLE_RESOURCE = "nvidia.com/gpu"
"""What a node is believed to offer where its allocatable names no GPU resource (DRA)."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a node, as the layout needs it.

    Attributes:
        row: its row in the telemetry.
        mig_profile: profile of a MIG instance, "" for a whole card.
        tenants: pods (`namespace/name`) that the device-to-pod mapping shows on it.
        measured_at: when its newest reading was measured, None where there is none.
        model_id: row of its model in the snapshot's models.
    """

    row: int
    mig_profile: str = ""
    tenants: tuple[str, ...] = ()
    measured_at: float | None = None
    model_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Devices that a node must have behind one resource, by what the API server says.

    Attributes:
        resource: the resource's name.
        count: physical devices.
        replicas: shares that each is sold as; 1 for whole devices.
        memory_bytes: room of each, None where no label says.
        mig_profile: profile of MIG instances as the resource names it, "" for whole cards.
        is_shared: whether the resource is sold in replicas.
        is_mps: whether MPS caps each replica's memory.
        is_by_claims: whether no count of the node tells of them: DRA serves them.
        is_reconfiguring: whether the node's operator is changing its GPUs or their driver.
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


def resource_profile(mig_profile: str) -> str:
    """Return a MIG profile as resource names write it.

    Example:
        >>> resource_profile("1g.10gb+me.all")
        '1g.10gb.me.all'
    """
    return mig_profile.replace("+", ".")


def expected_devices(node: NodeRecord, seen: Mapping[str, int]) -> tuple[Expected, ...]:
    """Return what stands behind each GPU resource that the node offers.

    Args:
        node: the node.
        seen: devices that telemetry sees, by MIG profile as resources write it, "" whole cards.
    """
    offers = {
        resource: max(node.capacity.get(resource, 0), node.allocatable.get(resource, 0))
        for resource in sorted({*node.allocatable, *node.capacity})
    }
    expected = tuple(
        _expect(node, resource, offered, seen) for resource, offered in offers.items() if offered
    )
    if expected:
        return expected
    return tuple(
        Expected(
            resource=f"nvidia.com/mig-{profile}" if profile else WHOLE_RESOURCE,
            count=count,
            mig_profile=profile,
            is_by_claims=True,
            is_reconfiguring=is_reconfiguring(node.labels),
        )
        for profile, count in sorted(seen.items())
    )


def _expect(node: NodeRecord, resource: str, offered: int, seen: Mapping[str, int]) -> Expected:
    """Return what stands behind one resource of which a node offers so many."""
    plain = resource.rsplit("/", 1)[-1].removesuffix(".shared")
    profile = plain.removeprefix("mig-") if plain.startswith("mig-") else ""
    prefix = f"nvidia.com/{plain}" if profile else "nvidia.com/gpu"
    count = sum(seen.get(name, 0) for name in _profiles_behind(node, profile, seen))
    replicas = _replicas(_number(node.labels.get(f"{prefix}.replicas")), offered, count)
    memory_mib = _number(node.labels.get(f"{prefix}.memory"))
    return Expected(
        resource=resource,
        count=-(-offered // replicas),
        replicas=replicas,
        memory_bytes=memory_mib * MIB if memory_mib else None,
        mig_profile=profile,
        is_shared=replicas > 1 or resource.endswith(".shared"),
        is_mps=node.labels.get(f"{prefix}.sharing-strategy") == "mps",
        is_reconfiguring=is_reconfiguring(node.labels),
    )


def _replicas(label: int | None, offered: int, seen: int) -> int:
    """Return how many shares each device is sold as.

    A label that does not divide what is offered is from before the layout changed. Without one, a
    whole multiple of the devices that telemetry sees means replicas; anything else, devices that
    it does not see.
    """
    if label and offered % label == 0:
        return label
    is_multiple = seen > 0 and offered > seen and offered % seen == 0
    return offered // seen if is_multiple else 1


def _profiles_behind(node: NodeRecord, profile: str, seen: Mapping[str, int]) -> tuple[str, ...]:
    """Return the profiles of the devices behind a resource.

    Under the MIG strategy `single` the plain GPU resource counts MIG instances.
    """
    if profile:
        return (profile,)
    if node.labels.get("nvidia.com/mig.strategy") == "single" and not seen.get(""):
        return tuple(name for name in seen if name)
    return ("",)


def _number(text: str | None) -> int | None:
    """Return a label's whole number, None where it is missing or none."""
    return int(text) if text and text.isascii() and text.isdigit() else None


def devices_behind(
    node: NodeRecord, expected: Expected, devices: Sequence[Device]
) -> tuple[Device, ...]:
    """Return the node's devices that stand behind one of its resources."""
    seen: dict[str, int] = {}
    for device in devices:
        profile = resource_profile(device.mig_profile)
        seen[profile] = seen.get(profile, 0) + 1
    profiles = _profiles_behind(node, expected.mig_profile, seen)
    return tuple(device for device in devices if resource_profile(device.mig_profile) in profiles)
