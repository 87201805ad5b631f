"""Reads lists and watch events without making objects of everything in them.

Most pods of a cluster have nothing to do with GPUs, and half of a pod's text is of no use to
anybody here. Reading only what tells whether a pod matters takes a fifth of the time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgspec

from extender.core.resources import ResourceNames
from extender.core.untyped import mapping_of
from extender.kube import KubeError, parse_object

_CHANGES: Final = frozenset({"ADDED", "MODIFIED", "DELETED"})
_EXPORTER_LABELS: Final = ("app", "app.kubernetes.io/name")
_MAX_KNOWN: Final = 4096

Quantities = dict[str, msgspec.Raw]


class _Resources(msgspec.Struct):
    limits: Quantities | None = None
    requests: Quantities | None = None


class _Container(msgspec.Struct):
    resources: _Resources | None = None


class _Spec(msgspec.Struct):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = msgspec.field(name="initContainers", default=None)
    claims: list[msgspec.Raw] | None = msgspec.field(name="resourceClaims", default=None)


class _Status(msgspec.Struct):
    claim: dict[str, msgspec.Raw] | None = msgspec.field(
        name="extendedResourceClaimStatus", default=None
    )


class _Metadata(msgspec.Struct):
    uid: str = ""
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


class _ListMetadata(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion", default="")
    token: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct):
    kind: str = ""
    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)
    items: list[msgspec.Raw] | None = None


_POD: Final = msgspec.json.Decoder(_Pod)
_POD_EVENT: Final = msgspec.json.Decoder(_PodEvent)
_LIST: Final = msgspec.json.Decoder(_List)
_ANYTHING: Final = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a list.

    Attributes:
        version: resource version of the list.
        token: asks for the next page, "" where there is none.
        items: the text of each object.
    """

    version: str
    token: str
    items: Sequence[msgspec.Raw]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a pod that does not matter.

    Attributes:
        uid: of the pod.
        version: its resource version.
    """

    uid: str
    version: str


class PodGlance:
    """Tells from a pod's text whether it can matter: asks for GPUs, holds claims, or exports.

    What is not read as expected may matter.

    Args:
        names: which resources are GPUs.
        exporter_words: exporters have one of these in their name or `app` label.
    """

    def __init__(self, names: ResourceNames, exporter_words: Sequence[str]) -> None:
        self._names = names
        self._words = tuple(exporter_words)
        self._known: dict[str, bool] = {}

    def may_matter(self, text: msgspec.Raw | bytes) -> bool:
        """Whether a pod of a list may matter."""
        try:
            return self._matters(_POD.decode(text))
        except msgspec.DecodeError:
            return True

    def idle_change(self, line: bytes) -> Change | None:
        """Return what an event of a watch says of a pod that does not matter, else None."""
        try:
            event = _POD_EVENT.decode(line)
        except msgspec.DecodeError:
            return None
        metadata = event.object.metadata
        if event.type not in _CHANGES or not metadata.version or self._matters(event.object):
            return None
        return Change(uid=metadata.uid, version=metadata.version)

    def _matters(self, pod: _Pod) -> bool:
        if pod.spec.claims or pod.status.claim:
            return True
        labels = pod.metadata.labels or {}
        told = (pod.metadata.name, *(labels.get(label, "") for label in _EXPORTER_LABELS))
        if any(word in text for word in self._words for text in told):
            return True
        containers = chain(pod.spec.containers or (), pod.spec.init_containers or ())
        return any(self._asks(container.resources) for container in containers)

    def _asks(self, resources: _Resources | None) -> bool:
        if resources is None:
            return False
        return self._any_gpu(resources.limits or ()) or self._any_gpu(resources.requests or ())

    def _any_gpu(self, names: Iterable[str]) -> bool:
        known = self._known
        for name in names:
            if name not in known:
                if len(known) >= _MAX_KNOWN:
                    known.clear()
                known[name] = self._names.matches(name)
            if known[name]:
                return True
        return False


def read_page(body: bytes, action: str) -> Page:
    """Read a page of a list, and leave its objects as text.

    Raises:
        KubeError: it is none.
    """
    try:
        found = _LIST.decode(body)
    except msgspec.DecodeError:
        parse_object(body, action)  # raises where it is not even JSON
        found = _List()
    # Something else in JSON must not be taken for a cluster without objects.
    if not found.metadata.version or not found.kind.endswith("List"):
        raise KubeError(f"cannot {action}: the answer is no list with a resourceVersion")
    return Page(version=found.metadata.version, token=found.metadata.token, items=found.items or ())


def read_object(text: msgspec.Raw, action: str) -> Mapping[str, object]:
    """Read an object of a page, an empty one for any other value.

    Raises:
        KubeError: it is no JSON after all.
    """
    try:
        return mapping_of(_ANYTHING.decode(text))
    except msgspec.DecodeError:
        return parse_object(bytes(text), action)
