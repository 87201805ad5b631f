"""Reduce the objects of one kind to records."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from extender.core.untyped import mapping_of, text_of
from extender.sources.kubernetes.json_text import WatchChange
from extender.sources.kubernetes.object_cache import ObjectCache, Pacer


class _Identified(Protocol):
    @property
    def uid(self) -> str: ...


_Record = TypeVar("_Record", bound=_Identified)


class RecordFeed(Generic[_Record]):
    """Reduce objects of one kind to records as they arrive, and keep the records by UID.

    Args:
        mark: part of the JSON text of every relevant object.
        reduce: returns an object's record, None if it is not relevant.
        set_record: receives a UID and its record, None if it was removed.
        on_listed: called after each complete list.

    Attributes:
        is_listed: a complete list has been read.
    """

    def __init__(
        self,
        mark: bytes,
        reduce: Callable[[Mapping[str, object]], _Record | None],
        set_record: Callable[[str, _Record | None], None],
        on_listed: Callable[[Pacer], Awaitable[None]],
    ) -> None:
        self._mark = mark
        self._reduce = reduce
        self._on_listed = on_listed
        self.is_listed = False
        self._object_cache: ObjectCache[_Record] = ObjectCache(
            apply=lambda record: set_record(record.uid, record),
            remove=lambda uid: set_record(uid, None),
        )

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
        self._object_cache.add_listed(_uid(raw), self._reduce(raw))

    def keep_unreadable(self, raw: Mapping[str, object]) -> None:
        """Keep the record of a listed object that cannot be read."""
        self._object_cache.keep_unreadable(_uid(raw))

    async def end_list(self, pacer: Pacer) -> int:
        """Apply the list; return the number of corrected records."""
        corrections = await self._object_cache.end_list(pacer)
        self.is_listed = True
        await self._on_listed(pacer)
        return corrections

    def abort_list(self) -> None:
        """Discard an incomplete list."""
        self._object_cache.abort_list()

    def put(self, raw: Mapping[str, object]) -> None:
        """Apply an added or changed object."""
        self._object_cache.put(_uid(raw), self._reduce(raw))

    def drop(self, raw: Mapping[str, object]) -> None:
        """Remove a deleted object, given its last state."""
        self._object_cache.drop(_uid(raw))


def _uid(raw: Mapping[str, object]) -> str:
    return text_of(mapping_of(raw.get("metadata")).get("uid"))
