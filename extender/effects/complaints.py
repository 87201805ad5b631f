"""Tells pods' owners of annotations that cannot be used: of each value once."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from extender.core.annotations import AnnotationProblem
from extender.core.request import PodRef
from extender.effects.events import EventWriter

logger = logging.getLogger(__name__)

REMEMBERED: Final = 10_000
"""Annotations that were complained about."""


class Complaints:
    """Complains in the log, and on the pod where events are written.

    Args:
        events: writes them.
        writes_events: whether they are to be written.
    """

    def __init__(self, events: EventWriter, writes_events: Callable[[], bool]) -> None:
        self._events = events
        self._writes_events = writes_events
        self._made: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def warn(self, pod: PodRef, problem: AnnotationProblem) -> None:
        """Tell the pod's owner of an annotation that cannot be used."""
        key = (pod.uid, problem.annotation, problem.value)
        if key in self._made:
            return
        self._made[key] = None
        if len(self._made) > REMEMBERED:
            self._made.popitem(last=False)
        logger.warning(
            "annotation cannot be used",
            extra={
                "pod": pod.key,
                "annotation": problem.annotation,
                "value": problem.value,
                "allowed": problem.allowed,
                "used_instead": problem.default_used,
            },
        )
        if self._writes_events():
            self._events.warn_annotation(pod, problem)
