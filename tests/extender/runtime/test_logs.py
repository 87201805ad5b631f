import io
import json
import logging
import math
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from extender.runtime.logs import (
    JsonFormatter,
    LogFormat,
    LogLevel,
    LogThrottle,
    TextFormatter,
    ThrottledLogger,
    configure,
)

Line = dict[str, object]


class Unprintable:
    @override
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def record(event: str = "placed pod", **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("extender.test", logging.INFO, "file", 1, event, None, None)
    made.created = datetime(2026, 1, 2, 3, 4, 5, 678900, UTC).timestamp()
    vars(made).update(extra)
    return made


def parse(line: str) -> Line:
    assert "\n" not in line
    parsed = json.loads(line)
    assert isinstance(parsed, dict)
    return parsed


def as_json(event: str = "placed pod", **extra: object) -> Line:
    return parse(JsonFormatter().format(record(event, **extra)))


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Yield a stream with the log, and restore the loggers at the end."""
    names = ("", "aiohttp.access", "asyncio", "kubernetes_asyncio", "urllib3", "prometheus_client")
    loggers = {name: logging.getLogger(name) for name in names}
    levels = {name: logger.level for name, logger in loggers.items()}
    root = loggers[""]
    handlers = root.handlers[:]
    root.handlers.clear()  # otherwise `configure` would close those of pytest
    yield io.StringIO()
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    for name, logger in loggers.items():
        logger.setLevel(levels[name])


def test_a_json_line_has_time_level_logger_event_and_extra_fields() -> None:
    assert as_json(node="gpu-7", seconds=0.25) == {
        "time": "2026-01-02T03:04:05.678Z",
        "level": "info",
        "logger": "extender.test",
        "event": "placed pod",
        "node": "gpu-7",
        "seconds": 0.25,
    }


def test_an_extra_field_never_replaces_one_of_the_line() -> None:
    line = as_json(event="placed pod", time="never", level=7)

    assert line["level"] == "info"
    assert line["extra_level"] == 7
    assert line["extra_time"] == "never"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param(math.nan, None, id="nan"),
        pytest.param(math.inf, None, id="infinity"),
        pytest.param("\ud800", "\\ud800", id="half a surrogate pair"),
        pytest.param(b"\xff", "b'\\xff'", id="bytes"),
        pytest.param(1 << 70, str(1 << 70), id="more than 64 bits"),
        pytest.param({"a"}, "{'a'}", id="set"),
        pytest.param({1: "x"}, {"1": "x"}, id="key that is a number"),
        pytest.param({(1, 2): "\ud800"}, {"(1, 2)": "\\ud800"}, id="key that is a tuple"),
        pytest.param(
            {"\udcff": [math.nan, None, True, 0.5, (1 << 53) - 1, 1 << 53, -(1 << 53)]},
            {"\\udcff": [None, None, True, 0.5, (1 << 53) - 1, str(1 << 53), str(-(1 << 53))]},
            id="deep",
        ),
        pytest.param(np.float64(0.5), 0.5, id="numpy number"),
        pytest.param(np.array([1, 2]), [1, 2], id="numpy array"),
        pytest.param(Unprintable(), "<Unprintable>", id="repr that fails"),
        pytest.param(LogLevel.INFO, "info", id="enum"),
        pytest.param(datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T00:00:00Z", id="time"),
    ],
)
def test_odd_values_are_written_somehow(value: object, shown: object) -> None:
    assert json.dumps(as_json(value=value)["value"]) == json.dumps(shown)
    assert "value=" in TextFormatter().format(record(value=value))


def test_a_value_that_holds_itself_is_cut() -> None:
    loop: list[object] = []
    loop.append(loop)

    assert "..." in str(as_json(value=loop)["value"])


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.builds(object),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters()) | st.integers(), inner)
        | st.tuples(inner)
    ),
    max_leaves=8,
)


@given(value=anything)
def test_any_extra_value_gives_one_line_of_json(value: object) -> None:
    assert "value" in as_json(value=value)


@given(value=anything)
def test_any_extra_value_gives_text_that_can_be_encoded(value: object) -> None:
    assert TextFormatter().format(record(value=value)).encode()


def test_a_traceback_is_one_field() -> None:
    made = record("failed")
    try:
        int("broken")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)

    line = parse(JsonFormatter().format(made))

    assert str(line["traceback"]).startswith("Traceback (most recent call last)")
    assert str(line["traceback"]).endswith("base 10: 'broken'")


def test_a_stack_is_written_with_the_traceback() -> None:
    made = record("failed")
    made.stack_info = "Stack (most recent call last):"

    assert parse(JsonFormatter().format(made))["traceback"] == made.stack_info
    assert TextFormatter().format(made).endswith(f"failed\n{made.stack_info}")


def test_what_another_formatter_left_in_a_record_is_not_written() -> None:
    made = record()
    logging.Formatter("%(asctime)s %(message)s").format(made)

    assert as_json() == parse(JsonFormatter().format(made))


def test_values_that_json_cannot_express_are_cut_below_a_depth() -> None:
    value: object = "deepest"
    for _ in range(9):
        value = {"\ud800": [value]}

    inner: Any = as_json(value=value)
    levels = 0
    while not isinstance(inner, str):
        if isinstance(inner, dict):
            inner = inner.get("value") or next(iter(inner.values()))
        else:
            (inner,) = inner
        levels += 1

    assert levels == 8  # with the line's own
    assert "'deepest'" in inner  # the repr of the rest


def test_a_message_whose_arguments_do_not_fit_is_still_written() -> None:
    made = record("%d nodes")
    made.args = ("three",)

    assert parse(JsonFormatter().format(made))["event"] == "%d nodes ('three',)"


def test_a_line_of_text_is_for_people() -> None:
    line = TextFormatter().format(record(node="gpu-7"))

    assert line == '2026-01-02T03:04:05.678Z INFO    extender.test: placed pod node="gpu-7"'


def test_configured_logs_go_to_one_stream_from_their_level_on(stream: io.StringIO) -> None:
    before = io.StringIO()
    configure(LogLevel.DEBUG, LogFormat.TEXT, before)
    configure(LogLevel.INFO, LogFormat.JSON, stream)

    logging.getLogger("extender.test").debug("hidden")
    logging.getLogger("extender.test").info("shown")
    for name in ("aiohttp.access", "asyncio", "kubernetes_asyncio", "urllib3", "prometheus_client"):
        logging.getLogger(name).info("GET /filter")
    logging.getLogger("aiohttp.access").warning("odd request")

    events = [parse(line)["event"] for line in stream.getvalue().splitlines()]
    assert events == ["shown", "odd request"]
    assert not before.getvalue()


@pytest.mark.parametrize("level", LogLevel)
def test_each_level_is_the_lowest_that_is_written(stream: io.StringIO, level: LogLevel) -> None:
    configure(level, LogFormat.TEXT, stream)

    for one in LogLevel:
        logging.getLogger("extender.test").log(logging.getLevelNamesMapping()[one.upper()], one)
        logging.getLogger("asyncio").log(logging.getLevelNamesMapping()[one.upper()], "of asyncio")

    levels = [*LogLevel]
    written = [line.split()[-1] for line in stream.getvalue().splitlines()]
    assert [one for one in written if one != "asyncio"] == levels[levels.index(level) :]
    assert written.count("asyncio") == min(2, len(levels) - levels.index(level))


def test_warnings_of_python_become_log_lines(stream: io.StringIO) -> None:
    with warnings.catch_warnings():  # which puts back what `configure` redirects
        warnings.simplefilter("always")
        configure(LogLevel.ERROR, LogFormat.TEXT, stream)
        logging.getLogger("py.warnings").setLevel(logging.WARNING)
        warnings.warn("old call", DeprecationWarning, stacklevel=1)
    logging.getLogger("py.warnings").setLevel(logging.NOTSET)

    assert "old call" in stream.getvalue()


def test_no_line_controls_a_terminal() -> None:
    hostile = "\x1b[31m\x9b31m\x7f\u0085\u061c\u200f\u2028\u202e\u2066"

    for formatter in (JsonFormatter(), TextFormatter()):
        line = formatter.format(record("event " + hostile, pod=hostile, pods={hostile: [hostile]}))

        assert line.isprintable()


def test_a_line_is_bounded_and_keeps_its_beginnings_and_ends() -> None:
    written = json.loads(JsonFormatter().format(record("event", pod="b" + "x" * 200_000 + "e")))

    assert written["event"] == "event"
    assert written["pod"].startswith("bx")
    assert written["pod"].endswith("xe")
    assert len(written["pod"]) < 3_000
    assert len(TextFormatter().format(record("event", pod="x" * 200_000))) < 33_000


def test_a_line_as_long_as_the_limit_is_written_whole() -> None:
    def line(length: int) -> str:
        return TextFormatter().format(record("x" * length))

    most = 32_768 - len(line(0))

    assert line(most).endswith(" " + "x" * most)
    assert " ... 1 characters ... " in line(most + 1)

    def json_line(length: int) -> str:
        return JsonFormatter().format(record("event", pod="x" * length))

    most = 32_768 - len(json_line(0))
    assert parse(json_line(most))["pod"] == "x" * most
    assert " characters ... " in json_line(most + 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_equal_line_is_logged_later_with_the_number_skipped() -> None:
    clock = Clock()
    throttle = LogThrottle(60.0, 10, clock)

    assert [throttle.due("full", "a") for _ in range(4)] == [0, None, None, None]
    assert throttle.due("full", "b") == 0
    clock.now = 60.0
    assert [throttle.due("full", "a") for _ in range(2)] == [3, None]


def test_the_number_of_different_lines_is_limited() -> None:
    clock = Clock()
    throttle = LogThrottle(60.0, 10, clock)

    assert [throttle.due(thing) for thing in range(1000)].count(0) == 10
    clock.now = 60.0
    assert [throttle.due(thing) for thing in range(1000, 2000)][:2] == [990, 0]
    clock.now = 120.0
    assert sum(throttle.due(thing) is not None for thing in range(2000, 3000)) == 10


def test_lines_skipped_since_a_forgotten_one_are_counted_with_the_next() -> None:
    clock = Clock()
    throttle = LogThrottle(60.0, 1, clock)

    assert [throttle.due("a") for _ in range(3)] == [0, None, None]
    assert throttle.due("b") is None
    clock.now = 60.0
    assert throttle.due("c") == 3


def test_a_library_writes_equal_warnings_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    throttled = ThrottledLogger(logging.getLogger("library"), LogThrottle(60.0, 10, clock))

    for clock.now in (0.0, 1.0, 60.0):
        throttled.warning("bad request from %s", clock.now)
        throttled.error("bad request from %s", clock.now, exc_info=ValueError())
        throttled.info("connection lost")

    warnings_only = [one for one in caplog.records if one.levelno > logging.INFO]
    assert len(caplog.records) - len(warnings_only) == 3
    assert [(one.message, one.__dict__["also_unlogged"]) for one in warnings_only] == [
        ("bad request from 0.0", 0),
        ("bad request from 0.0", 0),
        ("bad request from 60.0", 1),
        ("bad request from 60.0", 1),
    ]
