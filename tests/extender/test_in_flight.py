"""Other work gives way to a question from its first byte to its answer, but not for ever."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from extender import in_flight as module
from extender.in_flight import InFlight
from tests.extender.fake_kube import eventually


async def serving(
    in_flight: InFlight, over: asyncio.Event
) -> TestClient[web.Request, web.Application]:
    async def handle(_: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    app = web.Application(middlewares=[in_flight.count])
    app.add_routes([web.get("/filter", handle), web.get("/metrics", handle)])
    client = TestClient(TestServer(app))
    await client.start_server()
    return client


async def asked(
    in_flight: InFlight, client: TestClient[web.Request, web.Application], path: str
) -> asyncio.Task[None]:
    async def ask() -> None:
        async with client.get(path):
            pass

    task = asyncio.create_task(ask())
    await eventually(lambda: in_flight.requests == 1)
    return task


async def gives_way_at_once(in_flight: InFlight) -> bool:
    """Whether work that gives way goes on after a turn or two of the loop."""
    work = asyncio.create_task(in_flight.give_way())
    for _ in range(3):
        await asyncio.sleep(0)
    is_done = work.done()
    await work  # whatever is asked, it goes on some time
    return is_done


async def test_work_waits_for_a_verb_but_not_for_long() -> None:
    in_flight, over = InFlight(urgent=["/filter"]), asyncio.Event()
    client = await serving(in_flight, over)
    task = await asked(in_flight, client, "/filter")

    assert not await gives_way_at_once(in_flight)

    over.set()
    await task
    assert await gives_way_at_once(in_flight)
    await client.close()


async def test_work_does_not_wait_for_anything_else() -> None:
    in_flight, over = InFlight(urgent=["/filter"]), asyncio.Event()
    client = await serving(in_flight, over)
    task = await asked(in_flight, client, "/metrics")

    assert await gives_way_at_once(in_flight)

    assert not in_flight.is_quiet(0.0)
    over.set()
    await task
    assert in_flight.is_quiet(0.0)
    assert not in_flight.is_quiet(60.0)
    await client.close()


async def test_what_is_not_urgent_waits_for_the_end_of_a_burst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CALM_SECONDS", 0.01)
    in_flight, over = InFlight(), asyncio.Event()
    client = await serving(in_flight, over)
    task = await asked(in_flight, client, "/filter")
    work = asyncio.create_task(in_flight.calm())

    await asyncio.sleep(0.05)
    assert not work.done()

    over.set()
    await task
    await work
    assert in_flight.is_quiet(0.01)
    await client.close()


async def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BURST_SECONDS", 0.01)
    in_flight, over = InFlight(), asyncio.Event()
    client = await serving(in_flight, over)
    task = await asked(in_flight, client, "/filter")

    await in_flight.calm()

    over.set()
    await task
    await client.close()
