"""Nodes of a simulated fleet: their configuration, and their devices."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from simulation.devices import Card, Device, DeviceView, card_uuid, instance_ids, pci_bus_id
from simulation.models import GpuModel

GPU_RESOURCE: Final = "nvidia.com/gpu"


class FleetError(ValueError):
    """Error: the node or device does not exist, or a pod cannot be placed."""


class Sharing(StrEnum):
    """Sharing strategy of a node's devices, as in GFD's label."""

    NONE = "none"
    TIME_SLICING = "time-slicing"
    MPS = "mps"


class ExporterState(StrEnum):
    """Result of a scrape of a node's exporter."""

    UP = "up"
    DOWN = "down"
    """The connection breaks without an answer."""
    ERROR = "error"
    """Status 500."""
    EMPTY = "empty"
    """Status 200 without a body, as while the exporter reloads its configuration."""
    MISSING = "missing"
    """Status 404."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterBuild:
    """Build and configuration of a node's dcgm-exporter.

    Attributes:
        hostname_label: `Hostname` up to 4.5, `hostname` from 4.8.3.
        has_zero_xid: whether it prints XID 0 before the first error; builds from 4.8.2 do not.
        has_virtual_gpus: whether it repeats the series of a shared device for each pod on it.
        has_process_values: whether it then splits GPU_UTIL and FB_USED by pod (from 4.8.2).
        has_pods: whether it knows the pod that holds a device.
        extra_fields: enabled fields that are off by default.
        omitted_fields: disabled fields that are on by default.
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
    """Configuration of a node.

    Attributes:
        name: name of the node.
        model: model of all its cards.
        cards: number of cards.
        sharing: sharing strategy; `NONE` ignores `replicas`.
        replicas: shares per device.
        is_renamed: whether shared resources have the suffix `.shared`.
        mig: MIG profiles of each card, from the first card on; () for a card without MIG.
        address: InternalIP.
        hostname: hostname that the machine and its exporter report; "" for the name of the node.
        driver_version: version of the NVIDIA driver.
        exporter: its dcgm-exporter.
        description: short description for people.
        numa_nodes: NUMA node of each card; () if agents cannot read it.
        nvlinks: sets of cards that NVLink joins, by index.
        labels: further labels.
        topology_policy: policy of the kubelet's Topology Manager as its agent reads it.
    """

    name: str
    model: GpuModel
    cards: int = 8
    sharing: Sharing = Sharing.NONE
    replicas: int = 1
    is_renamed: bool = False
    mig: tuple[tuple[str, ...], ...] = ()
    address: str = "127.0.0.1"
    hostname: str = ""
    driver_version: str = "580.95.05"
    exporter: ExporterBuild = EXPORTER_4_5
    description: str = ""
    numa_nodes: tuple[int, ...] = ()
    nvlinks: tuple[tuple[int, ...], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    topology_policy: str = ""

    def __post_init__(self) -> None:
        """Reject impossible MIG layouts."""
        if len(self.mig) > self.cards:
            raise FleetError(f"node {self.name}: MIG layout for more cards than {self.cards}")
        for profile in {profile for card in self.mig for profile in card}:
            if profile not in self.model.mig_memory_mib:
                raise FleetError(f"node {self.name}: {self.model.name} has no profile {profile}")


@dataclass(slots=True, kw_only=True)
class SimulatedNode:
    """A node and its current state.

    Attributes:
        spec: its configuration.
        cards: its cards by index.
        devices: devices of its device plugin; MIG instances if a card has profiles.
        exporter: result of a scrape.
        frozen: values that the exporter repeats, or None for current values.
        silent_since: time of the last sample in Prometheus, or None, seconds since the epoch.
    """

    spec: NodeSpec
    cards: tuple[Card, ...]
    devices: tuple[Device, ...]
    exporter: ExporterState = ExporterState.UP
    frozen: tuple[DeviceView, ...] | None = None
    silent_since: float | None = None

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.spec.name

    def count(self, resource: str) -> int:
        """Return the number of devices or shares that the node offers."""
        return sum(device.replicas for device in self.devices if device.resource == resource)

    def resources(self) -> tuple[str, ...]:
        """Return the names of the node's GPU resources, sorted."""
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
