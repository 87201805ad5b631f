"""Keeps the log short, whoever can have a line written: of the same thing one line now and then."""

import logging
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override  # in typing from Python 3.12 on

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter

LOG_SECONDS: Final = 60.0
"""The same thing is logged this often at most."""

MOST_LINES: Final = 100
"""Different things that are logged in that time: whoever has many addresses has no more lines."""


class Seldom:
    """Says whether a line is due.

    Args:
        seconds: the same thing is logged this often at most.
        most: so many things are logged in that time.
        monotonic: seconds since any moment.
    """

    def __init__(
        self,
        seconds: float = LOG_SECONDS,
        most: int = MOST_LINES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._most = most
        self._monotonic = monotonic
        self._logged: dict[Hashable, tuple[float, int]] = {}
        self._unlogged = 0

    def due(self, *thing: Hashable) -> int | None:
        """Return how many lines were left out since the last one; None for another to leave out.

        What was left out for want of room is told with the first line that finds some.

        Args:
            thing: what the line says, as far as it counts as the same.
        """
        now = self._monotonic()
        if thing in self._logged:
            logged_at, unlogged = self._logged[thing]
            if now - logged_at < self._seconds:
                self._logged[thing] = logged_at, unlogged + 1
                return None
            del self._logged[thing]
        elif not self._has_room(now):
            self._unlogged += 1
            return None
        else:
            unlogged, self._unlogged = self._unlogged, 0
        self._logged[thing] = now, 0
        return unlogged

    def _has_room(self, now: float) -> bool:
        """Tell whether something else may be logged; forget what was logged long ago."""
        if len(self._logged) < self._most:
            return True
        # The oldest is first: whatever is logged anew goes to the end.
        oldest = next(iter(self._logged))
        logged_at, unlogged = self._logged[oldest]
        if now - logged_at < self._seconds:
            return False
        del self._logged[oldest]
        self._unlogged += unlogged
        return True


class SeldomLogger(Adapter):
    """A logger for a library that logs, with a traceback, whatever strangers send.

    Warnings and worse of the same text and kind of exception are written now and then.

    Args:
        logger: writes them.
        seldom: says when.
    """

    def __init__(self, logger: logging.Logger, seldom: Seldom | None = None) -> None:
        super().__init__(logger, {})
        self._seldom = seldom or Seldom()

    @override
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a line, if one is due."""
        if level >= logging.WARNING:
            unlogged = self._seldom.due(str(msg), type(kwargs.get("exc_info")).__name__)
            if unlogged is None:
                return
            kwargs["extra"] = {"also_unlogged": unlogged}
        self.logger.log(level, msg, *args, **kwargs)
