"""Evaluations of nodes for a pod, and the answer of /v1/best."""

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
