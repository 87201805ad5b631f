"""The answers of the JSON API, typed: field by field as docs/api-routes.md has them.

None is unknown. What an older extender does not send has its default; what a newer one sends
besides is left out.
"""

from typing import Any

import msgspec


class Answer(msgspec.Struct):
    """An object of an answer."""


class ResourceCounts(Answer):
    """What a node has of a GPU resource."""

    capacity: int
    allocatable: int
    held: int
    assumed: int


class SourceAnswer(Answer):
    """Who told something, how old that is, and by which of several signals where that is said."""

    source: str
    age_seconds: float
    signal: str = ""


class Gpu(Answer):
    """One GPU, or one MIG instance."""

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

    @property
    def name(self) -> str:
        """The GPU as people write it: `node::index`, with the instance where it is one."""
        index = "?" if self.index is None else str(self.index)
        instance = f"/{self.gpu_instance_id}" if self.gpu_instance_id else ""
        return f"{self.node}::{index}{instance}"


class Node(Answer):
    """One node with GPUs; `gpus` is filled where one node was asked for.

    A GPU is a card: one in MIG instances counts once, and is idle where all of them are.
    """

    name: str
    model: str
    driver_version: str
    is_ready: bool
    is_unschedulable: bool
    resources: dict[str, ResourceCounts]
    gpus_total: int
    gpus_idle: int
    utilization_mean_ratio: float | None
    memory_used_mean_ratio: float | None
    early_failures: int
    pods: list[str]
    gpus: list[Gpu] = []
    mig_instances_total: int = 0
    mig_instances_idle: int = 0


class Nodes(Answer):
    """Every node with GPUs, what the sources of telemetry last said, and what cannot be read."""

    nodes: list[Node]
    sources: dict[str, dict[str, Any]] = {}
    unreadable: dict[str, list[str | None]] = {}


class Gpus(Answer):
    """Every GPU, or those of one node."""

    gpus: list[Gpu]


class DeviceAnswer(Answer):
    """A device as a pod saw it."""

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
    """A term of a score: it adds share x value."""

    name: str
    share: float
    value: float
    adds: float


class FactorAnswer(Answer):
    """What takes its share of the certainty, and what it keeps of it."""

    name: str
    value: float
    keeps: float


class VerdictAnswer(Answer):
    """What a node is, or was, worth to a pod."""

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
    is_late: bool = False
    band: str = ""
    reason: str = ""


class Best(Answer):
    """The ranking that a pod would get now; `rejected` says why by node."""

    best: list[VerdictAnswer]
    feasible: int
    rejected: dict[str, str]


class Request(Answer):
    """What a pod asks for; None is not said, or not shown to the caller."""

    resources: dict[str, int]
    gpu_memory_bytes: int | None = None
    require_idle: bool | None = None
    max_utilization_ratio: float | None = None
    max_memory_ratio: float | None = None
    strategy: str | None = None
    prefer_models: list[str] | None = None


class Short(Answer):
    """A node in short."""

    score: float
    rejection: str | None


class DecisionAnswer(Answer):
    """What was decided about a pod; `explained` and `nodes` are filled where asked in full."""

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
    explained: list[VerdictAnswer] = []
    nodes: dict[str, Short] = {}


class Decisions(Answer):
    """Decisions, the newest first; replicas that did not answer are named."""

    decisions: list[DecisionAnswer]
    unreachable: list[str] = []


class Counted(Answer):
    """How many nodes a reason holds back; some of their names, where they are told."""

    count: int
    reason: str
    nodes: list[str] = []


class Waiting(Answer):
    """A pod that waits, and what for."""

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
    by_scheduler: list[Counted]
    by_us: list[Counted]
    message: str | None
    preemption: str | None
    hints: list[str]
    decision: DecisionAnswer | None = None


class PendingAnswer(Answer):
    """The GPU pods that are not bound, the longest wait first; replicas that did not answer."""

    pods: list[Waiting]
    total: int
    nodes: int
    unreachable: list[str] = []


class Other(Answer):
    """A candidate that is not kept in full."""

    node: str
    score: float
    rejection: str | None = None


class KeptAnswer(Answer):
    """How much of a decision is kept."""

    in_full: int
    in_short: int
    note: str


class AskedNode(Answer):
    """What a decision says of one node; `why` tells why that is not more.

    `now`: what the node is worth to the pod by now, recomputed, where it is not kept in full.
    """

    node: str
    kept: str
    rank: int | None
    score: float | None
    rejection: str | None
    why: str | None
    now: list[VerdictAnswer] = []


class ProblemAnswer(Answer):
    """An annotation that cannot be used."""

    annotation: str
    value: str
    allowed: str
    default_used: str
    message: str


class Explanation(Answer):
    """Why a pod went where it went, or waits; or what would happen to one that is not there."""

    pod: str
    uid: str | None
    is_hypothetical: bool
    state: str
    bound_node: str | None
    is_followed: bool | None
    pending: Waiting | None
    decision: DecisionAnswer | None
    filter: DecisionAnswer | None
    kept: KeptAnswer | None
    nodes: list[VerdictAnswer]
    others: list[Other]
    others_left: int
    rejected: list[Counted]
    closed: list[Counted] = []
    problems: list[ProblemAnswer] = []
    not_checked: list[str] = []
    asked_node: AskedNode | None = None


class BypassedGroup(Answer):
    """Pods alike that were bound without our answer."""

    scheduler: str
    resources: list[str]
    verdict: str
    count: int
    example: str
    first_age_seconds: float
    last_age_seconds: float


class Cause(Answer):
    """Why pods were bound without our answer, likely."""

    field: str
    text: str
    pods: int = 0
    kind: str = ""


class BypassedAnswer(Answer):
    """Pods that were bound without our answer, and the schedulers that ask for one.

    Replicas that did not answer are named.
    """

    unjudged: int
    bound: list[BypassedGroup]
    likely_causes: list[Cause]
    asked_by: list[str] = []
    unreachable: list[str] = []
