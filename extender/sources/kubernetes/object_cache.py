"""Cache the records of one kind of object by key, and report changes to a sink."""

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from extender.runtime.cooperative import YieldControl, yield_to_loop

_Record = TypeVar("_Record")

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


class ObjectCache(Generic[_Record]):
    """Records by key, updated by a watch and corrected by complete lists.

    Use it on the event loop's thread only. Changes from the watch during a list are newer than the
    list, which corrects only the other records. Records that are equal to the cached ones are not
    reported.

    Args:
        replace: receives the first complete list; if it is None, `apply` receives its records.
        apply: receives a new or changed record.
        remove: receives the key of a removed record.
    """

    def __init__(
        self,
        *,
        replace: Callable[[Iterable[_Record]], None] | None = None,
        apply: Callable[[_Record], None],
        remove: Callable[[str], None],
    ) -> None:
        self._replace = replace
        self._apply = apply
        self._remove = remove
        self._records: dict[str, _Record] = {}
        self._listed: dict[str, _Record] = {}
        self._touched: set[str] | None = None
        self._is_filled = False

    @property
    def records(self) -> Mapping[str, _Record]:
        """The cached records, by key."""
        return MappingProxyType(self._records)

    def put(self, key: str, record: _Record | None) -> None:
        """Apply a change from the watch; None if the object is not relevant (any more)."""
        if record is None:
            self.drop(key)
            return
        self._touch(key)
        if self._records.get(key) != record:
            self._records[key] = record
            self._apply(record)

    def drop(self, key: str) -> None:
        """Remove an object that the watch reports as deleted."""
        self._touch(key)
        if self._records.pop(key, None) is not None:
            self._remove(key)

    def begin_list(self) -> None:
        """Start a complete list."""
        self._touched = set()
        self._listed = {}

    def add_listed(self, key: str, record: _Record | None) -> None:
        """Add one object of the list."""
        if record is not None:
            self._listed[key] = record

    def keep_unreadable(self, key: str) -> None:
        """Keep the record of a listed object that cannot be read."""
        self._touch(key)

    async def end_list(self, pacer: Pacer) -> int:
        """Make the records equal to the list, except those that the watch has changed meanwhile.

        Returns:
            The number of corrected records; 0 for the first list.
        """
        listed, self._listed = self._listed, {}
        corrections = 0
        if self._is_filled:
            corrections = await self._correct(listed, pacer)
        elif self._replace is None:
            await self._correct(listed, pacer)
        else:
            self._records = listed
            self._replace(tuple(listed.values()))
        self._is_filled = True
        self._touched = None
        return corrections

    def abort_list(self) -> None:
        """Discard an incomplete list."""
        self._listed = {}
        self._touched = None

    async def _correct(self, listed: Mapping[str, _Record], pacer: Pacer) -> int:
        corrections = 0
        for key in [key for key in self._records if key not in listed]:
            if not self._is_touched(key) and self._records.pop(key, None) is not None:
                self._remove(key)
                corrections += 1
            await pacer.yield_if_due()
        for key, record in listed.items():
            if not self._is_touched(key) and self._records.get(key) != record:
                self._records[key] = record
                self._apply(record)
                corrections += 1
            await pacer.yield_if_due()
        return corrections

    def _touch(self, key: str) -> None:
        if self._touched is not None:
            self._touched.add(key)

    def _is_touched(self, key: str) -> bool:
        return self._touched is not None and key in self._touched
