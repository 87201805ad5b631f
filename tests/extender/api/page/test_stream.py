import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import aiohttp
import pytest
from typing_extensions import override

from extender.api.page import broadcaster as broadcaster_module
from extender.api.page import routes as stream_module
from extender.api.page.broadcaster import Broadcaster
from extender.server.redaction import AccessError, SeesNone
from testkit.cards import IDLE
from testkit.page.serving import Server, serving
from testkit.page.small_world import CARDS, wait_for_gpus
from testkit.webhook_requests import names_request, pod
from testkit.world import World
from tests.extender.api.page.feeds import read, until

STREAM = "/v1/page/stream"
TYPES = {"text/html", "text/css", "text/javascript", "image/svg+xml"}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcaster_module, "_LOOK_SECONDS", 0.02)


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[aiohttp.StreamReader]:
    async with aiohttp.ClientSession() as session, session.get(server.url + STREAM) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Connection"] == "close"
        yield response.content


async def event(content: aiohttp.StreamReader, name: str) -> dict[str, Any]:
    """Return the next event with a name."""
    async with asyncio.timeout(30):
        while True:
            block = await content.readuntil(b"\n\n")
            reported, document = read(block)
            if reported == name:
                return document


async def test_a_viewer_receives_the_fleet_and_then_the_changes(
    server: Server, world: World
) -> None:
    async with listening(server) as content:
        assert (await event(content, "fleet"))["nodes"] == list(CARDS)

        world.now += 10.0
        world.report(CARDS | {"node-c": [IDLE, IDLE]})

        assert (await event(content, "delta"))["places"]


async def test_signs_of_life_come_though_nothing_changes(server: Server) -> None:
    async with listening(server) as content:
        first = await event(content, "beat")
        second = await event(content, "beat")

    assert (first["at"], second["sources"]) == (server.world.now, [])


@pytest.mark.looptime
async def test_nothing_is_computed_without_viewers(world: World) -> None:
    page = Server(world).make_page()
    running = asyncio.create_task(page.run())
    broadcaster = page.broadcaster
    unseen = await looks_of(broadcaster, 60.0)

    viewer = broadcaster.join()
    seen = await looks_of(broadcaster, 60.0)
    known = broadcaster.fleet.is_there

    broadcaster.leave(viewer)
    await asyncio.sleep(broadcaster_module._LOOK_SECONDS)  # lets a pass that has begun end
    left = await looks_of(broadcaster, 60.0)

    assert seen > 1
    assert known
    assert (unseen, left) == (0, 0)
    assert not broadcaster.fleet.is_there
    running.cancel()
    await asyncio.wait([running])


async def looks_of(broadcaster: Broadcaster, seconds: float) -> int:
    """Return the number of times that a broadcaster refreshes the fleet in a period."""
    with mock.patch.object(
        broadcaster.fleet, "refresh_in_steps", wraps=broadcaster.fleet.refresh_in_steps
    ) as refresh:
        await asyncio.sleep(seconds)
    return refresh.call_count


async def test_changes_of_waiting_pods_and_holders_are_reported(
    server: Server, world: World
) -> None:
    async with listening(server) as content:
        before = await event(content, "changes")

        wait_for_gpus(world, "waits", 1)
        first = await event(content, "changes")
        world.add_pod("holds", "node-a")
        second = await event(content, "changes")

    assert first == before | {"pending": before["pending"] + 1}
    assert second == first | {"holders": before["holders"] + 1}


async def test_decisions_come_as_they_are_made_and_then_where_the_pod_went(
    server: Server, world: World
) -> None:
    async with listening(server) as content:
        await event(content, "fleet")
        requested = names_request("node-a", "node-b", requester=pod("p"))
        await world.webhooks().prioritize(json.dumps(requested).encode())
        reported = await event(content, "decisions")
        world.history.note_bound("uid-p", "node-a")
        bound = await event(content, "decisions")

    assert [one["pod"] for one in reported["decisions"]] == ["team/p"]
    assert bound["bound"] == [{"id": "here-1", "bound_node": "node-a", "is_followed": False}]


async def test_of_a_batch_of_many_decisions_only_the_newest_are_reported(
    server: Server, world: World
) -> None:
    async with listening(server) as content:
        await event(content, "fleet")
        for number in range(100):
            requested = names_request("node-a", requester=pod(f"p{number}"))
            await world.webhooks().prioritize(json.dumps(requested).encode())
        reported: list[Any] = []
        passed_over = 0
        while len(reported) + passed_over < 100:
            document = await event(content, "decisions")
            reported += document["decisions"]
            passed_over += document["passed_over"]

    assert reported[-1]["pod"] == "team/p99"
    assert [one["number"] for one in reported] == sorted(one["number"] for one in reported)


async def test_a_viewer_without_rights_sees_no_pod(world: World) -> None:
    async with serving(world, viewer=SeesNone()) as server, listening(server) as content:
        await event(content, "fleet")
        requested = names_request("node-a", requester=pod("secret"))
        await world.webhooks().prioritize(json.dumps(requested).encode())
        reported = await event(content, "decisions")
        async with aiohttp.ClientSession() as session:
            detail = await (await session.get(f"{server.url}/v1/page/nodes/node-b")).text()

    assert "secret" not in json.dumps(reported)
    assert "train" not in detail


@dataclass
class Expiring(SeesNone):
    """Caller whose token expires."""

    left: int = 2
    requested: list[int] = field(default_factory=list)

    @override
    async def renew(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise AccessError(401, "the token has ended")


async def test_a_stream_ends_with_the_right_to_read_it(world: World) -> None:
    async with serving(world, viewer=Expiring()) as server, listening(server) as content:
        async with asyncio.timeout(30):
            assert await content.read()

        await until(lambda: len(server.page.broadcaster) == 0)


async def test_a_viewer_that_does_not_read_is_disconnected_and_buffers_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_module, "_WRITE_SECONDS", 0.5)
    world = World()
    world.add({f"{'x' * 240}{at:05}": [IDLE] for at in range(12_000)}, readings=1)
    async with serving(world) as server:
        # A small window fills up quickly.
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        writer.write(b"GET /v1/page/stream HTTP/1.1\r\nHost: page\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: len(server.page.broadcaster) == 1)

        await until(lambda: len(server.page.broadcaster) == 0)

        rest = await reader.read()  # without the buffered part of the fleet
        assert rest.count(b"\n\n") < len(("beat", "changes", "fleet"))
        writer.close()


async def test_one_page_too_many_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_MOST_VIEWERS", 1)
    async with listening(server) as content, aiohttp.ClientSession() as session:
        await event(content, "fleet")

        async with session.get(server.url + STREAM) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "30"
            assert "close one" in (await response.json())["error"]


async def test_the_caller_with_most_open_pages_loses_one_to_another_caller(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_MOST_VIEWERS", 3)
    async with contextlib.AsyncExitStack() as open_pages:
        greedy = [await open_pages.enter_async_context(listening(server)) for _ in range(3)]
        await until(lambda: len(server.page.broadcaster) == 3)
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        other = await open_pages.enter_async_context(aiohttp.ClientSession(connector=connector))

        async with other.head(server.url + STREAM) as response:
            assert response.status == 200
        assert len(server.page.broadcaster) == 3  # no viewer is closed for a HEAD request
        async with other.get(server.url + STREAM) as response:
            assert response.status == 200
            async with asyncio.timeout(30):
                await greedy[-1].read()  # the newest viewer was closed
            assert await event(greedy[0], "fleet")

            async with other.get(server.url + STREAM) as more:
                assert more.status == 503  # otherwise it would have more viewers than the other
            assert len(server.page.broadcaster) == 3


async def test_streams_end_when_the_server_does(world: World) -> None:
    async with serving(world) as server:
        async with listening(server) as content:
            await event(content, "fleet")
            await server.stop()
            async with asyncio.timeout(30):
                await content.read()
        await server.start()


# --- files ----------------------------------------------------------------------------------------


async def test_every_file_comes_under_a_policy_that_lets_nothing_else_run(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/page/", "/page/main.js", "/page/page.css", "/page/icon.svg"):
            async with session.get(server.url + path) as response:
                policy = response.headers["Content-Security-Policy"]
                assert response.status == 200
                assert response.content_type in TYPES
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Referrer-Policy"] == "no-referrer"
                assert response.headers["Cross-Origin-Opener-Policy"] == "same-origin"
                assert response.headers["Permissions-Policy"].count("=()") == 3
                assert response.headers["Cache-Control"] == "no-cache"


async def test_a_file_that_has_not_changed_is_not_sent_again(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(server.url + "/page/main.js") as response:
            tag = response.headers["ETag"]
        headers = {"If-None-Match": tag}
        async with session.get(server.url + "/page/main.js", headers=headers) as response:
            assert response.status == 304


@pytest.mark.parametrize("path", ["/", "/page"])
async def test_the_address_alone_leads_to_the_page(server: Server, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(server.url + path) as response:
        assert [one.status for one in response.history] == [302]
        assert response.url.path == "/page/"
        assert "<title>idlegpu</title>" in await response.text()


@pytest.mark.parametrize("path", ["/page/../stream.py", "/page/%2e%2e/stream.py", "/page/nothing"])
async def test_nothing_but_the_pages_files_is_served(server: Server, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(server.url + path) as response:
        assert response.status == 404
