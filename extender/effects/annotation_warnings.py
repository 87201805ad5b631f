"""Report invalid pod annotations in the log and in Events, once for each value."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from extender.core.request.annotations import AnnotationProblem
from extender.core.request.request import PodRef
from extender.effects.events import EventWriter

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 10_000
"""Most reported annotations that are remembered."""


class AnnotationWarnings:
    """Reports invalid annotations in the log, and in an Event if Events are on.

    Args:
        events: writes the Events.
        writes_events: returns whether Events are on.
    """

    def __init__(self, events: EventWriter, writes_events: Callable[[], bool]) -> None:
        self._events = events
        self._writes_events = writes_events
        self._made: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def warn(self, pod: PodRef, problem: AnnotationProblem) -> None:
        """Report an invalid annotation of a pod, unless it was reported before."""
        key = (pod.uid, problem.annotation, problem.value)
        if key in self._made:
            return
        self._made[key] = None
        if len(self._made) > _REMEMBERED:
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
