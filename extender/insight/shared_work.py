"""Cache whose concurrent callers share one computation."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Result = TypeVar("Result")

MOST_KEPT = 4
"""Size of the cache: each result may take megabytes."""


class Shared(Generic[Result]):
    """Caches results for some seconds, and computes one at a time.

    Args:
        clock: seconds since the epoch.
        seconds: lifetime of a result.
    """

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._entries: OrderedDict[Hashable, tuple[float, Result]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[Result]]) -> Result:
        """Return the cached result for a key, or compute it; callers must not change it."""
        async with self._lock:
            entry = self._entries.get(key)
            if entry is not None and 0 <= self._clock() - entry[0] < self._seconds:
                return entry[1]
            result = await make()
            entry = self._entries[key] = (self._clock(), result)
            if len(self._entries) > MOST_KEPT:
                self._entries.popitem(last=False)
            # Free the memory even if no further request comes.
            asyncio.get_running_loop().call_later(self._seconds, self._forget, key, entry)
            return result

    def clear(self) -> None:
        """Drop all results, because their input has changed."""
        self._entries.clear()

    def _forget(self, key: Hashable, entry: tuple[float, Result]) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
