"""A pod with its devices, their GPU-hours and cost, and sums over pods."""

from dataclasses import dataclass

from extender.answers.holding import SumsAnswer
from extender.core.devices.readings import DeviceInfo
from extender.core.nodes.inventory import PodRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevice:
    """A device that a pod holds.

    Attributes:
        idle_seconds: time since its last activity, limited to the time since the pod's binding.
        is_at_least: whether the idle time may be longer, because earlier activity is unknown.
        tenants: number of pods on the device.
    """

    row: int
    info: DeviceInfo
    idle_seconds: float
    is_at_least: bool
    tenants: int

    @property
    def is_instance(self) -> bool:
        """Whether the device is a MIG instance."""
        return bool(self.info.mig_profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A pod that holds devices.

    Attributes:
        model: model of the devices as their source names it, "" if unknown.
        devices: devices known to be the pod's.
        missing: number of further devices that the pod holds but no source attributes to it.
        missing_instances: MIG instances among the missing devices.
        cards: size of all devices in whole cards; shares and MIG instances count in part.
        idle: members of `devices` that have been idle long enough.
        idle_seconds: time for which all devices in `idle` have been idle.
        held_seconds: time since the binding.
        price: price of one card-hour, None if unknown.
    """

    record: PodRecord
    model: str
    devices: tuple[HeldDevice, ...]
    missing: int
    missing_instances: int
    cards: float
    idle: tuple[HeldDevice, ...]
    idle_seconds: float
    held_seconds: float
    price: float | None

    @property
    def is_idle(self) -> bool:
        """Whether the pod uses none of its devices."""
        return not self.missing and len(self.idle) == len(self.devices)

    @property
    def size(self) -> int:
        """Number of the pod's devices."""
        return len(self.devices) + self.missing

    @property
    def instances(self) -> int:
        """Number of the pod's MIG instances."""
        return sum(device.is_instance for device in self.devices) + self.missing_instances

    @property
    def instances_idle(self) -> int:
        """Number of the pod's idle MIG instances."""
        return sum(device.is_instance for device in self.idle)

    @property
    def gpus(self) -> int:
        """Number of the pod's GPUs, without MIG instances."""
        return self.size - self.instances

    @property
    def gpus_idle(self) -> int:
        """Number of the pod's idle GPUs, without MIG instances."""
        return len(self.idle) - self.instances_idle

    @property
    def gpu_hours(self) -> float:
        """Card-hours since the binding."""
        return self.cards * self.held_seconds / 3600

    @property
    def gpu_hours_idle(self) -> float:
        """Card-hours since the last activity of each device that is idle now."""
        idle_seconds = sum(device.idle_seconds for device in self.idle)
        return self.cards * idle_seconds / max(self.size, 1) / 3600

    @property
    def cost(self) -> float | None:
        """Cost of all card-hours, None if the price is unknown."""
        return None if self.price is None else self.price * self.gpu_hours

    @property
    def cost_used(self) -> float | None:
        """Cost of the card-hours that were not idle, None if the price is unknown."""
        if self.price is None:
            return None
        return self.price * max(self.gpu_hours - self.gpu_hours_idle, 0.0)

    @property
    def cost_idle(self) -> float | None:
        """Cost of the idle card-hours, None if the price is unknown."""
        return None if self.price is None else self.price * self.gpu_hours_idle


@dataclass(slots=True, kw_only=True)
class Sums:
    """Devices, GPU-hours and costs, summed over pods: the fields of `SumsAnswer`."""

    pods: int = 0
    gpus: int = 0
    gpus_idle: int = 0
    instances: int = 0
    instances_idle: int = 0
    gpu_hours: float = 0.0
    gpu_hours_idle: float = 0.0
    unpriced_pods: int = 0
    cost: float = 0.0
    cost_idle: float = 0.0

    def add(self, holder: Holder) -> None:
        """Add a pod's devices, GPU-hours and costs."""
        self.pods += 1
        self.gpus += holder.gpus
        self.gpus_idle += holder.gpus_idle
        self.instances += holder.instances
        self.instances_idle += holder.instances_idle
        self.gpu_hours += holder.gpu_hours
        self.gpu_hours_idle += holder.gpu_hours_idle
        if holder.price is None:
            self.unpriced_pods += 1
            return
        self.cost += holder.price * holder.gpu_hours
        self.cost_idle += holder.price * holder.gpu_hours_idle

    def view(self) -> SumsAnswer:
        """Return the sums for an answer; costs are null if no pod has a price."""
        is_priced = self.pods > self.unpriced_pods
        return SumsAnswer(
            pods=self.pods,
            gpus=self.gpus,
            gpus_idle=self.gpus_idle,
            mig_instances=self.instances,
            mig_instances_idle=self.instances_idle,
            gpu_hours=self.gpu_hours,
            gpu_hours_used=max(self.gpu_hours - self.gpu_hours_idle, 0.0),
            gpu_hours_idle=self.gpu_hours_idle,
            cost=self.cost if is_priced else None,
            cost_used=max(self.cost - self.cost_idle, 0.0) if is_priced else None,
            cost_idle=self.cost_idle if is_priced else None,
            unpriced_pods=self.unpriced_pods,
        )
