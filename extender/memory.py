"""Keeps the process small, and Python's searches for garbage short.

Nearly all memory here is freed as soon as nobody refers to it; the search is for cycles alone. A
complete one walks every object there is: with forty thousand devices that takes a fifth of a
second, in which no question is answered, and Python would start one whenever a quarter is new.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

YOUNG_OBJECTS: Final = 700
"""New objects that are searched at once, as Python has it: of those that hold a remembered decision
5000 would take 40 ms."""
MIDDLE_ROUNDS: Final = 2
"""After so many such searches those that stayed are searched once more, and then left alone."""
NEVER: Final = 1 << 30

FIRST_SECONDS: Final = 120.0
"""Time until the first complete search: by then the past has been read."""
COMPLETE_SECONDS: Final = 3600.0
"""Time between the next ones."""
PATIENCE_SECONDS: Final = 6 * 3600.0
"""So long one waits for a quiet moment."""
LOOK_SECONDS: Final = 1.0

_TRIM_BYTES: Final = 1 << 20
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3


class Garbage:
    """Searches for garbage in small portions, and completely where nobody is kept waiting.

    Args:
        is_quiet: whether nobody asks just now.
        first_seconds: time until the first complete search.
        complete_seconds: time between the next ones.
        patience_seconds: after so long without a quiet moment it is done nevertheless.
        look_seconds: time between looks for a quiet moment.
    """

    def __init__(
        self,
        is_quiet: Callable[[], bool],
        *,
        first_seconds: float = FIRST_SECONDS,
        complete_seconds: float = COMPLETE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._is_quiet = is_quiet
        self._first_seconds = first_seconds
        self._complete_seconds = complete_seconds
        self._patience_seconds = patience_seconds
        self._look_seconds = look_seconds

    def tidy(self) -> None:
        """Search everything that has come since the last time, and give memory back.

        What is there afterwards is not searched again. So only where no question is under way:
        what belongs to it would never be found.
        """
        gc.collect()
        gc.freeze()
        give_back()

    async def run(self) -> None:
        """Search until cancelled; then Python does as it did before."""
        thresholds = gc.get_threshold()
        gc.set_threshold(YOUNG_OBJECTS, MIDDLE_ROUNDS, NEVER)
        pause_seconds = self._first_seconds
        try:
            while True:
                await asyncio.sleep(pause_seconds)
                pause_seconds = self._complete_seconds
                if await self._wait_until_quiet():
                    self.tidy()
                else:
                    gc.collect()
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    async def _wait_until_quiet(self) -> bool:
        """Wait for a quiet moment; tell whether one came."""
        looks = int(self._patience_seconds / self._look_seconds)
        for _ in range(looks):
            if self._is_quiet():
                return True
            await asyncio.sleep(self._look_seconds)
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
        libc.mallopt(_M_MMAP_THRESHOLD, _TRIM_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc: others have no such functions, nor the need."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim, libc.mallopt  # noqa: B018 - raises where it is not there
        return libc
    return None
