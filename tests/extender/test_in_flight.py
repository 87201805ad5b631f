"""Other work gives way to a question from its first byte to its answer, but not for ever."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from extender import in_flight as module
from extender.in_flight import InFlight
from tests.extender.fake_kube import eventually
from tests.extender.giving_way import makes_wait


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


async def test_work_waits_for_a_question_that_is_expected_but_not_for_long() -> None:
    in_flight = InFlight(urgent=["/filter"])

    in_flight.expect()

    assert not await gives_way_at_once(in_flight)  # and it went on, though nothing came
    assert await gives_way_at_once(in_flight)


@pytest.mark.usefixtures("patient")
async def test_what_was_expected_is_waited_for_until_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "EXPECTED_SECONDS", 60.0)
    in_flight, over = InFlight(urgent=["/filter"]), asyncio.Event()
    client = await serving(in_flight, over)
    in_flight.expect()
    work = asyncio.create_task(in_flight.give_way())

    task = await asked(in_flight, client, "/filter")
    assert not work.done()

    over.set()
    await asyncio.wait([task, work])
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


async def serving_verbs(in_flight: InFlight) -> TestClient[web.Request, web.Application]:
    over = asyncio.Event()
    over.set()
    return await serving(in_flight, over)


async def test_every_answer_at_the_end_is_the_last_of_its_connection() -> None:
    in_flight = InFlight(once=["/filter"])
    client = await serving_verbs(in_flight)
    async with client.get("/filter") as before:
        pass
    leaving = asyncio.create_task(in_flight.take_leave(0.0, 60.0))
    await eventually(lambda: in_flight.is_draining)

    async with client.get("/filter") as answer:
        assert answer.status == 200

    assert before.headers.get("Connection") != "close"
    assert answer.headers["Connection"] == "close"
    await leaving
    await client.close()


async def test_an_idle_connection_is_left_to_whoever_may_ask_on_it() -> None:
    in_flight = InFlight(once=["/filter"])
    client = await serving_verbs(in_flight)
    async with client.get("/filter"):
        pass

    leaving = asyncio.create_task(in_flight.take_leave(0.0, 60.0))
    await asyncio.sleep(5 * module.LOOK_SECONDS)
    assert not leaving.done()

    await client.session.close()
    await leaving
    await client.close()


async def test_who_asks_again_where_a_connection_breaks_is_not_waited_for() -> None:
    in_flight = InFlight(once=["/filter"])
    client = await serving_verbs(in_flight)
    async with client.get("/metrics"):
        pass

    await in_flight.take_leave(0.0, 60.0)

    await client.close()


async def test_an_idle_connection_is_not_waited_for_for_ever() -> None:
    in_flight = InFlight(once=["/filter"])
    client = await serving_verbs(in_flight)
    async with client.get("/filter"):
        pass

    await in_flight.take_leave(0.0, 0.2)

    await client.close()


async def test_what_was_waited_is_not_waited_twice() -> None:
    in_flight, over = InFlight(once=["/filter"]), asyncio.Event()
    client = await serving(in_flight, over)
    task = await asked(in_flight, client, "/filter")

    await in_flight.take_leave(0.0, 0.2)
    async with asyncio.timeout(30):
        await in_flight.drain(60.0)

    assert in_flight.requests == 1
    over.set()
    await task
    await client.close()


async def test_in_a_hurry_nobody_waits_for_what_is_under_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_flight, over = InFlight(), asyncio.Event()
    client = await serving(in_flight, over)
    task = await asked(in_flight, client, "/metrics")

    in_flight.hurry(0.01)
    async with asyncio.timeout(30):
        await in_flight.drain(3600)

    assert "requests left unanswered" in caplog.text
    over.set()
    await task
    await client.close()


# --- a question that is coming --------------------------------------------------------------------

QUESTION = b"GET /filter HTTP/1.1\r\nHost: here\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(
    in_flight: InFlight, first: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect, and have a first question answered."""

    async def handle(_: web.Request) -> web.Response:
        return web.Response(text="an answer")

    app = web.Application(middlewares=[in_flight.count])
    app.add_routes([web.get("/filter", handle), web.get("/metrics", handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    made = runner.server
    assert made is not None
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: in_flight.watch(made()), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    try:
        writer.write(first)
        await reader.readuntil(b"an answer")
        yield reader, writer
    finally:
        writer.close()
        server.close()
        await runner.cleanup()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have work wait longer than any test."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
async def test_work_waits_from_the_first_bytes_of_the_next_question() -> None:
    in_flight = InFlight(urgent=["/filter"], once=["/filter"])
    async with connected(in_flight, QUESTION) as (reader, writer):
        assert await gives_way_at_once(in_flight)
        writer.write(QUESTION[:9])

        await makes_wait(in_flight)

        writer.write(QUESTION[9:])
        await reader.readuntil(b"an answer")
        assert await gives_way_at_once(in_flight)


@pytest.mark.usefixtures("patient")
async def test_work_that_waits_for_a_question_goes_on_once_its_connection_is_gone() -> None:
    in_flight = InFlight(urgent=["/filter"], once=["/filter"])
    async with connected(in_flight, QUESTION) as (_, writer):
        writer.write(QUESTION[:9])
        await makes_wait(in_flight)
        work = asyncio.create_task(in_flight.give_way())

        writer.close()

        async with asyncio.timeout(30):
            await work


async def test_bytes_that_become_no_question_are_not_waited_for_long() -> None:
    in_flight = InFlight(urgent=["/filter"], once=["/filter"])
    async with connected(in_flight, QUESTION) as (_, writer):
        writer.write(QUESTION[:9])
        await asyncio.sleep(3 * module.PATIENCE_SECONDS)

        assert await gives_way_at_once(in_flight)


@pytest.mark.usefixtures("patient")
async def test_bytes_of_who_asks_nothing_urgent_are_not_waited_for() -> None:
    in_flight = InFlight(urgent=["/filter"], once=["/filter"])
    metrics = QUESTION.replace(b"/filter", b"/metrics")
    async with connected(in_flight, metrics) as (reader, writer):
        writer.write(metrics[:9])
        await asyncio.sleep(0.05)

        assert await gives_way_at_once(in_flight)

        writer.write(metrics[9:])
        await reader.readuntil(b"an answer")
