"""Answers about decisions."""

from extender.answers.answer import Answer
from extender.answers.verdicts import VerdictAnswer


class Request(Answer):
    """GPU request of a pod; a caller who may not read the pod sees `resources` alone.

    Attributes:
        resources: GPUs by resource.
        gpu_memory_bytes: memory that it requests of each GPU.
        gpu_memory_share: requested memory as a share of each GPU, if the pod states a share.
        gpu_memory_from: variable or argument that states the memory; null for the annotation.
        require_idle: whether it waits for GPUs that are known to be idle.
        max_utilization_ratio: utilization below which a GPU counts as idle, from 0 to 1.
        max_memory_ratio: memory in use below which a GPU counts as idle, from 0 to 1.
        strategy: `auto`, `spread` or `pack`.
        prefer_models: models that it prefers, best first.
        require_models: models that it requires.
        targets: nodes and GPUs that it names.
        target_policy: whether it requires or prefers its targets.
    """

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
    """Summary of a node's evaluation.

    Attributes:
        score: score from 0 to 1.
        rejection: why the node is refused; null if it passes.
    """

    score: float
    rejection: str | None


class Domain(Answer):
    """Domain of the topology with room for the rest of a group.

    Attributes:
        label: label whose value names the domain.
        name: value of the label.
        pods: number of the group's pods for which it has room.
    """

    label: str
    name: str
    pods: int


class Group(Answer):
    """Group of a pod: the nodes of its pods, and the domains with room for the rest.

    Attributes:
        name: name of the group.
        size: number of its pods.
        placed: number of its pods on each node.
        rest: pods that are not placed yet.
        fitting: domains with room for the rest, the nearest first.
        too_few: number of pods for which the cluster has GPUs; null if it has enough for all.
    """

    name: str
    size: int
    placed: dict[str, int]
    rest: int
    fitting: list[Domain]
    too_few: int | None = None


class DecisionAnswer(Answer):
    """One decision about a pod.

    Of a pod that does not exist, only request, numbers, nodes and group are sent.

    Attributes:
        candidates: nodes in kube-scheduler's request.
        feasible: nodes that passed.
        node: the first choice; null if no node passed.
        number: number of the decision in the replica's process.
        id: id of the decision across all replicas, such as `7f3a-812`.
        replica: pod of the replica that decided.
        at: time of the decision.
        verb: `filter`, `prioritize` or `preempt`.
        pod: the pod, as `namespace/name`.
        uid: its UID.
        request: its request.
        runner_up: the second choice.
        bound_node: node that it was bound to, once known.
        is_followed: whether that is the first choice.
        is_shadow: whether the answer changed nothing, because of shadow mode.
        snapshot: version of the fleet's snapshot.
        duration_seconds: time that the decision took.
        group: its group, if it is in one.
        explained: evaluations that are recorded in full; not sent with `brief`.
        nodes: score and rejection of every candidate; not sent with `brief`.
    """

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
    """Past decisions of all replicas, newest first, with the values that they used.

    Attributes:
        decisions: the decisions.
        unreachable: addresses of the replicas that did not answer; their decisions are missing.
    """

    decisions: list[DecisionAnswer]
    unreachable: list[str] = []
