"""Holds the records of one kind by key, and tells a sink what changes."""

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from extender.runtime.cooperative import YieldControl, yield_to_loop

Record = TypeVar("Record")

STEP_SECONDS: Final = 0.001
"""Work on the loop is interrupted this often, so that a webhook never waits much longer."""


class Pace:
    """Lets others use the event loop while a long piece of work goes on.

    Args:
        yield_control: lets them.
    """

    def __init__(self, yield_control: YieldControl = yield_to_loop) -> None:
        self._yield_control = yield_control
        self._since = time.perf_counter()

    async def breathe(self) -> None:
        """Yield to the loop if the last step has taken long enough."""
        if time.perf_counter() - self._since >= STEP_SECONDS:
            await self._yield_control()
            self._since = time.perf_counter()


class ObjectCache(Generic[Record]):
    """Records by key, fed by a watch and, while that goes on, by complete lists now and then.

    Only the event loop's thread changes it. What the watch says while a list is under way is newer
    than the list, which only corrects the rest. Records equal to what is held are not passed on.

    Args:
        replace: takes the first complete list; where it is None, `apply` takes its records.
        apply: takes a record that is new or changed.
        remove: takes the key of a record that is gone.
    """

    def __init__(
        self,
        *,
        replace: Callable[[Iterable[Record]], None] | None = None,
        apply: Callable[[Record], None],
        remove: Callable[[str], None],
    ) -> None:
        self._replace = replace
        self._apply = apply
        self._remove = remove
        self._records: dict[str, Record] = {}
        self._listed: dict[str, Record] = {}
        self._touched: set[str] | None = None
        self._is_filled = False

    @property
    def records(self) -> Mapping[str, Record]:
        """What is held."""
        return MappingProxyType(self._records)

    def put(self, key: str, record: Record | None) -> None:
        """Take what the watch says; None where the object is of no interest (any more)."""
        if record is None:
            self.drop(key)
            return
        self._touch(key)
        if self._records.get(key) != record:
            self._records[key] = record
            self._apply(record)

    def drop(self, key: str) -> None:
        """Take from the watch that an object is gone."""
        self._touch(key)
        if self._records.pop(key, None) is not None:
            self._remove(key)

    def begin_list(self) -> None:
        """Start to take a complete list."""
        self._touched = set()
        self._listed = {}

    def add_listed(self, key: str, record: Record | None) -> None:
        """Take one object of the list."""
        if record is not None:
            self._listed[key] = record

    def keep_listed(self, key: str) -> None:
        """Keep what is held of an object of the list: it is there, and cannot be read."""
        self._touch(key)

    async def end_list(self, pace: Pace) -> int:
        """Make what is held equal to the list, but for what the watch has touched meanwhile.

        Returns:
            How many records had to be corrected; 0 for the first list.
        """
        listed, self._listed = self._listed, {}
        corrections = 0
        if self._is_filled:
            corrections = await self._correct(listed, pace)
        elif self._replace is None:
            await self._correct(listed, pace)
        else:
            self._records = listed
            self._replace(tuple(listed.values()))
        self._is_filled = True
        self._touched = None
        return corrections

    def abort_list(self) -> None:
        """Forget a list that did not come to its end."""
        self._listed = {}
        self._touched = None

    async def _correct(self, listed: Mapping[str, Record], pace: Pace) -> int:
        corrections = 0
        for key in [key for key in self._records if key not in listed]:
            if not self._is_touched(key) and self._records.pop(key, None) is not None:
                self._remove(key)
                corrections += 1
            await pace.breathe()
        for key, record in listed.items():
            if not self._is_touched(key) and self._records.get(key) != record:
                self._records[key] = record
                self._apply(record)
                corrections += 1
            await pace.breathe()
        return corrections

    def _touch(self, key: str) -> None:
        if self._touched is not None:
            self._touched.add(key)

    def _is_touched(self, key: str) -> bool:
        return self._touched is not None and key in self._touched
