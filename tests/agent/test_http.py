import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest

from agent import http
from agent.http import Address, Answer, Headers, serve_http


def fail(_: Headers) -> Answer:
    raise ZeroDivisionError


ROUTES = {
    "/hello": lambda headers: Answer(body=f"you accept {headers.get('accept', '')}".encode()),
    "/json": lambda _: Answer(status=503, content_type="application/json", body=b"{}"),
    "/large": lambda _: Answer(body=b"x" * 1_000_000),
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


async def test_a_route_answers_with_what_it_is_asked(client: aiohttp.ClientSession) -> None:
    async with client.get("/hello?x=1", headers={"Accept": "text/plain"}) as answer:
        assert (answer.status, await answer.text()) == (200, "you accept text/plain")
        assert answer.content_type == "text/plain"


async def test_status_and_type_are_the_routes(client: aiohttp.ClientSession) -> None:
    async with client.get("/json") as answer:
        assert (answer.status, answer.content_type) == (503, "application/json")
        assert await answer.json() == {}


async def test_a_connection_serves_one_request_after_another(address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(3):
        writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 503")
    writer.close()


async def test_requests_that_come_together_are_answered_in_turn(address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n" * 3)

    for _ in range(3):
        await reader.readuntil(b"{}")
    writer.close()


async def test_a_client_of_the_old_kind_gets_its_answer_and_the_end(address: Address) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /json HTTP/1.0\r\n\r\n")

    assert (await reader.read()).endswith(b"{}")
    writer.close()


async def test_a_large_answer_arrives_whole(client: aiohttp.ClientSession) -> None:
    async with client.get("/large") as answer:
        assert len(await answer.read()) == 1_000_000


async def test_head_has_the_length_and_no_body(client: aiohttp.ClientSession) -> None:
    async with client.head("/large") as answer:
        assert answer.headers["Content-Length"] == "1000000"
        assert await answer.read() == b""


async def test_what_is_not_there_says_what_is(client: aiohttp.ClientSession) -> None:
    async with client.get("/nowhere") as answer:
        assert answer.status == 404
        assert "/hello, /json, /large" in await answer.text()


async def test_nothing_can_be_changed(client: aiohttp.ClientSession) -> None:
    async with client.post("/hello", data=b"x" * 100) as answer:
        assert answer.status == 405


async def test_a_fault_of_a_route_is_logged_and_hurts_nobody_else(
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
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
    ids=["nonsense", "without-host", "too-long", "tls"],
)
async def test_what_is_no_http_is_refused_and_the_connection_ends(
    address: Address, sent: bytes, status: bytes
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)

    async with asyncio.timeout(30):
        answer = await reader.read()

    assert answer.startswith(b"HTTP/1.1 " + status)
    writer.close()


async def test_a_client_that_says_half_of_it_does_not_stay_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.1)
    async with serve_http("127.0.0.1", 0, ROUTES) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /hello HTT")

        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_a_silent_client_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.1)
    async with serve_http("127.0.0.1", 0, ROUTES) as address:
        reader, writer = await asyncio.open_connection(*address)

        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_of_too_many_connections_the_longest_silent_one_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "MOST_CONNECTIONS", 2)
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


async def test_open_connections_end_with_the_server() -> None:
    async with serve_http("127.0.0.1", 0, ROUTES) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /json HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"{}")

    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()
