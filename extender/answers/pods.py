"""Answer about a caller's pods with GPUs."""

from extender.answers.answer import Answer
from extender.answers.pending import Waiting


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
        devices: the others.
        utilization_ratio: mean utilization of its devices.
        memory_used_bytes: memory that it uses on its devices; null if unknown for one of them.
        memory_declared_bytes: memory that it declared for a GPU, times `gpus`.
        gpus_idle: idle devices, as in `/v1/holders?idle_for=0`; null if its devices are unknown.
        idle_seconds: time for which all idle devices have been idle; null without one.
        is_at_least: whether that time may be longer, because earlier activity is unknown.
        held_seconds: time since its binding; null if its devices are unknown.
        wait: null unless the pod waits.
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
        pods: the page.
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
