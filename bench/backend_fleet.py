"""State of the simulated cluster: nodes, devices, pods, and the pods that hold each device.

It uses arrays and small objects instead of `simulation.fleet`, because 40,000 cards and 150,000
pods must start within seconds and change with little CPU.
"""

import random
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.backend_objects import BenchPod, Template, render_node
from simulation.models import A10, A100_40GB, H100, H200, L40S, V100, GpuModel
from simulation.nodes import GPU_RESOURCE, NodeSpec, Sharing, build_node

CARDS: Final = 8
MIG_LAYOUT: Final = ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb")
COUNTS: Final = (1, 1, 1, 1, 1, 1, 2, 2, 4, 8)
"""Numbers of whole GPUs that pods request. Most pods request one; most GPUs belong to pods with 8.
"""

NAMESPACES: Final = ("research", "serving", "vision", "speech", "search", "ads", "notebooks")
OTHER_NAMESPACES: Final = ("shop", "data", "payments", "logging", "monitoring", "ingress")
EXPORTER_NAMESPACE: Final = "gpu-operator"
START_AGE_SECONDS: Final = 7200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Size and composition of the simulated cluster.

    Attributes:
        nodes: number of GPU nodes. Of ten nodes six have whole GPUs (H100, H200 and others), one is
            small, two are time-sliced with 10 replicas, one is partitioned by MIG.
        gpu_pods: number of pods with GPUs that run from the start.
        other_pods: number of running pods without GPUs, including one exporter for each node.
        has_mig: whether MIG nodes exist; if not, those nodes have whole GPUs.
        seed: seed of the random numbers.
    """

    nodes: int = 5000
    gpu_pods: int = 10_000
    other_pods: int = 0
    has_mig: bool = True
    seed: int = 7


@dataclass(slots=True, kw_only=True)
class BenchNode:
    """Simulated node.

    Attributes:
        name: name of the node.
        address: its InternalIP.
        template: the Node object.
        devices: its devices by resource.
        replicas: replicas of each device.
        version: resource version of the last change.
        heartbeat: annotation value that `touch` changes.
        offered: allocatable devices of its first resource when none is broken.
        has_broken: whether one device is broken, and so not allocatable.
    """

    name: str
    address: str
    template: Template
    devices: dict[str, range]
    replicas: int
    offered: int
    version: int = 1
    heartbeat: bytes = b"2026-01-01T00:00:00Z"
    has_broken: bool = False

    def render(self) -> bytes:
        """Return the Node object."""
        return self.template.fill(
            {
                "version": b"%d" % self.version,
                "heartbeat": self.heartbeat,
                "offered": b"%d" % (self.offered - self.has_broken),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDevice:
    """Constant properties of a device.

    Attributes:
        node: number of the node.
        uuid: UUID of the card.
        gpu_instance_id: MIG GPU instance; "" for a whole card.
        profile: MIG profile, "" for a whole card.
        index: index of the card on the node.
        model: model of the card.
        memory_mib: memory of the device.
    """

    node: int
    uuid: str
    gpu_instance_id: str
    profile: str
    index: int
    model: GpuModel
    memory_mib: int


class BenchFleet:
    """Simulated cluster; used from one thread.

    Attributes:
        spec: size and composition.
        nodes: all nodes, in the order of their numbers.
        by_name: all nodes by name.
        devices: all devices, in the order of their rows.
        tenants: pods of each device.
        load: load of each device, 0 to 1000.
        pods: every pod by UID.
        generation: number of refreshes of the readings.
        random: source of random numbers.
    """

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.nodes: list[BenchNode] = []
        self.by_name: dict[str, BenchNode] = {}
        self.devices: list[BenchDevice] = []
        self.pods: dict[str, BenchPod] = {}
        self.generation = 0
        self.random = random.Random(spec.seed)
        self._dirty: set[int] = set()
        self._started_at = time.time()
        for number in range(spec.nodes):
            self._add_node(number)
        self.tenants: list[list[BenchPod]] = [[] for _ in self.devices]
        self.load = np.zeros(len(self.devices), dtype=np.intp)
        self._fill()

    # --- initial state --------------------------------------------------------------------------

    def _add_node(self, number: int) -> None:
        built = build_node(node_spec(number, has_mig=self.spec.has_mig))
        first = len(self.devices)
        by_resource: dict[str, list[int]] = {}
        # The devices of one resource are adjacent, so that each resource is a range of rows.
        ordered = sorted(built.devices, key=lambda device: device.resource)
        for row, device in enumerate(ordered, start=first):
            by_resource.setdefault(device.resource, []).append(row)
            self.devices.append(
                BenchDevice(
                    node=number,
                    uuid=device.card.uuid,
                    gpu_instance_id=device.gpu_instance_id,
                    profile=device.profile,
                    index=device.card.index,
                    model=device.card.model,
                    memory_mib=device.memory_mib,
                )
            )
        node = BenchNode(
            name=built.name,
            address=built.spec.address,
            template=render_node(built, created_at=self._started_at - START_AGE_SECONDS),
            devices={name: range(rows[0], rows[-1] + 1) for name, rows in by_resource.items()},
            replicas=max((device.replicas for device in built.devices), default=1),
            offered=built.count(built.resources()[0]),
        )
        self.nodes.append(node)
        self.by_name[node.name] = node

    def _fill(self) -> None:
        """Create and bind the initial pods."""
        for number, node in enumerate(self.nodes[: self.spec.other_pods]):
            exporter = self.new_pod("exporter")
            exporter.namespace = EXPORTER_NAMESPACE
            exporter.name = f"nvidia-dcgm-exporter-{number:05x}"
            self._start(exporter, node)
        for _ in range(self.spec.other_pods - len(self.nodes)):
            self._start(self.new_pod("web"), self.random.choice(self.nodes))
        # Place large pods first: they need nodes that are still empty.
        wishes = [self._wish() for _ in range(self.spec.gpu_pods)]
        for resource, count in sorted(wishes, key=lambda wish: -wish[1]):
            pod = self.new_pod("gpu", resource=resource, count=count)
            self._start(pod, self.node_with_room(resource, count))

    def _wish(self) -> tuple[str, int]:
        """Draw a pod's resource and count, in proportion to the nodes with each resource."""
        node = self.random.choice(self.nodes)
        resource = self.random.choice(list(node.devices))
        is_whole = resource == GPU_RESOURCE and node.replicas == 1
        return resource, self.random.choice(COUNTS) if is_whole else 1

    def node_with_room(self, resource: str, count: int) -> BenchNode:
        """Return a random node with `count` free devices of a resource.

        Raises:
            ValueError: no node has enough free devices.
        """
        for _ in range(100 * len(self.nodes)):
            node = self.random.choice(self.nodes)
            if self._has_room(node, resource, count):
                return node
        raise ValueError(f"cannot place {self.spec.gpu_pods} GPU pods: no {count} {resource} free")

    def _start(self, pod: BenchPod, node: BenchNode) -> None:
        pod.created_at = self._started_at - START_AGE_SECONDS
        self.pods[pod.uid] = pod
        self.bind(pod, node.name)
        pod.is_running = True

    def _has_room(self, node: BenchNode, resource: str, count: int) -> bool:
        rows = node.devices.get(resource, range(0))
        return sum(node.replicas - len(self.tenants[row]) for row in rows) >= count

    # --- changes ----------------------------------------------------------------------------------

    def new_pod(
        self,
        kind: str,
        *,
        resource: str = "",
        count: int = 0,
        wishes: tuple[tuple[str, str], ...] = (),
    ) -> BenchPod:
        """Create an unbound pod with a new name."""
        bits = self.random.getrandbits
        namespaces = NAMESPACES if kind == "gpu" else OTHER_NAMESPACES
        name = "trainer" if kind == "gpu" else f"{kind}-app"
        return BenchPod(
            uid=str(uuid.UUID(int=bits(128), version=4)),
            namespace=self.random.choice(namespaces),
            name=f"{name}-7f9c4d8b6c-{bits(40):010x}",
            kind=kind,
            resource=resource,
            count=count,
            created_at=time.time(),
            load=int(1000 * self.random.betavariate(2.0, 2.0)),
            wishes=wishes,
        )

    def bind(self, pod: BenchPod, node_name: str) -> None:
        """Bind a pod, and assign devices as the kubelet and the device plugin would.

        If too few devices are free, the pod gets only those.

        Raises:
            KeyError: no node has this name.
        """
        node = self.by_name[node_name]
        pod.node = node_name
        rows = node.devices.get(pod.resource, range(0))
        if not rows:
            return
        free = [row for row in rows if len(self.tenants[row]) < node.replicas]
        free.sort(key=lambda row: len(self.tenants[row]))
        pod.devices = tuple(free[: pod.count])
        for row in pod.devices:
            self.tenants[row].append(pod)
            self._dirty.add(row)

    def remove(self, pod: BenchPod) -> None:
        """Remove a pod, and free its devices."""
        self.pods.pop(pod.uid, None)
        for row in pod.devices:
            self.tenants[row].remove(pod)
            self._dirty.add(row)

    def refresh(self) -> Iterable[int]:
        """Update the readings from the current pods; return the devices that changed."""
        changed, self._dirty = self._dirty, set()
        for row in changed:
            shared = sum(pod.load for pod in self.tenants[row])
            self.load[row] = min(1000, shared)
        self.generation += 1
        return changed


def node_spec(number: int, *, has_mig: bool = True) -> NodeSpec:
    """Return the composition of the node with this number."""
    octets = number >> 8 & 255, number & 255
    name = f"ip-10-{64 + (number >> 16)}-{octets[0]}-{octets[1]}.eu-west-1.compute.internal"
    address = f"10.{64 + (number >> 16)}.{octets[0]}.{octets[1]}"
    match number % 10:
        case 9 if has_mig:
            return NodeSpec(
                name=name, model=A100_40GB, cards=CARDS, address=address, mig=(MIG_LAYOUT,) * CARDS
            )
        case 7 | 8:
            return NodeSpec(
                name=name,
                model=A10,
                cards=CARDS,
                address=address,
                sharing=Sharing.TIME_SLICING,
                replicas=10,
            )
        case kind:
            model = (H100, H200, A100_40GB, V100, L40S)[kind % 5]
            return NodeSpec(name=name, model=model, cards=CARDS, address=address)
