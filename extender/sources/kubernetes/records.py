"""Reduce Node and Pod objects to the records of the inventory; accept any JSON object.

Fields that kubelets update without a real change (heartbeats, timestamps) are left out, so that
equal records mean that nothing relevant changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from math import inf
from sys import intern
from types import MappingProxyType
from typing import Final

from extender.core.decision.filtering import Rejection
from extender.core.devices.gpu_models import ANY, short_model
from extender.core.nodes.host_resources import (
    CPU,
    MEMORY,
    NONE,
    HostResources,
    read_resources,
    requested,
    shared,
)
from extender.core.nodes.inventory import (
    HOSTNAME,
    MODEL_LABELS,
    NodeRecord,
    PodPhase,
    PodRecord,
    Taint,
    is_kept,
    is_shown,
)
from extender.core.nodes.node_selection import (
    Selection,
    has_preferences,
    is_excessive,
    read_selection,
)
from extender.core.nodes.pod_groups import likeness_of, owner_of, read_group
from extender.core.request.annotations import PREFIX, Annotation, has_memory, read_memory
from extender.core.request.gpu_resources import (
    ResourceNames,
    count_devices,
    count_lasting,
    has_claims,
    has_gpu_claims,
    holds_devices,
    list_containers,
    read_counts,
)
from extender.core.request.memory_limits import MemoryLimit, read_limits
from extender.core.request.request import (
    awaits_room,
    is_unschedulable,
    message_of,
    scheduled_condition,
)
from extender.core.untyped import int_of, items_of, mapping_of, objects_of, text_of
from extender.sources.kubernetes.pod_failures import (
    is_device_fault,
    is_failed_early,
    last_end,
    parse_time,
)


def _wanted_model(raw: Mapping[str, object]) -> str:
    """Return the short name of the GPU model that a Pod object requests, "" if none.

    Required models come before preferred ones; of several the first one counts.

    Example:
        >>> _wanted_model({"spec": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}}})
        'l4'
        >>> _wanted_model({})
        ''
    """
    spec = mapping_of(raw.get("spec"))
    for model in (*_selected(spec), *_preferred(raw)):
        short = short_model(model)
        if short != ANY:  # `ANY`: the text contains no model name
            return short
    return ""


def _selected(spec: Mapping[str, object]) -> Iterator[str]:
    selector = mapping_of(spec.get("nodeSelector"))
    yield from (text_of(selector.get(label)) for label in MODEL_LABELS)
    by_node = mapping_of(mapping_of(spec.get("affinity")).get("nodeAffinity"))
    required = mapping_of(by_node.get("requiredDuringSchedulingIgnoredDuringExecution"))
    for term in objects_of(required.get("nodeSelectorTerms")):
        for expression in objects_of(term.get("matchExpressions")):
            if expression.get("key") in MODEL_LABELS and expression.get("operator") == "In":
                yield from map(text_of, items_of(expression.get("values")))


def _preferred(raw: Mapping[str, object]) -> Iterator[str]:
    annotations = mapping_of(mapping_of(raw.get("metadata")).get("annotations"))
    yield from text_of(annotations.get(Annotation.PREFER_MODELS.value)).split(",")


_GPU_TAINT_WORDS: Final = ("gpu", "nvidia")
_STORED_ADDRESSES: Final = frozenset({"InternalIP", "Hostname", "InternalDNS"})
"""Types of node addresses that metrics may use to name a node."""
_MAX_LABELS: Final = 512
"""Limit for the labels of a node, of both kinds. A kubelet may set thousands, and other ones each
time, which the cache would keep."""
_MAX_ADDRESSES: Final = 32
"""Limit for the addresses of a node. Its kubelet may name any, and an address that several nodes
name identifies none."""
_MAX_TAINTS: Final = 100
"""Limit for the taints of a node; each is compared with the tolerations of waiting pods."""
_REPELLING_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})
_MAX_CACHED: Final = 4096
_MAX_SHARED: Final = 256
"""Cache size for large values: equal ones share one object while it is in the cache."""

_MAX_WISHES: Final = 4096
"""Limit for a pod's annotations under our prefix, in characters; larger ones are not stored unless
we refused the pod."""
_MAX_SELECTION: Final = 8192
"""Limit for a pod's node selection that is stored, in units of `Selection.size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterPod:
    """A pod that exports telemetry; it maps metrics to their node.

    Attributes:
        namespace, name: identify it.
        node: the node it runs on.
        addresses: its IP addresses.
    """

    namespace: str
    name: str
    node: str
    addresses: tuple[str, ...]


def reduce_node(raw: Mapping[str, object], names: ResourceNames) -> NodeRecord | None:
    """Return the record of a Node object, None if it has no name."""
    metadata = mapping_of(raw.get("metadata"))
    spec = mapping_of(raw.get("spec"))
    status = mapping_of(raw.get("status"))
    name = text_of(metadata.get("name"))
    if not name:
        return None
    labels = mapping_of(metadata.get("labels"))
    return NodeRecord(
        name=intern(name),
        addresses=tuple(
            text_of(address.get("address"))
            for address in objects_of(status.get("addresses"))[:_MAX_ADDRESSES]
            if text_of(address.get("type")) in _STORED_ADDRESSES
            and text_of(address.get("address")) not in {"", name}
        ),
        allocatable=_shared_counts(read_counts(status.get("allocatable"), names)),
        capacity=_shared_counts(read_counts(status.get("capacity"), names)),
        labels=_shown_labels(labels),
        other_labels=_other_labels(labels),
        hostname=intern(text_of(labels.get(HOSTNAME))),
        taints=_stored_taints(spec.get("taints")),
        host=_host(status),
        is_unschedulable=spec.get("unschedulable") is True,
        is_ready=_condition(status, "Ready").get("status", "True") == "True",
    )


def _host(status: Mapping[str, object]) -> HostResources | None:
    """Return the allocatable resources of a node, None if CPU or memory is missing."""
    allocatable = mapping_of(status.get("allocatable"))
    if CPU not in allocatable or MEMORY not in allocatable:
        return None
    return shared(read_resources(allocatable))


def reduce_pod(
    raw: Mapping[str, object],
    names: ResourceNames,
    *,
    early_seconds: float,
    reads_limits: bool = False,
) -> PodRecord | None:
    """Return the record of a Pod object, None if it neither requests GPUs nor has claims.

    Args:
        raw: the Pod object.
        early_seconds: a container that fails within this time after its start failed early.
        reads_limits: read the memory limits of variables and arguments.
    """
    resources = count_devices(raw, names)
    lasting = count_lasting(raw, names) if resources else resources
    claims = has_claims(raw)
    metadata = mapping_of(raw.get("metadata"))
    uid = text_of(metadata.get("uid"))
    if not uid or not (resources or claims):
        return None
    spec = mapping_of(raw.get("spec"))
    status = mapping_of(raw.get("status"))
    node = intern(text_of(spec.get("nodeName")))
    phase = _phase(status)
    scheduled = scheduled_condition(status)
    is_scheduled = scheduled.get("status") == "True"
    is_unscheduled = is_unschedulable(scheduled)
    is_refused = (
        is_unscheduled and not node and _is_our_rejection(text_of(scheduled.get("message")))
    )
    created_at = parse_time(metadata.get("creationTimestamp"))
    is_waiting = not (node or phase.is_terminal)
    wishes = _wishes(mapping_of(metadata.get("annotations"))) if is_waiting else ()
    is_stored = is_waiting and sum(map(len, chain(*wishes))) <= _MAX_WISHES
    bound_at = _bound_at(status, scheduled if is_scheduled else {}, created_at) if node else None
    is_failed = bool(node) and is_failed_early(raw, early_seconds)
    sidecars = _sidecars(spec, status, names)
    started_at = _started_at(status, sidecars)
    # A pod that its node refused to start ended when it was bound.
    refused_at = bound_at if phase.is_terminal else None
    limit = MemoryLimit(memory_bytes=read_memory(raw))
    if reads_limits and resources and not has_memory(raw):
        limit, _ = read_limits(raw, names)
    return PodRecord(
        uid=uid,
        namespace=intern(text_of(metadata.get("namespace"))),
        name=text_of(metadata.get("name")),
        node=node,
        nominated_node=text_of(status.get("nominatedNodeName")),
        phase=phase,
        resources=_shared_counts(resources),
        lasting=None if lasting == resources else _shared_counts(lasting),
        containers=list_containers(raw, names) if is_waiting else (),
        has_claims=claims,
        has_gpu_claims=claims and has_gpu_claims(raw),
        memory_bytes=limit.memory_bytes,
        memory_share=limit.share,
        host=shared(requested(raw)) if is_waiting else NONE,
        bound_at=bound_at,
        started_at=started_at,
        last_started_at=_last_started_at(spec, status, names, sidecars, started_at),
        ended_at=last_end(status, ("state",)) if phase.is_terminal else None,
        is_failed_early=is_failed,
        is_device_fault=is_failed and is_device_fault(status, names),
        failed_at=(last_end(status) or refused_at) if is_failed else None,
        is_unscheduled=is_unscheduled,
        is_refused=is_refused,
        has_preferences=is_waiting and has_preferences(raw),
        wishes=wishes if is_stored or is_refused else (),
        version=text_of(metadata.get("resourceVersion")) if is_stored else "",
        scheduler_name=intern(text_of(spec.get("schedulerName")) or "default-scheduler"),
        created_at=created_at or 0.0,
        is_deleting=bool(metadata.get("deletionTimestamp")),
        # Most waiting pods have the same message.
        message="" if node else intern(message_of(scheduled)),
        is_gated=not node and scheduled.get("reason") == "SchedulingGated",
        awaits_room=not node and awaits_room(spec),
        priority=_priority(spec),
        owner=intern(owner_of(metadata)),
        likeness=likeness_of(raw),
        wanted_model="" if node or is_excessive(raw) else _wanted_model(raw),
        gives_way=_priority(spec) < 0,
        selection=_selection(raw) if resources and not (node or phase.is_terminal) else None,
        group=read_group(raw),
    )


def reduce_exporter(raw: Mapping[str, object], words: tuple[str, ...]) -> ExporterPod | None:
    """Return the pod if it looks like a running telemetry exporter, else None.

    It does if its name, or its `app` or `app.kubernetes.io/name` label, contains one of `words`.
    """
    metadata = mapping_of(raw.get("metadata"))
    name = text_of(metadata.get("name"))
    labels = mapping_of(metadata.get("labels"))
    texts = (name, text_of(labels.get("app")), text_of(labels.get("app.kubernetes.io/name")))
    if not any(word in text for word in words for text in texts):
        return None
    status = mapping_of(raw.get("status"))
    node = text_of(mapping_of(raw.get("spec")).get("nodeName"))
    if not node or not metadata.get("uid") or _phase(status).is_terminal:
        return None
    addresses = [text_of(entry.get("ip")) for entry in objects_of(status.get("podIPs"))]
    addresses.append(text_of(status.get("podIP")))
    return ExporterPod(
        namespace=text_of(metadata.get("namespace")),
        name=name,
        node=node,
        addresses=tuple(dict.fromkeys(address for address in addresses if address)),
    )


def _shared_counts(counts: Mapping[str, int]) -> Mapping[str, int]:
    """Return counts as a read-only mapping; equal ones share one object."""
    return _frozen_counts(tuple(counts.items()))


@lru_cache(maxsize=_MAX_CACHED)
def _frozen_counts(items: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    return MappingProxyType(dict(items))


def _shown_labels(labels: Mapping[str, object]) -> Mapping[str, str]:
    """Return the labels about GPUs, pool and zone; most nodes share their few values."""
    shown = ((key, intern(text_of(value))) for key, value in labels.items() if is_shown(key))
    return MappingProxyType(dict(islice(shown, _MAX_LABELS)))


def _other_labels(labels: Mapping[str, object]) -> Mapping[str, str]:
    """Return the other labels that are stored; nodes of one pool share one mapping."""
    others = sorted(
        (key, text_of(value))
        for key, value in labels.items()
        if key != HOSTNAME and is_kept(key) and not is_shown(key)
    )
    return _frozen_labels(tuple(others[:_MAX_LABELS]))


@lru_cache(maxsize=_MAX_SHARED)
def _frozen_labels(items: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return MappingProxyType({intern(key): intern(value) for key, value in items})


def _selection(raw: Mapping[str, object]) -> Selection | None:
    """Return the pod's own node selection, None if it is too large."""
    if is_excessive(raw):
        return None
    selection = read_selection(raw)
    return _shared_selection(selection) if selection.size <= _MAX_SELECTION else None


@lru_cache(maxsize=_MAX_SHARED)
def _shared_selection(selection: Selection) -> Selection:
    """Return a cached `Selection`, so that similar pods share one object."""
    return selection


def _stored_taints(raw: object) -> tuple[Taint, ...]:
    """Return the taints that repel pods or concern GPUs."""
    stored = (
        Taint(key=key, value=text_of(taint.get("value")), effect=effect)
        for taint in objects_of(raw)
        if (key := text_of(taint.get("key")))
        and (effect := text_of(taint.get("effect")))
        and (effect in _REPELLING_EFFECTS or any(word in key for word in _GPU_TAINT_WORDS))
    )
    return tuple(islice(stored, _MAX_TAINTS))


def _condition(status: Mapping[str, object], kind: str) -> Mapping[str, object]:
    """Return the condition of a type, {} if it is missing."""
    for condition in objects_of(status.get("conditions")):
        if condition.get("type") == kind:
            return condition
    return {}


def _is_our_rejection(message: str) -> bool:
    """Return whether kube-scheduler's message contains one of our rejections."""
    return any(rejection.value in message for rejection in Rejection)


def _wishes(annotations: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return the annotations under our prefix."""
    ours = ((key, text_of(annotations[key])) for key in annotations if key.startswith(PREFIX))
    return tuple(sorted(ours))


def _priority(spec: Mapping[str, object]) -> int:
    """Return a pod's priority; the API server sets it in every pod that it creates."""
    return int_of(spec.get("priority"))


def _phase(status: Mapping[str, object]) -> PodPhase:
    """Return the pod's phase; Pending if it is not set yet."""
    phase = text_of(status.get("phase")) or PodPhase.PENDING
    return PodPhase(phase) if phase in set(PodPhase) else PodPhase.UNKNOWN


def _bound_at(
    status: Mapping[str, object], scheduled: Mapping[str, object], created_at: float | None
) -> float | None:
    """Return when the pod was bound.

    A pod that was created with a node name has no `PodScheduled` condition until its kubelet sets
    it.
    """
    at = parse_time(scheduled.get("lastTransitionTime"))
    if at is None:
        at = parse_time(status.get("startTime"))
    return created_at if at is None else at


def _sidecars(
    spec: Mapping[str, object], status: Mapping[str, object], names: ResourceNames
) -> list[Mapping[str, object]]:
    """Return the statuses of a pod's sidecars with GPUs: init containers that always restart."""
    sidecars = {
        text_of(container.get("name"))
        for container in objects_of(spec.get("initContainers"))
        if container.get("restartPolicy") == "Always" and holds_devices(container, names)
    }
    statuses = objects_of(status.get("initContainerStatuses")) if sidecars else ()
    return [one for one in statuses if text_of(one.get("name")) in sidecars]


def _started_at(
    status: Mapping[str, object], sidecars: Sequence[Mapping[str, object]]
) -> float | None:
    """Return the earliest start of a container that the status still contains.

    Of the init containers only sidecars with GPUs count: the others end before, or do not use GPUs.
    """
    containers = (*objects_of(status.get("containerStatuses")), *sidecars)
    return min(chain.from_iterable(map(_starts, containers)), default=None)


def _last_started_at(
    spec: Mapping[str, object],
    status: Mapping[str, object],
    names: ResourceNames,
    sidecars: Sequence[Mapping[str, object]],
    first: float | None,
) -> float | None:
    """Return the latest start of a container with GPUs, None if it equals `first`.

    Infinite while one of them waits to start again.
    """
    statuses = [one for one in objects_of(status.get("containerStatuses")) if any(_starts(one))]
    if not (statuses or sidecars):
        return None
    holding = {
        text_of(container.get("name"))
        for container in objects_of(spec.get("containers"))
        if holds_devices(container, names)
    }
    holders = (*(one for one in statuses if text_of(one.get("name")) in holding), *sidecars)
    if any("waiting" in mapping_of(one.get("state")) and any(_starts(one)) for one in holders):
        return inf
    last = max(chain.from_iterable(map(_starts, holders)), default=first)
    return None if last == first else last


def _starts(container: Mapping[str, object]) -> list[float]:
    """Return the current and the previous start of a container, as far as its status has them."""
    return [
        start
        for kind in ("state", "lastState")
        for state in mapping_of(container.get(kind)).values()
        # A container that could not be started has the epoch as its start.
        if (start := parse_time(mapping_of(state).get("startedAt")))
    ]
