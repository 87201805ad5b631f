"""Test answers that no client reads."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import orjson
import pytest
from aiohttp import web

from extender.placement.request_log import _MAX_PATHS, _SHOWN_PATH, BypassVerdict
from extender.webhook.handlers import _ABOUT, Webhooks, noting_wrong_paths
from testkit.fake_kube import eventually
from testkit.webhook_requests import Client, MakeClient, call, names_request, pod
from testkit.world import World


class Patience:
    """Client that may disconnect during its request."""

    def __init__(self) -> None:
        self.gives_up: Callable[[], None] = lambda: None

    def is_ready(self) -> bool:
        self.gives_up()
        return True


@pytest.fixture
async def served(world: World) -> AsyncIterator[tuple[World, int, Patience]]:
    """Yield a world behind a port, whose client may disconnect during an answer."""
    patience = Patience()
    webhooks = Webhooks(
        placer=world.placer,
        resources=lambda: world.resources,
        metrics=world.metrics,
        max_score=10,
        shortlist=0,
        is_ready=patience.is_ready,
        warn_annotation=lambda _, __: None,
        request_log=world.request_log,
    )
    app = web.Application()
    app.add_routes(webhooks.routes())
    runner = web.AppRunner(app, handler_cancellation=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield world, runner.addresses[0][1], patience
    await runner.cleanup()


def send(port: int, body: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    head = f"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


REQUEST = orjson.dumps(names_request("idle-a", "idle-b"))


async def test_an_answer_to_a_client_that_gave_up_is_lost(
    served: tuple[World, int, Patience],
) -> None:
    world, port, patience = served
    client = send(port, REQUEST)
    patience.gives_up = client.close

    await eventually(lambda: len(world.request_log))

    assert world.request_log.verdict("uid-requester") is BypassVerdict.ANSWER_LOST
    assert world.count("idlegpu_requests_total", verb="filter", outcome="unread") == 1
    assert world.request_log.incidents[0] == 1


async def test_an_answer_to_a_waiting_client_is_not_lost(
    served: tuple[World, int, Patience],
) -> None:
    world, port, _ = served
    client = send(port, REQUEST)

    await eventually(lambda: len(world.request_log))

    assert world.request_log.verdict("uid-requester") is BypassVerdict.NOT_SCORED
    assert world.request_log.incidents == (0, 0, 0.0)
    client.close()


async def test_an_incomplete_request_counts_as_lost(served: tuple[World, int, Patience]) -> None:
    world, port, _ = served
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await asyncio.sleep(0)
    client.close()

    await eventually(lambda: world.request_log.incidents[0])

    assert len(world.request_log) == 0


@pytest.mark.parametrize("verb", ["filter", "prioritize"])
@pytest.mark.parametrize(
    ("requester", "is_ready"),
    [
        pytest.param(pod(), True, id="answered"),
        pytest.param(pod(), False, id="not-ready"),
        pytest.param(pod(enabled="false"), True, id="disabled"),
        pytest.param(pod(gpus=None), True, id="no-gpu"),
    ],
)
async def test_every_answered_request_is_logged(
    world: World, client: Client, verb: str, requester: object, is_ready: bool
) -> None:
    world.is_ready = is_ready

    await call(client, verb, names_request("idle-a", requester=requester))

    await eventually(lambda: len(world.request_log))
    assert world.request_log.verdict("uid-requester") is BypassVerdict.CALLED


async def test_a_shortlist_of_one_node_leaves_nothing_to_score(
    world: World, aiohttp_client: MakeClient
) -> None:
    world.shortlist = 1
    client = await aiohttp_client(world.build_app())

    await call(client, "filter", names_request("idle-a", "idle-b"))

    await eventually(lambda: len(world.request_log))
    assert world.request_log.verdict("uid-requester") is BypassVerdict.CALLED


async def test_an_unreadable_request_is_logged_as_unreadable(world: World, client: Client) -> None:
    await client.post("/prioritize", data=b"{")

    await eventually(lambda: world.request_log.incidents[1])

    assert len(world.request_log) == 0
    assert world.request_log.last_at is not None


async def test_a_request_with_an_internal_fault_is_logged(world: World) -> None:
    def fail() -> bool:
        raise RuntimeError("broken")

    _, response = await replace(world.webhooks(), is_ready=fail).filter(REQUEST)

    assert response[_ABOUT].answered(0, at=0.0, is_lost=False).uid == "uid-requester"


async def test_a_wrong_path_is_logged_and_not_found(
    world: World, aiohttp_client: MakeClient
) -> None:
    app = web.Application(middlewares=[noting_wrong_paths(world.request_log)])
    app.add_routes(world.webhooks().routes())
    client = await aiohttp_client(app)

    refused = await client.post("/scheduler/filter", data=b"{}")
    looked = await client.get("/favicon.ico")

    assert (refused.status, looked.status) == (404, 404)
    assert list(world.request_log.wrong_paths) == ["/scheduler/filter"]


def test_the_log_of_wrong_paths_is_limited(world: World) -> None:
    for number in range(100):
        world.request_log.note_wrong_path(f"/{number}" + "x" * 1000)

    assert len(world.request_log.wrong_paths) == _MAX_PATHS
    assert max(map(len, world.request_log.wrong_paths)) == _SHOWN_PATH
