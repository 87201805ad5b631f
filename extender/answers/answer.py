"""Base of the JSON API's answers.

None means unknown. A field that an older extender does not send gets its default, and a field that
this client does not know is ignored. Documentation of the fields is generated from the docstrings.
"""

import msgspec


class Answer(msgspec.Struct):
    """Base class of the answers and of the objects in them."""


class ErrorAnswer(Answer):
    """Answer to a request that failed.

    Attributes:
        error: the fault and its remedy.
        unreachable: addresses of the replicas that did not answer, if there are any.
    """

    error: str
    unreachable: list[str] | msgspec.UnsetType = msgspec.UNSET


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
