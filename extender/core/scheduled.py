"""What kube-scheduler says in a pod's status of its last attempt to place it."""

from collections.abc import Mapping
from typing import Final

from extender.core.untyped import mapping_of, objects_of, text_of

GATE: Final = "idlegpu.io/room"
"""Scheduling gate of pods that kube-scheduler is to try once there is room for them, not before."""

MAX_MESSAGE: Final = 1500
"""So much is kept of what kube-scheduler says of a pod that waits; the reasons come first."""


def scheduled_condition(status: object) -> Mapping[str, object]:
    """Return the condition PodScheduled of a pod's status, an empty one where there is none."""
    for condition in objects_of(mapping_of(status).get("conditions")):
        if condition.get("type") == "PodScheduled":
            return condition
    return {}


def awaits_room(spec: object) -> bool:
    """Tell whether our scheduling gate is the only one that a pod has.

    Example:
        >>> awaits_room({"schedulingGates": [{"name": "idlegpu.io/room"}]})
        True
    """
    gates = objects_of(mapping_of(spec).get("schedulingGates"))
    return [gate.get("name") for gate in gates] == [GATE]


def is_unschedulable(scheduled: Mapping[str, object]) -> bool:
    """Tell whether the last attempt found no node.

    Example:
        >>> is_unschedulable({"status": "False", "reason": "Unschedulable"})
        True
    """
    return scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"


def message_of(scheduled: Mapping[str, object]) -> str:
    """Return the message, cut where it is long."""
    return text_of(scheduled.get("message"))[:MAX_MESSAGE]


def last_word(status: object) -> str | None:
    """Return why the last attempt found no node, None where it did, or was none.

    Example:
        >>> waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        >>> last_word({"conditions": [waits | {"message": "0/9 nodes are available"}]})
        '0/9 nodes are available'
        >>> last_word({"conditions": [waits | {"status": "True"}]}), last_word(None)
        (None, None)
    """
    scheduled = scheduled_condition(status)
    return message_of(scheduled) if is_unschedulable(scheduled) else None
