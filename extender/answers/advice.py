"""Answer with advice on sharing GPUs; docs/advice.md explains the rules."""

from extender.answers.answer import Answer


class Rules(Answer):
    """Thresholds of the advice.

    Attributes:
        quantile: quantile of the samples that is used as a device's use, from 0 to 1.
        full_ratio: activity up to which a card is filled, from 0 to 1.
        kept_back_bytes: memory of a card that is kept back.
        least_samples: fewer samples count as no history.
        most_replicas: maximum number of replicas that is recommended.
        tenth_ratio: activity up to which a whole GPU counts as barely used.
    """

    quantile: float
    full_ratio: float
    kept_back_bytes: int
    least_samples: int
    most_replicas: int
    tenth_ratio: float


class SampledUse(Answer):
    """Sampled use of a card, or of a pod's busiest GPU.

    Attributes:
        activity_ratio: activity that 19 of 20 samples do not exceed, from 0 to 1.
        memory_bytes: memory that 19 of 20 samples do not exceed.
        memory_most_bytes: maximum memory of a sample.
        samples: number of samples.
        looked_seconds: time that the samples cover.
        source: source of the samples: `memory`, `prometheus` or `agent`.
    """

    activity_ratio: float | None
    memory_bytes: float | None
    memory_most_bytes: float | None
    samples: int
    looked_seconds: float
    source: str


class CardAdvice(SampledUse):
    """Advice on one card.

    Attributes:
        node: its node.
        index: index of the card on its node.
        uuid: UUID of the card.
        model: model without its maker.
        resource: resource under which the kubelet offers it.
        shared_by: `mps` or `time-slicing`; null for a whole card.
        replicas: replicas that it offers.
        replicas_used: replicas that pods hold.
        memory_total_bytes: memory of the card.
        verdict: `fewer`, `do-not-share`, `share`, `more`, `keep` or `not-measured`.
        recommended_replicas: replicas to offer, 1 for a whole card; a default if `not-measured`.
        bound_by: limit that determines `recommended_replicas`: `activity`, `memory` or `most`; null
            without measurements.
        way: recommended way of sharing if it differs from the present one: `mig`, `mps` or
            `time-slicing`.
        mig_layout: MIG layout of equal instances, such as `2x 3g.40gb`.
        replica_memory_bytes: memory of each replica.
        why: the reason in one sentence.
    """

    node: str
    index: int | None
    uuid: str
    model: str
    resource: str
    shared_by: str | None
    replicas: int
    replicas_used: int
    memory_total_bytes: float | None
    verdict: str
    recommended_replicas: int
    bound_by: str | None
    way: str | None
    mig_layout: str | None
    replica_memory_bytes: float
    why: str

    @property
    def name(self) -> str:
        """Name of the card for people: `node::index`."""
        return f"{self.node}::{'?' if self.index is None else self.index}"


class PodAdvice(SampledUse):
    """Advice on one pod.

    Attributes:
        pod: the pod, as `namespace/name`.
        uid: its UID.
        owner: kind and name of its owner.
        node: its node.
        resources: GPUs that it requests, by resource.
        gpus: number of its GPUs.
        kind: `uses-a-tenth`, `requests-too-much` or `requests-too-little`.
        memory_total_bytes: memory of each of its GPUs.
        pods_per_gpu: number of pods like this one that would fit on one GPU; null for advice on
            memory.
        requested_memory_bytes: memory that it declares for each GPU.
        suggested_memory_bytes: memory that it should declare.
        why: the reason in one sentence.
    """

    pod: str
    uid: str | None
    owner: str | None
    node: str
    resources: dict[str, int]
    gpus: int
    kind: str
    memory_total_bytes: float
    pods_per_gpu: int | None
    requested_memory_bytes: int | None
    suggested_memory_bytes: int | None
    why: str


class HostAmounts(Answer):
    """Amounts of a node's resources besides GPUs.

    Attributes:
        cpus: CPU cores.
        memory_bytes: memory.
        storage_bytes: ephemeral storage.
    """

    cpus: float
    memory_bytes: int
    storage_bytes: int


class StrandedHolder(Answer):
    """A pod that holds more of a node than the even share of its GPUs.

    Attributes:
        pod: the pod, as `namespace/name`.
        gpus: GPUs that it holds.
        part: part of the node's scarcest resource that it holds beyond that share, from 0 to 1.
        requests: its requests; null if the caller may not read the pod.
    """

    pod: str
    gpus: int
    part: float
    requests: HostAmounts | None


class StrandedGpus(Answer):
    """Free GPUs of a node that its CPU, memory or ephemeral storage cannot serve.

    Attributes:
        node: the node.
        resource: the GPU resource.
        stranded_gpus: free GPUs that cannot be served; each MIG instance counts as one.
        free_gpus: all free GPUs.
        lacks: missing resources, the scarcest first: `cpu`, `memory` or `ephemeral-storage`.
        left: remaining host resources of the node.
        need: expected request of a pod with one GPU.
        is_need_assumed: whether `need` is the even share of a GPU, because no pod requests any.
        holders_total: number of holders, also of those that are not listed.
        holders: pods that hold more than their share, the largest part first.
        remedy: suggested remedy.
    """

    node: str
    resource: str
    stranded_gpus: int
    free_gpus: int
    lacks: list[str]
    left: HostAmounts
    need: HostAmounts
    is_need_assumed: bool
    holders_total: int
    holders: list[StrandedHolder]
    remedy: str


class Advice(Answer):
    """Advice on the sharing of cards and on pods' requests, and stranded GPUs.

    [advice.md](advice.md) explains the verdicts.

    Attributes:
        at: time of the answer.
        devices: devices with samples.
        looked_seconds: longest time that samples cover.
        samples: largest number of samples of a device.
        sources: sources of the samples: `memory`, `prometheus` or `agent`.
        over_seconds: the period.
        note: gaps in the samples, `""` without gaps.
        rules: thresholds of the advice.
        cards_total: cards with advice, also those beyond the limit.
        pods_total: pods with advice, also those beyond the limit.
        pods_unjudged: pods that hold devices but have too few samples.
        cards: the cards, by verdict.
        pods: the pods, by kind.
        stranded_gpus: stranded GPUs of all nodes; each MIG instance counts as one.
        stranded_total: nodes with stranded GPUs, also those beyond the limit.
        stranded: these nodes.
    """

    at: str
    devices: int
    looked_seconds: float
    samples: int
    sources: list[str]
    over_seconds: float
    note: str
    rules: Rules
    cards_total: int
    pods_total: int
    pods_unjudged: int
    cards: list[CardAdvice]
    pods: list[PodAdvice]
    stranded_gpus: int
    stranded_total: int
    stranded: list[StrandedGpus]
