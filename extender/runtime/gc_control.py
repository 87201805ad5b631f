"""Run Python's garbage collector between requests.

Reference counting frees almost everything; the collector finds only reference cycles, and the
extender creates few. Python's automatic collection could take a fifth of a second during a request,
because it visits the objects of 40,000 devices. So automatic collection is off. A frequent one
between requests visits only the objects of the last seconds, and freezes them. A full one runs
when no requests come, and finds cycles that were frozen while in use.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from typing import Final

from extender.runtime import native_memory

logger = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 1.0
"""Time between collections. Objects of one second take 5 to 15 milliseconds of CPU to visit, mostly
a snapshot of thousands of nodes; those of ten seconds take 35 or more. A request waits for it."""
_PATIENCE_SECONDS: Final = 60.0
"""Longest extra wait for a moment without open requests."""
_THOROUGH_SECONDS: Final = 600.0
"""Time between full collections, which visit all objects."""
_THOROUGH_QUIET_SECONDS: Final = 30.0
"""A full collection takes a fifth of a second or more, so it starts only after this long without
requests."""
_THOROUGH_PATIENCE_SECONDS: Final = 6 * 3600.0
"""Longest extra wait for such a quiet time."""
_TRIM_SECONDS: Final = 60.0
"""Time between attempts to return free memory to the system."""
_TRIM_QUIET_SECONDS: Final = 1.0
"""Time without requests before such an attempt."""
_LOOK_SECONDS: Final = 0.1
_MOST_OBJECTS: Final = 2_000_000
"""Number of new objects that triggers a collection at once: some code must be creating cycles."""


class GcControl:
    """Runs the garbage collector when no request is open.

    Args:
        is_idle: returns whether no request is open.
        is_quiet: returns whether no request was open for the given seconds.
    """

    def __init__(self, is_idle: Callable[[], bool], is_quiet: Callable[[float], bool]) -> None:
        self._is_idle = is_idle
        self._is_quiet = is_quiet

    def tidy(self) -> None:
        """Collect and freeze all new objects, and return free memory to the system.

        Only a full collection visits them again. So call this while no request is open: the objects
        of an open request would be freed late.
        """
        _search()
        native_memory.give_back()

    async def run(self) -> None:
        """Collect periodically until cancelled, then restore Python's automatic collection."""
        was_enabled = gc.isenabled()
        gc.disable()
        due_at = time.monotonic() + _PAUSE_SECONDS
        trim_at = time.monotonic() + _TRIM_SECONDS
        thorough_at = time.monotonic() + _THOROUGH_SECONDS
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                if self._has_searched_thoroughly(thorough_at):
                    thorough_at = time.monotonic() + _THOROUGH_SECONDS
                elif self._has_searched(due_at):
                    due_at = time.monotonic() + _PAUSE_SECONDS
                if time.monotonic() >= trim_at and self._is_quiet(_TRIM_QUIET_SECONDS):
                    native_memory.give_back()
                    trim_at = time.monotonic() + _TRIM_SECONDS
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def _has_searched_thoroughly(self, due_at: float) -> bool:
        """Run a full collection if one is due, and return whether it ran."""
        late_seconds = time.monotonic() - due_at
        if late_seconds >= _THOROUGH_PATIENCE_SECONDS or (
            late_seconds >= 0 and self._is_quiet(_THOROUGH_QUIET_SECONDS)
        ):
            gc.unfreeze()
            _search()
            return True
        return False

    def _has_searched(self, due_at: float) -> bool:
        """Run a collection if one is due, and return whether it ran."""
        late_seconds = time.monotonic() - due_at
        if late_seconds >= 0 and self._is_idle():
            _search()
            return True
        if late_seconds >= _PATIENCE_SECONDS or gc.get_count()[0] >= _MOST_OBJECTS:
            started = time.perf_counter()
            found = gc.collect()
            logger.info(
                "ran garbage collection while requests were open",
                extra={"found": found, "duration_seconds": time.perf_counter() - started},
            )
            return True
        return False


def _search() -> None:
    """Collect new objects, and freeze the rest, so that the next collection skips them."""
    gc.collect()
    gc.freeze()
