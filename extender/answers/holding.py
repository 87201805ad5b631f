"""Answers about pods that hold GPUs, their costs, and the measured use of similar pods."""

from extender.answers.answer import Answer


class HeldDeviceAnswer(Answer):
    """A device that a pod holds.

    Attributes:
        index: index of the card on its node.
        uuid: UUID of the card.
        gpu_instance_id: id of the MIG instance, `""` for a whole GPU.
        utilization_ratio: latest utilization, from 0 to 1.
        memory_used_bytes: memory in use.
        idle_seconds: time since its last activity, at most the time since the pod's binding.
        tenants: pods that hold it.
        processes: processes that use it, of any owner; only the node's agent lists them.
    """

    index: int | None
    uuid: str
    gpu_instance_id: str
    utilization_ratio: float | None
    memory_used_bytes: int | None
    idle_seconds: float
    tenants: int
    processes: int | None = None


class HolderAnswer(Answer):
    """A pod that holds GPUs, with their idle time and their costs.

    Attributes:
        pod: the pod, as `namespace/name`.
        uid: its UID.
        owner: kind and name of its owner.
        node: its node.
        resources: GPUs that it requests, by resource.
        gpus: GPUs or replicas that it holds, without MIG instances.
        gpus_idle: held GPUs that have been idle for `idle_for_seconds`. A pod is listed if all its
            GPUs and MIG instances are idle, or with `some=true` if any is.
        gpus_in_use: held GPUs that are not idle.
        mig_instances: MIG instances that it holds.
        mig_instances_idle: held MIG instances that have been idle for `idle_for_seconds`.
        mig_instances_in_use: held MIG instances that are not idle.
        bound_at: time of its binding.
        held_seconds: time since its binding.
        idle_seconds: time for which all idle devices have been idle. A device without readings
            for a while counts as active during that time, and a shared device that any pod uses is
            idle for none of them.
        is_at_least: whether the idle time may be longer, because earlier activity is unknown.
        gpu_hours: cards times hours since the binding. A share of a shared device counts in part,
            a MIG instance as its compute slices of the card's.
        gpu_hours_idle: part of `gpu_hours` since the last activity of the devices that are idle
            now.
        memory_used_bytes: memory in use on its devices.
        why: the evidence in one line.
        devices: its devices, as reported by a source.
        cost: `gpu_hours` times the card's price in the setting `prices`; null without a price.
        cost_used: cost of the hours that were not idle.
        cost_idle: cost of the idle hours.
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
    mig_instances: int = 0
    mig_instances_idle: int = 0
    mig_instances_in_use: int = 0


class SumsAnswer(Answer, kw_only=True):
    """Sums over pods that hold GPUs and that the caller may read.

    Attributes:
        pods: number of pods.
        gpus: GPUs or replicas that they hold, without MIG instances.
        gpus_idle: GPUs or replicas among these that are idle.
        mig_instances: MIG instances that they hold.
        mig_instances_idle: MIG instances among these that are idle.
        gpu_hours: card-hours since each binding.
        gpu_hours_used: card-hours that were not idle.
        gpu_hours_idle: idle card-hours.
        cost: cost of the card-hours; null without a price.
        cost_used: cost of the hours that were not idle.
        cost_idle: cost of the idle hours.
        unpriced_pods: pods without a price; the costs exclude their hours.
    """

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
    mig_instances: int = 0
    mig_instances_idle: int = 0


class HoldersAnswer(Answer):
    """Pods that hold GPUs without using them, longest idle first.

    The same request within five seconds gets the same answer.

    Attributes:
        holders: the pods.
        at: time of the answer.
        watched_since: start of the activity watch; idlegpu queries Prometheus once for the day
            before.
        idle_for_seconds: shortest idle time of the request.
        active_from_ratio: utilization from which a device counts as active.
        total: number of pods, also of those beyond the limit.
        unknown: number of pods whose devices no source reports; they are not listed.
        is_priced: whether the settings have prices.
        sums: sums over all these pods, also over those beyond the limit.
    """

    holders: list[HolderAnswer]
    at: str
    watched_since: str | None
    idle_for_seconds: float
    active_from_ratio: float
    total: int
    unknown: int
    is_priced: bool = False
    sums: SumsAnswer | None = None


class CostGroup(SumsAnswer, kw_only=True):
    """Costs of one pod, of one owner's pods or of one namespace's pods.

    Attributes:
        namespace: namespace of the pods.
        pod: the pod, as `namespace/name`; null in groups of another kind.
        owner: kind and name of the owner; null in groups of another kind, or without an owner.
    """

    namespace: str
    pod: str | None
    owner: str | None


class Costs(Answer):
    """Costs of the GPUs that pods hold, most expensive idle use first.

    Attributes:
        costs: the groups.
        at: time of the answer.
        watched_since: start of the activity watch.
        idle_for_seconds: shortest idle time of the request.
        by: kind of the groups: `pod`, `owner` or `namespace`.
        is_priced: whether the settings have prices.
        total: number of groups, also of those beyond the limit.
        sums: sums over all groups.
        hidden_pods: number of pods that the caller may not read; the sums exclude them.
        unknown: number of pods whose devices no source reports.
    """

    costs: list[CostGroup]
    at: str
    watched_since: str | None
    idle_for_seconds: float
    by: str
    is_priced: bool
    total: int
    sums: SumsAnswer
    hidden_pods: int
    unknown: int


class UsageFigures(Answer):
    """Card-hours and costs.

    Attributes:
        gpu_hours: card-hours.
        gpu_hours_idle: idle card-hours.
        cost: cost of the card-hours, 0 without prices.
        cost_idle: cost of the idle card-hours, 0 without prices.
    """

    gpu_hours: float
    gpu_hours_idle: float
    cost: float
    cost_idle: float


class UsageGroup(UsageFigures):
    """Usage of the pods of one namespace, kind of owner and GPU model.

    Attributes:
        namespace: namespace of the pods.
        owner_kind: kind of their owners, such as `Job`; `""` without an owner.
        model: model of the GPUs.
    """

    namespace: str
    owner_kind: str
    model: str


class Usage(Answer):
    """GPU-hours and costs of all pods over a period, including pods that have ended.

    It is this replica's own record, from its start on; `idlegpu_gpu_hours_total` and
    `idlegpu_gpu_cost_total` keep it in Prometheus.

    Attributes:
        at: time of the answer.
        since: start of the period, or of the record if that is later.
        is_priced: whether the settings have prices.
        usage: the groups, most idle hours first.
        sums: sums over the groups.
    """

    at: str
    since: str
    is_priced: bool
    usage: list[UsageGroup]
    sums: UsageFigures


class MeasuredUse(Answer):
    """GPU memory that similar pods used.

    Attributes:
        by: common property of the pods: `owner`, `images` or `requests`.
        pods: number of pods.
        memory_bytes: maximum memory that one of them used on a GPU.
        least_bytes: minimum memory that one of them used on a GPU.
    """

    by: str
    pods: int
    memory_bytes: int
    least_bytes: int


class Size(Answer):
    """GPU memory that similar pods were measured to use.

    Attributes:
        measured: the memory; null if none was measured, or if the caller may not read the
            namespace's pods.
    """

    measured: MeasuredUse | None
