"""What a pod asks of GPUs, read from the Pod object as kube-scheduler or the API server sends it.

Nothing here raises for any pod: what cannot be read counts as absent, a bad annotation as unset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from extender.core.annotations import AnnotationProblem, own_settings, read_annotations
from extender.core.host_resources import requested
from extender.core.inventory import PodRecord
from extender.core.kin import Kin, kin_of
from extender.core.policy import Policy, Strategy, Thresholds
from extender.core.resources import ResourceNames, count_devices, has_claims
from extender.core.scheduled import last_word
from extender.core.selection import has_preferences
from extender.core.untyped import mapping_of, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRef:
    """Which pod is meant.

    Attributes:
        uid: `metadata.uid`.
        namespace: its namespace.
        name: its name.
    """

    uid: str
    namespace: str
    name: str

    @classmethod
    def of(cls, record: PodRecord) -> "PodRef":
        """Return which pod a record is of."""
        return cls(uid=record.uid, namespace=record.namespace, name=record.name)

    @property
    def key(self) -> str:
        """The pod as people write it: `namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """What a pod asks of GPUs.

    Attributes:
        resource: the resource that it asks for (`nvidia.com/gpu`); where it asks for several, the
            one named first in the setting.
        count: devices or replicas of it, at least 1.
        resources: every GPU resource that it asks for with its count, `resource` first.
        memory_bytes: room that each device must have, None where the pod does not say.
        expected_bytes: what pods like it were measured to use of each device, None where none was,
            or the pod says itself what it needs.
        requires_idle: the pod waits for devices known to be idle.
        thresholds: below both a device is idle to this pod.
        strategy: which of the nodes is best that are as certain to do.
        preferred_models: models in the order of preference, as the pod writes them.
        millicores: CPU that it requests of its node.
        host_bytes: memory that it requests of its node.
        nominated_node: where preemption makes room for the pod, "" where there is none.
        avoided: nodes on which pods of its owner failed soon after their start, and the share of
            its certainty that each loses for that, 0 to 1; makes no request another, for it
            concerns few nodes.
        has_preferences: it has wishes of its own that kube-scheduler weighs (soft topology spread,
            preferred affinity); makes no request another.
        last_word: why kube-scheduler found no node for the pod when it last tried, None where it
            did not say so; makes no request another.
        own: names of the settings in whose place the pod's own word stands; makes no request
            another.
    """

    resource: str
    count: int
    resources: tuple[tuple[str, int], ...] = ()
    memory_bytes: int | None = None
    expected_bytes: int | None = None
    requires_idle: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)
    strategy: Strategy = Strategy.AUTO
    preferred_models: tuple[str, ...] = ()
    millicores: int = 0
    host_bytes: int = 0
    nominated_node: str = ""
    avoided: Mapping[str, float] = field(default_factory=dict, compare=False)
    has_preferences: bool = field(default=False, compare=False)
    last_word: str | None = field(default=None, compare=False)
    own: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        if not self.resources:
            object.__setattr__(self, "resources", ((self.resource, self.count),))
        if self.resources[0] != (self.resource, self.count):
            raise ValueError(f"{self.resources}: the first must be {self.resource}: {self.count}")
        if min(count for _, count in self.resources) < 1:
            raise ValueError(f"{self.resources}: each count must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """What a Pod object says.

    Attributes:
        request: what it asks for; None where it asks for no GPU, or is left to kube-scheduler.
        kin: keys that it has in common with pods that are like it.
        is_disabled: it says `idlegpu.io/enabled: "false"`.
        has_claims: it names ResourceClaims: it may get devices that no resource shows.
        problems: annotations that cannot be used.
    """

    request: GpuRequest | None
    kin: Kin = field(default=(), compare=False)
    is_disabled: bool = False
    has_claims: bool = False
    problems: tuple[AnnotationProblem, ...] = ()


def parse_request(pod: object, *, resources: ResourceNames, defaults: Policy) -> ParsedRequest:
    """Return what a pod asks of GPUs.

    Args:
        pod: the Pod object as decoded from JSON; anything at all is taken.
        resources: which resources are GPUs.
        defaults: what holds where the pod does not say.

    Example:
        >>> container = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        >>> metadata = {"annotations": {"idlegpu.io/gpu-memory": "20Gi"}}
        >>> pod = {"metadata": metadata, "spec": {"containers": [container]}}
        >>> parse_request(pod, resources=ResourceNames(), defaults=Policy()).request.memory_bytes
        21474836480
    """
    fields = mapping_of(pod)
    wishes = read_annotations(fields, defaults)
    counts = tuple(count_devices(fields, resources).items())
    status = mapping_of(fields.get("status"))
    request = None
    if wishes.is_enabled and counts:
        resource, count = counts[0]
        host = requested(fields)
        request = GpuRequest(
            resource=resource,
            count=count,
            resources=counts,
            memory_bytes=wishes.memory_bytes,
            requires_idle=wishes.requires_idle,
            thresholds=wishes.thresholds,
            strategy=wishes.strategy,
            preferred_models=wishes.preferred_models,
            millicores=host.millicores,
            host_bytes=host.memory_bytes,
            nominated_node=text_of(status.get("nominatedNodeName")),
            has_preferences=has_preferences(fields),
            last_word=last_word(status),
            own=own_settings(fields, wishes),
        )
    return ParsedRequest(
        request=request,
        kin=kin_of(fields) if request is not None else (),
        is_disabled=not wishes.is_enabled,
        has_claims=has_claims(fields),
        problems=wishes.problems,
    )


def parse_pod_ref(pod: object) -> PodRef:
    """Return which pod an object is; what it does not say is "".

    Example:
        >>> parse_pod_ref({"metadata": {"namespace": "ns", "name": "a", "uid": "1"}}).key
        'ns/a'
    """
    metadata = mapping_of(mapping_of(pod).get("metadata"))
    return PodRef(
        uid=text_of(metadata.get("uid")),
        namespace=text_of(metadata.get("namespace")),
        name=text_of(metadata.get("name")),
    )
