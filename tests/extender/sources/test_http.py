"""Every failure of a Prometheus is a `PrometheusError` within the time limit."""

import asyncio
import base64
import gzip
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from extender.settings.sources import Prometheus
from extender.sources.prometheus import http
from extender.sources.prometheus.http import PrometheusClient
from extender.sources.prometheus.protocol import PrometheusError
from extender.sources.prometheus.responses import Recognized, Row, Rows
from testkit.prometheus.fake import FakePrometheus, Handler, series

LIMIT_SECONDS = 0.5
PATIENCE = 60.0  # for tests that do not time out


@pytest.fixture(autouse=True)
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MAX_ANSWER_MIB", 1)


@pytest.fixture
async def prometheus() -> AsyncIterator[FakePrometheus]:
    fake = FakePrometheus(series=[series("DCGM_FI_DEV_GPU_UTIL", 7, UUID="GPU-1")])
    server = await fake.start()
    yield fake
    await server.close()


def settings(url: str, **values: object) -> Prometheus:
    return Prometheus.model_validate({"url": url, "timeout_seconds": PATIENCE, **values})


async def fetch(settings: Prometheus, limit_seconds: float = PATIENCE) -> Sequence[Row]:
    client = PrometheusClient(settings)
    query = "max by (UUID) (DCGM_FI_DEV_GPU_UTIL{})"
    try:
        rows: Rows | Recognized[object] = await asyncio.to_thread(
            lambda: client.query(query, limit_seconds)
        )
        assert not isinstance(rows, Recognized)
        return rows
    finally:
        client.close()


async def error_of(settings: Prometheus, limit_seconds: float = PATIENCE) -> str:
    with pytest.raises(PrometheusError) as raised:
        await fetch(settings, limit_seconds)
    return str(raised.value)


def answers(body: str, *, status: int = 200, kind: str = "application/json") -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type=kind)

    return handler


async def test_good_answer_is_returned(prometheus: FakePrometheus) -> None:
    rows = await fetch(settings(prometheus.url))

    assert len(rows) == 1
    assert rows[0]["metric"] == {"UUID": "GPU-1"}
    assert rows[0]["value"][1] == "7"


@pytest.mark.parametrize(
    ("handler", "cause"),
    [
        pytest.param(
            answers("<html>login</html>", kind="text/html"), "text/html, not JSON", id="html"
        ),
        pytest.param(
            answers('{"status":"error","errorType":"execution","error":"no"}'),
            "execution: no",
            id="error-with-200",
        ),
        pytest.param(
            answers('{"status":"error","errorType":"bad_data","error":"parse error"}', status=400),
            "HTTP 400: bad_data: parse error: check prometheus.selector",
            id="bad-query",
        ),
        pytest.param(answers("denied", status=401), "bearer_token_file", id="unauthorized"),
        pytest.param(answers("late", status=503), "HTTP 503: late", id="unavailable"),
        pytest.param(answers("", status=414), "node_labels", id="uri-too-long"),
        pytest.param(
            answers('{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}'),
            "a scalar, not a vector",
            id="scalar",
        ),
        pytest.param(answers('{"status":"success"}'), "no data", id="no-data"),
        pytest.param(
            answers('{"status":"success","data":null}'), "a NoneType, not a vector", id="null"
        ),
        pytest.param(answers("[1, 2]"), "not JSON of Prometheus", id="a-list"),
        pytest.param(answers('{"status":"succ'), "not JSON of Prometheus", id="cut-off"),
    ],
)
async def test_an_unusable_answer_is_an_error(
    prometheus: FakePrometheus, handler: Handler, cause: str
) -> None:
    prometheus.handler = handler

    error = await error_of(settings(prometheus.url))

    assert error.startswith(f"cannot query Prometheus at {prometheus.url}: ")
    assert cause in error


async def test_a_redirect_is_an_error_that_names_its_target(prometheus: FakePrometheus) -> None:
    async def handler(_request: web.Request) -> web.Response:
        raise web.HTTPFound("https://me:secret@login.example/?next=x")

    prometheus.handler = handler

    error = await error_of(settings(prometheus.url))

    assert "redirects to https://login.example/" in error
    assert "secret" not in error
    assert len(prometheus.queries) == 1


async def test_a_hanging_server_times_out(prometheus: FakePrometheus) -> None:
    over = asyncio.Event()

    async def handler(_request: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    prometheus.handler = handler

    error = await error_of(settings(prometheus.url), LIMIT_SECONDS)

    over.set()
    assert "no complete answer in time" in error


async def test_an_endlessly_slow_answer_times_out(prometheus: FakePrometheus) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    prometheus.handler = handler

    assert "no complete answer in time" in await error_of(settings(prometheus.url), LIMIT_SECONDS)


async def test_a_broken_connection_is_an_error(prometheus: FakePrometheus) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"status":"success"')
        assert request.transport is not None
        request.transport.abort()
        return response

    prometheus.handler = handler

    assert "cannot query Prometheus" in await error_of(settings(prometheus.url))


async def test_an_answer_of_the_largest_size_is_read(prometheus: FakePrometheus) -> None:
    prometheus.handler = answers("{}".ljust(1 << 20))

    assert "larger" not in await error_of(settings(prometheus.url))


async def test_huge_answer_is_refused(prometheus: FakePrometheus) -> None:
    prometheus.handler = answers(" " * (1 << 20) + "{}")

    assert "larger than 1 MiB" in await error_of(settings(prometheus.url))


async def test_an_answer_larger_than_the_memory_is_an_error(
    prometheus: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> bytearray:
        raise MemoryError

    monkeypatch.setattr(http.PrometheusClient, "_read", read)

    assert "needs too much memory" in await error_of(settings(prometheus.url))


async def test_an_endless_error_is_read_only_at_its_start(prometheus: FakePrometheus) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        while True:
            await response.write(b"out of memory " * 1000)

    prometheus.handler = handler

    assert "HTTP 500: out of memory" in await error_of(settings(prometheus.url))


async def test_a_small_answer_that_decompresses_to_a_huge_one_is_refused(
    prometheus: FakePrometheus,
) -> None:
    # Compressed before the query: the server shares this loop, and the query has a deadline.
    body = gzip.compress(b" " * (64 << 20), compresslevel=1)

    async def handler(_request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    prometheus.handler = handler

    assert "larger than 1 MiB" in await error_of(settings(prometheus.url))


async def test_an_unreachable_server_is_an_error_at_once(prometheus: FakePrometheus) -> None:
    url = "http://127.0.0.1:1"

    error = await error_of(settings(url))

    assert "Connection refused" in error
    assert "is Prometheus running" in error
    assert not prometheus.queries


async def test_retry_after_is_ignored(prometheus: FakePrometheus) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": "60"}, text="later")

    prometheus.handler = handler

    assert "HTTP 503" in await error_of(settings(prometheus.url))
    assert len(prometheus.queries) == 1


async def test_a_partial_answer_is_used_and_counted(prometheus: FakePrometheus) -> None:
    prometheus.warnings = ["store 2 is down"]
    client = PrometheusClient(settings(prometheus.url))

    query = "max by (UUID) (DCGM_FI_DEV_GPU_UTIL{})"
    rows: Rows | Recognized[object] = await asyncio.to_thread(lambda: client.query(query, PATIENCE))

    client.close()
    assert not isinstance(rows, Recognized)
    assert len(rows) == 1
    assert client.partial_answers == 1
    assert "store 2 is down" in client.last_warning


async def test_headers_and_token_are_sent_and_the_token_is_read_each_time(
    prometheus: FakePrometheus, tmp_path: Path
) -> None:
    seen: list[tuple[str | None, str | None]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers.get("Authorization"), request.headers.get("X-Scope-OrgID")))
        return web.Response(status=403)

    prometheus.handler = handler
    token = tmp_path / "token"
    given = settings(
        prometheus.url, bearer_token_file=str(token), headers={"X-Scope-OrgID": "gpus"}
    )

    for content in ("first\n", "second\n"):
        token.write_text(content)
        await error_of(given)

    assert seen == [("Bearer first", "gpus"), ("Bearer second", "gpus")]


async def test_user_and_password_are_sent(prometheus: FakePrometheus, tmp_path: Path) -> None:
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=403)

    prometheus.handler = handler
    password = tmp_path / "password"
    password.write_text("pass\n")

    await error_of(settings(prometheus.url, username="me", password_file=str(password)))

    assert seen == ["Basic " + base64.b64encode(b"me:pass").decode()]


async def test_a_missing_secret_file_is_named(prometheus: FakePrometheus, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"

    error = await error_of(settings(prometheus.url, bearer_token_file=str(missing)))

    assert str(missing) in error


async def test_password_in_the_url_is_not_shown() -> None:
    error = await error_of(settings("http://me:secret@127.0.0.1:1"))

    assert "127.0.0.1:1" in error
    assert "secret" not in error
