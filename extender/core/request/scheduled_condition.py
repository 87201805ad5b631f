"""Parse scheduling gates and the result of the last scheduling attempt from a Pod object."""

from collections.abc import Mapping
from typing import Final

from extender.core.untyped import mapping_of, objects_of, text_of

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


def last_refusal(status: object) -> str | None:
    """Return the message of the last attempt if it failed, else None.

    Example:
        >>> waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        >>> last_refusal({"conditions": [waits | {"message": "0/9 nodes are available"}]})
        '0/9 nodes are available'
        >>> last_refusal({"conditions": [waits | {"status": "True"}]}), last_refusal(None)
        (None, None)
    """
    scheduled = scheduled_condition(status)
    return message_of(scheduled) if is_unschedulable(scheduled) else None
