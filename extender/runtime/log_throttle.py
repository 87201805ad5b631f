"""Throttle log lines: write equal lines at most once a minute."""

import logging
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override  # in typing from Python 3.12 on

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

_LOG_SECONDS: Final = 60.0
"""Shortest time between two equal log lines."""

_MOST_LINES: Final = 100
"""Maximum number of different lines in that time, so that a client with many addresses cannot fill
the log."""


class LogThrottle:
    """Decides whether a log line may be written now.

    Args:
        seconds: shortest time between two equal lines.
        most: maximum number of different lines in that time.
        monotonic: returns a monotonic time in seconds.
    """

    def __init__(
        self,
        seconds: float = _LOG_SECONDS,
        most: int = _MOST_LINES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._most = most
        self._monotonic = monotonic
        self._logged: dict[Hashable, tuple[float, int]] = {}
        self._unlogged = 0

    def due(self, *thing: Hashable) -> int | None:
        """Return the number of equal lines skipped since the last one, or None to skip this one.

        Different lines that were skipped because of `most` are counted with the next new line.

        Args:
            thing: identifies the line: lines with the same values are equal.
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
        """Return whether one more line may be remembered; forget the oldest if it has expired."""
        if len(self._logged) < self._most:
            return True
        # The dict is in order of writing, so the oldest line is first.
        oldest = next(iter(self._logged))
        logged_at, unlogged = self._logged[oldest]
        if now - logged_at < self._seconds:
            return False
        del self._logged[oldest]
        self._unlogged += unlogged
        return True


class ThrottledLogger(_Adapter):
    """A throttled logger for libraries that log a traceback for invalid input from clients.

    Warnings and errors with the same text and exception type are written at most once a minute.

    Args:
        logger: writes the lines.
        throttle: decides which lines are written.
    """

    def __init__(self, logger: logging.Logger, throttle: LogThrottle | None = None) -> None:
        super().__init__(logger, {})
        self._throttle = throttle or LogThrottle()

    @override
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a line, unless it is throttled."""
        if level >= logging.WARNING:
            unlogged = self._throttle.due(str(msg), type(kwargs.get("exc_info")).__name__)
            if unlogged is None:
                return
            kwargs["extra"] = {"also_unlogged": unlogged}
        self.logger.log(level, msg, *args, **kwargs)
