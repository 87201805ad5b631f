"""Cache results of an immutable object, such as those of a batch that several requests share."""

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

_Found = TypeVar("_Found")

_MAX_RESULTS = 24
"""Maximum number of cached results, least recently used evicted first. A result may be several
columns of all devices."""


class SharedResults:
    """LRU cache by key; each immutable object owns one."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Hashable, object] = {}

    def get(self, key: Hashable, make: Callable[[], _Found]) -> _Found:
        """Return the cached result, computing it if missing.

        Args:
            key: everything that the result depends on besides the owner; None disables caching.
            make: computes the result; callers must not modify it.
        """
        if key is None:
            return make()
        found = self._found.pop(key, None)
        if found is None:
            found = make()
            if len(self._found) >= _MAX_RESULTS:
                del self._found[next(iter(self._found))]
        self._found[key] = found  # the most recently used is last
        return cast("_Found", found)
