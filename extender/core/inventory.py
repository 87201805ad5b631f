"""What the API server says of nodes and pods, reduced to what placing GPU pods needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from extender.core.host_resources import NONE, HostResources
from extender.core.kin import Kin, owner_key
from extender.core.labels import HOSTNAME
from extender.core.selection import Selection

EMPTY: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node, as `spec.taints` has it.

    Attributes:
        key: the taint's key.
        value: its value, "" where it has none.
        effect: NoSchedule, PreferNoSchedule or NoExecute.
    """

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    @property
    def repels(self) -> bool:
        """Whether pods that do not tolerate it are not scheduled there."""
        return self.effect in {"NoSchedule", "NoExecute"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node of the cluster.

    Attributes:
        name: the node's name.
        addresses: its internal IP addresses and host names, other than its name.
        allocatable: device count by GPU resource name; only GPU resources are kept.
        capacity: the same, from `status.capacity`; an unhealthy device is in capacity alone.
        labels: labels that speak of GPUs (GFD, MIG manager, cloud providers), pool and zone.
        other_labels: the others that are kept, but for the host's name: pods may select by them.
        hostname: the label `kubernetes.io/hostname`, "" where it has none.
        taints: taints that speak of GPUs or keep pods away.
        host: CPU and memory that pods may request of it, None where it does not say.
        is_unschedulable: `spec.unschedulable` (cordoned).
        is_ready: the Ready condition is True.
    """

    name: str
    addresses: tuple[str, ...] = ()
    allocatable: Mapping[str, int] = field(default_factory=lambda: EMPTY)
    capacity: Mapping[str, int] = field(default_factory=lambda: EMPTY)
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    other_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    hostname: str = ""
    taints: tuple[Taint, ...] = ()
    host: HostResources | None = None
    is_unschedulable: bool = False
    is_ready: bool = True

    def label(self, key: str) -> str | None:
        """Return the value of a label that is kept, None where the node has no such."""
        if key == HOSTNAME:
            return self.hostname or None
        found = self.labels.get(key)
        return self.other_labels.get(key) if found is None else found

    def offers_as(self, other: "NodeRecord") -> bool:
        """Tell whether another record of the node differs at most in what pods select by.

        Some write labels of theirs again and again: none of that changes what the node offers.
        """
        return replace(self, other_labels=other.other_labels, hostname=other.hostname) == other


class PodPhase(StrEnum):
    """How far a pod is; Succeeded and Failed hold no devices any more."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"

    @property
    def is_terminal(self) -> bool:
        """Whether a pod in this phase has ended."""
        return self in {PodPhase.SUCCEEDED, PodPhase.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedDevice:
    """A GPU that is allocated to a ResourceClaim.

    Attributes:
        uuid: UUID of the card, of the parent card for a MIG instance; "" where no ResourceSlice
            tells.
        mig_profile: profile of the instance (`1g.10gb`), "" for a whole card.
        name: as its claim names it (`gpu-0-mig-1g10gb-19-0`): of claims of one node, the same name
            is the same device.
    """

    uuid: str
    mig_profile: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """One pod that asks for GPUs, or holds them through ResourceClaims.

    Attributes:
        uid: `metadata.uid`.
        namespace: its namespace.
        name: its name.
        node: `spec.nodeName`, "" while it is not bound.
        nominated_node: `status.nominatedNodeName`, "" where there is none.
        phase: `status.phase`.
        resources: effective device count by GPU resource name.
        lasting: likewise, without what only its init containers ask for; None where that is all.
        has_claims: it names ResourceClaims: it may hold devices that `resources` does not show.
        has_gpu_claims: one of them was surely made for GPUs that `resources` does not show.
        claimed: the GPUs that it holds through ResourceClaims, none of them twice; None where that
            is not known, as of every pod that is not bound.
        memory_bytes: room per GPU that its annotation asks for, None where it does not say.
        host: CPU and memory that it requests of its node; kept only while it is not bound.
        bound_at: when it was bound: the PodScheduled condition, seconds since the epoch;
            None while it is not bound.
        started_at: when its first container started, None before that; of init containers only
            sidecars with GPUs count.
        last_started_at: when the youngest of its containers with GPUs did, the last time; None
            where that is the same.
        ended_at: when its last container ended (terminal phases only), None where unknown.
        is_failed_early: it failed, or a container of it keeps dying, soon after its start.
        is_device_fault: so it is, and its status says that a device was the cause.
        failed_at: when that was, None where it did not, or does so now.
        is_unscheduled: PodScheduled is False with reason Unschedulable.
        is_refused: so it is, and its message names one of our rejections: every replica learns
            there, also after a restart, that we refused nodes to the pod.
        has_preferences: as `GpuRequest` has it; kept only while it is not bound.
        wishes: name and value of each of its annotations under `idlegpu.io/`, sorted; kept only
            while it is not bound.
        version: `metadata.resourceVersion`, "" where the record does not have all that the pod asks
            for; kept only while it is not bound; makes no record another.
        scheduler_name: `spec.schedulerName`.
        created_at: `metadata.creationTimestamp`, seconds since the epoch.
        is_deleting: `metadata.deletionTimestamp` is set.
        message: what kube-scheduler says of why it is not placed, cut where it is long; kept only
            while the pod is not bound.
        is_gated: a scheduling gate keeps kube-scheduler from trying it.
        awaits_room: ours is the only one, `core.scheduled.GATE`.
        priority: `spec.priority`.
        owner: kind and name of what controls it (`Job train`), "" where nothing does.
        likeness: keys of its images and its requests: other pods with the same are like it.
        wanted_model: the model that it asks for, as one word of `core.cards.NAMES` or `other`, ""
            where it does not say; kept only while the pod is not bound.
        gives_way: its priority is negative: it is there to be preempted by any pod.
        selection: which nodes it may go to by its own word; kept only while the pod is not bound,
            None where it asks for no GPU resource or says more than is kept.
    """

    uid: str
    namespace: str
    name: str
    node: str = ""
    nominated_node: str = ""
    phase: PodPhase = PodPhase.PENDING
    resources: Mapping[str, int] = field(default_factory=lambda: EMPTY)
    lasting: Mapping[str, int] | None = None
    has_claims: bool = False
    has_gpu_claims: bool = False
    claimed: tuple[ClaimedDevice, ...] | None = None
    memory_bytes: int | None = None
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

    @property
    def key(self) -> str:
        """The pod as people write it: `namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def kin(self) -> Kin:
        """The keys that it has in common with pods that are like it."""
        return owner_key(self.namespace, self.owner, self.name), *self.likeness

    @property
    def works_since(self) -> float | None:
        """When what works on its GPUs last started, None before that."""
        return self.started_at if self.last_started_at is None else self.last_started_at

    @property
    def holds_devices(self) -> bool:
        """Whether the pod counts as a tenant of its node: bound and not ended."""
        return bool(self.node) and not self.phase.is_terminal
