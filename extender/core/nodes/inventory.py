"""Node and pod records: the fields of API objects that GPU placement needs.

A pod's node selection is matched against a node as kube-scheduler's plugins NodeAffinity,
TaintToleration and NodeUnschedulable do. Requirements on labels that the extender does not store
count as met.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from extender.core.devices.topology import POLICY_LABEL, SCOPE_LABEL
from extender.core.nodes.host_resources import NONE, HostResources
from extender.core.nodes.node_selection import Operator, Requirement, Selection, Term
from extender.core.nodes.pod_groups import Kin, PodGroup, owner_key
from extender.core.request.gpu_resources import Containers

HOSTNAME: Final = "kubernetes.io/hostname"

POOL_LABELS: Final = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
"""Labels for the node pool, set by cloud providers and Karpenter; Cluster Autoscaler sets none."""

MODEL_LABELS: Final = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
"""Labels with the model of a node's GPUs, the most exact first."""

ZONE: Final = "topology.kubernetes.io/zone"

_LABELS_SHOWN: Final = frozenset(
    {
        *POOL_LABELS,
        *MODEL_LABELS,
        "cloud.google.com/gke-gpu-partition-size",
        "cloud.google.com/gke-gpu-sharing-strategy",
        "cloud.google.com/gke-max-shared-clients-per-gpu",
        "karpenter.k8s.aws/instance-gpu-count",
        "karpenter.k8s.aws/instance-gpu-memory",
        "kubernetes.azure.com/accelerator",
        "node.kubernetes.io/instance-type",
        POLICY_LABEL,
        SCOPE_LABEL,
        ZONE,
    }
)
_NVIDIA_PREFIX: Final = "nvidia.com/"
_DROPPED_PREFIXES: Final = (
    "nvidia.com/gfd.timestamp",  # changes every minute, without information
    "nvidia.com/gpu.deploy.",  # operator components on the node
    "feature.node.kubernetes.io/",  # about a hundred per node
)
_DROPPED_NVIDIA_WORDS: Final = (".engines.", ".slices.", ".multiprocessors")
"""Parts of labels with MIG profile details, a dozen per profile; no decision needs them."""

_MAX_CACHED: Final = 4096


@lru_cache(maxsize=_MAX_CACHED)
def is_kept(label: str) -> bool:
    """Return whether a node label is stored.

    Example:
        >>> is_kept("disk"), is_kept("feature.node.kubernetes.io/cpu-cpuid.AVX512F")
        (True, False)
        >>> is_kept("nvidia.com/gpu.deploy.dcgm"), is_kept("nvidia.com/mig-1g.10gb.slices.gi")
        (False, False)
    """
    if label.startswith(_DROPPED_PREFIXES):
        return False
    return not label.startswith(_NVIDIA_PREFIX) or not any(
        word in label for word in _DROPPED_NVIDIA_WORDS
    )


@lru_cache(maxsize=_MAX_CACHED)
def is_shown(label: str) -> bool:
    """Return whether a node label describes GPUs, node pool or zone.

    Example:
        >>> is_shown("nvidia.com/gpu.product"), is_shown(ZONE), is_shown("disk")
        (True, True, False)
        >>> is_shown("karpenter.sh/nodepool"), is_shown("k8s.amazonaws.com/accelerator")
        (True, True)
        >>> is_shown("karpenter.k8s.aws/instance-gpu-memory")
        True
    """
    return label in _LABELS_SHOWN or (label.startswith(_NVIDIA_PREFIX) and is_kept(label))


_EMPTY: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint from a node's `spec.taints`.

    Attributes:
        key: the taint's key.
        value: its value, "" without one.
        effect: NoSchedule, PreferNoSchedule or NoExecute.
    """

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    @property
    def repels(self) -> bool:
        """Whether the taint keeps pods without a toleration away."""
        return self.effect in {"NoSchedule", "NoExecute"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node of the cluster.

    Attributes:
        name: the node's name.
        addresses: internal IP addresses and host names that differ from the name.
        allocatable: `status.allocatable` of the GPU resources: count by resource name.
        capacity: `status.capacity` of the GPU resources. Includes unhealthy devices.
        labels: labels about GPUs (GFD, MIG manager, cloud providers), node pool and zone.
        other_labels: other stored labels except the host name; pods may select by them.
        hostname: label `kubernetes.io/hostname`, "" without one.
        taints: taints about GPUs or that keep pods away.
        host: allocatable CPU, memory and ephemeral storage, None if unknown.
        is_unschedulable: `spec.unschedulable` (cordoned).
        is_ready: the Ready condition is True.
    """

    name: str
    addresses: tuple[str, ...] = ()
    allocatable: Mapping[str, int] = field(default_factory=lambda: _EMPTY)
    capacity: Mapping[str, int] = field(default_factory=lambda: _EMPTY)
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    other_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    hostname: str = ""
    taints: tuple[Taint, ...] = ()
    host: HostResources | None = None
    is_unschedulable: bool = False
    is_ready: bool = True

    def label(self, key: str) -> str | None:
        """Return the value of a stored label, or None if the node lacks it."""
        if key == HOSTNAME:
            return self.hostname or None
        found = self.labels.get(key)
        return self.other_labels.get(key) if found is None else found

    def offers_as(self, other: "NodeRecord") -> bool:
        """Return whether another record of the node is equal except for labels that pods select by.

        Some controllers rewrite such labels all the time; they do not change the node's devices.
        """
        return replace(self, other_labels=other.other_labels, hostname=other.hostname) == other


class PodPhase(StrEnum):
    """Phase of a pod; in Succeeded and Failed it holds no devices any more."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"

    @property
    def is_terminal(self) -> bool:
        """Whether the pod has ended."""
        return self in {PodPhase.SUCCEEDED, PodPhase.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedDevice:
    """A GPU that is allocated to a ResourceClaim.

    Attributes:
        uuid: UUID of the card, or of the parent card of a MIG instance; "" if no ResourceSlice has
            it.
        mig_profile: profile of the MIG instance (`1g.10gb`), "" for a whole card.
        name: device name in the claim (`gpu-0-mig-1g10gb-19-0`), unique per node.
    """

    uuid: str
    mig_profile: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """One pod that requests GPUs, or holds GPUs through ResourceClaims.

    Times are in seconds since the epoch.

    Attributes:
        uid: `metadata.uid`.
        node: `spec.nodeName`, "" if not bound.
        nominated_node: `status.nominatedNodeName`, "" if none.
        phase: `status.phase`.
        resources: effective device count by GPU resource name.
        lasting: `resources` without the part that only init containers request; None if equal.
        containers: as in `GpuRequest`; only while unbound.
        has_claims: the pod uses ResourceClaims, which may hold devices outside `resources`.
        has_gpu_claims: one of its claims certainly holds GPUs outside `resources`.
        claimed: GPUs that it holds through ResourceClaims, each once; None if unknown, as for every
            unbound pod.
        memory_bytes: GPU memory per device from its annotation or a limit; None if not set.
        memory_share: the limit as a share of the card's memory, 0 without one.
        host: requested CPU, memory and ephemeral storage of the node; only while unbound.
        bound_at: time of binding, from the PodScheduled condition; None if not bound.
        started_at: start of its first container, None before that. Init containers count only as
            sidecars with GPUs.
        last_started_at: latest start of any of its containers with GPUs, infinite while one of them
            waits to start again; None if equal to `started_at`.
        ended_at: end of its last container, in terminal phases; None if unknown.
        is_failed_early: the pod failed, or one of its containers restarts repeatedly, soon after
            its start.
        is_device_fault: the pod failed early, and its status names a device as the cause.
        failed_at: time of the early failure; None without one, or while it is still failing.
        is_unscheduled: PodScheduled is False with reason Unschedulable.
        is_refused: the pod is unscheduled, and the message contains one of our rejections. Every
            replica reads it there, also after a restart.
        has_preferences: as in `GpuRequest`; only while unbound.
        wishes: name and value of its `idlegpu.io/` annotations, sorted; only while unbound.
        version: `metadata.resourceVersion`, "" if the record lacks part of the request; only while
            unbound; not compared.
        scheduler_name: `spec.schedulerName`.
        created_at: `metadata.creationTimestamp`.
        is_deleting: `metadata.deletionTimestamp` is set.
        message: kube-scheduler's message why the pod is unscheduled, truncated; only while unbound.
        is_gated: a scheduling gate holds the pod back.
        awaits_room: its only scheduling gate is `core.request.request.GATE`.
        priority: `spec.priority`.
        owner: kind and name of its controller (`Job train`), "" without one.
        likeness: keys of its images and its requests; similar pods share them.
        wanted_model: requested GPU model, a word of `core.devices.gpu_models._NAMES` or `other`, ""
            if none; only while unbound.
        gives_way: its priority is negative: any pod may preempt it.
        selection: its node selector, required affinity and tolerations; only while unbound. None if
            it requests no GPU resource or exceeds the size limit.
        group: its group, None if it is in none.
    """

    uid: str
    namespace: str
    name: str
    node: str = ""
    nominated_node: str = ""
    phase: PodPhase = PodPhase.PENDING
    resources: Mapping[str, int] = field(default_factory=lambda: _EMPTY)
    lasting: Mapping[str, int] | None = None
    containers: Containers = ()
    has_claims: bool = False
    has_gpu_claims: bool = False
    claimed: tuple[ClaimedDevice, ...] | None = None
    memory_bytes: int | None = None
    memory_share: float = 0.0
    host: HostResources = NONE
    bound_at: float | None = None
    started_at: float | None = None
    last_started_at: float | None = None
    ended_at: float | None = None
    is_failed_early: bool = False
    is_device_fault: bool = False
    failed_at: float | None = None
    is_unscheduled: bool = False
    is_refused: bool = False
    has_preferences: bool = False
    wishes: tuple[tuple[str, str], ...] = ()
    version: str = field(default="", compare=False)
    scheduler_name: str = "default-scheduler"
    created_at: float = 0.0
    is_deleting: bool = False
    message: str = ""
    is_gated: bool = False
    awaits_room: bool = False
    priority: int = 0
    owner: str = ""
    likeness: Kin = ()
    wanted_model: str = ""
    gives_way: bool = False
    selection: Selection | None = None
    group: PodGroup | None = None

    @property
    def key(self) -> str:
        """The pod's `namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def kin(self) -> Kin:
        """Keys that identify similar pods, the most similar first."""
        return owner_key(self.namespace, self.owner, self.name), *self.likeness

    @property
    def works_since(self) -> float | None:
        """Latest start of its containers with GPUs, None before the first start."""
        return self.started_at if self.last_started_at is None else self.last_started_at

    @property
    def holds_devices(self) -> bool:
        """Whether the pod is bound and has not ended, so that it holds devices of its node."""
        return bool(self.node) and not self.phase.is_terminal


CORDON: Final = Taint(key="node.kubernetes.io/unschedulable")
"""Taint of cordoned nodes; pods that tolerate it may go there."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_INT64: Final = 1 << 63


def may_go(selection: Selection, node: NodeRecord) -> bool:
    """Return whether labels, taints and cordon let a pod go to a node.

    Example:
        >>> may_go(Selection(labels=(("disk", "ssd"),)), NodeRecord(name="a"))
        False
    """
    if node.is_unschedulable and not tolerates(selection, CORDON):
        return False
    return all(tolerates(selection, taint) for taint in node.taints if taint.repels) and selects(
        selection, node
    )


def selects(selection: Selection, node: NodeRecord) -> bool:
    """Return whether a pod's node selector and required affinity match a node."""
    for key, value in selection.labels:
        if is_kept(key) and node.label(key) != value:
            return False
    return selection.terms is None or any(_meets(node, term) for term in selection.terms)


def tolerates(selection: Selection, taint: Taint) -> bool:
    """Return whether a pod tolerates a taint."""
    return any(
        (key, effect, value) in selection.tolerations
        for key, value in ((taint.key, taint.value), (taint.key, None), ("", None))
        for effect in ("", taint.effect)
    )


def _meets(node: NodeRecord, term: Term) -> bool:
    return all(
        not is_kept(one.key) or _holds(one, node.label(one.key)) for one in term.labels
    ) and all(_holds_of_name(one, node.name) for one in term.fields)


def _holds(requirement: Requirement, value: str | None) -> bool:
    """Return whether a label value, None if missing, meets a requirement."""
    match requirement.operator:
        case Operator.IN:
            return value in requirement.values
        case Operator.NOT_IN:
            return value not in requirement.values
        case Operator.EXISTS:
            return value is not None
        case Operator.DOES_NOT_EXIST:
            return value is None
        case Operator.GT | Operator.LT:
            return _compares(requirement, value)


def _compares(requirement: Requirement, value: str | None) -> bool:
    """Return whether a label's value meets a Gt or Lt requirement."""
    if len(requirement.values) != 1:
        return False
    bound, found = _integer(next(iter(requirement.values))), _integer(value or "")
    if bound is None or found is None:
        return False
    return found > bound if requirement.operator is Operator.GT else found < bound


def _integer(text: str) -> int | None:
    """Parse an int64 like kube-scheduler; None if invalid."""
    if not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    return number if -_INT64 <= number < _INT64 else None


def _holds_of_name(requirement: Requirement, name: str) -> bool:
    """Return whether a node name meets a `metadata.name` requirement with one value."""
    if requirement.key != "metadata.name" or len(requirement.values) != 1:
        return False
    if requirement.operator not in {Operator.IN, Operator.NOT_IN}:
        return False
    return _holds(requirement, name)
