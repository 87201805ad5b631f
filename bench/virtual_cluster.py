"""Cluster in simulated time, with placement by the extender's own code in this process.

A real fleet receives the data of a simulated API server and Prometheus; pods are placed by the real
decision on its snapshots.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.decision.decision import Evaluate, decide
from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodPhase, PodRecord
from extender.core.nodes.pod_groups import Kin
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.fleet.fleet import Fleet
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer

GPU: Final = "nvidia.com/gpu"
NAMESPACE: Final = "bench"
START: Final = 1_800_000_000.0
GIB: Final = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Composition of a cluster of equal nodes.

    Attributes:
        nodes: number of nodes.
        cards: number of cards of each node.
        replicas: replicas of each card; 1 for whole cards.
        memory_bytes: memory of each card.
        resource: resource name of the cards or their replicas.
        host: CPU and memory of each node; None if they never run out.
    """

    nodes: int
    cards: int = 8
    replicas: int = 1
    memory_bytes: float = 80 * GIB
    resource: str = GPU
    host: HostResources | None = None

    @property
    def devices(self) -> int:
        """Number of cards; card `i` belongs to node `i // cards`."""
        return self.nodes * self.cards


class VirtualCluster:
    """Fleet and placer of a cluster, which the simulation updates.

    Args:
        shape: composition of the cluster.
        evaluate: replacement of the extender's evaluation; None for the original.
        also: shapes of further nodes, which follow the others.
    """

    def __init__(
        self,
        shape: Shape,
        policy: Policy,
        evaluate: Evaluate | None = None,
        also: Sequence[Shape] = (),
    ) -> None:
        self.shape = shape
        self._evaluate = evaluate
        self.now = START
        self.fleet = Fleet(policy, self._clock)
        self.placer = Placer(self.fleet, DecisionHistory(1, self._clock), self._clock)
        shapes = [each for each in (shape, *also) for _ in range(each.nodes)]
        self.names = tuple(f"node-{number:03}" for number in range(len(shapes)))
        self.infos = tuple(
            DeviceInfo(node=name, uuid=f"GPU-{name}-{index}", index=index)
            for name, each in zip(self.names, shapes, strict=True)
            for index in range(each.cards)
        )
        self._pods: dict[str, PodRecord] = {}
        self.numbers = {name: number for number, name in enumerate(self.names)}
        for name, each in zip(self.names, shapes, strict=True):
            self.fleet.apply_node(_node(name, each))

    def _clock(self) -> float:
        return self.now

    def read(
        self,
        columns: Mapping[Signal, npt.NDArray[np.float64]],
        measured_at: npt.NDArray[np.float64],
        tenants: Mapping[int, Sequence[str]],
    ) -> None:
        """Apply an answer of Prometheus to the fleet.

        Args:
            columns: values of every card.
            measured_at: time of each card's measurement.
            tenants: names of each card's pods; a card without pods is free.
        """
        self.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=self.now,
                devices=self.infos,
                columns=columns,
                measured_at=measured_at,
                tenants={
                    self.infos[device].key: tuple(f"{NAMESPACE}/{pod}" for pod in pods)
                    for device, pods in tenants.items()
                    if pods
                },
                tenants_at=self.now,
            )
        )

    def ranking(self, nodes: Iterable[int]) -> list[int]:
        """Return the given nodes that pass for one GPU or replica, the best first."""
        policy = self.fleet.policy
        request = GpuRequest(resource=GPU, count=1, strategy=policy.strategy)
        names = [self.names[node] for node in nodes]
        decision = decide(self.fleet.snapshot(), request, names, policy, overlays={})
        return [self.numbers[decision.candidates[at]] for at in decision.order.tolist()]

    def choose(self, nodes: Iterable[int], count: int = 1, kin: Kin = ()) -> int | None:
        """Return the best of the given nodes by filter and prioritize, None if none passes.

        Args:
            nodes: numbers of the nodes on which kube-scheduler finds room.
            count: requested GPUs or replicas.
            kin: keys that the pod shares with similar pods.
        """
        policy = self.fleet.policy
        request = GpuRequest(resource=GPU, count=count, strategy=policy.strategy)
        request = self.fleet.informed(request, kin)
        names = [self.names[node] for node in nodes]
        if self._evaluate is None:
            decision = self.placer.rank(request, names)
        else:
            snapshot = self.fleet.snapshot()
            decision = decide(
                snapshot, request, names, policy, overlays={}, evaluate=self._evaluate
            )
        return None if decision.best is None else self.numbers[decision.best]

    def bind(
        self, name: str, node: int, *, count: int = 1, owner: str = "", likeness: Kin = ()
    ) -> None:
        """Report a pod as bound to a node and running, as the watch would.

        Args:
            name: name of the pod, unique over time.
            node: number of the node.
            count: GPUs or replicas.
            owner: kind and name of the controller, "" for a Job of its own.
            likeness: keys of its requests.
        """
        record = PodRecord(
            uid=f"uid-{name}",
            namespace=NAMESPACE,
            name=name,
            resources={GPU: count},
            owner=owner or f"Job {name}",
            likeness=likeness,
        )
        self.fleet.apply_pod(record)
        self.bind_known(record, node)

    def bind_known(self, record: PodRecord, node: int) -> None:
        """Report a waiting pod as bound and running, as the watch would."""
        bound = replace(
            record,
            node=self.names[node],
            phase=PodPhase.RUNNING,
            bound_at=self.now,
            started_at=self.now,
        )
        self._pods[record.name] = bound
        self.fleet.apply_pod(bound)

    def end(self, name: str, *, is_failed: bool = False) -> None:
        """Report a pod as ended and deleted, as the watch would.

        Args:
            name: name of the pod.
            is_failed: whether it failed; soon after its start this is an early failure.
        """
        record = self._pods.pop(name)
        ended = replace(record, phase=PodPhase.SUCCEEDED, ended_at=self.now)
        if is_failed:
            ran = self.now - (record.started_at or self.now)
            is_early = ran < self.fleet.policy.early_failures.within_seconds
            ended = replace(
                ended, phase=PodPhase.FAILED, failed_at=self.now, is_failed_early=is_early
            )
        self.fleet.apply_pod(ended)
        self.fleet.remove_pod(ended.uid, self.now)


def _node(name: str, shape: Shape) -> NodeRecord:
    offered = {shape.resource: shape.cards * shape.replicas}
    labels = {
        "nvidia.com/gpu.memory": str(int(shape.memory_bytes) >> 20),
        "nvidia.com/gpu.count": str(shape.cards),
    }
    if shape.replicas > 1:
        labels["nvidia.com/gpu.replicas"] = str(shape.replicas)
        labels["nvidia.com/gpu.sharing-strategy"] = "time-slicing"
    return NodeRecord(
        name=name, allocatable=offered, capacity=offered, labels=labels, host=shape.host
    )
