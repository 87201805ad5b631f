"""Find pods that failed soon after their start, possibly because of their node.

A failure counts against a node if the node could not start a container, or a container ended with
an error soon after its start, as CUDA programs do with a broken GPU or driver. Not counted are ends
from outside (eviction, preemption, deletion, shutdown), the pod's own limits (out of memory in its
cgroup) and failures before a container exists (images, configuration).
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from extender.core.request.gpu_resources import ResourceNames
from extender.core.untyped import mapping_of, objects_of, text_of

_MAX_CACHED: Final = 4096
_YEAR_10000: Final = 253_402_300_800.0
"""First time that a `datetime` cannot hold, in UTC."""


@lru_cache(maxsize=_MAX_CACHED)
def _parse_time(text: str) -> float | None:
    """Parse a time; cached, because containers of a pod and pods of a burst share theirs."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return seconds if 0 <= seconds < _YEAR_10000 else None


def parse_time(value: object) -> float | None:
    """Return a time of the Kubernetes API in seconds since the epoch, None for any other value.

    Times before 1970 or after 9999 are None, too: in UTC some of them could not be written again.

    Example:
        >>> parse_time("1970-01-01T00:01:00Z"), parse_time(None)
        (60.0, None)
        >>> parse_time("0001-01-01T00:00:00+23:59"), parse_time("9999-12-31T23:59:59-23:59")
        (None, None)
    """
    return _parse_time(value) if isinstance(value, str) else None


_NODE_REFUSED: Final = frozenset({"TopologyAffinityError", "UnexpectedAdmissionError"})
"""Pod reasons: the kubelet or the device plugin could not provide the devices that the node offers.
"""

_REFUSED_RESOURCE: Final = re.compile(
    r"(?:devices unavailable for|cannot allocate unregistered device"
    r"|cannot allocate unhealthy devices|changed request for resource) \"?([^\s\"]+)"
)
"""Matches the resource name in the kubelet's message about a missing device, for any device plugin.
"""

_DEVICE_FAULT: Final = re.compile(
    r"nvidia-container-cli: (?!requirement error)|nvml error|driver/library version mismatch"
    r"|unresolvable cdi devices[^:]*nvidia|no cuda-capable device"
    r"|cuda-capable device\(s\) is/are busy|uncorrectable ecc error|gpu is lost"
    r"|fallen off the bus|unable to determine the device handle"
    r"|cuda_error_(?:no_device|ecc_uncorrectable|devices_unavailable|system_not_ready"
    r"|system_driver_mismatch|nvlink_uncorrectable)",
    re.IGNORECASE,
)
"""Messages of NVIDIA's container tools and CUDA about a failed device or driver.

`requirement error` is excluded: the image needs a newer driver.
"""

_ENDED_EXTERNALLY: Final = frozenset(
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
"""Pod reasons: the pod was ended from outside; its containers' reports do not count."""

_START_FAILED: Final = frozenset({"ContainerCannotRun", "StartError"})
"""Termination reasons: the container runtime could not start the container, as without a driver."""

_NOT_STARTING: Final = frozenset({"RunContainerError"})
"""Waiting reasons: as `_START_FAILED`, before the termination is recorded."""

_UNRELATED_TO_GPUS: Final = frozenset({"ContainerStatusUnknown", "OOMKilled"})
"""Termination reasons unrelated to GPUs: the node was lost, or the pod exceeded its memory limit.
"""


def is_failed_early(pod: Mapping[str, object], within_seconds: float) -> bool:
    """Return whether a container of a bound pod failed soon after its start.

    Args:
        within_seconds: a failure within this time after the start is early.
    """
    status = mapping_of(pod.get("status"))
    reason = text_of(status.get("reason"))
    if reason in _NODE_REFUSED:
        return True
    if reason in _ENDED_EXTERNALLY or _is_disrupted(status):
        return False
    deleted_at = _deleted_at(mapping_of(pod.get("metadata")))
    return any(
        _has_failed(container, within_seconds, deleted_at)
        for kind in ("containerStatuses", "initContainerStatuses")
        for container in objects_of(status.get(kind))
    )


def is_device_fault(status: Mapping[str, object], names: ResourceNames) -> bool:
    """Return whether the status of a pod that failed early names a GPU or its driver as the cause.

    Args:
        status: the pod's status.
    """
    if text_of(status.get("reason")) in _NODE_REFUSED:
        # Most errors of device plugins name no resource.
        named = _REFUSED_RESOURCE.search(text_of(status.get("message")))
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
    """Return when a container of a pod last ended, None if none did or the time is unknown.

    Args:
        status: the pod's status.
        states: container states to read.

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
    """Return whether the message of a container's state reports a fault of a GPU or its driver."""
    return _DEVICE_FAULT.search(text_of(state.get("message"))) is not None


def _terminated(container: Mapping[str, object], state: str) -> Mapping[str, object]:
    """Return a container's termination in one of its states, {} if there is none."""
    return mapping_of(mapping_of(container.get(state)).get("terminated"))


def _is_disrupted(status: Mapping[str, object]) -> bool:
    """Return whether eviction, preemption or a taint ended the pod."""
    return any(
        condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
        for condition in objects_of(status.get("conditions"))
    )


def _deleted_at(metadata: Mapping[str, object]) -> float | None:
    """Return when the deletion of the pod was requested: its deadline minus its grace period."""
    deadline = parse_time(metadata.get("deletionTimestamp"))
    grace_seconds = metadata.get("deletionGracePeriodSeconds")
    if deadline is None or not isinstance(grace_seconds, int):
        return deadline
    return deadline - grace_seconds


def _has_failed(
    container: Mapping[str, object], within_seconds: float, deleted_at: float | None
) -> bool:
    """Return whether a container failed early, now or the time before, or cannot start.

    A container that runs again, or has succeeded, counts as recovered.
    """
    state = mapping_of(container.get("state"))
    last = mapping_of(container.get("lastState"))
    if state.get("running") or mapping_of(state.get("terminated")).get("exitCode") == 0:
        return False
    waiting = mapping_of(state.get("waiting"))
    if text_of(waiting.get("reason")) in _NOT_STARTING or _names_device(waiting):
        return True
    return any(
        _is_early(mapping_of(ended), within_seconds, deleted_at)
        for ended in (state.get("terminated"), last.get("terminated"))
        if ended
    )


def _is_early(ended: Mapping[str, object], within_seconds: float, deleted_at: float | None) -> bool:
    """Return whether a termination is an error soon after the container's start."""
    reason = text_of(ended.get("reason"))
    if ended.get("exitCode") == 0 or reason in _UNRELATED_TO_GPUS:
        return False
    finished = parse_time(ended.get("finishedAt"))
    # Times are whole seconds: an end in the same second as the deletion counts as its effect.
    if deleted_at is not None and (finished is None or finished >= deleted_at):
        return False
    if reason in _START_FAILED:
        return True
    started = parse_time(ended.get("startedAt"))
    return started is not None and finished is not None and finished - started <= within_seconds
