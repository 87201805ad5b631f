"""Log lines are written outside of requests."""

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest
from typing_extensions import override

from extender.runtime import logs
from extender.runtime.logs import JsonFormatter, _BackgroundHandler

DEADLINE_SECONDS = 10.0


class SlowStream(io.StringIO):
    """Stream whose reader has stopped until the test lets it continue."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()
        self.is_full = threading.Event()

    @override
    def write(self, text: str) -> int:
        self.is_full.set()
        assert self.reads.wait(DEADLINE_SECONDS)
        return super().write(text)


@pytest.fixture
def stream() -> Iterator[SlowStream]:
    """Yield a stream, and let its reader continue at the end."""
    slow = SlowStream()
    yield slow
    slow.reads.set()


def log_to(stream: io.StringIO) -> tuple[logging.Logger, _BackgroundHandler]:
    """Return a logger that writes to a stream only."""
    handler = _BackgroundHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")  # noqa: LOG001 - no other logger shall see it
    logger.addHandler(handler)
    return logger, handler


def events(stream: io.StringIO) -> list[str]:
    """Return the written events."""
    return [json.loads(line)["event"] for line in stream.getvalue().splitlines()]


def test_all_lines_are_written_in_order_by_the_end() -> None:
    stream = io.StringIO()
    logger, handler = log_to(stream)
    handler.name = "of this test"

    for number in range(1000):
        logger.warning("line %d", number)
    handler.close()

    assert events(stream) == [f"line {number}" for number in range(1000)]
    assert handler._writer._thread is None
    assert handler.name not in logging._handlers  # type: ignore[attr-defined] # logging's registry


def test_logging_does_not_wait_for_the_reader(stream: SlowStream) -> None:
    logger, handler = log_to(stream)

    logger.warning("first")
    assert stream.is_full.wait(DEADLINE_SECONDS)
    logger.warning("second")  # returns although the reader has stopped
    assert not stream.getvalue()

    stream.reads.set()
    handler.close()
    assert events(stream) == ["first", "second"]


def test_lines_that_are_not_read_are_dropped_and_counted(
    stream: SlowStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_WAITING_LINES", 3)
    logger, handler = log_to(stream)
    logger.warning("held")
    assert stream.is_full.wait(DEADLINE_SECONDS)

    for number in range(5):
        logger.warning("line %d", number)
    stream.reads.set()
    handler.queue.join()
    logger.warning("read again")
    handler.close()

    assert events(stream) == [
        "held",
        "line 0",
        "line 1",
        "line 2",
        "log lines dropped: they came faster than they were read: 2",
        "read again",
    ]


def test_closing_waits_for_a_blocked_reader_only_for_a_while(
    stream: SlowStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_CLOSE_SECONDS", 0.05)
    logger, handler = log_to(stream)
    logger.warning("held")
    assert stream.is_full.wait(DEADLINE_SECONDS)
    writer = handler._writer._thread

    handler.close()  # returns although the reader has stopped

    assert writer is not None
    assert writer.is_alive()  # it writes the line if the reader continues
    stream.reads.set()
    handler.close()
    assert events(stream) == ["held"]
    assert not writer.is_alive()


def test_a_stream_that_is_gone_ends_nothing() -> None:
    stream = io.StringIO()
    logger, handler = log_to(stream)
    stream.close()

    logger.warning("this is lost")
    handler.close()
