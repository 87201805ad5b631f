"""Tells pods that died soon after their start by what may be their node's fault.

What counts against a node is a container that its node could not start, or that ended with an
error soon after it started: with a broken GPU or driver that is what CUDA programs do. What others
decided (eviction, preemption, deletion, shutdown), what the pod's own limits did (out of memory of
its cgroup) and what happens before a container exists (images, configuration) does not count.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from extender.core.request.gpu_resources import ResourceNames
from extender.core.untyped import mapping_of, objects_of, text_of
from extender.sources.kubernetes.timestamps import parse_time

NODE_REFUSED: Final = frozenset({"TopologyAffinityError", "UnexpectedAdmissionError"})
"""Pod reasons: the kubelet or the device plugin could not give devices as the node should."""

REFUSED_RESOURCE: Final = re.compile(
    r"(?:devices unavailable for|cannot allocate unregistered device"
    r"|cannot allocate unhealthy devices|changed request for resource) \"?([^\s\"]+)"
)
"""How the kubelet names the resource of which it has no device to give: any device plugin's."""

DEVICE_FAULT: Final = re.compile(
    r"nvidia-container-cli: (?!requirement error)|nvml error|driver/library version mismatch"
    r"|unresolvable cdi devices[^:]*nvidia|no cuda-capable device"
    r"|cuda-capable device\(s\) is/are busy|uncorrectable ecc error|gpu is lost"
    r"|fallen off the bus|unable to determine the device handle"
    r"|cuda_error_(?:no_device|ecc_uncorrectable|devices_unavailable|system_not_ready"
    r"|system_driver_mismatch|nvlink_uncorrectable)",
    re.IGNORECASE,
)
"""What NVIDIA's container tools and CUDA write where device or driver fail, not the program.

A `requirement error` is an image that asks for a newer driver."""

OTHERS_DECIDED: Final = frozenset(
    {
        "DeadlineExceeded",
        "Evicted",
        "NodeLost",
        "NodeShutdown",
        "Preempting",
        "Shutdown",
        "Terminated",
    }
)
"""Pod reasons: somebody ended it, whatever its containers say."""

START_FAILED: Final = frozenset({"ContainerCannotRun", "StartError"})
"""Reasons of an end: the container runtime could not start it, as when the driver is gone."""

NOT_STARTING: Final = frozenset({"RunContainerError"})
"""Reasons of waiting: the same, seen before the end is recorded."""

OWN_FAULT: Final = frozenset({"ContainerStatusUnknown", "OOMKilled"})
"""Reasons of an end that say nothing of GPUs: the node was lost, or the pod's memory limit hit."""


def is_failed_early(pod: Mapping[str, object], within_seconds: float) -> bool:
    """Whether a container of a bound pod died soon after its start, maybe by its node's fault.

    Args:
        pod: the Pod object.
        within_seconds: so soon after its start a container's end is early.
    """
    status = mapping_of(pod.get("status"))
    reason = text_of(status.get("reason"))
    if reason in NODE_REFUSED:
        return True
    if reason in OTHERS_DECIDED or _is_disrupted(status):
        return False
    deleted_at = _deleted_at(mapping_of(pod.get("metadata")))
    return any(
        _has_failed(container, within_seconds, deleted_at)
        for kind in ("containerStatuses", "initContainerStatuses")
        for container in objects_of(status.get(kind))
    )


def is_device_fault(status: Mapping[str, object], names: ResourceNames) -> bool:
    """Whether the status of a pod that failed early says that a GPU, or its driver, was why.

    Args:
        status: the pod's status.
        names: which resources are GPUs.
    """
    if text_of(status.get("reason")) in NODE_REFUSED:
        # Most of the plugins' own errors name no resource.
        named = REFUSED_RESOURCE.search(text_of(status.get("message")))
        return named is None or names.matches(named[1].rstrip(".,;"))
    return any(
        _names_device(mapping_of(ended_or_waits))
        for kind in ("containerStatuses", "initContainerStatuses")
        for container in objects_of(status.get(kind))
        for state in ("state", "lastState")
        for ended_or_waits in mapping_of(container.get(state)).values()
    )


def last_end(
    status: Mapping[str, object], states: Sequence[str] = ("state", "lastState")
) -> float | None:
    """Return when a container of a pod last ended, None where none did, or that is not known.

    Args:
        status: the pod's status.
        states: which states of a container count.

    Example:
        >>> ended = {"terminated": {"finishedAt": "1970-01-01T00:01:00Z"}}
        >>> last_end({"containerStatuses": [{"state": {"waiting": {}}, "lastState": ended}]})
        60.0
    """
    ends = [
        end
        for kind in ("containerStatuses", "initContainerStatuses")
        for container in objects_of(status.get(kind))
        for state in states
        if (end := parse_time(_terminated(container, state).get("finishedAt")))
    ]
    return max(ends, default=None)


def _names_device(state: Mapping[str, object]) -> bool:
    """Whether the message of a container's state tells of a fault of a device or its driver."""
    return DEVICE_FAULT.search(text_of(state.get("message"))) is not None


def _terminated(container: Mapping[str, object], state: str) -> Mapping[str, object]:
    """Return how a container ended, empty where it did not."""
    return mapping_of(mapping_of(container.get(state)).get("terminated"))


def _is_disrupted(status: Mapping[str, object]) -> bool:
    """Whether eviction, preemption or a taint ended the pod."""
    return any(
        condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
        for condition in objects_of(status.get("conditions"))
    )


def _deleted_at(metadata: Mapping[str, object]) -> float | None:
    """Return when somebody asked for the pod's deletion: its deadline less its grace period."""
    deadline = parse_time(metadata.get("deletionTimestamp"))
    grace_seconds = metadata.get("deletionGracePeriodSeconds")
    if deadline is None or not isinstance(grace_seconds, int):
        return deadline
    return deadline - grace_seconds


def _has_failed(
    container: Mapping[str, object],
    within_seconds: float,
    deleted_at: float | None,
) -> bool:
    """Whether the container's present or last end was an early failure, or it cannot start.

    A container that runs again, or that has succeeded, has recovered for all that can be seen.
    """
    state = mapping_of(container.get("state"))
    last = mapping_of(container.get("lastState"))
    if state.get("running") or mapping_of(state.get("terminated")).get("exitCode") == 0:
        return False
    waiting = mapping_of(state.get("waiting"))
    if text_of(waiting.get("reason")) in NOT_STARTING or _names_device(waiting):
        return True
    return any(
        _is_early(mapping_of(ended), within_seconds, deleted_at)
        for ended in (state.get("terminated"), last.get("terminated"))
        if ended
    )


def _is_early(
    ended: Mapping[str, object],
    within_seconds: float,
    deleted_at: float | None,
) -> bool:
    """Whether an end of a container was an error soon after its start."""
    reason = text_of(ended.get("reason"))
    if ended.get("exitCode") == 0 or reason in OWN_FAULT:
        return False
    finished = parse_time(ended.get("finishedAt"))
    # Times are whole seconds: an end in the second of the deletion is taken to follow from it.
    if deleted_at is not None and (finished is None or finished >= deleted_at):
        return False
    if reason in START_FAILED:
        return True
    started = parse_time(ended.get("startedAt"))
    return started is not None and finished is not None and finished - started <= within_seconds
