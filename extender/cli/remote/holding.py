"""The answers of the JSON API that tell who holds GPUs and what that costs, typed."""

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
    """A pod that holds GPUs, for how long it has not used them, and what that costs.

    Costs are None where no price is known, and of pods that the caller may not read.
    """

    pod: str
    uid: str | None
    owner: str | None
    node: str
    resources: dict[str, int]
    gpus: int
    gpus_idle: int
    gpus_in_use: int
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
    """What some pods hold, and what it costs; costs are None where no price is known."""

    pods: int
    gpus: int
    gpus_idle: int
    gpu_hours: float
    gpu_hours_used: float
    gpu_hours_idle: float
    cost: float | None
    cost_used: float | None
    cost_idle: float | None
    unpriced_pods: int


class HoldersAnswer(Answer):
    """The pods that hold GPUs and do not use them, the longest idle first."""

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
    """What one pod, the pods of one owner or those of one namespace cost.

    `pod` and `owner` are None where something else is summed up, or the pods have no owner.
    """

    namespace: str
    pod: str | None
    owner: str | None


class Costs(Answer):
    """What the GPUs that pods hold cost; what costs most for nothing comes first.

    The pods that the caller may not read, `hidden_pods`, are in no sum.
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
