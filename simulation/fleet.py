"""Simulate a fleet: nodes, their devices, and the pods that hold them."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from simulation.devices import (
    LOST_XID,
    Card,
    Device,
    DeviceView,
    Load,
    Loss,
    PodRef,
    Tenant,
    view_of,
)
from simulation.models import GIB
from simulation.nodes import ExporterState, FleetError, NodeSpec, SimulatedNode, build_node

_DEFAULT_LOAD: Final = Load(utilization=0.6, memory_bytes=8 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of a placed pod.

    Attributes:
        node: name of its node.
        resource: resource that it requested.
        count: number of devices or shares.
        devices: device of each share.
    """

    pod: PodRef
    node: str
    resource: str
    count: int
    devices: tuple[Device, ...]


@dataclass(slots=True, kw_only=True)
class SimulatedFleet:
    """All simulated nodes; use them on one thread.

    Attributes:
        nodes: nodes by name.
        default_load: load of a placed pod on each of its devices.
        warm_up_seconds: time without load after a placement.
        clock: returns seconds since the epoch.
        placements: placements by pod UID.
    """

    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    default_load: Load = _DEFAULT_LOAD
    warm_up_seconds: float = 0.0
    clock: Callable[[], float] = time.time
    placements: dict[str, tuple[Placement, ...]] = field(default_factory=dict)

    def add(self, spec: NodeSpec) -> SimulatedNode:
        """Build a node, add it to the fleet, and return it."""
        node = build_node(spec)
        self.nodes[spec.name] = node
        return node

    def node(self, name: str) -> SimulatedNode:
        """Return the node with this name.

        Raises:
            FleetError: the node does not exist.
        """
        try:
            return self.nodes[name]
        except KeyError:
            raise FleetError(f"no such node in the simulated fleet: {name}") from None

    def device(self, node: str, index: int, gpu_instance_id: str = "") -> Device:
        """Return a whole card, or one of its MIG instances.

        Raises:
            FleetError: the device does not exist.
        """
        for device in self.node(node).devices:
            if device.card.index == index and device.gpu_instance_id == gpu_instance_id:
                return device
        raise FleetError(f"node {node} has no device {index} {gpu_instance_id}".rstrip())

    def place(
        self, pod: PodRef, node: str, resource: str, count: int = 1, load: Load | None = None
    ) -> Placement:
        """Allocate devices to a pod as kubelet and device plugin would.

        Args:
            pod: the pod; its UID identifies the placement.
            node: name of its node.
            resource: resource that it requests.
            count: number of devices or shares.
            load: its load on each device, or None for the fleet's default.

        Raises:
            FleetError: too few are free, like the kubelet's UnexpectedAdmissionError.
        """
        target = self.node(node)
        offered = [device for device in target.devices if device.resource == resource]
        free = sum(device.free_replicas for device in offered)
        if free < count:
            raise FleetError(
                f"cannot place {pod.key} on {node}: {free} of {count} {resource} are free"
            )
        now = self.clock()
        devices: list[Device] = []
        for _ in range(count):
            device = _pick(offered)
            device.tenants.append(
                Tenant(
                    pod=pod,
                    replica=device.next_replica(),
                    load=load or self.default_load,
                    warm_at=now + self.warm_up_seconds,
                )
            )
            devices.append(device)
        placement = Placement(
            pod=pod, node=node, resource=resource, count=count, devices=tuple(devices)
        )
        uid = pod.uid or pod.key
        self.placements[uid] = (*self.placements.get(uid, ()), placement)
        return placement

    def release(self, uid: str) -> bool:
        """Remove a pod from its devices, and return whether it held any.

        Args:
            uid: UID of the pod, or `namespace/name` for a pod without a UID.
        """
        placements = self.placements.pop(uid, ())
        for placement in placements:
            for device in placement.devices:
                device.tenants[:] = [
                    tenant for tenant in device.tenants if (tenant.pod.uid or tenant.pod.key) != uid
                ]
        return bool(placements)

    def adopt(self, pod: PodRef, node: str) -> bool:
        """Replace the UID of a placed pod by the one that an API server assigned.

        Returns:
            Whether a pod of that name was placed on that node under another UID.
        """
        known = next(
            (
                uid
                for uid, placements in self.placements.items()
                if placements[0].pod.key == pod.key and placements[0].node == node
            ),
            None,
        )
        if known is None:
            return False
        placements = self.placements.pop(known)
        self.placements[pod.uid] = tuple(replace(placement, pod=pod) for placement in placements)
        for device in (device for placement in placements for device in placement.devices):
            device.tenants[:] = [
                replace(tenant, pod=pod) if tenant.pod.key == pod.key else tenant
                for tenant in device.tenants
            ]
        return True

    def set_utilization(self, node: str, index: int, ratio: float) -> None:
        """Set a device's activity in addition to placed pods, 0 to 1."""
        device = self.device(node, index)
        device.base = replace(device.base, utilization=ratio)

    def set_memory_used(self, node: str, index: int, memory_bytes: int) -> None:
        """Set a device's memory use in addition to placed pods, in bytes."""
        device = self.device(node, index)
        device.base = replace(device.base, memory_bytes=memory_bytes)

    def set_foreign(self, node: str, index: int, load: Load | None) -> None:
        """Set the load of processes outside Kubernetes on a device; None ends them."""
        device = self.device(node, index)
        device.foreign, device.foreign_since = load or Load(), self.clock()

    def set_xid(self, node: str, index: int, xid: int) -> None:
        """Set a card's last XID error; 0 for none."""
        self.card(node, index).xid = xid

    def card(self, node: str, index: int) -> Card:
        """Return a physical card; its attributes may be changed.

        Raises:
            FleetError: the card does not exist.
        """
        cards = self.node(node).cards
        if not 0 <= index < len(cards):
            raise FleetError(f"node {node} has no card {index}")
        return cards[index]

    def kill_device(self, node: str, index: int, loss: Loss = Loss.VANISHED) -> None:
        """Make a card fall off the bus.

        Args:
            node: name of the card's node.
            index: index of the card.
            loss: effect on telemetry.
        """
        card = self.card(node, index)
        card.is_vanished = loss is Loss.VANISHED
        card.xid = LOST_XID

    def freeze(self, *names: str) -> None:
        """Freeze the values that the exporters of these nodes, or of all, report."""
        for name in names or self.nodes:
            node = self.node(name)
            node.frozen = tuple(self._views(node))

    def thaw(self, *names: str) -> None:
        """Let the exporters of these nodes, or of all, report current values again."""
        for name in names or self.nodes:
            self.node(name).frozen = None

    def silence(self, name: str, age_seconds: float = 0.0) -> None:
        """Stop all samples of a node, so that its last sample becomes stale.

        A real Prometheus would record the failed scrape. The simulated one keeps the last sample,
        as if an agent that forwards samples had died.

        Args:
            name: name of the node.
            age_seconds: age of the last sample.
        """
        node = self.node(name)
        self.freeze(name)
        node.exporter = ExporterState.DOWN
        node.silent_since = self.clock() - age_seconds

    def views(self, name: str) -> tuple[DeviceView, ...]:
        """Return the values that a node's exporter reports now, by device."""
        node = self.node(name)
        return tuple(self._views(node)) if node.frozen is None else node.frozen

    def _views(self, node: SimulatedNode) -> Iterator[DeviceView]:
        now = self.clock()
        return (view_of(device, now) for device in node.devices if not device.card.is_vanished)


def _pick(devices: Iterable[Device]) -> Device:
    """Return a device with a free share and the fewest shares in use.

    Among whole devices and MIG instances this is the first free one.
    """
    free = [device for device in devices if device.free_replicas > 0]
    return min(free, key=lambda device: device.used_replicas)
