"""Parse lists and watch events, and skip pods that do not concern GPUs.

Most pods of a cluster do not use GPUs, and half of a pod's text is never used here. Parsing only
the fields that decide whether a pod is relevant takes a fifth of the time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from sys import intern
from typing import Final

import msgspec

from extender.core.nodes.host_resources import (
    CPU,
    MEMORY,
    NAMES,
    NONE,
    ContainerNeeds,
    HostResources,
    PlacedPod,
    add_up,
    override,
    read_quantities,
    shared,
)
from extender.core.request.gpu_resources import ResourceNames
from extender.core.untyped import mapping_of
from extender.kube.client import KubeError, parse_object
from extender.runtime.decoding import MalformedError, decode_with

_ENDED: Final = frozenset({"Succeeded", "Failed"})
_CHANGES: Final = frozenset({"ADDED", "MODIFIED", "DELETED"})
_EXPORTER_LABELS: Final = ("app", "app.kubernetes.io/name")
_MAX_KNOWN: Final = 4096

_Quantities = dict[str, msgspec.Raw]


class _Resources(msgspec.Struct):
    limits: _Quantities | None = None
    requests: _Quantities | None = None


class _Container(msgspec.Struct):
    resources: _Resources | None = None
    restart_policy: str | None = msgspec.field(name="restartPolicy", default=None)


class _Spec(msgspec.Struct):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = msgspec.field(name="initContainers", default=None)
    claims: list[msgspec.Raw] | None = msgspec.field(name="resourceClaims", default=None)
    node: str | None = msgspec.field(name="nodeName", default=None)
    resources: _Resources | None = None
    overhead: _Quantities | None = None


class _Status(msgspec.Struct):
    claim: dict[str, msgspec.Raw] | None = msgspec.field(
        name="extendedResourceClaimStatus", default=None
    )
    phase: str | None = None


class _Metadata(msgspec.Struct):
    uid: str = ""
    namespace: str = ""
    name: str = ""
    version: str = msgspec.field(name="resourceVersion", default="")
    labels: dict[str, str] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class _PodEvent(msgspec.Struct):
    type: str = ""
    object: _Pod = msgspec.field(default_factory=_Pod)


class _Event(msgspec.Struct):
    type: str = ""
    object: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


class _Named(msgspec.Struct):
    namespace: str = ""
    name: str = ""
    uid: str = ""
    version: str = msgspec.field(name="resourceVersion", default="")


class _NamedObject(msgspec.Struct):
    metadata: _Named = msgspec.field(default_factory=_Named)


class _ListMetadata(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion", default="")
    token: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct):
    kind: str = ""
    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)
    items: list[msgspec.Raw] | None = None


_POD: Final = msgspec.json.Decoder(_Pod)
_POD_EVENT: Final = msgspec.json.Decoder(_PodEvent)
_EVENT: Final = msgspec.json.Decoder(_Event)
_NAMED: Final = msgspec.json.Decoder(_NamedObject)
_LIST: Final = msgspec.json.Decoder(_List)
_ANYTHING: Final = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListPage:
    """A page of a list.

    Attributes:
        version: resource version of the list.
        token: token of the next page, "" on the last page.
    """

    version: str
    token: str
    items: Sequence[msgspec.Raw]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of a watch.

    Attributes:
        kind: "ADDED", "MODIFIED", "DELETED", "BOOKMARK" or "ERROR".
        text: JSON text of the object.
    """

    kind: str
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchChange:
    """A change of a pod that is not relevant.

    Attributes:
        version: resource version of the pod.
    """

    uid: str
    version: str


_OnPlaced = Callable[[str, PlacedPod | None], None]
"""Receives a pod's `namespace/name` and its requests on its node, None if it has none."""


class PodFilter:
    """Decide from a pod's JSON text whether the pod is relevant.

    It is if it requests GPUs, has claims, exports telemetry, or cannot be parsed.

    Args:
        exporter_words: words in the name or `app` label of exporter pods.
        on_listed: receives the node requests of each listed pod.
        on_watched: receives the node requests of each pod that a watch reports.
    """

    def __init__(
        self,
        names: ResourceNames,
        exporter_words: Sequence[str],
        on_listed: _OnPlaced = lambda *_: None,
        on_watched: _OnPlaced = lambda *_: None,
    ) -> None:
        self._names = names
        self._words = tuple(exporter_words)
        self._on_listed, self._on_watched = on_listed, on_watched
        self._known: dict[str, bool] = {}

    def is_relevant(self, text: msgspec.Raw | bytes) -> bool:
        """Return whether a listed pod is relevant."""
        try:
            pod = decode_with(_POD.decode, text)
        except MalformedError:
            return True
        self._on_listed(_key(pod.metadata), _placed(pod))
        return self._matters(pod)

    def irrelevant_change(self, line: bytes) -> WatchChange | None:
        """Return UID and version of a watch event's pod if it is not relevant, else None."""
        try:
            event = decode_with(_POD_EVENT.decode, line)
        except MalformedError:
            return None
        metadata = event.object.metadata
        if event.type not in _CHANGES or not metadata.version:
            return None
        is_deleted = event.type == "DELETED"
        self._on_watched(_key(metadata), None if is_deleted else _placed(event.object))
        if self._matters(event.object):
            return None
        return WatchChange(uid=metadata.uid, version=metadata.version)

    def _matters(self, pod: _Pod) -> bool:
        if pod.spec.claims or pod.status.claim:
            return True
        labels = pod.metadata.labels or {}
        names = (pod.metadata.name, *(labels.get(label, "") for label in _EXPORTER_LABELS))
        if any(word in text for word in self._words for text in names):
            return True
        containers = chain(pod.spec.containers or (), pod.spec.init_containers or ())
        return any(self._requests_gpu(container.resources) for container in containers)

    def _requests_gpu(self, resources: _Resources | None) -> bool:
        if resources is None:
            return False
        return self._is_any_gpu(resources.limits or ()) or self._is_any_gpu(
            resources.requests or ()
        )

    def _is_any_gpu(self, names: Iterable[str]) -> bool:
        known = self._known
        for name in names:
            if name not in known:
                if len(known) >= _MAX_KNOWN:
                    known.clear()
                known[name] = self._names.matches(name)
            if known[name]:
                return True
        return False


def _key(metadata: _Metadata) -> str:
    return f"{metadata.namespace}/{metadata.name}"


def _placed(pod: _Pod) -> PlacedPod | None:
    """Return a pod's requests on its node, None if it has no node or has ended."""
    spec = pod.spec
    if not spec.node or pod.status.phase in _ENDED:
        return None
    needs = add_up(
        (_needs(one.resources) for one in spec.containers or ()),
        (
            ContainerNeeds(_needs(one.resources), one.restart_policy == "Always")
            for one in spec.init_containers or ()
        ),
    )
    if spec.resources is not None and spec.resources.requests:
        own = spec.resources.requests
        needs = override(needs, _text(own.get(CPU)), _text(own.get(MEMORY)))
    needs = needs.plus(_of(spec.overhead))
    return PlacedPod(intern(spec.node), shared(needs)) if needs != NONE else None


def _needs(resources: _Resources | None) -> HostResources:
    return _of(resources.requests) if resources is not None else NONE


def _of(quantities: _Quantities | None) -> HostResources:
    if not quantities:
        return NONE
    return _read(*(_text(quantities.get(name)) for name in NAMES))


@lru_cache(maxsize=_MAX_KNOWN)
def _read(cpu: str | None, memory: str | None, storage: str | None) -> HostResources:
    return read_quantities(cpu, memory, storage)


def _text(raw: msgspec.Raw | None) -> str | None:
    """Return a quantity as text; JSON numbers are valid quantities, too.

    The decoder has not checked the text: invalid UTF-8 is replaced and makes an invalid quantity.
    """
    return None if raw is None else bytes(raw).decode(errors="replace").strip('"')


def read_page(body: bytes, action: str) -> _ListPage:
    """Parse a page of a list; its objects stay JSON text.

    Raises:
        KubeError: it is not a list.
    """
    try:
        found = decode_with(_LIST.decode, body)
    except MalformedError:
        parse_object(body, action)  # raises if it is not JSON
        found = _List()
    # Another JSON document must not look like a cluster without objects.
    if not found.metadata.version or not found.kind.endswith("List"):
        raise KubeError(f"cannot {action}: the answer is not a list with a resourceVersion")
    return _ListPage(
        version=found.metadata.version, token=found.metadata.token, items=found.items or ()
    )


def read_event(line: bytes, action: str) -> Event:
    """Parse an event of a watch; its object stays JSON text.

    Raises:
        KubeError: it is not an event.
    """
    try:
        found = decode_with(_EVENT.decode, line)
    except MalformedError as error:
        parse_object(line, action)  # raises if it is not JSON
        raise KubeError(f"cannot {action}: the answer is not an event: {error}") from error
    return Event(kind=found.type, text=bytes(found.object))


def read_object(text: bytes, action: str) -> Mapping[str, object]:
    """Parse an object of a page or an event; return {} for any other JSON value.

    Raises:
        KubeError: it is not JSON.
    """
    try:
        return mapping_of(decode_with(_ANYTHING.decode, text))
    except MalformedError:
        return parse_object(text, action)


def read_identity(text: bytes) -> Mapping[str, object]:
    """Parse only namespace, name, UID and version of an object; return {} if that fails.

    Example:
        >>> read_identity(b'{"metadata": {"name": "n", "uid": "u"}, "spec": 1e999}')["metadata"]
        {'namespace': '', 'name': 'n', 'uid': 'u', 'resourceVersion': ''}
    """
    try:
        found = decode_with(_NAMED.decode, text).metadata
    except MalformedError:
        return {}
    return {
        "metadata": {
            "namespace": found.namespace,
            "name": found.name,
            "uid": found.uid,
            "resourceVersion": found.version,
        }
    }
