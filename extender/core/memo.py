"""What is worked out once of something that never changes."""

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

Found = TypeVar("Found")

MOST = 24
"""So many results are kept at most, those that were asked for last: each may be some columns of all
devices."""


class Memo:
    """Results by what they depend on besides the thing that keeps the memo."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Hashable, object] = {}

    def get(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """Return a result, which is made if it is not there yet.

        Args:
            key: all that it depends on; None for a result that is not kept.
            make: makes it; whoever gets it must not change it.
        """
        if key is None:
            return make()
        found = self._found.pop(key, None)
        if found is None:
            found = make()
            if len(self._found) >= MOST:
                del self._found[next(iter(self._found))]
        self._found[key] = found  # the latest stand last
        return cast("Found", found)
