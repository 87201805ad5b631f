"""Work that several askers share: who asks soon after another gets what that one got."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Result = TypeVar("Result")

MOST_KEPT = 4
"""Results of so many different questions are kept at once: each may take megabytes."""


class Shared(Generic[Result]):
    """Keeps results for some seconds, and makes one at a time.

    Args:
        clock: seconds since the epoch.
        seconds: so long a result is good.
    """

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._kept: OrderedDict[Hashable, tuple[float, Result]] = OrderedDict()
        self._turn = asyncio.Lock()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[Result]]) -> Result:
        """Return what was made for a question lately, or make it; nobody may change it."""
        async with self._turn:
            kept = self._kept.get(key)
            if kept is not None and 0 <= self._clock() - kept[0] < self._seconds:
                return kept[1]
            result = await make()
            kept = self._kept[key] = (self._clock(), result)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            # Nothing is kept for nobody.
            asyncio.get_running_loop().call_later(self._seconds, self._forget, key, kept)
            return result

    def clear(self) -> None:
        """Forget all: what they rest on is no longer so."""
        self._kept.clear()

    def _forget(self, key: Hashable, kept: tuple[float, Result]) -> None:
        if self._kept.get(key) is kept:
            del self._kept[key]
