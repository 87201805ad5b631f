"""Read a pod's group: pods that only work together, such as the ranks of a distributed training.

The pod's own fields, labels, annotations and controller name the group. Its size is known here only
if the pod states it; `sources.kubernetes.group_sizes` reads it from other objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from extender.core.untyped import mapping_of, objects_of, text_of

MAX_SIZE: Final = 100_000
_MAX_NAME: Final = 253
_MAX_NAMESPACE: Final = 63
_MAX_CACHED: Final = 4096

POD_GROUP: Final = "PodGroup"
"""Kind of Kubernetes' own groups, which kube-scheduler places whole or not at all."""
COSCHEDULING: Final = "coscheduling group"
VOLCANO: Final = "Volcano group"
JOB_SET: Final = "JobSet"

_LWS: Final = "leaderworkerset.sigs.k8s.io/"
_JOBSET: Final = "jobset.sigs.k8s.io/"
_KUEUE: Final = "kueue.x-k8s.io/"
_COSCHEDULING_LABEL: Final = "scheduling.x-k8s.io/pod-group"
_OLD_COSCHEDULING: Final = "pod-group.scheduling.sigs.k8s.io"
_VOLCANO_NAME: Final = "scheduling.k8s.io/group-name"
_VOLCANO_SIZE: Final = "scheduling.volcano.sh/group-min-member"

_GROUP_OWNERS: Final = frozenset(
    {
        *("JAXJob", "MPIJob", "PaddleJob", "PyTorchJob", "TFJob", "XGBoostJob"),
        *("RayCluster",),
    }
)
"""Kinds of Kubeflow and Ray that make pods themselves, all for one computation."""


@dataclass(frozen=True, slots=True)
class PodGroup:
    """The group that a pod belongs to.

    Attributes:
        kind: kind of the object that made the group: `PodGroup`, `JobSet`, ...
        namespace: namespace of its pods.
        name: its name, unique for its kind within the namespace.
        size: number of its pods, None if the pod does not state it.
        least: number of its pods with GPUs that certainly exist or will exist, None if unknown.
    """

    kind: str
    namespace: str
    name: str
    size: int | None = None
    least: int | None = None

    @property
    def is_reverted(self) -> bool:
        """Whether kube-scheduler reverts the placements of all pods if some find no node."""
        return self.kind == POD_GROUP

    @property
    def title(self) -> str:
        """Kind and name of the group."""
        return f"{self.kind} {self.name}"

    @property
    def key(self) -> str:
        """Key of the group, equal for all of its pods.

        Example:
            >>> PodGroup("JobSet", "ns", "train").key
            'ns/JobSet train'
        """
        return f"{self.namespace}/{self.title}"


def read_group(pod: Mapping[str, object]) -> PodGroup | None:
    """Return the group of a Pod object, None if it is in none.

    Kubernetes' own group counts before a LeaderWorkerSet's, and these before the groups of
    schedulers and queues, which may be larger. Next come a JobSet, and controllers whose pods work
    together.

    Example:
        >>> labels = {"jobset.sigs.k8s.io/jobset-name": "train"}
        >>> read_group({"metadata": {"namespace": "ns", "labels": labels}})
        PodGroup(kind='JobSet', namespace='ns', name='train', size=None, least=None)
    """
    metadata = mapping_of(pod.get("metadata"))
    spec = mapping_of(pod.get("spec"))
    found = _own_group(spec)
    if found is None:
        labels = mapping_of(metadata.get("labels"))
        annotations = mapping_of(metadata.get("annotations"))
        if labels or annotations:
            found = _labelled(labels, annotations)
    found = found or _owned(metadata)
    if found is None:
        return None
    kind, name, size = found
    namespace = text_of(metadata.get("namespace"))
    sizes = (None, read_size(size)) if kind == JOB_SET else (read_size(size), None)
    return _shared(kind, namespace[:_MAX_NAMESPACE], name[:_MAX_NAME], *sizes)


def _own_group(spec: Mapping[str, object]) -> tuple[str, str, object] | None:
    """Return Kubernetes' own group: `schedulingGroup` from 1.36 on, `workloadRef` in 1.35."""
    if name := text_of(mapping_of(spec.get("schedulingGroup")).get("podGroupName")):
        return POD_GROUP, name, None
    reference = mapping_of(spec.get("workloadRef"))
    if workload := text_of(reference.get("name")):
        parts = (workload, reference.get("podGroup"), reference.get("podGroupReplicaKey"))
        return POD_GROUP, "/".join(text_of(part) for part in parts if part), None
    return None


def _labelled(
    labels: Mapping[str, object], annotations: Mapping[str, object]
) -> tuple[str, str, object] | None:
    """Return kind, name and size of the first group that labels or annotations name."""
    replica = text_of(labels.get(f"{_LWS}group-index"))
    if (lws := text_of(labels.get(f"{_LWS}name"))) and replica:
        return "LeaderWorkerSet", f"{lws}-{replica}", _lws_size(labels, annotations)
    if name := text_of(labels.get(_COSCHEDULING_LABEL) or labels.get(_OLD_COSCHEDULING)):
        return COSCHEDULING, name, None
    if name := text_of(labels.get(f"{_OLD_COSCHEDULING}/name")):
        return COSCHEDULING, name, labels.get(f"{_OLD_COSCHEDULING}/min-available")
    if name := text_of(labels.get(f"{_KUEUE}pod-group-name")):
        return "Kueue group", name, annotations.get(f"{_KUEUE}pod-group-total-count")
    if name := text_of(annotations.get(_VOLCANO_NAME)):
        return VOLCANO, name, annotations.get(_VOLCANO_SIZE)
    if name := text_of(labels.get(f"{_JOBSET}jobset-name")):
        # Every Job of the pod's own kind has a pod like it; how many is not on the pod.
        return JOB_SET, name, labels.get(f"{_JOBSET}replicatedjob-replicas")
    if name := text_of(annotations.get(f"{_KUEUE}workload")):
        return "Kueue workload", name, None
    return None


def _owned(metadata: Mapping[str, object]) -> tuple[str, str, object] | None:
    """Return the group that all pods of a pod's controller form."""
    for owner in objects_of(metadata.get("ownerReferences")):
        kind, name = text_of(owner.get("kind")), text_of(owner.get("name"))
        if owner.get("controller") is True and kind in _GROUP_OWNERS and name:
            return kind, name, None
    return None


def _lws_size(labels: Mapping[str, object], annotations: Mapping[str, object]) -> str:
    """Return the number of pods of a LeaderWorkerSet's replica that certainly have GPUs.

    A leader may have none. If it has some, it is placed before its workers.
    """
    size = read_size(annotations.get(f"{_LWS}size"))
    is_worker = text_of(labels.get(f"{_LWS}worker-index")) not in {"", "0"}
    return "" if size is None else str(size - is_worker)


def read_size(value: object) -> int | None:
    """Parse a number of pods; None if it is invalid.

    Example:
        >>> read_size("4"), read_size("four"), read_size("0")
        (4, None, None)
    """
    text = text_of(value)
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_SIZE))
    return int(text) if is_number and 1 <= int(text) <= MAX_SIZE else None


@lru_cache(maxsize=_MAX_CACHED)
def _shared(kind: str, namespace: str, name: str, size: int | None, least: int | None) -> PodGroup:
    """Return a cached `PodGroup`, so that all pods of a group share one object."""
    return PodGroup(kind, namespace, name, size, least)
