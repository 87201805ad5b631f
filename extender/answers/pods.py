"""Answers about pods: waiting, bypassed and explained ones, and the caller's own."""

from extender.answers.answer import Answer
from extender.answers.decisions import DecisionAnswer, RankedVerdict, VerdictAnswer


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


class PodDevice(Answer):
    """A device that a pod holds.

    Attributes:
        index: index of the card on its node.
        uuid: UUID of the card.
        gpu_instance_id: id of the MIG instance, `""` for a whole GPU.
        mig_profile: profile of the MIG instance, `""` for a whole GPU.
        shares: number of shares that the device is divided into, 1 for a whole one.
        tenants: pods that hold it.
        utilization_ratio: mean utilization of the device over the window (`recent_seconds`), also
            where several pods share it.
        memory_used_bytes: memory in use on the device if the pod is alone on it, otherwise memory
            that the pod's processes use; null if no source reports it by pod.
    """

    index: int | None
    uuid: str
    gpu_instance_id: str
    mig_profile: str
    shares: int
    tenants: int
    utilization_ratio: float | None
    memory_used_bytes: int | None


class PodSummary(Answer):
    """A pod with GPUs, or one that waits for them.

    Attributes:
        pod: the pod, as `namespace/name`.
        uid: its UID.
        owner: kind and name of its owner.
        state: `holds` (bound, and not ended) or `waits`.
        is_deleting: whether it is being deleted.
        node: its node; null while it waits.
        model: model of its GPUs without the maker, `""` if unknown.
        resources: GPUs that it requests, by resource.
        gpus: GPUs, shares or MIG instances that it holds or waits for.
        gpus_unknown: number of its GPUs that no source attributes to the pod.
        devices: its devices that a source attributes to the pod.
        utilization_ratio: mean utilization of its devices.
        memory_used_bytes: memory that it uses on its devices; null if unknown for one of them.
        memory_declared_bytes: memory that it declared for a GPU, times `gpus`.
        gpus_idle: idle devices, as in `/v1/holders?idle_for=0`; null if its devices are unknown.
        idle_seconds: time for which all idle devices have been idle; null without one.
        is_at_least: whether that time may be longer, because earlier activity is unknown.
        held_seconds: time since its binding; null if its devices are unknown.
        wait: reasons why the pod waits; null unless it waits.
    """

    pod: str
    uid: str | None
    owner: str | None
    state: str
    is_deleting: bool
    node: str | None
    model: str
    resources: dict[str, int]
    gpus: int
    gpus_unknown: int
    devices: list[PodDevice]
    utilization_ratio: float | None
    memory_used_bytes: int | None
    memory_declared_bytes: int | None
    gpus_idle: int | None
    idle_seconds: float | None
    is_at_least: bool
    held_seconds: float | None
    wait: Waiting | None


class Pods(Answer):
    """GPU pods that the caller may read, a page at a time; others are neither listed nor counted.

    Attributes:
        pods: the pods of this page.
        at: time of the answer.
        total: number of pods that match, on all pages.
        offset: number of pods before the page.
        holds: number of pods that match and hold GPUs; `state` does not limit it.
        waits: number of pods that match and wait; `state` does not limit it.
        namespaces: namespaces of all GPU pods that the caller may read.
        unreachable: addresses of the replicas that did not answer; their latest decisions about
            waiting pods are missing.
    """

    pods: list[PodSummary]
    at: str
    total: int
    offset: int
    holds: int
    waits: int
    namespaces: list[str]
    unreachable: list[str] = []


class BypassedGroup(Answer):
    """Similar pods that were bound without the extender's answer.

    Attributes:
        scheduler: name of their scheduler.
        resources: GPU resources that they request.
        verdict: `not-called` (no replica got a request), `answer-lost` (kube-scheduler disconnected
            before the answer), `not-scored` (prioritize is never called) or `called`.
        count: number of pods.
        example: one of them, as `namespace/name`.
        first_age_seconds: time since the first binding.
        last_age_seconds: time since the last binding.
    """

    scheduler: str
    resources: list[str]
    verdict: str
    count: int
    example: str
    first_age_seconds: float
    last_age_seconds: float


class Cause(Answer):
    """Likely cause of bindings without the extender's answer.

    Attributes:
        field: field to check in kube-scheduler's configuration, or in idlegpu's.
        text: the cause in one sentence.
        pods: number of pods that it explains.
        kind: the cause in one word, such as `http-timeout`.
    """

    field: str
    text: str
    pods: int = 0
    kind: str = ""


class BypassedAnswer(Answer):
    """Pods that were bound without the extender's answer, and the schedulers that call it.

    Each replica classifies every pod that it saw waiting; replicas exchange their requests.

    Attributes:
        unjudged: bindings for which no replica knows whether the extender answered.
        bound: groups of pods.
        likely_causes: likely causes.
        schedulers: schedulers that call the extender, as known to this replica.
    """

    unjudged: int
    bound: list[BypassedGroup]
    likely_causes: list[Cause]
    schedulers: list[str] = []


class ReasonNodes(ReasonCount):
    """Number of nodes with one reason, and some of them.

    Attributes:
        nodes: names of some of the nodes.
    """

    nodes: list[str] = []


class Other(Answer):
    """Candidate whose evaluation is not recorded in full.

    Attributes:
        node: name of the node.
        score: score from 0 to 1.
        rejection: null, because it passed.
    """

    node: str
    score: float
    rejection: str | None = None


class StoredAnswer(Answer):
    """Extent of a decision's record.

    Attributes:
        in_full: candidates that are recorded in full.
        in_short: number of candidates that are recorded with score and reason only.
        note: the same in words.
    """

    in_full: int
    in_short: int
    note: str


class NodeReport(Answer):
    """Record of the requested node.

    Attributes:
        node: name of the node.
        kept: `in-full` (the node is in `nodes`), `in-short` (rank and score, or the reason for its
            rejection), `no-candidate` (not a candidate) or `unknown` (no such node).
        rank: rank among the nodes that passed, from 1.
        score: score from 0 to 1.
        rejection: why it was refused; null if it passed.
        why: reason why no further detail is recorded.
        now: for `in-short`, its evaluation with current readings.
    """

    node: str
    kept: str
    rank: int | None = None
    score: float | None = None
    rejection: str | None = None
    why: str | None = None
    now: list[VerdictAnswer] = []


class ProblemAnswer(Answer):
    """An invalid annotation, variable or argument.

    Attributes:
        kind: `annotation`, `variable` or `argument`.
        annotation: its name.
        value: its value.
        allowed: values that are allowed.
        default_used: value that counts instead.
        message: the same in words.
    """

    kind: str
    annotation: str
    value: str
    allowed: str
    default_used: str
    message: str


class Explanation(Answer):
    """Reasons for a pod's placement or wait; or the prediction for a pod that does not exist.

    The status is 404 if no decision about the pod is remembered and there is no such GPU pod. Other
    replicas are queried for their decisions. A decision records at most `decisions.detailed_nodes`
    nodes in full. `others` and `rejected` refer to the filter call if any replica remembers it,
    because prioritize only sees the nodes that passed filter.

    Attributes:
        pod: the pod, as `namespace/name`.
        uid: its UID.
        is_hypothetical: whether the pod does not exist (POST).
        state: `bound`, `gone`, `placeable`, `unplaceable`, or the state of a waiting pod.
        bound_node: its node.
        is_followed: whether that is the first choice.
        pending: for a waiting pod, the reasons why it waits.
        decision: the latest decision about it.
        filter: the filter decision of the same attempt, of any replica.
        kept: extent of the decision's record.
        nodes: nodes that are recorded in full, best first, including the pod's own node. If few
            nodes pass, some rejected nodes follow, including those that filter rejected.
        others: the other candidates that passed, best first.
        others_left: number of those beyond the limit.
        rejected: the refused candidates by reason, with up to 20 names each, or up to `limit` if it
            is above 100.
        closed: POST only: nodes that kube-scheduler would not offer, as far as idlegpu knows:
            cordoned, not ready, excluded by the pod's `nodeSelector` or required node affinity,
            tainted without a toleration, or with too few free GPUs by the API's count, or too
            little CPU, memory or ephemeral storage left.
        problems: POST only: invalid annotations.
        not_checked: POST only: fields of the pod that only kube-scheduler evaluates: `affinity`
            except required node affinity, labels of node feature discovery, topology spread,
            volumes, quotas; `nodeSelector` and `affinity` as a whole if they name more than 100
            labels.
        requested_node: record of the requested node.
        gpus: indexes of the GPUs that the pod holds, if a source reports them.
    """

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
    nodes: list[RankedVerdict]
    others: list[Other]
    others_left: int
    rejected: list[ReasonNodes]
    closed: list[ReasonNodes] = []
    problems: list[ProblemAnswer] = []
    not_checked: list[str] = []
    requested_node: NodeReport | None = None
    gpus: list[int] = []
