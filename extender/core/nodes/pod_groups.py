"""Identify related pods: the pods of one group only work together, similar pods behave alike.

A group is, for example, the ranks of a distributed training. The pod's own fields, labels,
annotations and controller name it. Its size is known here only if the pod states it;
`sources.kubernetes.group_sizes` reads it from other objects. Measurements and failures of similar
pods predict the behavior of the next one.
"""

import re
from calendar import timegm
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
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
WORKLOAD: Final = "Workload"
LEADER_WORKER_SET: Final = "LeaderWorkerSet"

_LWS: Final = "leaderworkerset.sigs.k8s.io/"
_JOBSET: Final = "jobset.sigs.k8s.io/"
_KUEUE: Final = "kueue.x-k8s.io/"
_COSCHEDULING_LABEL: Final = "scheduling.x-k8s.io/pod-group"
_OLD_COSCHEDULING: Final = "pod-group.scheduling.sigs.k8s.io"
_VOLCANO_NAME: Final = "scheduling.k8s.io/group-name"
_VOLCANO_SIZE: Final = "scheduling.volcano.sh/group-min-member"

_GROUP_OWNERS: Final = frozenset(
    {*("JAXJob", "MPIJob", "PaddleJob", "PyTorchJob", "TFJob", "XGBoostJob"), *("RayCluster",)}
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
    def has_leader(self) -> bool:
        """Whether the first pod may request other GPUs than the later ones."""
        return self.kind == LEADER_WORKER_SET

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

    @property
    def size_key(self) -> str:
        """Key of the object's size: all replicas of a Workload's pod group have the same size.

        Example:
            >>> PodGroup("Workload", "ns", "train/workers/0").size_key
            'ns/Workload train/workers'
        """
        if self.kind != WORKLOAD:
            return self.key
        return f"{self.namespace}/{self.kind} {'/'.join(self.name.split('/')[:2])}"


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
    """Return Kubernetes' own group: `schedulingGroup` from 1.36 on, `workloadRef` in 1.35.

    1.35 reverts no placements: it holds the pods that have a node until the group has enough.
    """
    if name := text_of(mapping_of(spec.get("schedulingGroup")).get("podGroupName")):
        return POD_GROUP, name, None
    reference = mapping_of(spec.get("workloadRef"))
    if workload := text_of(reference.get("name")):
        parts = (workload, reference.get("podGroup"), reference.get("podGroupReplicaKey"))
        return WORKLOAD, "/".join(text_of(part) for part in parts if part), None
    return None


def _labelled(
    labels: Mapping[str, object], annotations: Mapping[str, object]
) -> tuple[str, str, object] | None:
    """Return kind, name and size of the first group that labels or annotations name."""
    replica = text_of(labels.get(f"{_LWS}group-index"))
    if (lws := text_of(labels.get(f"{_LWS}name"))) and replica:
        return LEADER_WORKER_SET, f"{lws}-{replica}", _lws_size(labels, annotations)
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


_MAX_OWNER: Final = 200

_TEMPLATE_HASH_LABEL: Final = "pod-template-hash"
"""Label of a Deployment's pods. A ReplicaSet's name is the Deployment's name and this label's
value."""

_OWNER_NAME_LABELS: Final[Mapping[str, tuple[str, str]]] = {
    "Job": ("jobset.sigs.k8s.io/jobset-name", "JobSet"),
    "StatefulSet": ("leaderworkerset.sigs.k8s.io/name", LEADER_WORKER_SET),
}
"""By a controller's kind: the pod label with the name of the controller's owner, and the owner's
kind."""

_MAX_RUN_DAYS: Final = 31
"""Maximum time between a CronJob's scheduled time and its pod's creation. A Job whose name ends in
an older time has another origin: users often put dates into names."""

_MINUTES: Final = re.compile(r"[0-9]{8}")
"""Minutes since the epoch, from 1989 to 2160."""

_TIME: Final = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):")

_SERIES: Final = re.compile(r"-(?:[bcdfghjklmnpqrstvwxz2456789]{5}|[0-9]{1,10})\Z")
"""End of a pod's name in a series: the API server's addition to a `generateName` with a hyphen at
its end, or a number."""

_LIKENESS: Final = ("images", "requests")
"""Properties that make pods similar besides their owner, the most specific first."""

Kin = tuple[str, ...]
"""Keys that similar pods share, the most specific first: their owner, images and requests, each
within one namespace."""


def owner_of(metadata: Mapping[str, object]) -> str:
    """Return kind and name of a pod's controller, "" without one.

    A Deployment creates a ReplicaSet per revision, and a CronJob a Job per run. The result is the
    Deployment or the CronJob if the controller's name proves it.

    Example:
        >>> owner = {"controller": True, "kind": "ReplicaSet", "name": "serve-5d8f9c"}
        >>> owner_of({"ownerReferences": [owner], "labels": {"pod-template-hash": "5d8f9c"}})
        'Deployment serve'
    """
    for owner in objects_of(metadata.get("ownerReferences")):
        if owner.get("controller") is True:
            kind, name = text_of(owner.get("kind")), text_of(owner.get("name"))
            found = _maker_of(kind, name, metadata) or f"{kind} {name}"
            return found.strip()[:_MAX_OWNER]
    return ""


def _maker_of(kind: str, name: str, metadata: Mapping[str, object]) -> str:
    """Return kind and name of the controller's own owner, "" if uncertain."""
    labels = mapping_of(metadata.get("labels"))
    base, _, suffix = name.rpartition("-")
    if kind == "ReplicaSet" and base and suffix and suffix == labels.get(_TEMPLATE_HASH_LABEL):
        return f"Deployment {base}"
    label, maker_kind = _OWNER_NAME_LABELS.get(kind, ("", ""))
    maker = text_of(labels.get(label))
    if maker and f"{name}-".startswith(f"{maker}-"):
        return f"{maker_kind} {maker}"
    if kind == "Job" and base and _is_of_schedule(suffix, metadata):
        return f"CronJob {base}"
    return ""


def _is_of_schedule(suffix: str, metadata: Mapping[str, object]) -> bool:
    """Return whether a Job's name ends in the scheduled time of its CronJob."""
    if not _MINUTES.fullmatch(suffix):
        return False
    created = _TIME.match(text_of(metadata.get("creationTimestamp")))
    if created is None:
        return False
    try:
        created_at = timegm((*map(int, created.groups()), 0))
    except ValueError:  # no such day
        return False
    return 0 <= created_at // 60 - int(suffix) <= _MAX_RUN_DAYS * 24 * 60


def owner_key(namespace: str, owner: str, name: str) -> str:
    """Return the key of a pod's owner, or of the pod itself without an owner.

    Pods without an owner are one series, with one key, if their names come from one `generateName`
    or differ only in the number at their end.

    Example:
        >>> owner_key("ns", "Job train", "train-x7k2p"), owner_key("ns", "", "alone")
        ('ns/Job train', 'ns/alone')
        >>> owner_key("ns", "", "sweep-x7k2p"), owner_key("ns", "", "sweep-12")
        ('ns/sweep-', 'ns/sweep-')
    """
    if owner:
        return f"{namespace}/{owner}"
    return f"{namespace}/{_SERIES.sub('-', name)}"


def kin_of(pod: Mapping[str, object]) -> Kin:
    """Return the keys of a Pod object: owner, images and requests.

    Example:
        >>> container = {"image": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        >>> metadata = {"namespace": "ns", "name": "alone"}
        >>> len(kin_of({"metadata": metadata, "spec": {"containers": [container]}}))
        3
    """
    metadata = mapping_of(pod.get("metadata"))
    namespace, name = text_of(metadata.get("namespace")), text_of(metadata.get("name"))
    return owner_key(namespace, owner_of(metadata), name), *likeness_of(pod)


def similarity_of(key: str) -> str:
    """Return the kind of a key of `kin_of`: owner, images or requests.

    Example:
        >>> similarity_of("ns/Job train"), similarity_of("ns images 5d8f9c")
        ('owner', 'images')
    """
    return next((kind for kind in _LIKENESS if f" {kind} " in key), "owner")


def likeness_of(pod: Mapping[str, object]) -> Kin:
    """Return the keys of a Pod object's images and requests, without empty ones."""
    containers = list(objects_of(mapping_of(pod.get("spec")).get("containers")))
    images = [text_of(container.get("image")) for container in containers]
    requests = [
        f"{name}={text_of(amount)}"
        for container in containers
        for kind in ("limits", "requests")
        for name, amount in mapping_of(mapping_of(container.get("resources")).get(kind)).items()
    ]
    namespace = text_of(mapping_of(pod.get("metadata")).get("namespace"))
    digests = _digest([text for text in images if text]), _digest(sorted(set(requests)))
    return _likeness(namespace[:_MAX_NAMESPACE], *digests)


@lru_cache(maxsize=_MAX_CACHED)
def _likeness(namespace: str, *digests: str) -> Kin:
    """Return a key per non-empty digest; cached, so that similar pods share one object.

    The cache keeps its arguments, so they must be short for any pod that a caller sends.
    """
    named = zip(_LIKENESS, digests, strict=True)
    return tuple(f"{namespace} {kind} {digest}" for kind, digest in named if digest)


def _digest(texts: Sequence[str]) -> str:
    """Return a short digest of a list, "" if it is empty."""
    if not texts:
        return ""
    text = "\n".join(texts).encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).hexdigest()
