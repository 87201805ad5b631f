"""Parse a pod's GPU request from its Pod object, or from its stored record.

Parsing never raises: an unreadable field counts as absent, an invalid annotation as unset.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from extender.core.devices.gpu_models import OTHER, normalize_model
from extender.core.nodes.host_resources import CPU, MEMORY, STORAGE, HostResources, requested
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.node_selection import has_preferences
from extender.core.nodes.pod_groups import Kin, PodGroup, kin_of, read_group
from extender.core.policy import GroupPolicy, Policy, Strategy, Thresholds
from extender.core.request.annotations import (
    Annotation,
    AnnotationProblem,
    Target,
    TargetPolicy,
    Wishes,
    has_memory,
    own_settings,
    parse_models,
    read_annotations,
)
from extender.core.request.gpu_resources import (
    Containers,
    ResourceNames,
    count_devices,
    list_containers,
)
from extender.core.request.memory_limits import MemoryLimit, read_limits
from extender.core.untyped import mapping_of, objects_of, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRef:
    """Identity of a pod.

    Attributes:
        uid: `metadata.uid`.
    """

    uid: str
    namespace: str
    name: str

    @classmethod
    def of(cls, record: PodRecord) -> "PodRef":
        """Return the identity of a record's pod."""
        return cls(uid=record.uid, namespace=record.namespace, name=record.name)

    @property
    def key(self) -> str:
        """The pod's `namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """A pod's GPU request.

    Fields from `avoided` on do not take part in comparison: they do not change the evaluation of
    most nodes, so requests that differ only there share cached results.

    Attributes:
        resource: requested GPU resource (`nvidia.com/gpu`); of several, the first in the setting's
            order.
        count: devices or replicas of `resource`, at least 1.
        resources: every requested GPU resource with its count, `resource` first.
        containers: the containers that request devices, by resource; () if one container requests
            all of each.
        memory_bytes: required memory per device, None if the pod does not specify any.
        memory_share: required memory per device as a share of the card's memory, 0 if the pod does
            not specify any.
        memory_source: variable or argument that states either, "" for the annotation.
        expected_bytes: measured memory use of similar pods per device; None without such a pod, or
            if the pod specifies its memory.
        requires_idle: the pod waits for devices known to be idle.
        thresholds: a device below both thresholds is idle for this pod.
        strategy: order among nodes of equal certainty.
        preferred_models: preferred GPU models, best first, as the pod writes them.
        required_models: the only GPU models that the pod accepts; () for all.
        targets: nodes that the pod names, in the order in which they are tried; () for any node.
        target_policy: behavior of the pod while no target can take it.
        millicores: requested CPU of the node.
        host_bytes: requested memory of the node.
        storage_bytes: requested ephemeral storage of the node.
        nominated_node: node on which preemption frees devices for the pod, "" if none.
        avoided: nodes where pods of the same owner failed soon after their start, with the share of
            its certainty that each node loses, 0 to 1.
        has_preferences: the pod has soft topology spread or preferred affinity for kube-scheduler.
        last_refusal: message of kube-scheduler's last failed attempt, None without one.
        group: group of the pod, None if it is in none or ignores it. Its size counts pods with
            GPUs.
        group_policy: effect of the group.
        own: names of settings that the pod's annotations override.
    """

    resource: str
    count: int
    resources: tuple[tuple[str, int], ...] = ()
    containers: Containers = ()
    memory_bytes: int | None = None
    memory_share: float = 0.0
    memory_source: str = field(default="", compare=False)
    expected_bytes: int | None = None
    requires_idle: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)
    strategy: Strategy = Strategy.AUTO
    preferred_models: tuple[str, ...] = ()
    required_models: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    target_policy: TargetPolicy = TargetPolicy.REQUIRE
    millicores: int = 0
    host_bytes: int = 0
    storage_bytes: int = 0
    nominated_node: str = ""
    avoided: Mapping[str, float] = field(default_factory=dict, compare=False)
    has_preferences: bool = field(default=False, compare=False)
    last_refusal: str | None = field(default=None, compare=False)
    group: PodGroup | None = field(default=None, compare=False)
    group_policy: GroupPolicy = field(default=GroupPolicy.REQUIRE, compare=False)
    own: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def host(self) -> HostResources:
        """Requested CPU, memory and storage of the node."""
        return HostResources(self.millicores, self.host_bytes, self.storage_bytes)

    @property
    def names_models(self) -> bool:
        """Whether the pod names GPU models, so that their price does not matter to it."""
        return bool(self.preferred_models or self.required_models)

    @property
    def may_wait(self) -> bool:
        """Whether the pod waits for its own conditions instead of going to an unsuitable node."""
        is_bound = self.targets and self.target_policy is TargetPolicy.REQUIRE
        return bool(self.requires_idle or self.required_models or is_bound)

    @property
    def target_nodes(self) -> frozenset[str] | None:
        """The only nodes that the pod accepts, None for all."""
        if not self.targets or self.target_policy is TargetPolicy.PREFER:
            return None
        return frozenset(target.node for target in self.targets if target.is_usable)

    def __post_init__(self) -> None:
        if not self.resources:
            object.__setattr__(self, "resources", ((self.resource, self.count),))
        if self.resources[0] != (self.resource, self.count):
            raise ValueError(f"{self.resources}: the first must be {self.resource}: {self.count}")
        if min(count for _, count in self.resources) < 1:
            raise ValueError(f"{self.resources}: each count must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """Result of parsing a Pod object.

    Attributes:
        request: the GPU request; None if the pod requests no GPU or disables the extender.
        kin: keys that identify similar pods.
        is_disabled: the pod has `idlegpu.io/enabled: "false"`.
        problems: invalid annotations, variables and arguments.
    """

    request: GpuRequest | None
    kin: Kin = field(default=(), compare=False)
    is_disabled: bool = False
    problems: tuple[AnnotationProblem, ...] = ()


def parse_request(
    pod: object, *, resources: ResourceNames, defaults: Policy, group: PodGroup | None = None
) -> ParsedRequest:
    """Parse a pod's GPU request and its annotations.

    Args:
        pod: the Pod object as decoded from JSON, of any shape.
        defaults: values for annotations that the pod does not set.
        group: the pod's group, if it is known already.

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
    request, problems = None, wishes.problems
    if wishes.is_enabled and counts:
        resource, count = counts[0]
        host = requested(fields)
        limit = MemoryLimit(memory_bytes=wishes.memory_bytes)
        if defaults.reads_memory_limits and not has_memory(fields):
            limit, ignored = read_limits(fields, resources)
            problems = (*problems, *ignored)
        request = GpuRequest(
            resource=resource,
            count=count,
            resources=counts,
            containers=list_containers(fields, resources),
            memory_bytes=limit.memory_bytes,
            memory_share=limit.share,
            memory_source=limit.source,
            requires_idle=wishes.requires_idle,
            thresholds=wishes.thresholds,
            strategy=wishes.strategy,
            preferred_models=wishes.preferred_models,
            required_models=wishes.required_models,
            targets=wishes.targets,
            target_policy=wishes.target_policy,
            millicores=host.millicores,
            host_bytes=host.memory_bytes,
            storage_bytes=host.storage_bytes,
            nominated_node=text_of(status.get("nominatedNodeName")),
            has_preferences=has_preferences(fields),
            last_refusal=_last_refusal(status),
            group=_group(group or read_group(fields), wishes),
            group_policy=wishes.group_policy,
            own=own_settings(fields, wishes),
        )
    return ParsedRequest(
        request=request,
        kin=kin_of(fields) if request is not None else (),
        is_disabled=not wishes.is_enabled,
        problems=problems,
    )


def _group(group: PodGroup | None, wishes: Wishes) -> PodGroup | None:
    """Return a pod's group with the size in the pod's own annotation."""
    if group is None or wishes.group_policy is GroupPolicy.IGNORE:
        return None
    return group if wishes.group_size is None else replace(group, size=wishes.group_size)


def parse_pod_ref(pod: object) -> PodRef:
    """Parse the identity of a Pod object; a missing field is "".

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


GATE: Final = "idlegpu.io/room"
"""Scheduling gate of pods that wait until the extender finds room for them."""

_MAX_MESSAGE: Final = 1500
"""Maximum stored length of kube-scheduler's message; the reasons come first."""


def scheduled_condition(status: object) -> Mapping[str, object]:
    """Return the PodScheduled condition of a pod's status, empty if missing."""
    for condition in objects_of(mapping_of(status).get("conditions")):
        if condition.get("type") == "PodScheduled":
            return condition
    return {}


def awaits_room(spec: object) -> bool:
    """Return whether our scheduling gate is the pod's only one.

    Example:
        >>> awaits_room({"schedulingGates": [{"name": "idlegpu.io/room"}]})
        True
    """
    gates = objects_of(mapping_of(spec).get("schedulingGates"))
    return [gate.get("name") for gate in gates] == [GATE]


def is_unschedulable(scheduled: Mapping[str, object]) -> bool:
    """Return whether the PodScheduled condition reports that no node was found.

    Example:
        >>> is_unschedulable({"status": "False", "reason": "Unschedulable"})
        True
    """
    return scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"


def message_of(scheduled: Mapping[str, object]) -> str:
    """Return the condition's message, truncated to `_MAX_MESSAGE`."""
    return text_of(scheduled.get("message"))[:_MAX_MESSAGE]


def _last_refusal(status: object) -> str | None:
    """Return the message of the last attempt if it failed, else None.

    Example:
        >>> waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        >>> _last_refusal({"conditions": [waits | {"message": "0/9 nodes are available"}]})
        '0/9 nodes are available'
        >>> _last_refusal({"conditions": [waits | {"status": "True"}]}), _last_refusal(None)
        (None, None)
    """
    scheduled = scheduled_condition(status)
    return message_of(scheduled) if is_unschedulable(scheduled) else None


_REMEMBERED: Final = 256
"""Cache size: number of different requests; most waiting pods have equal ones."""


class WaitingRequests:
    """Cached parser of pod records: equal requests are parsed once."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._read: OrderedDict[object, ParsedRequest] = OrderedDict()

    def read(self, record: PodRecord, policy: Policy) -> ParsedRequest:
        """Return the result that `parse_request` gives for the pod's own object.

        Args:
            record: record of an unbound pod.
            policy: defaults for annotations that the pod does not set.
        """
        if self._policy is not policy:
            self._policy = policy
            self._read.clear()
        key = (
            tuple(record.resources.items()),
            record.containers,
            record.wishes,
            record.nominated_node,
            record.message if record.is_unscheduled else None,
            record.host,
            record.has_preferences,
            record.group,
            record.memory_bytes,
            record.memory_share,
        )
        parsed = self._read.get(key)
        if parsed is None:
            parsed = self._read[key] = _parse(record, policy)
            if len(self._read) > _REMEMBERED:
                self._read.popitem(last=False)
        return parsed


def required_models(record: PodRecord) -> tuple[str, ...]:
    """Return the GPU models that an unbound pod accepts, normalized; () for all.

    They come from its annotation, else from its node selector or affinity.
    """
    wishes = dict(record.wishes)
    listed = wishes.get(Annotation.REQUIRE_MODELS, "")
    if listed:
        try:
            return tuple(map(normalize_model, parse_models(listed)))
        except ValueError:
            return ()
    is_wish = Annotation.PREFER_MODELS in wishes
    return () if is_wish or record.wanted_model in {"", OTHER} else (record.wanted_model,)


def _requests(host: HostResources) -> dict[str, str]:
    """Return the resource requests of an equivalent container."""
    return {
        CPU: f"{host.millicores}m",
        MEMORY: str(host.memory_bytes),
        STORAGE: str(host.storage_bytes),
    }


def _parse(record: PodRecord, policy: Policy) -> ParsedRequest:
    """Parse a pod's record through an equivalent Pod object."""
    limits = {resource: str(count) for resource, count in record.resources.items()}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pod = {
        "metadata": {"annotations": dict(record.wishes)},
        "spec": {
            "containers": [{"resources": {"limits": limits, "requests": _requests(record.host)}}]
        },
        "status": {
            "nominatedNodeName": record.nominated_node,
            "conditions": [condition | {"message": record.message}] * record.is_unscheduled,
        },
    }
    # The record's resources are in the order of the setting.
    names = ResourceNames(tuple(limits)) if limits else ResourceNames()
    parsed = parse_request(pod, resources=names, defaults=policy, group=record.group)
    if parsed.request is None:
        return parsed
    memory_bytes = parsed.request.memory_bytes
    request = replace(
        parsed.request,
        containers=record.containers,
        has_preferences=record.has_preferences,
        # Its containers' limits are not in the equivalent pod.
        memory_bytes=record.memory_bytes if memory_bytes is None else memory_bytes,
        memory_share=record.memory_share,
    )
    return replace(parsed, request=request)
