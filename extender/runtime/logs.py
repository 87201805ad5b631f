"""Format log records as one JSON object each, or as text for people, and throttle equal lines.

Messages are constant event names; variable data goes to `extra={...}`. Formatting never raises,
even for odd values in `extra`.
"""

import contextlib
import logging
import math
import queue
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, TextIO

import orjson
from typing_extensions import override  # in typing from Python 3.12 on

from extender.runtime.terminal_escapes import escape_json, escape_text

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class LogLevel(StrEnum):
    """Lowest level of the lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Format of the log lines."""

    JSON = "json"
    """One JSON object for each line, for machines."""
    TEXT = "text"
    """One line of text for people."""


_WAITING_LINES: Final = 20_000
"""Maximum number of queued lines; further lines are dropped and counted."""

_CLOSE_SECONDS: Final = 2.0
"""Longest wait for the last lines at shutdown."""

_POLL_SECONDS: Final = 0.01


class _BackgroundHandler(QueueHandler):
    """Formats lines at once and writes them from a thread; a slow reader delays no request."""

    queue: queue.Queue[logging.LogRecord]

    def __init__(self, stream: TextIO) -> None:
        super().__init__(queue.Queue(_WAITING_LINES))
        self._dropped = 0
        self._writer = QueueListener(self.queue, logging.StreamHandler(stream))
        self._writer.start()

    @override
    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a formatted line; drop it if the queue is full."""
        try:
            self._report_dropped(self.queue.put_nowait)
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    @override
    def close(self) -> None:
        """Write the queued lines within `_CLOSE_SECONDS`, and stop the thread."""
        deadline = monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(queue.Full):
            self._report_dropped(partial(self.queue.put, timeout=_CLOSE_SECONDS))
        while self.queue.unfinished_tasks and monotonic() < deadline:
            sleep(_POLL_SECONDS)
        if not self.queue.unfinished_tasks:  # else the stream is blocked: `stop` would wait for it
            self._writer.stop()
        super().close()

    def _report_dropped(self, put: Callable[[logging.LogRecord], None]) -> None:
        """Queue a line with the number of dropped lines, if there are any.

        Args:
            put: puts a line into the queue, and may wait for room.

        Raises:
            Full: the queue has no room.
        """
        if self._dropped:
            text = "log lines dropped: they came faster than they were read: %d"
            about = (__name__, logging.WARNING, __file__, 0, text, (self._dropped,), None)
            put(self.prepare(logging.LogRecord(*about)))
            self._dropped = 0


_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every log record; all others came from `extra`."""

_QUIET: Final = ("aiohttp.access", "asyncio", "kubernetes_asyncio", "prometheus_client", "urllib3")
"""Loggers that are limited to warnings, because they log more than an operator needs."""

_LEVELS: Final[Mapping[LogLevel, int]] = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}
_MAX_DEPTH: Final = 8
"""Nesting depth below which values are written as their repr."""

_MAX_LINE: Final = 32_768
_MAX_TRACEBACK: Final = 8_192
_MAX_FIELD: Final = 2_048
"""Limits in characters, so that one request cannot fill the log. Fields are cut in long lines
only."""

_JSON_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_UTC_Z


def configure(
    level: LogLevel,
    format: LogFormat,  # noqa: A002 - the setting's name
    stream: TextIO | None = None,
    *,
    in_background: bool = False,
) -> None:
    """Send all log records and Python's warnings to one stream, replacing earlier handlers.

    Args:
        level: lowest level that is written.
        format: JSON or text.
        stream: the stream, or None for standard error.
        in_background: write from a separate thread, so that no caller waits for the stream.
    """
    make = _BackgroundHandler if in_background else logging.StreamHandler
    handler = make(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(handlers=[handler], level=_LEVELS[level], force=True)
    logging.captureWarnings(capture=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, _LEVELS[level]))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, event, extra fields, traceback."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _event_of(record),
        }
        for name, value in _extra_of(record).items():
            fields[f"extra_{name}" if name in fields else name] = value
        traceback = _traceback_of(self, record)
        if traceback:
            fields["traceback"] = traceback
        line = _dump(fields)
        if len(line) > _MAX_LINE:
            short = {name: _shorten(_text(value), _MAX_FIELD) for name, value in fields.items()}
            line = _dump(short)
        return line


class TextFormatter(logging.Formatter):
    """Formats a record as a line for people: time, level, logger, event, extra fields."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_dump(value)}" for name, value in _extra_of(record).items())
        start = f"{_time_of(record)} {record.levelname:<7} {record.name}: {_event_of(record)}"
        traceback = _traceback_of(self, record)
        line = f"{start}{fields}" + (f"\n{traceback}" if traceback else "")
        return _shorten(_printable(line), _MAX_LINE)


def _time_of(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _event_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - arguments of others' loggers may fail in any way
        return f"{record.msg} {_repr(record.args)}"


def _extra_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _traceback_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(record.stack_info)
    return _shorten("\n".join(parts), _MAX_TRACEBACK)


def _text(value: object) -> str:
    return value if isinstance(value, str) else _dump(value)


def _dump(value: object) -> str:
    """Encode a value as JSON; values that JSON cannot express become their repr."""
    try:
        return escape_json(orjson.dumps(value, default=_repr, option=_JSON_OPTIONS).decode())
    except TypeError:  # base of orjson's only exception
        # Text that is not UTF-8, integers over 64 bits, keys of odd types, reference cycles.
        return orjson.dumps(_plain(value, _MAX_DEPTH)).decode()


def _plain(value: object, depth: int) -> object:
    """Convert a value to types that JSON can always express."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _printable(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping) and depth:
        return {_printable(_key_of(key)): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, int) and abs(value) < 1 << 53:
        return int(value)
    return _repr(value)


def _key_of(key: object) -> str:
    return key if isinstance(key, str) else _repr(key)


def _repr(value: object) -> str:
    try:
        return _printable(repr(value))
    except Exception:  # noqa: BLE001 - a class's own repr may fail in any way
        return f"<{type(value).__name__}>"


def _printable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode or that control a terminal."""
    return escape_text(text.encode("utf-8", "backslashreplace").decode())


def _shorten(text: str, most: int) -> str:
    """Replace the middle of a text that is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


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
