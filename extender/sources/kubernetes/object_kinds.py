"""Describe a kind of object that is watched, its status, and the receivers of its objects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.sources.kubernetes.json_text import WatchChange
from extender.sources.kubernetes.object_cache import Pacer


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind:
    """A kind of object that is watched.

    Attributes:
        resource: the kind as RBAC names it ("pods").
        path: API path of the list of all objects.
        field_selector: selects objects at the API server, "" for all.
        is_optional: the API server may not serve such objects, or may forbid us to list them.
    """

    resource: str
    path: str
    field_selector: str = ""
    is_optional: bool = False


class InventorySink(Protocol):
    """Receives nodes and pods from the API server, on the event loop; every call returns soon."""

    def replace_nodes(self, records: Iterable[NodeRecord]) -> None:
        """Apply the first complete list of nodes."""

    def apply_node(self, record: NodeRecord) -> None:
        """Apply an added or changed node."""

    def remove_node(self, name: str) -> None:
        """Remove a node."""

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        """Apply the first complete list of GPU pods."""

    def apply_pod(self, record: PodRecord) -> None:
        """Apply an added or changed GPU pod."""

    def remove_pod(self, uid: str, at: float) -> None:
        """Remove a pod that was deleted before `at`, seconds since the epoch."""

    def apply_host_use(self, node: str, requested: HostResources) -> None:
        """Apply the sum of the requests of all pods on a node, with or without GPUs."""

    def apply_group_size(self, key: str, size: int | None) -> None:
        """Apply the size that a pod group's object states, None if no object states it."""


@dataclass(slots=True, kw_only=True)
class ReflectorStatus:
    """Status of the list and watch of one kind of object; updated in place.

    Attributes:
        is_listed: a complete list has been read once.
        is_absent: the API server does not serve these objects, or forbids us to list them; only for
            optional kinds.
        is_connected: the last attempt to list or watch succeeded.
        last_event_at: when the API server last sent something, seconds since the epoch; None before
            that.
        last_error: cause of the current failure, "" if there is none.
        watches: watches started.
        lists: complete lists read.
        errors: failed attempts.
        expired: watches or lists that the API server ended because their version was too old (410).
        corrections: records that a list corrected because the watch had missed a change.
        unreadable: objects that could not be processed and were ignored.
        unreadable_since_list: unreadable objects since the last complete list began.
        unreadable_names: namespace and name of the last unreadable objects, each once.
    """

    is_listed: bool = False
    is_absent: bool = False
    is_connected: bool = False
    last_event_at: float | None = None
    last_error: str = ""
    watches: int = 0
    lists: int = 0
    errors: int = 0
    expired: int = 0
    corrections: int = 0
    unreadable: int = 0
    unreadable_since_list: int = 0
    unreadable_names: tuple[tuple[str, str], ...] = ()

    @property
    def was_tried(self) -> bool:
        """Whether an attempt to list has ended, with or without success."""
        return self.is_listed or self.is_absent or self.errors > 0


class Feed(Protocol):
    """Receives the objects of one kind."""

    def begin_list(self) -> None:
        """Start a complete list."""

    def is_relevant(self, text: msgspec.Raw) -> bool:
        """Return whether an object of a list, as JSON text, has to be parsed."""

    def irrelevant_change(self, line: bytes) -> WatchChange | None:
        """Return UID and version of a watch event's object if it need not be parsed, else None."""

    def add_listed(self, raw: Mapping[str, object]) -> None:
        """Add one object of the list."""

    def keep_unreadable(self, raw: Mapping[str, object]) -> None:
        """Keep the record of a listed object that cannot be read; `raw` has its metadata alone."""

    async def end_list(self, pacer: Pacer) -> int:
        """Apply the list; return the number of corrected records."""

    def abort_list(self) -> None:
        """Discard an incomplete list."""

    def put(self, raw: Mapping[str, object]) -> None:
        """Apply an added or changed object."""

    def drop(self, raw: Mapping[str, object]) -> None:
        """Remove a deleted object, given its last state."""
