"""Types of the JSON API's answers, with the fields of docs/api-routes.md.

None means unknown. A field that an older extender does not send gets its default. Unknown fields
from a newer one are ignored.
"""

from typing import Any

import msgspec


class Answer(msgspec.Struct):
    """An object of an answer."""


class ResourceCounts(Answer):
    """Numbers of a node's GPU resource."""

    capacity: int
    allocatable: int
    held: int
    assumed: int


class SourceAnswer(Answer):
    """Source and age of a value, and its signal if there are several."""

    source: str
    age_seconds: float
    signal: str = ""


class ForeignProcess(Answer):
    """A process that uses a GPU without holding it; `pod` is "" outside Kubernetes."""

    pid: int
    name: str
    memory_bytes: int | None
    started_at: str | None
    pod: str
    container: str


class Gpu(Answer):
    """One GPU or MIG instance.

    `foreign_processes` is empty for callers who may not read the pods of all namespaces.
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
    utilization_spread_ratio: float | None
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
    foreign_processes: list[ForeignProcess] = []

    @property
    def name(self) -> str:
        """Name of the GPU for people: `node::index`, with the MIG instance if it is one."""
        index = "?" if self.index is None else str(self.index)
        instance = f"/{self.gpu_instance_id}" if self.gpu_instance_id else ""
        return f"{self.node}::{index}{instance}"


class StateCounts(Answer):
    """Number of devices in each state; a device that a pod holds is `held_idle`, not `idle`."""

    idle: int = 0
    held_idle: int = 0
    busy: int = 0
    foreign: int = 0
    unhealthy: int = 0
    unknown: int = 0

    @property
    def total(self) -> int:
        """Number of devices."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


class Node(Answer):
    """One node with GPUs; `gpus` is filled only in the answer for a single node.

    `gpu_states` counts GPUs without MIG instances, `mig_states` MIG instances: each device once.
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
    gpus: list[Gpu] = []


class Nodes(Answer):
    """All nodes with GPUs, the state of the telemetry sources, and unreadable objects."""

    nodes: list[Node]
    sources: dict[str, dict[str, Any]] = {}
    unreadable: dict[str, list[str | None]] = {}


class Gpus(Answer):
    """All GPUs, or those of one node."""

    gpus: list[Gpu]


class DeviceAnswer(Answer):
    """A device as seen for one pod."""

    can_land: bool
    state: str
    utilization_ratio: float | None
    memory_used_ratio: float | None
    free_bytes: int | None
    freshness: str
    assumed: int
    used: int
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    declared_bytes: int = 0
    others_bytes: int = 0
    index: int | None = None
    uuid: str = ""
    gpu_instance_id: str = ""
    source: str = "none"
    age_seconds: float | None = None
    health: str = ""
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    throttling: str | None = None
    signals: dict[str, SourceAnswer] = {}


class PartAnswer(Answer):
    """Term of a score: it adds share x value."""

    name: str
    share: float
    value: float
    adds: float


class FactorAnswer(Answer):
    """Factor of the certainty, and the share that remains after it."""

    name: str
    value: float
    keeps: float


class VerdictAnswer(Answer):
    """Evaluation of a node for a pod; the answer for `best` counts the stranded GPUs."""

    node: str
    resource: str
    rejection: str | None
    score: float
    landing: int
    idle: int
    needed: int
    taken: int
    chance: float
    is_agreed: bool
    suspicion: float
    model: str
    devices: list[DeviceAnswer]
    parts: list[PartAnswer] = []
    factors: list[FactorAnswer] = []
    rank: int | None = None
    is_bound: bool = False
    assumed: int = 0
    lost_by: str | None = None
    stranded: int = 0
    is_late: bool = False
    band: str = ""
    reason: str = ""


class MeasuredUse(Answer):
    """Memory that similar pods used of a GPU; `by` is owner, images or requests."""

    by: str
    pods: int
    memory_bytes: int
    least_bytes: int


class Size(Answer):
    """Memory that similar pods were measured to use; None if none was measured."""

    measured: MeasuredUse | None


class ModelCount(Answer):
    """Number of GPUs, or of their replicas, of one model: held, free, and free but stranded."""

    gpus: int
    held: int
    free: int
    stranded: int


class Best(Answer):
    """Ranking of the nodes for a pod now; `rejected` gives the reasons by node."""

    best: list[VerdictAnswer]
    feasible: int
    rejected: dict[str, str]
    models: dict[str, ModelCount] = {}


class PodMove(Answer):
    """Pod that has to move: its owner is None if hidden or missing; `to` is None without room."""

    pod: str
    owner: str | None
    gpus: int
    to: str | None


class MovePlan(Answer):
    """Moves that free a node; `fits` says whether all pods fit on other nodes."""

    node: str
    free: int
    fits: bool
    moves: list[PodMove]


class Defrag(Answer):
    """Nodes that have room already, and the fewest moves that make room on others."""

    resource: str
    gpus: int
    ready: list[str]
    plans: list[MovePlan]
    total: int


class Request(Answer):
    """GPU request of a pod; None if not set, or not shown to the caller."""

    resources: dict[str, int]
    gpu_memory_bytes: int | None = None
    gpu_memory_share: float | None = None
    gpu_memory_from: str | None = None
    require_idle: bool | None = None
    max_utilization_ratio: float | None = None
    max_memory_ratio: float | None = None
    strategy: str | None = None
    prefer_models: list[str] | None = None
    require_models: list[str] | None = None
    targets: list[str] | None = None
    target_policy: str | None = None


class NodeSummary(Answer):
    """Summary of a node's evaluation."""

    score: float
    rejection: str | None


class Domain(Answer):
    """Domain of the topology with room for the rest of a group."""

    label: str
    name: str
    pods: int


class Group(Answer):
    """Group of a pod: where its pods are, and where the rest fits.

    `too_few` is the number of its pods that the cluster has GPUs for, None if it has them for all.
    """

    name: str
    size: int
    placed: dict[str, int]
    rest: int
    fitting: list[Domain]
    too_few: int | None = None


class DecisionAnswer(Answer):
    """One decision about a pod; only the detailed answer has `explained` and `nodes`."""

    candidates: int
    feasible: int
    node: str | None
    number: int = 0
    id: str = ""
    replica: str = ""
    at: str = ""
    verb: str = ""
    pod: str = ""
    uid: str | None = None
    request: Request | None = None
    runner_up: str | None = None
    bound_node: str | None = None
    is_followed: bool | None = None
    is_shadow: bool = False
    snapshot: int | None = None
    duration_seconds: float | None = None
    group: Group | None = None
    explained: list[VerdictAnswer] = []
    nodes: dict[str, NodeSummary] = {}


class Decisions(Answer):
    """Decisions, newest first, and the replicas that did not answer."""

    decisions: list[DecisionAnswer]
    unreachable: list[str] = []


class ReasonCount(Answer):
    """Number of nodes with one reason, and the names of some of them."""

    count: int
    reason: str
    nodes: list[str] = []


class Waiting(Answer):
    """A waiting pod, and what it waits for."""

    pod: str
    uid: str | None
    owner: str | None
    scheduler: str
    created_at: str
    waiting_seconds: float
    resources: dict[str, int]
    gpu_memory_bytes: int | None
    nominated_node: str | None
    assumed_node: str | None
    state: str
    nodes: int | None
    by_scheduler: list[ReasonCount]
    by_us: list[ReasonCount]
    message: str | None
    preemption: str | None
    hints: list[str]
    decision: DecisionAnswer | None = None


class PendingAnswer(Answer):
    """GPU pods that are not bound, longest wait first, and replicas that did not answer."""

    pods: list[Waiting]
    total: int
    nodes: int
    unreachable: list[str] = []


class Other(Answer):
    """Candidate whose evaluation is not stored in full."""

    node: str
    score: float
    rejection: str | None = None


class StoredAnswer(Answer):
    """How much of a decision is stored."""

    in_full: int
    in_short: int
    note: str


class NodeDetail(Answer):
    """Stored evaluation of one node; `why` says why there is no more.

    `now` is the node's current evaluation, if the former one is not stored in full.
    """

    node: str
    kept: str
    rank: int | None
    score: float | None
    rejection: str | None
    why: str | None
    now: list[VerdictAnswer] = []


class ProblemAnswer(Answer):
    """An invalid annotation, variable or argument; `kind` says which."""

    kind: str
    annotation: str
    value: str
    allowed: str
    default_used: str
    message: str


class Explanation(Answer):
    """Why a pod was placed where it is, or waits; or what would happen to a hypothetical pod."""

    pod: str
    uid: str | None
    is_hypothetical: bool
    state: str
    bound_node: str | None
    is_followed: bool | None
    pending: Waiting | None
    decision: DecisionAnswer | None
    filter: DecisionAnswer | None
    kept: StoredAnswer | None
    nodes: list[VerdictAnswer]
    others: list[Other]
    others_left: int
    rejected: list[ReasonCount]
    closed: list[ReasonCount] = []
    problems: list[ProblemAnswer] = []
    not_checked: list[str] = []
    asked_node: NodeDetail | None = None
    gpus: list[int] = []


class BypassedGroup(Answer):
    """Similar pods that were bound without our answer."""

    scheduler: str
    resources: list[str]
    verdict: str
    count: int
    example: str
    first_age_seconds: float
    last_age_seconds: float


class Cause(Answer):
    """Likely cause of bindings without our answer."""

    field: str
    text: str
    pods: int = 0
    kind: str = ""


class BypassedAnswer(Answer):
    """Pods that were bound without our answer, and schedulers that call the extender."""

    unjudged: int
    bound: list[BypassedGroup]
    likely_causes: list[Cause]
    asked_by: list[str] = []
