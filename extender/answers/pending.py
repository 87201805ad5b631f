"""Answer about waiting pods."""

from extender.answers.answer import Answer


class ReasonCount(Answer):
    """Number of nodes with one reason.

    Attributes:
        count: number of nodes.
        reason: the reason.
    """

    count: int
    reason: str


class LastDecision(Answer):
    """The latest decision about a waiting pod; `/v1/decisions/{id}` returns it in full.

    Attributes:
        id: id of the decision across all replicas, such as `7f3a-812`.
        replica: pod of the replica that decided.
        number: number of the decision in the replica's process.
        at: time of the decision.
        verb: `filter`, `prioritize` or `preempt`.
        candidates: nodes in kube-scheduler's request.
        feasible: nodes that passed.
        node: the first choice; null if no node passed.
    """

    id: str
    replica: str
    number: int
    at: str
    verb: str
    candidates: int
    feasible: int
    node: str | None


class Waiting(Answer):
    """A waiting pod, and the reasons why it waits.

    kube-scheduler counts `by_scheduler` and `by_us`; idlegpu reads them from the pod's PodScheduled
    condition. If the condition is still empty, `by_us` comes from idlegpu's latest decision.

    Attributes:
        pod: the pod, as `namespace/name`.
        uid: its UID.
        owner: kind and name of its owner.
        scheduler: name of its scheduler.
        created_at: time of its creation.
        waiting_seconds: time since its creation.
        resources: GPUs that it requests, by resource.
        gpu_memory_bytes: memory that it requests of each GPU.
        nominated_node: node on which preemption makes room for it.
        assumed_node: node that idlegpu chose, until the binding is visible.
        state: `refused` (kube-scheduler's latest message names one of idlegpu's reasons),
            `unschedulable` (kube-scheduler's own filters left no node, so it did not call idlegpu),
            `placing` (idlegpu chose a node; the binding is not seen yet), `nominated` (preemption
            is making room), `gated` (the pod has scheduling gates), `untried` (no attempt is known)
            or `deleting`.
        nodes: number of nodes that kube-scheduler examined; null if its message does not state it.
        by_scheduler: nodes that kube-scheduler itself refused, by reason.
        by_us: nodes that idlegpu refused, by reason.
        message: text of the pod's PodScheduled condition.
        preemption: the part of that text about preemption.
        hints: a remedy for each reason, one sentence each, the most common first.
        decision: the latest decision about the pod, of any replica; null if none is remembered.
    """

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
    decision: LastDecision | None = None


class PendingAnswer(Answer):
    """Every GPU pod that is not bound, with the reasons; longest wait first.

    Attributes:
        pods: the pods.
        total: number of pods, also of those beyond the limit.
        nodes: nodes with GPUs.
        unreachable: addresses of the replicas that did not answer; their latest decisions are
            missing.
    """

    pods: list[Waiting]
    total: int
    nodes: int
    unreachable: list[str] = []
