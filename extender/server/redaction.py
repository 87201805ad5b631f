"""Redact pods in an answer if the caller may not read them.

An answer names a pod by `pod_name` or `pod_key`, and wraps other data about it in `of_pod`. These
return placeholders, declared to type checkers as the type that the caller receives. `write_json`
replaces each placeholder with the data or its replacement when it encodes the answer for a caller.
Any other encoder fails on a placeholder, so that a mistake is an error and not a leak.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final, Protocol, TypeVar, cast, final

import msgspec
from typing_extensions import override  # in typing from Python 3.12 on

_T = TypeVar("_T")

_ANOTHER_POD: Final = "another pod"
"""Replacement for the name of a pod that the caller may not read."""

NO_NAMESPACE: Final = ""
"""Unknown namespace: visible only to callers who may read all pods."""


class AccessError(Exception):
    """A caller may not read the API, or its rights are unknown; the message says why.

    Attributes:
        status: HTTP status: 401, 429 or 503.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Viewer(Protocol):
    """The caller of a request."""

    @property
    def name(self) -> str:
        """User name, "" if unknown; limits then apply to the client address."""

    def sees(self, namespace: str) -> bool:
        """Check whether the caller may read a namespace's pods; never blocks."""

    async def learn(self, namespaces: Iterable[str]) -> None:
        """Review the caller's rights for further namespaces before their data is encoded."""

    async def renew(self) -> None:
        """Review expired rights; call repeatedly during long answers.

        Raises:
            AccessError: the caller may no longer read.
        """


class SeesNone:
    """A caller who may read no pods, or who is not authenticated."""

    name = ""

    def sees(self, namespace: str) -> bool:  # noqa: ARG002 - see Viewer
        """Return False."""
        return False

    async def learn(self, namespaces: Iterable[str]) -> None:
        """Do nothing."""

    async def renew(self) -> None:
        """Do nothing."""


class _SeesAll(SeesNone):
    """A caller who may read all pods."""

    @override
    def sees(self, namespace: str) -> bool:
        """Return True."""
        return True


SEES_ALL: Final = _SeesAll()

VIEWER: Final[ContextVar[Viewer]] = ContextVar("viewer", default=SeesNone())  # noqa: B039 - SeesNone has no state
"""The caller of the current task; without a caller no pod is visible."""


@final
class OfPod:
    """Data about a pod that only callers who may read the pod see. Immutable.

    Args:
        value: the data, JSON-ready.
        instead: replacement for other callers, JSON-ready.
    """

    __slots__ = ("_instead", "_value", "namespace")

    def __init__(self, namespace: str, value: object, instead: object = None) -> None:
        self.namespace = namespace
        self._value = value
        self._instead = instead

    def shown(self) -> object:
        """Return the value if the current caller may read the pod, else the replacement."""
        return self._value if sees(self.namespace) else self._instead

    def __deepcopy__(self, _: object) -> "OfPod":
        return self

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OfPod):
            return NotImplemented
        return (self.namespace, self._value) == (other.namespace, other._value)

    @override
    def __hash__(self) -> int:
        return hash(self.namespace)

    @override
    def __repr__(self) -> str:
        """Return the replacement, so that a log or f-string cannot leak the value."""
        return str(self._instead)


def sees(namespace: str) -> bool:
    """Check whether the current caller may read a namespace's pods."""
    return VIEWER.get().sees(namespace)


def redactable(namespace: str, value: _T, instead: _T) -> _T:
    """Wrap data about a pod for an answer; other callers see `instead`."""
    return cast("_T", OfPod(namespace, value, instead))


def pod_name(namespace: str, name: str) -> str:
    """Return a pod's redactable `namespace/name`."""
    return redactable(namespace, f"{namespace}/{name}", _ANOTHER_POD)


def pod_key(key: str) -> str:
    """Return a redactable pod name from a `namespace/name` key."""
    return redactable(namespace_of(key), key, _ANOTHER_POD)


def of_pod(namespace: str, value: _T | None) -> _T | None:
    """Wrap data about a pod, such as UID, owner or annotations; other callers see null."""
    return redactable(namespace, value, None)


def namespace_of(key: str) -> str:
    """Return the namespace of a `namespace/name` key, `NO_NAMESPACE` if there is none.

    Example:
        >>> namespace_of("team/a"), namespace_of("a")
        ('team', '')
    """
    namespace, slash, _ = key.partition("/")
    return namespace if slash else NO_NAMESPACE


def write_json(document: object) -> bytes:
    """Encode a document as JSON, redacted for the current caller."""
    return _REDACTED.encode(document)


def write_json_in_full(document: object) -> bytes:
    """Encode a document as JSON without redaction, for another replica, which redacts it."""
    return _IN_FULL.encode(document)


def _show(value: object) -> object:
    if isinstance(value, OfPod):
        return value.shown()
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def _show_all(value: object) -> object:
    if isinstance(value, OfPod):
        return value._value  # noqa: SLF001 - the one that may
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


_REDACTED: Final = msgspec.json.Encoder(enc_hook=_show)
_IN_FULL: Final = msgspec.json.Encoder(enc_hook=_show_all)
