"""The answer about pods that were bound without the extender."""

from extender.answers.answer import Answer


class BypassedGroup(Answer):
    """Similar pods that were bound without the extender's answer.

    Attributes:
        scheduler: name of their scheduler.
        resources: GPU resources that they request.
        verdict: `not-asked` (no replica got a request), `answer-lost` (kube-scheduler disconnected
            before the answer), `not-scored` (prioritize is never called) or `asked`.
        count: number of pods.
        example: one of them, as `namespace/name`.
        first_age_seconds: time since the first binding.
        last_age_seconds: time since the last binding.
    """

    scheduler: str
    resources: list[str]
    verdict: str
    count: int
    example: str
    first_age_seconds: float
    last_age_seconds: float


class Cause(Answer):
    """Likely cause of bindings without the extender's answer.

    Attributes:
        field: field to check in kube-scheduler's configuration, or in idlegpu's.
        text: the cause in one sentence.
        pods: number of pods that it explains.
        kind: the cause in one word, such as `http-timeout`.
    """

    field: str
    text: str
    pods: int = 0
    kind: str = ""


class BypassedAnswer(Answer):
    """Pods that were bound without the extender's answer, and the schedulers that call it.

    Each replica classifies every pod that it saw waiting; replicas exchange their requests.

    Attributes:
        unjudged: bindings for which no replica knows whether the extender answered.
        bound: groups of pods.
        likely_causes: likely causes.
        schedulers: schedulers that call the extender, as known to this replica.
    """

    unjudged: int
    bound: list[BypassedGroup]
    likely_causes: list[Cause]
    schedulers: list[str] = []
