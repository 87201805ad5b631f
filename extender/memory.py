"""Keeps the process small, and Python's searches for garbage out of the way of answers.

Memory is freed here as soon as nobody refers to it; the search is for cycles alone, and answering,
watching and reading make next to none. Python's own would take a fifth of a second where it walks
forty thousand devices, whenever it likes. This one searches between two answers, and often: so it
walks only what came in the last seconds. What was in use during such a search, and is garbage only
later, as what belonged to a connection may be, is found by a thorough one, while nobody asks.
"""

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import mmap
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 1.0
"""Time between searches. What came in a second takes 5 to 15 milliseconds of CPU to walk, most of
it a snapshot of thousands of nodes and some decisions; what comes in ten seconds takes up to 35 and
more. A question that arrives in between waits for it."""
PATIENCE_SECONDS: Final = 60.0
"""So much longer one waits for a moment in which nobody is being answered."""
THOROUGH_SECONDS: Final = 600.0
"""Time between thorough searches, which walk everything."""
THOROUGH_QUIET_SECONDS: Final = 30.0
"""One takes a fifth of a second or more: only after so long a silence the next question is far."""
THOROUGH_PATIENCE_SECONDS: Final = 6 * 3600.0
"""So much longer one waits for such a silence."""
TRIM_SECONDS: Final = 60.0
"""Time between looks whether free memory can be given back ..."""
TRIM_QUIET_SECONDS: Final = 1.0
"""... once nobody has asked for so long."""
LOOK_SECONDS: Final = 0.1
MOST_OBJECTS: Final = 2_000_000
"""Where so many have come and stayed, something makes cycles after all: search at once."""

_LARGE_BYTES: Final = 1 << 20
_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3


class Garbage:
    """Searches for garbage where nobody is kept waiting.

    Args:
        is_idle: whether nobody is being answered just now.
        is_quiet: whether nobody has asked for so many seconds.
        pause_seconds: time until the first search, and between two.
        patience_seconds: after so much longer without an idle moment it is done nevertheless.
        thorough_seconds: time between two thorough searches.
        thorough_patience_seconds: after so much longer without a quiet moment one is made
            nevertheless.
        trim_seconds: time between two attempts to give free memory back.
        look_seconds: time between looks for an idle moment.
        most_objects: where so many more have come than gone, it is done at once.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool],
        is_quiet: Callable[[float], bool],
        *,
        pause_seconds: float = PAUSE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        thorough_seconds: float = THOROUGH_SECONDS,
        thorough_patience_seconds: float = THOROUGH_PATIENCE_SECONDS,
        trim_seconds: float = TRIM_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        most_objects: int = MOST_OBJECTS,
    ) -> None:
        self._is_idle = is_idle
        self._is_quiet = is_quiet
        self._pause_seconds = pause_seconds
        self._patience_seconds = patience_seconds
        self._thorough_seconds = thorough_seconds
        self._thorough_patience_seconds = thorough_patience_seconds
        self._trim_seconds = trim_seconds
        self._look_seconds = look_seconds
        self._most_objects = most_objects

    def tidy(self) -> None:
        """Search everything that has come since the last time, and give memory back.

        What is there afterwards is searched again only by a thorough search. So where no question
        is under way: what belongs to it would be found late.
        """
        _search()
        give_back()

    async def run(self) -> None:
        """Search now and then until cancelled; then Python does as it did before."""
        was_enabled = gc.isenabled()
        gc.disable()
        due_at = time.monotonic() + self._pause_seconds
        trim_at = time.monotonic() + self._trim_seconds
        thorough_at = time.monotonic() + self._thorough_seconds
        try:
            while True:
                await asyncio.sleep(self._look_seconds)
                if self._has_searched_thoroughly(thorough_at):
                    thorough_at = time.monotonic() + self._thorough_seconds
                elif self._has_searched(due_at):
                    due_at = time.monotonic() + self._pause_seconds
                if time.monotonic() >= trim_at and self._is_quiet(TRIM_QUIET_SECONDS):
                    give_back()
                    trim_at = time.monotonic() + self._trim_seconds
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def _has_searched_thoroughly(self, due_at: float) -> bool:
        """Search everything if it is time; tell whether it was."""
        late_seconds = time.monotonic() - due_at
        if late_seconds >= self._thorough_patience_seconds or (
            late_seconds >= 0 and self._is_quiet(THOROUGH_QUIET_SECONDS)
        ):
            gc.unfreeze()
            _search()
            return True
        return False

    def _has_searched(self, due_at: float) -> bool:
        """Search if it is time; tell whether it was."""
        late_seconds = time.monotonic() - due_at
        if late_seconds >= 0 and self._is_idle():
            _search()
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


def _search() -> None:
    """Search what has come since the last time; what is left is not walked by the next search."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Return free memory to the system; nothing happens where the C library cannot."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def forget(buffer: memoryview) -> None:
    """Return a buffer's memory to the system, until it is written to again.

    Of what it held, whole pages are zeros from now on; pages that it shares with others stay as
    they are. Nothing happens where the C library cannot.

    Args:
        buffer: may be written to, and is not empty.
    """
    libc = _libc()
    if libc is None:
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (start + buffer.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def prefer_small() -> None:
    """Have large blocks of memory returned as soon as they are free, and threads share a pool.

    For a process that handles a few large blocks at a time: each costs the system some work.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc: others have no such functions, nor the need."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim, libc.mallopt  # noqa: B018 - raises where it is not there
        return libc
    return None
