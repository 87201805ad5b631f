import asyncio
import logging
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from agent.exporter import http
from agent.exporter.http import Address, Answer, Headers, serve_http

HUGE = 64 << 20


def fail(_: Headers) -> Answer:
    raise ZeroDivisionError


ROUTES = {
    "/hello": lambda headers: Answer(body=f"you accept {headers.get('accept', '')}".encode()),
    "/json": lambda _: Answer(status=503, content_type="application/json", body=b"{}"),
    "/large": lambda _: Answer(body=b"x" * 1_000_000),
    "/huge": lambda _: Answer(body=b"x" * HUGE),  # more than the kernel buffers
    "/fault": fail,
}


@pytest.fixture
async def address() -> AsyncIterator[Address]:
    async with serve_http("127.0.0.1", 0, ROUTES) as address:
        yield address


@pytest.fixture
async def client(address: Address) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{address[0]}:{address[1]}") as client:
        yield client


async def test_a_route_receives_the_request_headers(client: aiohttp.ClientSession) -> None:
    async with client.get("/hello?x=1", headers={"Accept": "text/plain"}) as answer:
        assert (answer.status, await answer.text()) == (200, "you accept text/plain")
        assert answer.content_type == "text/plain"


async def test_status_and_content_type_come_from_the_route(client: aiohttp.ClientSession) -> None:
    async with client.get("/json") as answer:
        assert (answer.status, answer.content_type) == (503, "application/json")
        assert await answer.json() == {}


async def test_a_connection_serves_one_request_after_another(address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(3):
        writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 503")
    writer.close()


async def test_pipelined_requests_are_answered_in_order(address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n" * 3)

    for _ in range(3):
        await reader.readuntil(b"{}")
    writer.close()


async def test_an_http_1_0_client_gets_its_response_and_a_closed_connection(
    address: Address,
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /json HTTP/1.0\r\n\r\n")

    assert (await reader.read()).endswith(b"{}")
    writer.close()


async def test_a_large_response_arrives_complete(client: aiohttp.ClientSession) -> None:
    async with client.get("/large") as answer:
        assert len(await answer.read()) == 1_000_000


async def test_a_head_response_has_the_length_and_no_body(client: aiohttp.ClientSession) -> None:
    async with client.head("/large") as answer:
        assert answer.headers["Content-Length"] == "1000000"
        assert await answer.read() == b""


async def test_an_unknown_path_lists_the_known_paths(client: aiohttp.ClientSession) -> None:
    async with client.get("/nowhere") as answer:
        assert answer.status == 404
        assert "/fault, /hello, /huge, /json, /large" in await answer.text()


async def test_only_get_and_head_are_allowed(client: aiohttp.ClientSession) -> None:
    async with client.post("/hello", data=b"x" * 100) as answer:
        assert answer.status == 405


async def test_an_exception_in_a_route_is_logged_and_does_not_affect_other_requests(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with client.get("/fault") as answer:
            assert answer.status == 500
    assert "ZeroDivisionError" in caplog.text

    async with client.get("/json") as answer:
        assert answer.status == 503


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /hello HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /hello HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40_000, b"431"),
        (b"HEAD / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
    ids=["nonsense", "without-host", "too-long", "bad-chunk", "tls"],
)
async def test_malformed_http_is_rejected_and_the_connection_closed(
    address: Address, sent: bytes, status: bytes
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)

    async with asyncio.timeout(30):
        answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 " + status)
    writer.close()


async def test_an_incomplete_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.1)
    async with serve_http("127.0.0.1", 0, ROUTES) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /hello HTT")

        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "head", [b"", b"POST /hello HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"]
)
async def test_a_request_that_arrives_byte_by_byte_times_out(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.2)
    endless = b"1\r\nx\r\n" if head else b"x"
    async with serve_http("127.0.0.1", 0, ROUTES) as address, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head)
        ended = asyncio.create_task(reader.read())
        while not ended.done():
            writer.write(endless)
            await asyncio.sleep(0.02)
        writer.close()


async def test_a_route_that_fails_often_is_logged_once(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        async with client.get("/fault") as answer:
            assert answer.status == 500

    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1


async def test_an_idle_connection_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_IDLE_SECONDS", 0.1)
    async with serve_http("127.0.0.1", 0, ROUTES) as address:
        reader, writer = await asyncio.open_connection(*address)

        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_above_the_connection_limit_the_longest_silent_one_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 2)
    async with serve_http("127.0.0.1", 0, ROUTES) as address, asyncio.timeout(30):
        silent, asking = [await asyncio.open_connection(*address) for _ in range(2)]
        for reader, writer in (silent, asking, asking):
            writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"{}")

        probe = await asyncio.open_connection(*address)

        for reader, writer in (probe, asking):
            writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n")
            assert await reader.readuntil(b"{}")
        assert await silent[0].read() == b""
        for _, writer in (silent, asking, probe):
            writer.close()


async def test_open_connections_close_with_the_server() -> None:
    async with serve_http("127.0.0.1", 0, ROUTES) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"{}")

    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def deaf_client(address: Address) -> socket.socket:
    """Request more data than the kernel buffers, and read none of it."""
    client = socket.create_connection(address)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(client, b"GET /huge HTTP/1.1\r\nHost: a\r\n\r\n")
    while not is_readable(client):
        await asyncio.sleep(0.01)
    return client


def is_readable(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def received_by(client: socket.socket) -> int:
    """Read to the end of a connection; return the number of bytes."""
    loop = asyncio.get_running_loop()
    received = 0
    try:
        while got := len(await loop.sock_recv(client, 1 << 20)):
            received += got
    except ConnectionResetError:
        pass
    client.close()
    return received


async def no_connection_is_served() -> None:
    while any(task.get_name() == "http" for task in asyncio.all_tasks()):
        await asyncio.sleep(0.01)


async def test_a_response_that_is_not_read_is_dropped_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.1)
    async with serve_http("127.0.0.1", 0, ROUTES) as address, asyncio.timeout(60):
        client = await deaf_client(address)
        await no_connection_is_served()

        assert await received_by(client) < HUGE, "the server keeps no buffer for it"


async def test_a_response_that_is_not_read_is_dropped_above_the_connection_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 1)
    async with serve_http("127.0.0.1", 0, ROUTES) as address, asyncio.timeout(60):
        client = await deaf_client(address)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"{}")

        assert await received_by(client) < HUGE, "the server keeps no buffer for it"
        writer.close()


async def test_connections_that_arrive_at_once_are_closed_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 2)
    async with serve_http("127.0.0.1", 0, ROUTES) as address, asyncio.timeout(60):
        # All connect before the event loop accepts the first.
        clients = [socket.create_connection(address) for _ in range(20)]
        for client in clients:
            client.setblocking(False)

        for client in clients[:-2]:
            assert await received_by(client) == 0
        for client in clients[-2:]:
            assert not is_readable(client)
            client.close()
