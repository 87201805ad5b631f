"""Keeps the process small, and Python's searches for garbage out of the way of answers.

Memory is freed here as soon as nobody refers to it; the search is for cycles alone, and answering,
watching and reading make none. It would find nothing, and take its time for that: a fifth of a
second where it walks forty thousand devices, and ten milliseconds again and again for whatever is
new. So it waits until nobody asks.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 60.0
"""Time between searches: what has come meanwhile is searched within a hundredth of a second or two;
what came in ten minutes, or with the first readings, would take a fifth."""
PATIENCE_SECONDS: Final = 3600.0
"""So much longer one waits for a quiet moment."""
LOOK_SECONDS: Final = 1.0
MOST_OBJECTS: Final = 2_000_000
"""Where so many have come and stayed, something makes cycles after all: search at once."""

_LARGE_BYTES: Final = 1 << 20
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3


class Garbage:
    """Searches for garbage where nobody is kept waiting.

    Args:
        is_quiet: whether nobody asks just now.
        pause_seconds: time until the first search, and between two.
        patience_seconds: after so much longer without a quiet moment it is done nevertheless.
        look_seconds: time between looks for a quiet moment.
        most_objects: where so many more have come than gone, it is done at once.
    """

    def __init__(
        self,
        is_quiet: Callable[[], bool],
        *,
        pause_seconds: float = PAUSE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        most_objects: int = MOST_OBJECTS,
    ) -> None:
        self._is_quiet = is_quiet
        self._pause_seconds = pause_seconds
        self._patience_seconds = patience_seconds
        self._look_seconds = look_seconds
        self._most_objects = most_objects

    def tidy(self) -> None:
        """Search everything that has come since the last time, and give memory back.

        What is there afterwards is not searched again. So only where no question is under way:
        what belongs to it would never be found.
        """
        gc.collect()
        gc.freeze()
        give_back()

    async def run(self) -> None:
        """Search now and then until cancelled; then Python does as it did before."""
        was_enabled = gc.isenabled()
        gc.disable()
        due_at = time.monotonic() + self._pause_seconds
        try:
            while True:
                await asyncio.sleep(self._look_seconds)
                if self._search(due_at):
                    due_at = time.monotonic() + self._pause_seconds
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def _search(self, due_at: float) -> bool:
        """Search if it is time; tell whether it was."""
        late_seconds = time.monotonic() - due_at
        if late_seconds >= 0 and self._is_quiet():
            self.tidy()
            return True
        if late_seconds >= self._patience_seconds or gc.get_count()[0] >= self._most_objects:
            started = time.perf_counter()
            found = gc.collect()
            logger.info(
                "searched for garbage while questions came",
                extra={"found": found, "duration_seconds": time.perf_counter() - started},
            )
            return True
        return False


def give_back() -> None:
    """Return free memory to the system; nothing happens where the C library cannot."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def prefer_small() -> None:
    """Have large blocks of memory returned as soon as they are free, and threads share a pool.

    For a process that handles a few large blocks at a time: each costs the system some work.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc: others have no such functions, nor the need."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim, libc.mallopt  # noqa: B018 - raises where it is not there
        return libc
    return None
