"""Answers about decisions, their outcome, and the evaluation of nodes for a pod."""

from extender.answers.answer import Answer
from extender.answers.fleet import SourceAnswer


class DeviceAnswer(Answer):
    """A device, with the values that the pod's decision used.

    Attributes:
        can_land: whether the kubelet could allocate it to the pod.
        state: `idle`, `busy`, `unknown`, `unhealthy`, `excluded` or `foreign`.
        utilization_ratio: utilization that the decision used, from 0 to 1.
        memory_used_ratio: memory in use, from 0 to 1.
        free_bytes: memory available to the pod: `memory_total_bytes` minus `declared_bytes` and
            `others_bytes`, and at most `memory_free_bytes`.
        freshness: `fresh`, `stale` or `missing` activity.
        assumed: pods placed on it that readings did not show yet.
        used: replicas that pods hold.
        memory_total_bytes: memory of the device.
        memory_free_bytes: measured free memory.
        declared_bytes: memory that its pods declared, in use or not.
        others_bytes: memory in use by processes outside Kubernetes and pods that declared none.
        index: index of the card on its node.
        uuid: UUID of the card, `""` if no source shows it.
        gpu_instance_id: id of the MIG instance, `""` for a whole GPU.
        source: source of its activity, `none` without one.
        age_seconds: age of its activity at the decision.
        health: each sign of ill health with its effect, `""` if healthy.
        temperature_celsius: temperature of the chip.
        memory_temperature_celsius: temperature of the memory.
        throttling: cause of reduced clocks that lowers the score, `""` for none.
        signals: source and age of `utilization` (with the busiest signal), `memory`,
            `temperature`, `throttling` and, if a reading shows ill health, `health`.
    """

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
    """Term of a score; the score is the sum of `adds`.

    Attributes:
        name: name of the term.
        share: weight of the term in the score.
        value: value of the term, from 0 to 1.
        adds: share x value.
    """

    name: str
    share: float
    value: float
    adds: float


class FactorAnswer(Answer):
    """Factor of the certainty; the product of `keeps` is the certainty before rounding.

    Attributes:
        name: name of the factor.
        value: value of the factor, from 0 to 1.
        keeps: share of the certainty that remains after it.
    """

    name: str
    value: float
    keeps: float


class VerdictAnswer(Answer):
    """Evaluation of a node for a pod.

    A node has one for each resource that the pod requests; the lowest score counts.

    Attributes:
        node: name of the node.
        resource: the requested resource.
        rejection: why the node is refused; null if it passes.
        score: score from 0 to 1; the higher, the better.
        landing: devices that the kubelet could allocate to the pod.
        idle: landing devices that are known to be suitable.
        needed: distinct devices that the pod gets.
        taken: number of landing devices that pods hold, if it is unknown which.
        chance: probability that every device of the pod is suitable, from 0 to 1.
        is_agreed: whether the device holders agree with the API server's count.
        suspicion: share of the certainty that early failures cost, from 0 to 1.
        model: model of the devices without its maker, `""` if unknown.
        devices: every device of the node.
        parts: terms of the score.
        factors: factors of the certainty.
        is_late: whether it was evaluated at the pod's binding, because the binding came more than
            3 s or 8 decisions after the decision and the node was not recorded in full. Rank and
            `rejection` are the decision's.
        band: band of the probability: `likely`, `unknown` or `unlikely`.
        reason: the score in the words of [decision.md](decision.md).
    """

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
    is_late: bool = False
    band: str = ""
    reason: str = ""


class RankedVerdict(VerdictAnswer):
    """Evaluation of a node for a pod, compared with the first choice.

    Attributes:
        rank: rank among the nodes that pass, from 1.
        is_bound: whether the pod is bound to the node.
        assumed: pods placed on its devices that readings did not show yet.
        lost_by: the clause of its reason that explains its lower rank; null for the first choice.
    """

    rank: int | None = None
    is_bound: bool = False
    assumed: int = 0
    lost_by: str | None = None


class BestNode(VerdictAnswer):
    """Evaluation of a node for a pod now.

    Attributes:
        stranded: free GPUs for which the node lacks CPU, memory or ephemeral storage
            ([advice.md](advice.md#stranded-gpus)).
    """

    stranded: int = 0


class ModelCount(Answer):
    """Number of GPUs, or of their replicas, of one model: `gpus` = `held` + `free` + `stranded`.

    Attributes:
        gpus: GPUs of the model.
        free: GPUs that no pod holds and for which their nodes have CPU, memory and ephemeral
            storage.
        held: GPUs that pods hold.
        stranded: GPUs that no pod holds and for which their nodes lack CPU, memory or ephemeral
            storage.
    """

    gpus: int
    free: int
    held: int = 0
    stranded: int = 0


class Best(Answer):
    """The current ranking of nodes for a pod, with reasons.

    Attributes:
        best: the best nodes, best first.
        feasible: number of nodes that pass.
        rejected: reason for each refused node.
        models: numbers for each model that the request names.
    """

    best: list[BestNode]
    feasible: int
    rejected: dict[str, str]
    models: dict[str, ModelCount] = {}


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


class RegretMeans(Answer):
    """Mean activity over the placements for which `choice_ratio` is known; ratios from 0 to 1.

    Attributes:
        placements: number of placements.
        got_ratio: activity of the GPUs that the pods got.
        choice_ratio: activity of the GPUs of the first choice.
        best_ratio: activity of the GPUs of the node that turned out best.
        got_then_ratio: activity, at the decision, of the GPUs that the pods got.
        choice_then_ratio: activity, at the decision, of the GPUs of the first choice.
    """

    placements: int
    got_ratio: float | None
    choice_ratio: float | None
    best_ratio: float | None
    got_then_ratio: float | None
    choice_then_ratio: float | None


class OutcomeAnswer(Answer):
    """Outcome of one placement; ratios are mean activities from 0 to 1.

    Attributes:
        pod: the pod, as `namespace/name`.
        uid: its UID.
        bound_at: time of its binding.
        seconds: time for which it was watched.
        node: its node.
        choice: node of the first choice.
        best: node with the least active GPUs, among the 10 best of the decision and the pod's own
            node; no other node is watched.
        is_followed: whether the pod is on the first choice.
        is_shadow: whether the answer changed nothing, because of shadow mode.
        is_known: whether it is known which GPUs the pod got.
        gpus: number of its GPUs.
        got_ratio: activity of the GPUs that the pod got.
        choice_ratio: activity of the GPUs of the first choice.
        best_ratio: activity of the GPUs of `best`.
        got_then_ratio: `got_ratio` at the decision.
        choice_then_ratio: `choice_ratio` at the decision.
        regret_ratio: `got_ratio` minus `choice_ratio`.
        hindsight_ratio: `got_ratio` minus `best_ratio`.
    """

    pod: str
    uid: str | None
    bound_at: str
    seconds: float
    node: str
    choice: str | None
    best: str
    is_followed: bool
    is_shadow: bool
    is_known: bool
    gpus: int
    got_ratio: float
    choice_ratio: float | None
    best_ratio: float
    got_then_ratio: float | None
    choice_then_ratio: float | None
    regret_ratio: float | None
    hindsight_ratio: float


class Regret(Answer):
    """Outcomes of placements, newest first.

    [trusting.md](trusting.md#regret) explains the meaning and the limits of these values. The
    answer covers all replicas, at most the newest 10,000 placements of each. If two replicas
    decided about a pod, the later decision counts.

    Attributes:
        after_seconds: time after the binding at which a placement is compared.
        watched: pods that are being watched.
        left_out: pods that were not compared.
        total: number of placements, also of those beyond the limit.
        all: means over all placements.
        followed: means over the pods that are on the first choice.
        not_followed: means over the other pods.
        placements: the placements.
        unreachable: addresses of the replicas that did not answer.
    """

    after_seconds: float
    watched: int
    left_out: int
    total: int
    all: RegretMeans
    followed: RegretMeans
    not_followed: RegretMeans
    placements: list[OutcomeAnswer]
    unreachable: list[str] = []
