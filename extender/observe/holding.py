"""A pod that holds devices, what that comes to, and the sums over many."""

from dataclasses import dataclass

from extender.core.inventory import PodRecord
from extender.core.readings import DeviceInfo
from extender.observe.views import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevice:
    """A device that a pod holds.

    Attributes:
        row: its row in the telemetry.
        info: what is known of it besides numbers.
        idle_seconds: since it was last active, and no longer than the pod holds it.
        is_at_least: nobody knows whether it was active before that.
        tenants: pods on it.
    """

    row: int
    info: DeviceInfo
    idle_seconds: float
    is_at_least: bool
    tenants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A pod that holds devices.

    Attributes:
        record: the pod.
        devices: those that it is known to hold.
        missing: so many more it holds, and nobody knows which.
        cards: how many whole cards that comes to: a share of a shared device, or a MIG instance,
            counts in part.
        idle: of `devices`, those idle for as long as was asked.
        idle_seconds: for how long all of these have been idle.
        held_seconds: since the binding.
        price: of an hour of a whole card, None where it is not known.
    """

    record: PodRecord
    devices: tuple[HeldDevice, ...]
    missing: int
    cards: float
    idle: tuple[HeldDevice, ...]
    idle_seconds: float
    held_seconds: float
    price: float | None

    @property
    def is_idle(self) -> bool:
        """Whether it uses none of them."""
        return not self.missing and len(self.idle) == len(self.devices)

    @property
    def gpus(self) -> int:
        """How many devices it holds."""
        return len(self.devices) + self.missing

    @property
    def gpu_hours(self) -> float:
        """Hours of whole cards since the binding."""
        return self.cards * self.held_seconds / 3600

    @property
    def gpu_hours_idle(self) -> float:
        """Of these, those since it last used what is idle now, of each device its own."""
        idle_seconds = sum(device.idle_seconds for device in self.idle)
        return self.cards * idle_seconds / max(self.gpus, 1) / 3600

    @property
    def cost(self) -> float | None:
        """What its hours cost, None where the price is not known."""
        return None if self.price is None else self.price * self.gpu_hours

    @property
    def cost_used(self) -> float | None:
        """What of that the hours cost that were not idle."""
        if self.price is None:
            return None
        return self.price * max(self.gpu_hours - self.gpu_hours_idle, 0.0)

    @property
    def cost_idle(self) -> float | None:
        """What of that the idle ones cost."""
        return None if self.price is None else self.price * self.gpu_hours_idle


@dataclass(slots=True, kw_only=True)
class Sums:
    """What some pods hold, and what it costs.

    Attributes:
        pods: how many.
        gpus: devices that they hold.
        gpus_idle: of these.
        gpu_hours: hours of whole cards.
        gpu_hours_idle: of these.
        unpriced_pods: those of which no price is known: their hours are in no cost.
        cost: of all hours with a price.
        cost_idle: of that.
    """

    pods: int = 0
    gpus: int = 0
    gpus_idle: int = 0
    gpu_hours: float = 0.0
    gpu_hours_idle: float = 0.0
    unpriced_pods: int = 0
    cost: float = 0.0
    cost_idle: float = 0.0

    def add(self, holder: Holder) -> None:
        """Count one more pod."""
        self.pods += 1
        self.gpus += holder.gpus
        self.gpus_idle += len(holder.idle)
        self.gpu_hours += holder.gpu_hours
        self.gpu_hours_idle += holder.gpu_hours_idle
        if holder.price is None:
            self.unpriced_pods += 1
            return
        self.cost += holder.price * holder.gpu_hours
        self.cost_idle += holder.price * holder.gpu_hours_idle

    def view(self) -> Json:
        """Return them for an answer; costs are null where no pod has a price."""
        is_priced = self.pods > self.unpriced_pods
        return {
            "pods": self.pods,
            "gpus": self.gpus,
            "gpus_idle": self.gpus_idle,
            "gpu_hours": self.gpu_hours,
            "gpu_hours_used": max(self.gpu_hours - self.gpu_hours_idle, 0.0),
            "gpu_hours_idle": self.gpu_hours_idle,
            "cost": self.cost if is_priced else None,
            "cost_used": max(self.cost - self.cost_idle, 0.0) if is_priced else None,
            "cost_idle": self.cost_idle if is_priced else None,
            "unpriced_pods": self.unpriced_pods,
        }
