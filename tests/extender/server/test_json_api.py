"""Test long answers to clients of any speed."""

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp import web

from extender.answers.fleet import Gpus
from extender.server.json_api import stream_answer
from testkit.webhook_requests import MakeClient

DEADLINE_SECONDS = 20.0


async def test_a_client_that_does_not_read_is_disconnected(
    aiohttp_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extender.server.json_api._ANSWER_SECONDS", 0.5)
    ended = asyncio.Event()

    def pieces() -> Iterator[list[dict[str, str]]]:
        while True:
            yield [{"x": "x" * 65536}]

    async def endless(request: web.Request) -> web.StreamResponse:
        try:
            return await stream_answer(request, Gpus(gpus=[]), "gpus", pieces())
        finally:
            ended.set()

    app = web.Application()
    app.router.add_get("/endless", endless)
    client = await aiohttp_client(app)
    reader, writer = await asyncio.open_connection(client.host, client.port)
    try:
        writer.write(b"GET /endless HTTP/1.1\r\nHost: it\r\n\r\n")
        async with asyncio.timeout(DEADLINE_SECONDS):
            await ended.wait()
            reported = await reader.read()
    finally:
        writer.close()
    assert reported.startswith(b"HTTP/1.1 200")
    assert not reported.endswith(b"0\r\n\r\n")  # the client regards it as incomplete
