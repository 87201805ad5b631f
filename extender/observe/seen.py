"""What a caller may see of pods: every view of a pod goes through here on its way into an answer.

A view names a pod by `pod_name` or `pod_key`, and says anything else of it by `of_pod`. What these
return is no JSON: it becomes JSON only where an answer is written, by `write_json`, and there it
depends on the caller. A view that is written by other means is a fault, not a leak.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final, Protocol, final

import orjson
from typing_extensions import override  # in typing from Python 3.12 on

ANOTHER_POD: Final = "another pod"
"""How a pod is called that the caller may not read."""

NO_NAMESPACE: Final = ""
"""Where it is not known whose something is: only who may read all pods sees it."""


class AccessError(Exception):
    """Somebody may not read on, or that cannot be found out; the message says why.

    Attributes:
        status: the HTTP status that says it: 401, 429 or 503.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Viewer(Protocol):
    """Whoever an answer is for."""

    @property
    def name(self) -> str:
        """Who it is; "" where that is not known: whoever comes from somewhere."""

    def sees(self, namespace: str) -> bool:
        """Whether the pods of a namespace may be shown; never waits."""

    async def learn(self, namespaces: Iterable[str]) -> None:
        """Find out about further namespaces, before something of them is shown."""

    async def renew(self) -> None:
        """Find out anew what is old: for answers that take longer than a moment, again and again.

        Raises:
            AccessError: no more may be shown.
        """


class SeesAll:
    """Somebody who may read all pods."""

    name = ""

    def sees(self, namespace: str) -> bool:  # noqa: ARG002 - see Viewer
        """Return true."""
        return True

    async def learn(self, namespaces: Iterable[str]) -> None:
        """There is nothing to find out."""

    async def renew(self) -> None:
        """There is nothing to find out."""


class SeesNone:
    """Somebody who may read no pod, or of whom nothing is known."""

    name = ""

    def sees(self, namespace: str) -> bool:  # noqa: ARG002 - see Viewer
        """Return false."""
        return False

    async def learn(self, namespaces: Iterable[str]) -> None:
        """There is nothing to find out."""

    async def renew(self) -> None:
        """There is nothing to find out."""


SEES_ALL: Final = SeesAll()

VIEWER: Final[ContextVar[Viewer]] = ContextVar("viewer", default=SeesNone())  # noqa: B039 - no state
"""Who the answer is for that this task writes; nobody's rights unless somebody said."""


@final
class OfPod:
    """Something about a pod, to be shown only to those who may read it; never changes.

    Args:
        namespace: the pod's.
        value: what there is to show, JSON-ready.
        instead: what others see, JSON-ready.
    """

    __slots__ = ("_instead", "_value", "namespace")

    def __init__(self, namespace: str, value: object, instead: object = None) -> None:
        self.namespace = namespace
        self._value = value
        self._instead = instead

    def shown(self) -> object:
        """Return what the caller sees."""
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
        """Return what others see: a text that this gets into by mistake tells nothing."""
        return str(self._instead)


def sees(namespace: str) -> bool:
    """Whether the caller may read the pods of a namespace."""
    return VIEWER.get().sees(namespace)


def pod_name(namespace: str, name: str) -> OfPod:
    """Return a pod's `namespace/name`, for an answer."""
    return OfPod(namespace, f"{namespace}/{name}", ANOTHER_POD)


def pod_key(key: str) -> OfPod:
    """Return a pod that is known by its `namespace/name`, for an answer."""
    return OfPod(namespace_of(key), key, ANOTHER_POD)


def of_pod(namespace: str, value: object) -> OfPod:
    """Return something else about a pod, for an answer: its UID, owner, annotations; else null."""
    return OfPod(namespace, value)


def namespace_of(key: str) -> str:
    """Return the namespace in `namespace/name`, `NO_NAMESPACE` where there is none.

    Example:
        >>> namespace_of("team/a"), namespace_of("a")
        ('team', '')
    """
    namespace, slash, _ = key.partition("/")
    return namespace if slash else NO_NAMESPACE


def write_json(document: object) -> bytes:
    """Return a document as JSON, with what the caller may see of the pods in it."""
    return orjson.dumps(document, default=_show)


def write_json_in_full(document: object) -> bytes:
    """Return a document as JSON with all that it says, for another replica: it hides its part."""
    return orjson.dumps(document, default=_tell)


def _show(value: object) -> object:
    if isinstance(value, OfPod):
        return value.shown()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _tell(value: object) -> object:
    if isinstance(value, OfPod):
        return value._value  # noqa: SLF001 - the one that may
    raise TypeError(f"{type(value).__name__} is no JSON")
