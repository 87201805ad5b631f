"""A small cluster for tests of fleet and placement: what API server and Prometheus would say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from extender.core.decision.decision import Decision
from extender.core.devices.readings import DeviceInfo, DeviceKey, Readings, Signal
from extender.core.nodes.inventory import NodeRecord, PodPhase, PodRecord
from extender.core.nodes.snapshot import PoolRow
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.fleet.fleet import Fleet
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer
from testkit.builders import GIB, GPU, NOW, pod_ref, request

IDLE: Mapping[Signal, float] = {
    Signal.GPU_UTILIZATION: 0.0,
    Signal.GRAPHICS_ACTIVE: 0.0,
    Signal.MEMORY_USED: 0.0,
    Signal.MEMORY_FREE: 80 * GIB,
}
BUSY: Mapping[Signal, float] = {
    Signal.GPU_UTILIZATION: 0.9,
    Signal.GRAPHICS_ACTIVE: 0.9,
    Signal.MEMORY_USED: 60 * GIB,
    Signal.MEMORY_FREE: 20 * GIB,
}


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = NOW

    def __call__(self) -> float:
        return self.now


@dataclass
class Device:
    """One device as telemetry shows it; measured with the others unless it says when."""

    info: DeviceInfo
    values: dict[Signal, float] = field(default_factory=lambda: dict(IDLE))
    tenants: tuple[str, ...] = ()
    is_shown: bool = True
    measured_at: float | None = None


class World:
    """A cluster whose fleet and placer see what a test lets happen; every node is idle at first."""

    def __init__(self, policy: Policy | None = None, *, in_steps: bool = False) -> None:
        self.policy = policy or Policy()
        self.clock = Clock()
        self.fleet = Fleet(self.policy, self.clock, in_steps=in_steps)
        self.history = DecisionHistory(100, self.clock)
        self.placer = Placer(self.fleet, self.history, self.clock)
        self.devices: dict[DeviceKey, Device] = {}
        self.is_mapped = True
        self.is_shown_by_shares = False

    def add_node(
        self,
        name: str = "node",
        cards: int = 1,
        *,
        replicas: int = 1,
        resource: str = GPU,
        **changes: Any,
    ) -> NodeRecord:
        """Add a node with so many cards, each sold as so many replicas, and GFD's labels."""
        self.add_cards(name, cards)
        offered = {resource: cards * replicas}
        labels = {"nvidia.com/gpu.memory": str(80 * 1024)}
        if replicas > 1:
            labels["nvidia.com/gpu.replicas"] = str(replicas)
            labels["nvidia.com/gpu.sharing-strategy"] = "time-slicing"
        record = NodeRecord(name=name, allocatable=offered, capacity=offered, labels=labels)
        record = replace(record, **changes)
        self.fleet.apply_node(record)
        return record

    def add_cards(self, node: str, count: int) -> None:
        """Let telemetry show so many cards of a node."""
        for index in range(count):
            self.show(DeviceInfo(node=node, uuid=f"GPU-{node}-{index}", index=index))

    def add_instances(self, node: str, card: int, profiles: Iterable[str], first: int = 7) -> None:
        """Let telemetry show MIG instances of a card, numbered from `first`."""
        for number, profile in enumerate(profiles, start=first):
            self.show(
                DeviceInfo(
                    node=node,
                    uuid=f"GPU-{node}-{card}",
                    gpu_instance_id=str(number),
                    index=card,
                    mig_profile=profile,
                )
            )

    def show(self, info: DeviceInfo) -> None:
        """Let telemetry show a device."""
        self.devices[info.key] = Device(info=info)

    def card(self, node: str = "node", index: int = 0, instance: str = "") -> Device:
        """Return a device of a node."""
        return self.devices[DeviceKey((f"GPU-{node}-{index}", instance))]

    def remove_card(self, node: str, index: int) -> None:
        """Let a card and all its instances vanish from telemetry for good."""
        uuid = f"GPU-{node}-{index}"
        self.devices = {key: device for key, device in self.devices.items() if key[0] != uuid}

    def read(
        self,
        *,
        measured_at: float | None = None,
        began_at: float | None = None,
        **values: float,
    ) -> None:
        """Let one answer of Prometheus arrive, measured now unless said otherwise.

        Args:
            measured_at: when its values were measured, seconds since the epoch.
            began_at: when the round began that ends now by asking who holds what, likewise.
            values: of every device, by the name of a `Signal`.
        """
        shown = [device for device in self.devices.values() if device.is_shown]
        for device in shown:
            device.values.update({Signal[name]: value for name, value in values.items()})
        signals = {signal for device in shown for signal in device.values}
        measured = self.clock.now if measured_at is None else measured_at
        self.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=self.clock.now if began_at is None else began_at,
                devices=tuple(device.info for device in shown),
                columns={
                    signal: np.array([device.values.get(signal, np.nan) for device in shown])
                    for signal in signals
                },
                measured_at=np.array(
                    [measured if one.measured_at is None else one.measured_at for one in shown]
                ),
                tenants={device.info.key: device.tenants for device in shown if device.tenants}
                if self.is_mapped
                else None,
                tenants_at=self.clock.now,
                divided=tuple(device.info.key for device in shown if device.tenants)
                if self.is_shown_by_shares
                else (),
            )
        )

    def read_after(self, seconds: float, times: int = 1, **values: float) -> None:
        """Let so many answers arrive, one each time so many seconds have passed."""
        for _ in range(times):
            self.clock.now += seconds
            self.read(**values)

    def bind(
        self,
        name: str,
        node: str = "node",
        count: int = 1,
        *,
        on: Iterable[Device] = (),
        **changes: Any,
    ) -> PodRecord:
        """Let the watch show a pod bound and running; the next readings show it on these devices.

        Args:
            name: the pod's name.
            node: its node.
            count: devices or replicas.
            on: devices that the mapping shows it on.
            changes: what else is different in its record.
        """
        described = PodRecord(
            uid=f"uid-{name}",
            namespace="ns",
            name=name,
            node=node,
            resources={GPU: count},
            phase=PodPhase.RUNNING,
            bound_at=self.clock.now,
            started_at=self.clock.now,
        )
        record = replace(described, **changes)
        for device in on:
            device.tenants = (*device.tenants, record.key)
        self.fleet.apply_pod(record)
        return record

    def end(self, record: PodRecord, **changes: Any) -> None:
        """Let the watch show that a pod has ended now; the mapping forgets it."""
        ended = replace(record, phase=PodPhase.SUCCEEDED, ended_at=self.clock.now)
        self.fleet.apply_pod(replace(ended, **changes))
        for device in self.devices.values():
            device.tenants = tuple(key for key in device.tenants if key != record.key)

    def row(self, node: str = "node", resource: str = GPU) -> PoolRow:
        """Return a node's row as the snapshot has it."""
        pool = self.fleet.snapshot().pools[resource]
        return pool.rows[pool.row_of[node]]

    def estimated(self, device: Device, column: str) -> float:
        """Return what the snapshot believes of a device."""
        row = self.fleet.store.row_of(device.info.key)
        assert row is not None
        return float(getattr(self.fleet.snapshot().telemetry, column)[row])

    def rank(self, asked: GpuRequest | None = None, nodes: Iterable[str] | None = None) -> Decision:
        """Return what a pod would get now."""
        names = self.fleet.nodes if nodes is None else nodes
        return self.placer.rank(asked or request(), tuple(names))

    def place(self, name: str, asked: GpuRequest | None = None) -> str | None:
        """Place a pod as kube-scheduler does, filter and prioritize; return our first choice."""
        about, pod, names = asked or request(), pod_ref(name), tuple(self.fleet.nodes)
        passed = self.placer.place("filter", pod, about, names).decision
        feasible = tuple(passed.candidates[index] for index in passed.order)
        return self.placer.place("prioritize", pod, about, feasible).decision.best


def one_node(cards: int = 2, *, policy: Policy | None = None, **node: Any) -> World:
    """Return a world with one node, read once."""
    made = World(policy)
    made.add_node("node", cards, **node)
    made.read()
    return made


def time_sliced(nodes: int = 4, cards: int = 1, replicas: int = 10, **values: float) -> World:
    """Return equal time-sliced nodes, read once; afterwards their metrics are frozen."""
    world = World()
    for index in range(nodes):
        world.add_node(f"node-{index}", cards, replicas=replicas)
    world.read(**values)
    return world
