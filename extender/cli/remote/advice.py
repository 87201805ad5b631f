"""Types of the /v1/advice answer, with the fields of docs/api-routes.md."""

from extender.cli.remote.answers import Answer


class Rules(Answer):
    """Thresholds that the advice uses."""

    quantile: float
    full_ratio: float
    kept_back_bytes: int
    least_samples: int
    most_replicas: int
    tenth_ratio: float


class CardAdvice(Answer):
    """Advice on one card."""

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
    activity_ratio: float | None
    memory_bytes: float | None
    memory_most_bytes: float | None
    samples: int
    looked_seconds: float
    source: str
    why: str

    @property
    def name(self) -> str:
        """Name of the card for people: `node::index`."""
        return f"{self.node}::{'?' if self.index is None else self.index}"


class PodAdvice(Answer):
    """Advice on one pod; its requests are None if the caller may not read the pod."""

    pod: str
    uid: str | None
    owner: str | None
    node: str
    resources: dict[str, int]
    gpus: int
    kind: str
    memory_total_bytes: float
    pods_per_gpu: int | None
    asked_memory_bytes: int | None
    suggested_memory_bytes: int | None
    activity_ratio: float | None
    memory_bytes: float | None
    memory_most_bytes: float | None
    samples: int
    looked_seconds: float
    source: str
    why: str


class HostAmounts(Answer):
    """CPU, memory and ephemeral storage of a node."""

    cpus: float
    memory_bytes: int
    storage_bytes: int


class StrandedHolder(Answer):
    """A pod that holds more of a node than the even share of its GPUs.

    `part` is the part of the node's scarcest resource beyond that share. `requests` is None if the
    caller may not read the pod.
    """

    pod: str
    gpus: int
    part: float
    requests: HostAmounts | None


class StrandedGpus(Answer):
    """Free GPUs of a node that its CPU, memory or ephemeral storage cannot serve."""

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
    """How to share cards, which pods request too much or too little, and stranded GPUs."""

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
