"""How questions end, for metrics; every series that can be known in advance starts at 0.

A counter that appears with its first event has not increased by it: `increase()` and the alerts
that ask it would miss the first fault, and panels would be empty until then.
"""

from enum import StrEnum
from typing import Final

from extender.core.decision.filtering import Code
from extender.core.request.annotations import KNOWN
from extender.runtime.metrics import Metrics

VERBS: Final = ("filter", "prioritize", "preempt")

FAULTY: Final = (*VERBS, "foresee", "explain", "tell")
"""What a fault of ours may happen in."""

UNKNOWN: Final = "unknown"
"""Stands for all annotations that mean nothing to us: anybody can invent names."""


class RequestOutcome(StrEnum):
    """How a question ended, for metrics."""

    ANSWERED = "answered"
    NO_GPU = "no-gpu"
    """The pod asks for no GPU: every candidate passes."""
    DISABLED = "disabled"
    """The pod says that it is to be left to kube-scheduler."""
    NOT_READY = "not-ready"
    """The inventory is not complete yet: every candidate passes."""
    MALFORMED = "malformed"
    FAULT = "fault"
    DISCONNECTED = "disconnected"
    """The client went away before its question was complete."""
    UNREAD = "unread"
    """The client went away before the answer was complete: kube-scheduler, after httpTimeout."""


def reason_of(code: Code) -> str:
    """Return the label of a reason against a node.

    Example:
        >>> reason_of(Code.NOT_IDLE)
        'not_idle'
    """
    return code.name.lower()


def create_series(metrics: Metrics) -> None:
    """Have every series of the webhooks start at 0."""
    for verb in VERBS:
        metrics.candidates.labels(verb)
        # A histogram is many series, and the other outcomes take no time worth watching.
        metrics.latency.labels(verb, RequestOutcome.ANSWERED)
        for outcome in RequestOutcome:
            metrics.requests.labels(verb, outcome)
    for verb in FAULTY:
        metrics.faults.labels(verb)
    for code in Code:
        if code is not Code.PASSES:
            metrics.rejections.labels(reason_of(code))
    for annotation in (*sorted(KNOWN), UNKNOWN):
        metrics.annotation_problems.labels(annotation)
