"""Keeps Python's searches for garbage out of the way of answers.

Memory is freed here as soon as nobody refers to it; the search is for cycles alone, and answering,
watching and reading make next to none. Python's own would take a fifth of a second where it walks
forty thousand devices, whenever it likes. This one searches between two answers, and often: so it
walks only what came in the last seconds. What was in use during such a search, and is garbage only
later, as what belonged to a connection may be, is found by a thorough one, while nobody asks.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from typing import Final

from extender import memory

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
        memory.give_back()

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
                    memory.give_back()
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
