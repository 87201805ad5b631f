"""Nodes and pods of a public trace, and a simulated cluster of them for the extender's webhooks."""

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import orjson

from bench.traces import DATA, Ints
from extender.core.devices.readings import DeviceInfo, DeviceKey, Holders, Own, Readings, Signal
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodPhase, PodRecord
from extender.core.policy import Assumed, Freshness, Policy, SharedPolicy, Strategy
from extender.core.request.annotations import Annotation
from extender.core.request.gpu_resources import ResourceNames
from extender.core.steps import finish
from extender.fleet.fleet import Fleet
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer
from extender.placement.request_log import RequestLog
from extender.runtime.metrics import Metrics
from extender.webhook.handlers import Webhooks

PACKED: Final = DATA / "openb_packing.json.gz"
GPU: Final = "nvidia.com/gpu"
START: Final = 1_800_000_000.0
FOREVER: Final = 1e9
WHOLE: Final = 1000
"""Thousandths of a GPU in a whole GPU."""

REPLICAS: Final = 100
"""Replicas of each GPU if pods request fractions; all fractions of the trace are whole hundredths.
"""

MIB: Final = 1 << 20
REFRESH_PODS: Final = 100
"""Number of bindings between two estimates of all devices."""

REFRESH_SECONDS: Final = 11.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Request that equal pods of the trace share.

    Attributes:
        millicores: CPU.
        memory_mib: host memory.
        gpus: number of GPUs.
        gpu_milli: thousandths of each.
        models: accepted GPU models, () for all.
    """

    millicores: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...] = ()

    @property
    def requested_milli(self) -> int:
        """Sum of the thousandths of all its GPUs."""
        return self.gpus * self.gpu_milli


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Nodes in the order that breaks ties, and pods in the order of arrival.

    Attributes:
        millicores: CPU of each node.
        memory_mib: memory of each node.
        gpus: number of GPUs of each node.
        models: model of each node's GPUs.
    """

    millicores: Ints
    memory_mib: Ints
    gpus: Ints
    models: tuple[str, ...]
    pods: tuple[Shape, ...]

    def with_whole_gpus(self) -> "Trace":
        """Return the trace with every fraction of a GPU rounded up to a whole one."""
        whole = {
            shape: Shape(shape.millicores, shape.memory_mib, shape.gpus, WHOLE, shape.models)
            for shape in set(self.pods)
        }
        return Trace(
            millicores=self.millicores,
            memory_mib=self.memory_mib,
            gpus=self.gpus,
            models=self.models,
            pods=tuple(whole[pod] for pod in self.pods),
        )


def read_trace(workload: str, seed: int, folder: Path | None = None) -> Trace:
    """Read the nodes and pods of one sequence.

    Args:
        workload: name of the pod list, such as `default`.
        seed: seed of the sequence.
        folder: folder with `openb` and `fgd_sequences`; None for the copy in this repository.
    """
    if folder is None:
        document = orjson.loads(gzip.decompress(PACKED.read_bytes()))
        nodes = document["nodes"]
        shapes = [_shape(*values) for values in document["shapes"]]
        sequence = document["sequences"][f"{workload} {seed}"]
        return _trace(
            [nodes[at] for at in sequence["nodes"]], [shapes[at] for at in sequence["pods"]]
        )
    with (folder / "openb" / "openb_node_list_gpu_node.csv").open(encoding="utf-8") as file:
        nodes = [
            (row["cpu_milli"], row["memory_mib"], row["gpu"], row["model"])
            for row in csv.DictReader(file)
        ]
    with (folder / "openb" / f"openb_pod_list_{workload}.csv").open(encoding="utf-8") as file:
        pods = [
            _shape(
                *(
                    row[name]
                    for name in ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec")
                )
            )
            for row in csv.DictReader(file)
        ]
    path = folder / "fgd_sequences" / f"{workload}_seed{seed}.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = {line[0]: list(map(int, line[1:].split())) for line in file if line[0] in "NP"}
    return _trace([nodes[at] for at in lines["N"]], [pods[at] for at in lines["P"]])


def _shape(millicores: str, memory: str, gpus: str, milli: str, models: str) -> Shape:
    wanted = tuple(model for model in models.split("|") if model)
    return Shape(int(millicores), int(memory), int(gpus), int(milli), wanted)


def _trace(nodes: Sequence[Sequence[str]], pods: Sequence[Shape]) -> Trace:
    numbers = np.array([[int(value) for value in node[:3]] for node in nodes], dtype=np.intp)
    return Trace(
        millicores=numbers[:, 0],
        memory_mib=numbers[:, 1],
        gpus=numbers[:, 2],
        models=tuple(node[3] for node in nodes),
        pods=tuple(pods),
    )


class Nodes:
    """Free resources of each node, as kube-scheduler and the device plugin count them."""

    def __init__(self, trace: Trace) -> None:
        self.millicores, self.memory_mib = trace.millicores.copy(), trace.memory_mib.copy()
        width = int(trace.gpus.max())
        self.milli = np.where(np.arange(width) < trace.gpus[:, None], WHOLE, 0)
        self._models = np.array(trace.models)

    def with_room(self, shape: Shape) -> Ints:
        """Return the numbers of the nodes that have room for a pod."""
        fits = (self.millicores >= shape.millicores) & (self.memory_mib >= shape.memory_mib)
        if shape.models:
            fits &= np.isin(self._models, shape.models)
        if shape.gpus:
            fits &= (self.milli >= shape.gpu_milli).sum(axis=1) >= shape.gpus
        return np.flatnonzero(fits)

    def bind(self, node: int, shape: Shape) -> list[int]:
        """Subtract a pod's request from a node; return its GPUs: the fullest ones."""
        self.millicores[node] -= shape.millicores
        self.memory_mib[node] -= shape.memory_mib
        free = self.milli[node]
        order = np.argsort(np.where(free >= shape.gpu_milli, free, 10 * WHOLE), kind="stable")
        gpus: list[int] = order[: shape.gpus].tolist()
        free[gpus] -= shape.gpu_milli
        return gpus


class PackedCluster:
    """Fleet with the trace's nodes, and the webhooks that place pods on it.

    Args:
        trace: the nodes.
        replicas: shares of each GPU; 1 for whole GPUs.
        strategy: strategy of all pods.
        learns: whether the extender sees pods before they are bound, so that it learns from them.
    """

    def __init__(self, trace: Trace, *, replicas: int, strategy: Strategy, learns: bool) -> None:
        self.nodes = Nodes(trace)
        self._replicas, self._learns = replicas, learns
        self._now = START
        # The trace has no load: no device ever counts as busy.
        policy = Policy(
            strategy=strategy,
            shared_policy=SharedPolicy.PACKED,
            freshness=Freshness(max_age_seconds=FOREVER, forget_seconds=FOREVER),
            assumed=Assumed(utilization=0.0, warm_up_seconds=0.0, loading_seconds=0.0),
        )
        self.fleet = Fleet(policy, lambda: self._now, in_steps=True)
        history = DecisionHistory(1, lambda: self._now)
        self.placer = Placer(self.fleet, history, lambda: self._now, detailed=1)
        self.webhooks = Webhooks(
            placer=self.placer,
            resources=lambda: ResourceNames((GPU,)),
            metrics=Metrics(),
            max_score=400,
            shortlist=100,
            is_ready=lambda: True,
            warn_annotation=lambda _, __: None,
            request_log=RequestLog(
                self.fleet, clock=lambda: self._now, monotonic=lambda: self._now
            ),
        )
        self.names = [f"node-{number:04}" for number in range(len(trace.gpus))]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self._trace = trace
        self._bound = 0
        self._holders: list[dict[DeviceKey, tuple[str, ...]]] = []
        self._requested = [HostResources() for _ in self.names]
        self._infos: list[tuple[DeviceInfo, ...]] = []
        for number, name in enumerate(self.names):
            self.fleet.apply_node(self._record(number, name))
            infos = tuple(
                DeviceInfo(
                    node=name, uuid=f"GPU-{name}-{gpu}", index=gpu, model=trace.models[number]
                )
                for gpu in range(trace.gpus[number])
            )
            self._infos.append(infos)
            self._holders.append({info.key: () for info in infos})
            self._report(number)
        self.fleet.snapshot_of_all()

    def _record(self, number: int, name: str) -> NodeRecord:
        trace, gpus = self._trace, int(self._trace.gpus[number])
        labels = {"nvidia.com/gpu.count": str(gpus), "nvidia.com/gpu.product": trace.models[number]}
        if self._replicas > 1:
            labels |= {
                "nvidia.com/gpu.replicas": str(self._replicas),
                "nvidia.com/gpu.sharing-strategy": "time-slicing",
            }
        offered = {GPU: gpus * self._replicas}
        memory = int(trace.memory_mib[number]) * MIB
        return NodeRecord(
            name=name,
            allocatable=offered,
            capacity=offered,
            labels=labels,
            host=HostResources(int(trace.millicores[number]), memory),
        )

    def _report(self, number: int) -> None:
        """Report idle GPUs and the pods that hold them, as the node's agent would."""
        name, infos = self.names[number], self._infos[number]
        nothing = np.full(len(infos), np.nan)
        self.fleet.apply_readings(
            Readings(
                source="agent",
                at=self._now,
                devices=infos,
                columns={
                    Signal.GPU_UTILIZATION: np.zeros(len(infos)),
                    Signal.MEMORY_USED: np.zeros(len(infos)),
                    Signal.MEMORY_FREE: np.full(len(infos), 16.0 * (1 << 30)),
                },
                measured_at=np.full(len(infos), self._now),
                tenants=None,
                own=Own(
                    nodes=(name,),
                    news=frozenset({name}),
                    holders={
                        name: Holders(at=self._now, pods=dict(self._holders[number]), uids={})
                    },
                    mean=nothing,
                    mean_square=nothing,
                    is_foreign=np.zeros(len(infos), dtype=np.bool_),
                    xid_age=nothing,
                    devices=len(infos),
                ),
            )
        )

    def pod(self, number: int, shape: Shape) -> PodRecord:
        """Return the record of an unbound pod."""
        count = shape.gpus * self._replicas
        if shape.gpu_milli < WHOLE:
            count = -(-shape.gpu_milli * self._replicas // WHOLE)
        models = {Annotation.REQUIRE_MODELS.value: ",".join(shape.models)} if shape.models else {}
        return PodRecord(
            uid=f"uid-{number}",
            namespace="bench",
            name=f"pod-{number}",
            resources={GPU: count},
            host=HostResources(shape.millicores, shape.memory_mib * MIB),
            wishes=tuple(models.items()),
        )

    async def choose(self, record: PodRecord, nodes: Sequence[int]) -> int | None:
        """Call filter and prioritize; return the node with the highest score, None without one."""
        if self._learns:
            self.fleet.apply_pod(record)
        body = _body(record, [self.names[node] for node in nodes])
        _, answer = await self.webhooks.filter(body)
        passed = orjson.loads(_bytes(answer.body))["NodeNames"] or []
        if len(passed) < 2:
            return self.numbers[passed[0]] if passed else None
        _, answer = await self.webhooks.prioritize(_body(record, passed))
        scores = orjson.loads(_bytes(answer.body))
        best = max(scores, key=lambda score: (score["Score"], -self.numbers[score["Host"]]))
        return self.numbers[best["Host"]]

    def bind(self, record: PodRecord, node: int, shape: Shape) -> None:
        """Bind a pod, and report it as the watch and the node's agent would."""
        name = self.names[node]
        bound = PodRecord(
            uid=record.uid,
            namespace=record.namespace,
            name=record.name,
            node=name,
            resources=record.resources,
            phase=PodPhase.RUNNING,
            bound_at=self._now,
            started_at=self._now,
        )
        self.fleet.apply_pod(bound)
        for gpu in self.nodes.bind(node, shape):
            key = self._infos[node][gpu].key
            self._holders[node][key] = (*self._holders[node][key], record.key)
        self._requested[node] = self._requested[node].plus(record.host)
        self.fleet.apply_host_use(name, self._requested[node])
        self._report(node)
        self._bound += 1
        if self._bound % REFRESH_PODS == 0:
            self._now += REFRESH_SECONDS
            finish(self.fleet.settle_in_steps())
            finish(self.fleet.refresh_in_steps())

    def drop(self, record: PodRecord) -> None:
        """Report a pod as deleted, as the watch would."""
        self.fleet.remove_pod(record.uid, self._now)


def _bytes(body: object) -> bytes:
    assert isinstance(body, bytes)
    return body


def _body(record: PodRecord, names: Sequence[str]) -> bytes:
    limits = {name: str(count) for name, count in record.resources.items()}
    requests = {"cpu": f"{record.host.millicores}m", "memory": str(record.host.memory_bytes)}
    pod: Mapping[str, object] = {
        "metadata": {
            "uid": record.uid,
            "namespace": record.namespace,
            "name": record.name,
            "annotations": dict(record.wishes),
        },
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": limits, "requests": requests}}]
        },
    }
    return orjson.dumps({"Pod": pod, "Nodes": None, "NodeNames": names})
