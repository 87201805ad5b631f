"""Devices of a simulated node: mutable state, and its view by an exporter."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from simulation.models import MIB, GpuModel

LOST_XID: Final = 79
"""XID of a GPU that has fallen off the bus."""

_HEAT_CELSIUS: Final = 50.0
"""Temperature difference between full load and idle."""

# PCI buses of the boards in common eight-way servers; further cards get higher numbers.
_BUSES: Final = ("1A", "3D", "4E", "5E", "9B", "BA", "CB", "DB")

# The driver's first instance id for each size in slices.
_FIRST_INSTANCE_ID: Final = {"7": 0, "4": 1, "3": 1, "2": 3, "1": 7}


class Loss(StrEnum):
    """Telemetry of a lost GPU."""

    VANISHED = "vanished"
    """Its series disappear."""
    XID_79 = "xid-79"
    """Its last values remain, with XID 79."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load on a device.

    Attributes:
        utilization: ratio of time busy, 0 to 1.
        memory_bytes: memory in use.
    """

    utilization: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRef:
    """Identity of a pod in the fleet."""

    namespace: str
    name: str
    uid: str = ""
    container: str = "main"

    @property
    def key(self) -> str:
        """Key of the pod: `namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A pod on a device.

    Attributes:
        replica: number of its share of the device.
        load: its load after the warm-up.
        warm_at: end of the warm-up, seconds since the epoch.
    """

    pod: PodRef
    replica: int
    load: Load
    warm_at: float


@dataclass(slots=True, kw_only=True)
class Card:
    """A physical GPU, with the state that its MIG instances share.

    Attributes:
        index: DCGM's index on the node.
        uuid: UUID, `GPU-…`.
        pci_bus_id: PCI address with DCGM's eight-digit domain.
        power_watts: power, or None to follow the load.
        temperature_celsius: temperature, or None to follow the load.
        xid: last XID error, 0 for none.
        row_remap_pending: 1 if a row waits for a reset.
        row_remap_failure: 1 if remapping a row failed.
        uncorrectable_remapped_rows: number of rows replaced so far.
        double_bit_errors: uncorrectable memory errors since the last reset.
        clock_event_reasons: NVML's bit mask.
        is_vanished: whether telemetry has no series for it.
    """

    index: int
    uuid: str
    pci_bus_id: str
    model: GpuModel
    power_watts: float | None = None
    temperature_celsius: float | None = None
    xid: int = 0
    row_remap_pending: int = 0
    row_remap_failure: int = 0
    uncorrectable_remapped_rows: int = 0
    double_bit_errors: int = 0
    clock_event_reasons: int = 0
    is_vanished: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether the card has fallen off the bus."""
        return self.is_vanished or self.xid == LOST_XID


@dataclass(slots=True, kw_only=True)
class Device:
    """A device of the device plugin: a card, or a MIG instance of a card.

    Attributes:
        card: the physical GPU.
        resource: resource name under which the kubelet offers it.
        replicas: number of shares; 1 for a whole device.
        memory_mib: total framebuffer.
        reserved_mib: framebuffer that the driver reserves.
        gpu_instance_id: GPU instance id, "" for a whole card.
        profile: MIG profile, "" for a whole card.
        base: load without placed pods, set by tests.
        foreign: load of processes outside Kubernetes.
        foreign_since: their start, seconds since the epoch.
        tenants: pods on the device.
    """

    card: Card
    resource: str
    replicas: int
    memory_mib: int
    reserved_mib: int
    gpu_instance_id: str = ""
    profile: str = ""
    base: Load = Load()
    foreign: Load = Load()
    foreign_since: float = 0.0
    tenants: list[Tenant] = field(default_factory=list)

    @property
    def used_replicas(self) -> int:
        """Number of shares that pods hold."""
        return len(self.tenants)

    @property
    def free_replicas(self) -> int:
        """Number of free shares."""
        return self.replicas - len(self.tenants)

    def next_replica(self) -> int:
        """Return the lowest share number that is free."""
        held = {tenant.replica for tenant in self.tenants}
        return next(number for number in range(self.replicas) if number not in held)

    def load_at(self, now: float) -> Load:
        """Return the total load at a time: base, foreign and all warm pods."""
        loads = [self.base, self.foreign]
        loads += [tenant.load for tenant in self.tenants if tenant.warm_at <= now]
        room_bytes = (self.memory_mib - self.reserved_mib) * MIB
        return Load(
            utilization=min(1.0, sum(load.utilization for load in loads)),
            memory_bytes=min(room_bytes, sum(load.memory_bytes for load in loads)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantView:
    """A pod on a device in an exporter's view, with the load of its own processes."""

    pod: PodRef
    replica: int
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """All values that an exporter can report about a device at one time.

    The attributes are those of `Card` and `Device`, and:
        is_shared: whether the device has several shares.
        memory_temperature_celsius: temperature of HBM.
        sm_clock_mhz: current SM clock.
        energy_joules: energy since the driver was loaded.
    """

    index: int
    uuid: str
    pci_bus_id: str
    model: GpuModel
    memory_mib: int
    reserved_mib: int
    utilization: float
    memory_used_bytes: int
    is_shared: bool = False
    gpu_instance_id: str = ""
    profile: str = ""
    power_watts: float = 0.0
    temperature_celsius: int = 30
    memory_temperature_celsius: int = 33
    sm_clock_mhz: int = 345
    energy_joules: float = 0.0
    xid: int = 0
    row_remap_pending: int = 0
    row_remap_failure: int = 0
    uncorrectable_remapped_rows: int = 0
    double_bit_errors: int = 0
    clock_event_reasons: int = 0
    tenants: tuple[TenantView, ...] = ()


def view_of(device: Device, now: float) -> DeviceView:
    """Return the values that an exporter would report about a device."""
    load = device.load_at(now)
    card, model = device.card, device.card.model
    watts = model.idle_watts + load.utilization * (model.max_watts - model.idle_watts)
    power_watts = watts if card.power_watts is None else card.power_watts
    celsius = 28.0 + _HEAT_CELSIUS * load.utilization
    temperature_celsius = int(
        celsius if card.temperature_celsius is None else card.temperature_celsius
    )
    is_working = load.utilization > 0
    return DeviceView(
        index=card.index,
        uuid=card.uuid,
        pci_bus_id=card.pci_bus_id,
        model=model,
        memory_mib=device.memory_mib,
        reserved_mib=device.reserved_mib,
        utilization=load.utilization,
        memory_used_bytes=load.memory_bytes,
        is_shared=device.replicas > 1,
        gpu_instance_id=device.gpu_instance_id,
        profile=device.profile,
        power_watts=power_watts,
        temperature_celsius=temperature_celsius,
        memory_temperature_celsius=temperature_celsius + 8,
        sm_clock_mhz=model.max_clock_mhz if is_working else model.idle_clock_mhz,
        energy_joules=model.idle_watts * (now % 1e8),
        xid=card.xid,
        row_remap_pending=card.row_remap_pending,
        row_remap_failure=card.row_remap_failure,
        uncorrectable_remapped_rows=card.uncorrectable_remapped_rows,
        double_bit_errors=card.double_bit_errors,
        clock_event_reasons=card.clock_event_reasons,
        tenants=tuple(
            TenantView(
                pod=tenant.pod,
                replica=tenant.replica,
                load=tenant.load if tenant.warm_at <= now else Load(),
            )
            for tenant in device.tenants
        ),
    )


def card_uuid(node: str, index: int) -> str:
    """Return the UUID of a card, which depends only on node and index.

    Example:
        >>> card_uuid("gpu-h100-01", 0) == card_uuid("gpu-h100-01", 0)
        True
        >>> len(card_uuid("gpu-h100-01", 0))
        40
    """
    digits = hashlib.sha256(f"{node}/{index}".encode()).hexdigest()
    return "GPU-" + "-".join(
        (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32])
    )


def pci_bus_id(index: int) -> str:
    """Return the PCI address of the card with this index.

    Example:
        >>> pci_bus_id(0)
        '00000000:1A:00.0'
    """
    bus = _BUSES[index] if index < len(_BUSES) else f"{0xE0 + index - len(_BUSES):02X}"
    return f"00000000:{bus}:00.0"


def instance_ids(profiles: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPU instance ids that the driver would assign to these MIG profiles.

    Example:
        >>> instance_ids(("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"))
        ('1', '3', '7', '8')
    """
    ids: list[int] = []
    for profile in profiles:
        number = _FIRST_INSTANCE_ID[profile[0]]
        while number in ids:
            number += 1
        ids.append(number)
    return tuple(map(str, ids))
