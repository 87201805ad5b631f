"""A cluster in simulated time that the extender's own code decides for, in this process.

What API server and Prometheus would say goes into the real fleet; pods are placed by the real
decision on its snapshots.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.decision.decision import Evaluate, decide
from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.core.nodes.inventory import NodeRecord, PodPhase, PodRecord
from extender.core.nodes.pod_owners import Kin
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
    """What a cluster of equal nodes is made of.

    Attributes:
        nodes: how many.
        cards: of each node.
        replicas: shares that each card is sold as; 1 for whole cards.
        memory_bytes: of each card.
    """

    nodes: int
    cards: int = 8
    replicas: int = 1
    memory_bytes: float = 80 * GIB

    @property
    def devices(self) -> int:
        """How many cards there are; card `i` is of node `i // cards`."""
        return self.nodes * self.cards


class VirtualCluster:
    """Fleet and placer of a cluster, which see what the simulation lets happen.

    Args:
        shape: what the cluster is made of.
        policy: the settings of the decision.
        evaluate: how nodes are evaluated where it is not the extender's own way.
    """

    def __init__(self, shape: Shape, policy: Policy, evaluate: Evaluate | None = None) -> None:
        self.shape = shape
        self._evaluate = evaluate
        self.now = START
        self.fleet = Fleet(policy, self._clock)
        self.placer = Placer(self.fleet, DecisionHistory(1, self._clock), self._clock)
        self.names = tuple(f"node-{number:03}" for number in range(shape.nodes))
        self.infos = tuple(
            DeviceInfo(node=name, uuid=f"GPU-{name}-{index}", index=index)
            for name in self.names
            for index in range(shape.cards)
        )
        self._pods: dict[str, PodRecord] = {}
        self._numbers = {name: number for number, name in enumerate(self.names)}
        for name in self.names:
            self.fleet.apply_node(_node(name, shape))

    def _clock(self) -> float:
        return self.now

    def read(
        self,
        columns: Mapping[Signal, npt.NDArray[np.float64]],
        measured_at: npt.NDArray[np.float64],
        tenants: Mapping[int, Sequence[str]],
    ) -> None:
        """Let an answer of Prometheus arrive.

        Args:
            columns: values of every card.
            measured_at: when each card's were measured.
            tenants: names of the pods that are shown on each card; cards without any are free.
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

    def choose(self, nodes: Iterable[int], count: int = 1, kin: Kin = ()) -> int | None:
        """Return the node that is ranked first of some, None where none of them would do.

        Args:
            nodes: numbers of the nodes on which kube-scheduler itself finds room.
            count: GPUs or replicas that the pod asks for.
            kin: keys that the pod has in common with pods like it.
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
        return None if decision.best is None else self._numbers[decision.best]

    def bind(
        self, name: str, node: int, *, count: int = 1, owner: str = "", likeness: Kin = ()
    ) -> None:
        """Let the watch show that a pod runs on a node.

        Args:
            name: the pod's; no other pod ever had it.
            node: number of the node.
            count: GPUs or replicas.
            owner: kind and name of what controls it, "" for nothing.
            likeness: keys of its requests.
        """
        record = PodRecord(
            uid=f"uid-{name}",
            namespace=NAMESPACE,
            name=name,
            node=self.names[node],
            resources={GPU: count},
            phase=PodPhase.RUNNING,
            bound_at=self.now,
            started_at=self.now,
            owner=owner,
            likeness=likeness,
        )
        self._pods[name] = record
        waiting = replace(record, node="", phase=PodPhase.PENDING, bound_at=None, started_at=None)
        self.fleet.apply_pod(waiting)
        self.fleet.apply_pod(record)

    def end(self, name: str, *, is_failed: bool = False) -> None:
        """Let the watch show that a pod has ended, and that it is gone.

        Args:
            name: the pod's.
            is_failed: it has failed; that is early where it is soon after its start.
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
    offered = {GPU: shape.cards * shape.replicas}
    labels = {
        "nvidia.com/gpu.memory": str(int(shape.memory_bytes) >> 20),
        "nvidia.com/gpu.count": str(shape.cards),
    }
    if shape.replicas > 1:
        labels["nvidia.com/gpu.replicas"] = str(shape.replicas)
        labels["nvidia.com/gpu.sharing-strategy"] = "time-slicing"
    return NodeRecord(name=name, allocatable=offered, capacity=offered, labels=labels)
