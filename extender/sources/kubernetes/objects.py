"""Describe the kinds of objects that are watched, and cache their records.

An `ObjectKind` is listed and watched by a reflector, which passes the objects to a `Feed`. A feed
reduces them to records and keeps these in an `ObjectCache`, which reports changes.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from typing_extensions import override  # in typing from Python 3.12 on

from extender.core.nodes.host_resources import NONE, HostResources, PlacedPod
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.untyped import mapping_of, text_of
from extender.runtime.cooperative import YieldControl, yield_to_loop
from extender.sources.kubernetes.json_text import WatchChange

_Record = TypeVar("_Record")

_OnChange = Callable[[str, _Record | None, _Record | None], None]
"""Receives a key, and its record before and after a change; None for no record."""

_STEP_SECONDS: Final = 0.001
"""Longest step of work on the event loop, so that a webhook never waits much longer."""


class Pacer:
    """Yield the event loop to other tasks during a long piece of work.

    Args:
        yield_control: yields the event loop.
    """

    def __init__(self, yield_control: YieldControl = yield_to_loop) -> None:
        self._yield_control = yield_control
        self._since = time.perf_counter()

    async def yield_if_due(self) -> None:
        """Yield if the current step has taken longer than `_STEP_SECONDS`."""
        if time.perf_counter() - self._since >= _STEP_SECONDS:
            await self._yield_control()
            self._since = time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectKind:
    """A kind of object that is watched.

    Attributes:
        resource: the kind as RBAC names it ("pods").
        path: API path of the list of all objects.
        field_selector: selects objects at the API server, "" for all.
        is_optional: the API server may not serve such objects, or may forbid us to list them.
        absence_level: level of the log line if it does not serve them.
    """

    resource: str
    path: str
    field_selector: str = ""
    is_optional: bool = False
    absence_level: int = logging.INFO


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
        """Set the size of a pod group from its API object; None if no object states a size."""


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
        lists: complete lists read.
        errors: failed attempts.
        unreadable: objects that could not be processed and were ignored.
        unreadable_since_list: unreadable objects since the last complete list began.
        unreadable_names: namespace and name of the last unreadable objects, each once.
    """

    is_listed: bool = False
    is_absent: bool = False
    is_connected: bool = False
    last_event_at: float | None = None
    last_error: str = ""
    lists: int = 0
    errors: int = 0
    unreadable: int = 0
    unreadable_since_list: int = 0
    unreadable_names: tuple[tuple[str, str], ...] = ()

    @property
    def was_tried(self) -> bool:
        """Whether an attempt to list has ended, with or without success."""
        return self.is_listed or self.is_absent or self.errors > 0


class ObjectCache(Generic[_Record]):
    """Records by key, updated by a watch and corrected by complete lists.

    Use it on the event loop's thread only. Changes from the watch during a list are newer than the
    list, which corrects only the other records. Records that are equal to the cached ones are not
    reported.

    Args:
        on_change: receives each change.
        replace: receives the first complete list; if it is None, `on_change` receives its records.

    Attributes:
        records: the cached records, by key.
    """

    def __init__(
        self,
        on_change: _OnChange[_Record],
        *,
        replace: Callable[[Iterable[_Record]], None] | None = None,
    ) -> None:
        self._on_change = on_change
        self._replace = replace
        self._records: dict[str, _Record] = {}
        self.records: Mapping[str, _Record] = MappingProxyType(self._records)
        self._unlisted: dict[str, None] = {}
        self._differing: dict[str, _Record] = {}
        self._touched: set[str] | None = None
        self._is_filled = False

    def put(self, key: str, record: _Record | None) -> None:
        """Apply a change from the watch; None if the object is not relevant (any more)."""
        if record is None:
            self.drop(key)
            return
        self._touch(key)
        self._set(key, record)

    def drop(self, key: str) -> None:
        """Remove an object that the watch reports as deleted."""
        self._touch(key)
        self._remove(key)

    def begin_list(self) -> None:
        """Start a complete list."""
        self._touched = set()
        self._unlisted, self._differing = dict.fromkeys(self._records), {}

    def add_listed(self, key: str, record: _Record | None) -> None:
        """Add one object of the list.

        Only differences are stored: a second copy of all records would double the memory.
        """
        if record is None:
            return
        self._unlisted.pop(key, None)
        if self._records.get(key) == record:
            self._differing.pop(key, None)
        else:
            self._differing[key] = record

    def keep_unreadable(self, key: str) -> None:
        """Keep the record of a listed object that cannot be read."""
        self._unlisted.pop(key, None)

    async def end_list(self, pacer: Pacer) -> None:
        """Make the records equal to the list, except those that the watch has changed meanwhile."""
        unlisted, differing = self._unlisted, self._differing
        self._unlisted, self._differing = {}, {}
        if self._is_filled or self._replace is None:
            await self._correct(unlisted, differing, pacer)
        else:
            for key in unlisted:
                self._records.pop(key, None)
            self._records.update(differing)
            self._replace(tuple(self._records.values()))
        self._is_filled = True
        self._touched = None

    def abort_list(self) -> None:
        """Discard an incomplete list."""
        self._unlisted, self._differing = {}, {}
        self._touched = None

    async def _correct(
        self, unlisted: Iterable[str], differing: Mapping[str, _Record], pacer: Pacer
    ) -> None:
        for key in unlisted:
            if not self._is_touched(key):
                self._remove(key)
            await pacer.yield_if_due()
        for key, record in differing.items():
            if not self._is_touched(key):
                self._set(key, record)
            await pacer.yield_if_due()

    def _set(self, key: str, record: _Record) -> None:
        before = self._records.get(key)
        if before != record:
            self._records[key] = record
            self._on_change(key, before, record)

    def _remove(self, key: str) -> None:
        before = self._records.pop(key, None)
        if before is not None:
            self._on_change(key, before, None)

    def _touch(self, key: str) -> None:
        if self._touched is not None:
            self._touched.add(key)

    def _is_touched(self, key: str) -> bool:
        return self._touched is not None and key in self._touched


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

    async def end_list(self, pacer: Pacer) -> None:
        """Apply the list."""

    def abort_list(self) -> None:
        """Discard an incomplete list."""

    def put(self, raw: Mapping[str, object]) -> None:
        """Apply an added or changed object."""

    def drop(self, raw: Mapping[str, object]) -> None:
        """Remove a deleted object, given its last state."""


def uid_of(raw: Mapping[str, object]) -> str:
    """Return the UID of an object, "" if it is missing."""
    return text_of(mapping_of(raw.get("metadata")).get("uid"))


class RecordFeed(Generic[_Record]):
    """Reduce objects of one kind to records as they arrive, and keep the records by key.

    Args:
        reduce: returns an object's record, None if it is not relevant.
        on_change: receives each change of a record, as for `ObjectCache`.
        key: returns the key of an object.
        mark: part of the JSON text of every relevant object.
        replace: as for `ObjectCache`.
        on_listed: called after each complete list.

    Attributes:
        is_listed: a complete list has been read.
    """

    def __init__(
        self,
        reduce: Callable[[Mapping[str, object]], _Record | None],
        on_change: _OnChange[_Record],
        *,
        key: Callable[[Mapping[str, object]], str] = uid_of,
        mark: bytes = b"",
        replace: Callable[[Iterable[_Record]], None] | None = None,
        on_listed: Callable[[Pacer], Awaitable[None]] | None = None,
    ) -> None:
        self._reduce = reduce
        self._key = key
        self._mark = mark
        self._on_listed = on_listed
        self._object_cache = ObjectCache(on_change, replace=replace)
        self.is_listed = False
        self.records = self._object_cache.records

    def is_relevant(self, text: msgspec.Raw) -> bool:
        """Return whether an object of a list, as JSON text, has to be parsed."""
        return self._mark in bytes(text)

    def irrelevant_change(self, _: bytes) -> WatchChange | None:
        """Return None: every changed object has to be parsed."""
        return None

    def begin_list(self) -> None:
        """Start a complete list."""
        self._object_cache.begin_list()

    def add_listed(self, raw: Mapping[str, object]) -> None:
        """Add one object of the list."""
        self._object_cache.add_listed(self._key(raw), self._reduce(raw))

    def keep_unreadable(self, raw: Mapping[str, object]) -> None:
        """Keep the record of a listed object that cannot be read."""
        self._object_cache.keep_unreadable(self._key(raw))

    async def end_list(self, pacer: Pacer) -> None:
        """Apply the list."""
        await self._object_cache.end_list(pacer)
        self.is_listed = True
        if self._on_listed is not None:
            await self._on_listed(pacer)

    def abort_list(self) -> None:
        """Discard an incomplete list."""
        self._object_cache.abort_list()

    def put(self, raw: Mapping[str, object]) -> None:
        """Apply an added or changed object."""
        self._object_cache.put(self._key(raw), self._reduce(raw))

    def drop(self, raw: Mapping[str, object]) -> None:
        """Remove a deleted object, given its last state."""
        self._object_cache.drop(self._key(raw))


class HostUse(ObjectCache[PlacedPod]):
    """Cache the requests of all pods with a node, and report their sum for each node.

    The cache key is `namespace/name`, which is unique at any time. Most pods have no GPUs: of these
    nothing else is stored.

    Args:
        notify: receives a node's name and the sum of its pods' requests after each change.
    """

    def __init__(self, notify: Callable[[str, HostResources], None]) -> None:
        super().__init__(self._update_sums)
        self._notify = notify
        self._sums: dict[str, HostResources] = {}
        self._changed: set[str] = set()

    @override
    def put(self, key: str, record: PlacedPod | None) -> None:
        super().put(key, record)
        while self._changed:
            self._notify_one()

    @override
    async def end_list(self, pacer: Pacer) -> None:
        await super().end_list(pacer)
        while self._changed:
            self._notify_one()
            await pacer.yield_if_due()

    def _notify_one(self) -> None:
        node = self._changed.pop()
        self._notify(node, self._sums.get(node, NONE))

    def _update_sums(self, _: str, before: PlacedPod | None, after: PlacedPod | None) -> None:
        if before is not None:
            self._sums[before.node] = self._sums[before.node].less(before.needs)
        if after is not None:
            self._sums[after.node] = self._sums.get(after.node, NONE).plus(after.needs)
        for node in {placed.node for placed in (before, after) if placed is not None}:
            self._changed.add(node)
            if self._sums[node] == NONE:
                del self._sums[node]
