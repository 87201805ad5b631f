"""The nodes of a simulated fleet: how they were set up, and what is built from that."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from simulation.devices import Card, Device, DeviceView, card_uuid, instance_ids, pci_bus_id
from simulation.models import GpuModel

GPU_RESOURCE: Final = "nvidia.com/gpu"


class FleetError(ValueError):
    """The fleet has no such node or device, or cannot place a pod."""


class Sharing(StrEnum):
    """How a node's devices are shared, as GFD's label says it."""

    NONE = "none"
    TIME_SLICING = "time-slicing"
    MPS = "mps"


class Allocation(StrEnum):
    """Which shared device the device plugin hands out."""

    DISTRIBUTED = "distributed"
    PACKED = "packed"


class ExporterState(StrEnum):
    """What a scrape of a node's exporter gets."""

    UP = "up"
    DOWN = "down"
    """The connection breaks without an answer."""
    ERROR = "error"
    """500."""
    EMPTY = "empty"
    """200 with no body, as while the exporter reloads its configuration."""
    MISSING = "missing"
    """404."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterBuild:
    """Which dcgm-exporter a node runs.

    Attributes:
        hostname_label: `Hostname` up to 4.5, `hostname` from 4.8.3.
        has_zero_xid: prints XID 0 before the first error; builds from 4.8.2 print nothing.
        has_virtual_gpus: repeats the series of a shared device for each pod on it.
        has_process_values: with the above, GPU_UTIL and FB_USED are split by pod (from 4.8.2).
        has_pods: knows which pod holds which device.
        extra_fields: names of fields that are off by default and on here.
        omitted_fields: names of fields that are on by default and off here.
    """

    hostname_label: str = "Hostname"
    has_zero_xid: bool = True
    has_virtual_gpus: bool = False
    has_process_values: bool = False
    has_pods: bool = True
    extra_fields: frozenset[str] = frozenset()
    omitted_fields: frozenset[str] = frozenset()


EXPORTER_4_5: Final = ExporterBuild()
EXPORTER_4_8: Final = ExporterBuild(
    hostname_label="hostname", has_zero_xid=False, has_virtual_gpus=True, has_process_values=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node as it was bought and set up.

    Attributes:
        name: the node's name.
        model: model of all its cards.
        cards: how many.
        sharing: how devices are shared; `NONE` ignores `replicas`.
        replicas: shares per device.
        is_renamed: shared resources carry the suffix `.shared`.
        mig: MIG profiles of each card from the first on; () for a card without MIG.
        allocation: which shared device is handed out.
        address: InternalIP.
        hostname: what its exporter calls the node, "" for its name.
        driver_version: NVIDIA driver.
        exporter: its dcgm-exporter.
        description: what it stands for, a few words for people.
    """

    name: str
    model: GpuModel
    cards: int = 8
    sharing: Sharing = Sharing.NONE
    replicas: int = 1
    is_renamed: bool = False
    mig: tuple[tuple[str, ...], ...] = ()
    allocation: Allocation = Allocation.DISTRIBUTED
    address: str = "127.0.0.1"
    hostname: str = ""
    driver_version: str = "580.95.05"
    exporter: ExporterBuild = EXPORTER_4_5
    description: str = ""

    def __post_init__(self) -> None:
        """Reject what cannot be."""
        if len(self.mig) > self.cards:
            raise FleetError(f"node {self.name}: MIG layout for more cards than {self.cards}")
        for profile in {profile for card in self.mig for profile in card}:
            if profile not in self.model.mig_memory_mib:
                raise FleetError(f"node {self.name}: {self.model.name} has no profile {profile}")


@dataclass(slots=True, kw_only=True)
class SimulatedNode:
    """A node and what is going on on it.

    Attributes:
        spec: what it is.
        cards: its cards by index.
        devices: what its device plugin hands out; MIG instances where a card is cut up.
        exporter: what a scrape gets.
        frozen: the views that the exporter keeps repeating; None while it works.
        silent_since: from when on no sample of it reached Prometheus, seconds since the epoch.
    """

    spec: NodeSpec
    cards: tuple[Card, ...]
    devices: tuple[Device, ...]
    exporter: ExporterState = ExporterState.UP
    frozen: tuple[DeviceView, ...] | None = None
    silent_since: float | None = None

    @property
    def name(self) -> str:
        """The node's name."""
        return self.spec.name

    def count(self, resource: str, *, is_allocatable: bool = False) -> int:
        """Return how many devices or replicas the kubelet offers: capacity, or allocatable."""
        return sum(
            device.replicas
            for device in self.devices
            if device.resource == resource and not (is_allocatable and device.card.is_unhealthy)
        )

    def resources(self) -> tuple[str, ...]:
        """Return the names of its GPU resources, sorted."""
        return tuple(sorted({device.resource for device in self.devices}))


def build_node(spec: NodeSpec) -> SimulatedNode:
    """Build a node with all its devices, idle and healthy."""
    cards = tuple(
        Card(
            index=index,
            uuid=card_uuid(spec.name, index),
            pci_bus_id=pci_bus_id(index),
            model=spec.model,
        )
        for index in range(spec.cards)
    )
    layouts = (*spec.mig, *(() for _ in range(spec.cards - len(spec.mig))))
    devices = [
        device
        for card, profiles in zip(cards, layouts, strict=True)
        for device in _devices(spec, card, profiles)
    ]
    return SimulatedNode(spec=spec, cards=cards, devices=tuple(devices))


def _devices(spec: NodeSpec, card: Card, profiles: tuple[str, ...]) -> Iterator[Device]:
    replicas = 1 if spec.sharing is Sharing.NONE else spec.replicas
    suffix = ".shared" if spec.is_renamed and spec.sharing is not Sharing.NONE else ""
    if not profiles:
        yield Device(
            card=card,
            resource=GPU_RESOURCE + suffix,
            replicas=replicas,
            memory_mib=spec.model.memory_mib,
            reserved_mib=spec.model.reserved_mib,
        )
    for profile, instance_id in zip(profiles, instance_ids(profiles), strict=True):
        yield Device(
            card=card,
            resource=f"nvidia.com/mig-{profile}{suffix}",
            replicas=replicas,
            memory_mib=spec.model.mig_memory_mib[profile],
            reserved_mib=0,
            gpu_instance_id=instance_id,
            profile=profile,
        )
