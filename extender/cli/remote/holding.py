"""Types of the answers about pods that hold GPUs, and about their costs."""

from extender.cli.remote.answers import Answer


class HeldDeviceAnswer(Answer):
    """A device that a pod holds."""

    index: int | None
    uuid: str
    gpu_instance_id: str
    utilization_ratio: float | None
    memory_used_bytes: int | None
    idle_seconds: float
    tenants: int
    processes: int | None = None


class HolderAnswer(Answer):
    """A pod that holds GPUs or MIG instances, how long it has not used them, and the costs.

    Costs are None without a price, and for pods that the caller may not read.
    """

    pod: str
    uid: str | None
    owner: str | None
    node: str
    resources: dict[str, int]
    gpus: int
    gpus_idle: int
    gpus_in_use: int
    mig_instances: int
    mig_instances_idle: int
    mig_instances_in_use: int
    bound_at: str
    held_seconds: float
    idle_seconds: float
    is_at_least: bool
    gpu_hours: float
    gpu_hours_idle: float
    memory_used_bytes: int | None
    why: str
    devices: list[HeldDeviceAnswer]
    cost: float | None = None
    cost_used: float | None = None
    cost_idle: float | None = None


class SumsAnswer(Answer):
    """Sums over pods that hold GPUs; costs are None without a price."""

    pods: int
    gpus: int
    gpus_idle: int
    mig_instances: int
    mig_instances_idle: int
    gpu_hours: float
    gpu_hours_used: float
    gpu_hours_idle: float
    cost: float | None
    cost_used: float | None
    cost_idle: float | None
    unpriced_pods: int


class HoldersAnswer(Answer):
    """Pods that hold GPUs without using them, longest idle first."""

    at: str
    watched_since: str | None
    idle_for_seconds: float
    active_from_ratio: float
    total: int
    unknown: int
    holders: list[HolderAnswer]
    is_priced: bool = False
    sums: SumsAnswer | None = None


class CostGroup(SumsAnswer):
    """Costs of one pod, of one owner's pods or of one namespace's pods.

    `pod` and `owner` are None in groups of another kind, and for pods without an owner.
    """

    namespace: str
    pod: str | None
    owner: str | None


class UsageFigures(Answer):
    """Card-hours and costs; costs are 0 without prices."""

    gpu_hours: float
    gpu_hours_idle: float
    cost: float
    cost_idle: float


class UsageGroup(UsageFigures):
    """Usage of the pods of one namespace, kind of controller and GPU model."""

    namespace: str
    owner_kind: str
    model: str


class Usage(Answer):
    """Usage of all pods over a period, also of those that have ended, most idle hours first."""

    at: str
    since: str
    is_priced: bool
    usage: list[UsageGroup]
    sums: UsageFigures


class Costs(Answer):
    """Costs of the GPUs that pods hold, most expensive idle use first.

    The sums do not include the pods that the caller may not read; `hidden_pods` counts them.
    """

    at: str
    watched_since: str | None
    idle_for_seconds: float
    by: str
    is_priced: bool
    total: int
    sums: SumsAnswer
    hidden_pods: int
    unknown: int
    costs: list[CostGroup]
