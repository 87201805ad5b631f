"""Label values of the webhook metrics; create every series at 0 at start.

A counter that appears with its first event shows no increase: `increase()` and alerts built on it
would miss the first fault, and panels would be empty until then.
"""

from enum import StrEnum
from typing import Final

from extender.core.decision.filtering import Code
from extender.core.request.annotations import KNOWN
from extender.runtime.metrics import Metrics

VERBS: Final = ("filter", "prioritize", "preempt")

FAULTY: Final = (*VERBS, "foresee", "explain", "tell")
"""Steps in which an internal fault is counted."""

UNKNOWN: Final = "unknown"
"""Label for all unknown annotations, because pods can have any names."""


class RequestOutcome(StrEnum):
    """How a request ended, for metrics."""

    ANSWERED = "answered"
    NO_GPU = "no-gpu"
    """The pod requests no GPU: every candidate passes."""
    DISABLED = "disabled"
    """The pod is annotated `idlegpu.io/enabled: "false"`: every candidate passes."""
    NOT_READY = "not-ready"
    """The inventory is not complete yet: every candidate passes."""
    MALFORMED = "malformed"
    FAULT = "fault"
    DISCONNECTED = "disconnected"
    """The client disconnected before its request was complete."""
    UNREAD = "unread"
    """The client disconnected before the answer was complete: kube-scheduler after httpTimeout."""


def reason_of(code: Code) -> str:
    """Return the metric label of a rejection code.

    Example:
        >>> reason_of(Code.NOT_IDLE)
        'not_idle'
    """
    return code.name.lower()


def create_series(metrics: Metrics) -> None:
    """Create every series of the webhooks at 0."""
    for verb in VERBS:
        metrics.candidates.labels(verb)
        # A histogram has many series, and the duration of other outcomes does not matter.
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
