"""Answers about the caller and the extender itself."""

from extender.answers.answer import Answer


class Session(Answer):
    """The caller, and the namespaces whose pods it may read.

    Attributes:
        user: user name; null if the API requires no token.
        sees_all: whether the caller sees the pods of all namespaces.
        namespaces: reviewed namespaces whose pods the caller may read.
    """

    user: str | None
    sees_all: bool
    namespaces: list[str]


class Readiness(Answer):
    """Whether the extender can answer kube-scheduler; the status is 503 if it cannot.

    Attributes:
        status: `ready`, `degraded`, or the state that keeps it from answering.
        degraded: cause of each degradation, by component.
    """

    status: str
    degraded: dict[str, str]
