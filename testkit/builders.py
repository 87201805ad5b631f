"""Builders for tests of the decision: every default is a healthy, idle GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from extender.core.decision.assessment import Assessment, DeviceRequest, assess
from extender.core.decision.decision import Decision, decide
from extender.core.decision.evaluation import Overlay, estimates
from extender.core.nodes.node_index import NodeIndex
from extender.core.nodes.seen_requests import NONE_SEEN, SeenRequests
from extender.core.nodes.snapshot import (
    NO_LIMIT,
    Batch,
    Leaving,
    PoolRow,
    Snapshot,
    Telemetry,
    batch_rows,
    build_pool,
)
from extender.core.policy import Policy, Strategy, Thresholds
from extender.core.request.request import GpuRequest, PodRef

GIB = float(1 << 30)
NOW = 1_800_000_000.0
GPU = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Device and its pods, with the fields of `Telemetry` and `PoolRow`."""

    utilization: float = 0.0
    latest: float | None = None
    peak: float | None = None
    next_hour: float | None = None
    freshness: float = 1.0
    memory_used: float = 0.0
    memory_free_bytes: float | None = None
    memory_total_bytes: float = 80 * GIB
    memory_freshness: float = 1.0
    presumed: float = 0.0
    stress: float = 0.0
    penalty: float = 0.0
    is_excluded: bool = False
    is_excluded_multi: bool = False
    cause: int = 0
    is_out: bool = False
    is_foreign: bool = False
    is_in_use: bool = False
    was_foreign: bool = False
    """Whether it had foreign use before its pods came."""
    used: int = 0
    assumed: int = 0
    assumed_shares: int = 0
    declared_bytes: float = 0.0
    others_bytes: float = 0.0
    foreign_bytes: float = 0.0
    loading: int = 0
    guessed_bytes: float = 0.0

    def columns(self) -> dict[str, float | bool]:
        """Return the device's columns of `Telemetry`."""
        room = self.memory_total_bytes * (1 - self.memory_used)
        latest = self.utilization if self.latest is None else self.latest
        return {
            "utilization": self.utilization,
            "latest": latest,
            "peak": max(self.utilization, latest) if self.peak is None else self.peak,
            "next_hour": self.utilization if self.next_hour is None else self.next_hour,
            "freshness": self.freshness,
            "memory_used": self.memory_used,
            "memory_free_bytes": room if self.memory_free_bytes is None else self.memory_free_bytes,
            "memory_total_bytes": self.memory_total_bytes,
            "memory_freshness": self.memory_freshness,
            "presumed": self.presumed,
            "others_bytes": self.others_bytes,
            "foreign_bytes": self.foreign_bytes,
            "stress": self.stress,
            "penalty": self.penalty,
            "is_excluded": self.is_excluded,
            "is_excluded_multi": self.is_excluded_multi or self.is_excluded,
            "cause": self.cause,
            "is_out": self.is_out or self.is_excluded,
            "is_foreign": self.is_foreign,
            "is_in_use": self.is_in_use,
        }


@dataclass(frozen=True, kw_only=True)
class Node:
    """Devices of one node behind one resource; counts follow from the devices by default."""

    gpus: tuple[Gpu, ...]
    replicas: int = 1
    allocatable: int | None = None
    withdrawn: int = 0
    held: int | None = None
    taken: int = 0
    just_freed: int = 0
    is_shared: bool = False
    is_packed: bool = False
    is_mps: bool = False
    is_agreed: bool = True
    is_presumed: bool = False
    is_reconfiguring: bool = False
    model_id: int = 0
    zone_id: int = 0
    suspicion: float = 0.0
    joined: tuple[int, ...] = ()
    numa: tuple[int, ...] = ()
    alignment: int = 0
    free_millicores: int = NO_LIMIT
    free_bytes: int = NO_LIMIT
    free_storage_bytes: int = NO_LIMIT
    leaving: tuple[int, ...] = ()
    """Devices whose pods are all being deleted; these pods account for all use of the devices."""

    def row(self, first_slot: int) -> PoolRow:
        """Return the node's row in a pool, with devices numbered from `first_slot`."""
        used = sum(device.used for device in self.gpus) + self.taken
        full = len(self.gpus) * self.replicas
        return PoolRow(
            slots=tuple(range(first_slot, first_slot + len(self.gpus))),
            used=tuple(device.used for device in self.gpus),
            assumed=tuple(device.assumed for device in self.gpus),
            assumed_shares=tuple(device.assumed_shares for device in self.gpus),
            declared_bytes=tuple(device.declared_bytes for device in self.gpus),
            loading=tuple(device.loading for device in self.gpus),
            guessed_bytes=tuple(device.guessed_bytes for device in self.gpus),
            replicas=self.replicas,
            allocatable=full if self.allocatable is None else self.allocatable,
            withdrawn=self.withdrawn,
            held=used if self.held is None else self.held,
            taken=self.taken,
            just_freed=self.just_freed,
            is_shared=self.is_shared,
            is_packed=self.is_packed,
            is_mps=self.is_mps,
            is_agreed=self.is_agreed,
            is_presumed=self.is_presumed,
            is_reconfiguring=self.is_reconfiguring,
            model_id=self.model_id,
            zone_id=self.zone_id,
            joined=self.joined,
            numa=self.numa,
            alignment=self.alignment,
            free_millicores=self.free_millicores,
            free_bytes=self.free_bytes,
            free_storage_bytes=self.free_storage_bytes,
            leaving=self._leaving(first_slot) if self.leaving else None,
        )

    def _leaving(self, first_slot: int) -> Leaving:
        """Return the node's state after its terminating pods are gone."""
        freed = tuple(at in self.leaving for at in range(len(self.gpus)))
        gone: dict[str, Any] = {"used": 0, "assumed": 0, "assumed_shares": 0}
        gone |= {"declared_bytes": 0.0, "guessed_bytes": 0.0}
        left = tuple(
            replace(device, **gone) if is_freed else device
            for device, is_freed in zip(self.gpus, freed, strict=True)
        )
        held = None if self.held is None else self.held - sum(freed)
        in_use = tuple(
            device.memory_used * device.memory_total_bytes if is_freed else 0.0
            for device, is_freed in zip(self.gpus, freed, strict=True)
        )
        return Leaving(
            row=replace(self, gpus=left, held=held, leaving=()).row(first_slot),
            freed=freed,
            released_bytes=in_use,
            released_others=in_use,
            foreign=tuple(device.was_foreign for device in self.gpus),
        )


def gpu(**changes: Any) -> Gpu:
    """Build a healthy, idle H100 that no pod holds, with changes."""
    return replace(Gpu(), **changes)


def busy(**changes: Any) -> Gpu:
    """Build a GPU that is known to be busy."""
    return gpu(**{"utilization": 0.9, "memory_used": 0.7, **changes})


def unknown(**changes: Any) -> Gpu:
    """Build a GPU without telemetry."""
    return gpu(**{"freshness": 0.0, "memory_freshness": 0.0, "memory_free_bytes": 0.0, **changes})


def freed(**changes: Any) -> Gpu:
    """Build a GPU whose last pod has just ended, and that was idle before that pod."""
    return unknown(**{"presumed": 1.0, **changes})


def node(*gpus: Gpu, **changes: Any) -> Node:
    """Build a node with these GPUs, or with one idle GPU."""
    return replace(Node(gpus=gpus or (gpu(),)), **changes)


def shared(*gpus: Gpu, replicas: int = 10, **changes: Any) -> Node:
    """Build a time-sliced node with these GPUs, or with one idle GPU."""
    return node(*(gpus or (gpu(),)), **{"replicas": replicas, "is_shared": True, **changes})


def request(count: int = 1, **changes: Any) -> GpuRequest:
    """Build the GPU request of a pod without annotations."""
    return replace(GpuRequest(resource=GPU, count=count), **changes)


def device_request(
    count: int = 1, memory_bytes: float = 0.0, thresholds: Thresholds | None = None
) -> DeviceRequest:
    """Build the device request of a pod without annotations."""
    return DeviceRequest(
        count=count, memory_bytes=memory_bytes, thresholds=thresholds or Thresholds()
    )


def pod_ref(name: str = "pod") -> PodRef:
    """Return a reference to a pod in namespace `ns`."""
    return PodRef(uid=f"uid-{name}", namespace="ns", name=name)


def telemetry_of(nodes: Mapping[str, Node]) -> Telemetry:
    """Build the telemetry of all devices, in the order of the nodes."""
    columns = [device.columns() for described in nodes.values() for device in described.gpus]
    blank = Telemetry.missing(len(columns))
    return replace(
        blank,
        **{
            name: np.array([column[name] for column in columns], getattr(blank, name).dtype)
            for name in Gpu().columns()
        },
    )


def snapshot_of(
    nodes: Mapping[str, Node], *, models: tuple[str, ...] = ("",), seen: SeenRequests = NONE_SEEN
) -> Snapshot:
    """Build a snapshot of these nodes, all in the pool of `nvidia.com/gpu`."""
    telemetry = telemetry_of(nodes)
    rows, slot = {}, 0
    for name, described in nodes.items():
        rows[name] = described.row(slot)
        slot += len(described.gpus)
    suspicion = {name: described.suspicion for name, described in nodes.items()}
    return Snapshot(
        version=1,
        at=NOW,
        nodes=frozenset(nodes),
        pools={GPU: replace(build_pool(GPU, rows, telemetry, suspicion), seen=seen)},
        telemetry=telemetry,
        models=models,
        node_index=NodeIndex(nodes, {GPU: sorted(rows)}),
    )


def batch_of(*nodes: Node) -> Batch:
    """Build a batch of nodes."""
    named = {str(index): described for index, described in enumerate(nodes)}
    rows, slot = [], 0
    for described in nodes:
        rows.append(described.row(slot))
        slot += len(described.gpus)
    suspicion = np.array([described.suspicion for described in nodes])
    return batch_rows(tuple(rows), telemetry_of(named), suspicion)


def assessment_of(
    *nodes: Node, requested: DeviceRequest | None = None, policy: Policy | None = None
) -> Assessment:
    """Return the assessment of the nodes' devices for a pod."""
    return assess(
        batch_of(*nodes), (requested or device_request()).columns, estimates(policy or Policy())
    )


def decide_on(
    nodes: Mapping[str, Node],
    requested: GpuRequest | None = None,
    *,
    candidates: tuple[str, ...] | None = None,
    policy: Policy | None = None,
    overlay: Overlay | None = None,
    models: tuple[str, ...] = ("",),
    seen: SeenRequests = NONE_SEEN,
) -> Decision:
    """Decide for a pod among these nodes without cached evaluations."""
    return decide(
        snapshot_of(nodes, models=models, seen=seen),
        requested or request(),
        tuple(nodes) if candidates is None else candidates,
        policy or Policy(),
        overlays={GPU: overlay or {}},
    )


def ranking(decision: Decision) -> list[str]:
    """Return the feasible nodes, best first."""
    return [decision.candidates[index] for index in decision.order]


def rejected(decision: Decision) -> dict[str, int]:
    """Return the rejection code of each infeasible node."""
    return {
        name: int(code)
        for name, code in zip(decision.candidates, decision.codes, strict=True)
        if code
    }


def score_of(described: Node, requested: GpuRequest | None = None, **how: Any) -> float:
    """Return the score of one node."""
    return float(decide_on({"node": described}, requested, **how).scores[0])


STRATEGIES = (Strategy.AUTO, Strategy.SPREAD, Strategy.PACK)
