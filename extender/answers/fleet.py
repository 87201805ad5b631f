"""Answers about nodes and GPUs."""

from extender.answers.answer import Answer


class ResourceCounts(Answer):
    """Numbers of a node's GPU resource, in the units of the resource: devices or replicas.

    Attributes:
        capacity: GPUs of the node.
        allocatable: GPUs that the kubelet offers.
        held: GPUs that pods hold by the API server's count.
        assumed: GPUs of pods that were placed and whose binding is not visible yet.
    """

    capacity: int
    allocatable: int
    held: int
    assumed: int


class SourceAnswer(Answer, omit_defaults=True):
    """Source and age of a value.

    Attributes:
        source: name of the source, such as `prometheus` or `agent`.
        age_seconds: time since the measurement.
        signal: the signal that counts, if there are several; else missing.
    """

    source: str
    age_seconds: float
    signal: str = ""


class ForeignProcessAnswer(Answer):
    """A process that uses a GPU although its pod, if any, does not hold the GPU.

    Attributes:
        pid: its process id on the node.
        name: its command without arguments.
        memory_bytes: memory that it uses of the GPU, rounded up to 256 MiB.
        started_at: time of its start, by the node's clock.
        pod: `""` outside Kubernetes; else the pod that uses the GPU although it does not hold it.
        container: its container or system unit, `""` without one.
    """

    pid: int
    name: str
    memory_bytes: int | None
    started_at: str | None
    pod: str
    container: str


class Gpu(Answer):
    """One GPU or MIG instance.

    Attributes:
        node: name of its node.
        resource: resource under which the kubelet offers it.
        index: index of the card on its node.
        uuid: UUID of the card, `""` if no source shows it.
        gpu_instance_id: id of the MIG instance, `""` for a whole GPU.
        mig_profile: profile of the MIG instance such as `1g.10gb`, `""` for a whole GPU.
        model: model without its maker, such as `A100 SXM4 40GB`; `""` if unknown.
        state: `idle`, `busy`, `stale`, `unknown`, `unhealthy`, `excluded` or
            `foreign`. Excluded: it works, but another GPU of its node has a fault that excludes the
            whole node.
        why: reason of the state in one sentence.
        health: each sign of ill health with its effect, `""` if healthy.
        utilization_ratio: utilization used for its state, from 0 to 1.
        utilization_latest_ratio: utilization of the latest reading.
        utilization_next_hour_ratio: expected utilization in the next hour, by the last four hours
            since its pods last changed; null without pods, or with readings of less than half an
            hour.
        utilization_next_hour_low_ratio: low end of the interval that holds the mean of the next
            hour in four of five cases.
        utilization_next_hour_high_ratio: high end of this interval.
        memory_used_ratio: memory in use, from 0 to 1.
        memory_free_bytes: free memory.
        memory_total_bytes: memory of the device.
        temperature_celsius: temperature of the chip.
        power_watts: power draw.
        xid: last XID error.
        freshness: `fresh`, `stale` or `missing` readings.
        age_seconds: age of the newest reading.
        source: source of the newest reading, `none` without one.
        replicas: replicas that the device offers, 1 without sharing.
        replicas_used: replicas that pods hold.
        assumed: pods placed on it that readings do not show yet.
        tenants: pods that hold it, as `namespace/name`.
        signals: source and age of `utilization`, `memory` and, if a reading shows it, `health`.
        foreign_processes: at most 4 processes that use it although their pod, if any, does not hold
            it, most memory first. Only the node's agent reports them (it needs `hostPID`). They
            belong to no namespace: the list is empty for callers who may not list the pods of all
            namespaces.
    """

    node: str
    resource: str
    index: int | None
    uuid: str
    gpu_instance_id: str
    mig_profile: str
    model: str
    state: str
    why: str
    health: str
    utilization_ratio: float | None
    utilization_latest_ratio: float | None
    utilization_next_hour_ratio: float | None
    utilization_next_hour_low_ratio: float | None
    utilization_next_hour_high_ratio: float | None
    memory_used_ratio: float | None
    memory_free_bytes: int | None
    memory_total_bytes: int | None
    temperature_celsius: float | None
    power_watts: float | None
    xid: int | None
    freshness: str
    age_seconds: float | None
    source: str
    replicas: int
    replicas_used: int
    assumed: int
    tenants: list[str]
    signals: dict[str, SourceAnswer] = {}
    foreign_processes: list[ForeignProcessAnswer] = []

    @property
    def name(self) -> str:
        """Name of the GPU for people: `node::index`, with the MIG instance if it is one."""
        index = "?" if self.index is None else str(self.index)
        instance = f"/{self.gpu_instance_id}" if self.gpu_instance_id else ""
        return f"{self.node}::{index}{instance}"


class StateCounts(Answer):
    """Number of devices in each state; each device counts once.

    Attributes:
        idle: idle, and no pod holds it.
        held_idle: idle, but a pod holds it.
        busy: in use by its pods.
        foreign: in use by a process outside Kubernetes.
        unhealthy: cannot work.
        excluded: work, but another GPU of their node has a fault that excludes the whole node.
        unknown: without fresh readings.
    """

    idle: int = 0
    held_idle: int = 0
    busy: int = 0
    foreign: int = 0
    unhealthy: int = 0
    excluded: int = 0
    unknown: int = 0

    @property
    def total(self) -> int:
        """Number of devices."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


class Node(Answer):
    """One node with GPUs.

    Attributes:
        name: name of the node.
        model: model of its first GPU without the maker, `""` if unknown.
        driver_version: version of the NVIDIA driver, `""` if unknown.
        is_ready: whether its condition Ready is true.
        is_unschedulable: whether it is cordoned.
        resources: numbers by GPU resource.
        gpu_states: GPUs by state, without MIG instances.
        mig_states: MIG instances by state.
        utilization_mean_ratio: mean utilization of its devices, from 0 to 1.
        memory_used_mean_ratio: mean share of memory in use, from 0 to 1.
        early_failures: number of owners whose pods failed there soon after their start; old
            failures fade.
        pods: pods with GPUs on it, as `namespace/name`.
    """

    name: str
    model: str
    driver_version: str
    is_ready: bool
    is_unschedulable: bool
    resources: dict[str, ResourceCounts]
    gpu_states: StateCounts
    mig_states: StateCounts
    utilization_mean_ratio: float | None
    memory_used_mean_ratio: float | None
    early_failures: int
    pods: list[str]


class NodeAnswer(Node):
    """One node and its GPUs.

    Attributes:
        gpus: its GPUs and MIG instances, by index.
    """

    gpus: list[Gpu]


class SourceSummary(Answer):
    """Last answer of a telemetry source.

    Attributes:
        at: time of the answer, seconds since the epoch.
        devices: devices in the answer.
        unmatched_series: series whose labels name no node.
        unmatched_example: labels of one such series, `""` without one.
        disagreements: devices whose signals contradict each other.
    """

    at: float
    devices: int
    unmatched_series: int
    unmatched_example: str
    disagreements: int


class Nodes(Answer):
    """All nodes with GPUs, the telemetry sources, and objects that cannot be read.

    Attributes:
        nodes: the nodes, by name.
        sources: last answer of each telemetry source.
        unreadable: by kind, the last ten objects that cannot be read; null instead of a name in a
            namespace that the caller may not read.
    """

    nodes: list[Node]
    sources: dict[str, SourceSummary] = {}
    unreadable: dict[str, list[str | None]] = {}


class Gpus(Answer):
    """All GPUs, or those of one node.

    Attributes:
        gpus: GPUs and MIG instances, by node and index.
    """

    gpus: list[Gpu]


class PodMove(Answer):
    """A pod that has to move.

    Attributes:
        pod: the pod, as `namespace/name`.
        owner: kind and name of its owner; null if hidden or missing.
        gpus: GPUs that it holds.
        to: node with free GPUs, CPU, memory and storage for it; null without one.
    """

    pod: str
    owner: str | None
    gpus: int
    to: str | None


class MovePlan(Answer):
    """The fewest moves that free a node.

    Attributes:
        node: the node.
        free: GPUs that are free there now.
        fits: whether all pods fit on other nodes.
        moves: the pods to move; empty if pods that are being deleted hold the GPUs.
    """

    node: str
    free: int
    fits: bool
    moves: list[PodMove]


class Defrag(Answer):
    """Nodes with room for a large request, and the fewest moves that make room on other nodes.

    Attributes:
        resource: the GPU resource.
        gpus: GPUs that must be free on one node.
        ready: nodes with this many free GPUs.
        plans: plans for other nodes, the best first.
        total: number of plans, also of those beyond the limit.
    """

    resource: str
    gpus: int
    ready: list[str]
    plans: list[MovePlan]
    total: int
