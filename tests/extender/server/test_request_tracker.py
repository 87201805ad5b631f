"""Test that background work yields to a request from its first byte to its answer.

The tests use virtual time (`loop.time()`), stand-ins for connections, and no server.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from extender.server import request_tracker as module
from extender.server.request_tracker import (
    _BURST_SECONDS,
    _CHECK_SECONDS,
    _EXPECTED_SECONDS,
    _MAX_YIELD_SECONDS,
    _QUIET_SECONDS,
    RequestTracker,
)

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now))


class Connection:
    """Stand-in for a client's connection, with its requests and its end."""

    def __init__(self, request_tracker: RequestTracker) -> None:
        self.connected = True
        self._request_tracker = request_tracker

    def call(
        self, path: str, handle: Callable[[], Awaitable[object]]
    ) -> asyncio.Task[web.Response]:
        """Start to handle a request."""

        async def answer(_: web.Request) -> web.Response:
            await handle()
            return web.Response()

        request = SimpleNamespace(path=path, protocol=self)
        count: Any = self._request_tracker.count
        return asyncio.create_task(count(request, answer))

    def receive_bytes(self) -> None:
        self._request_tracker.note_bytes(self)  # type: ignore[arg-type] # stands in for one

    def close(self) -> None:
        self.connected = False
        self._request_tracker.note_end(self)  # type: ignore[arg-type] # stands in for one


async def at_once() -> None:
    """Answer at once."""


async def answered(connection: Connection, path: str = "/filter") -> web.Response:
    return await connection.call(path, at_once)


async def begun(connection: Connection, path: str, over: asyncio.Event) -> asyncio.Task[Any]:
    """Send a request that is answered after `over`; return once it is being handled."""
    task = connection.call(path, over.wait)
    await asyncio.sleep(0)
    return task


async def seconds_of(work: Awaitable[object]) -> float:
    """Return the seconds that some work takes."""
    began = now()
    await work
    return now() - began


async def test_work_waits_for_a_request_but_not_for_long() -> None:
    request_tracker, over = RequestTracker(urgent=["/filter"]), asyncio.Event()
    task = await begun(Connection(request_tracker), "/filter", over)

    assert await seconds_of(request_tracker.yield_control()) == pytest.approx(_MAX_YIELD_SECONDS)

    over.set()
    await task
    assert await seconds_of(request_tracker.yield_control()) == 0.0


async def test_work_continues_when_the_request_is_answered() -> None:
    request_tracker = RequestTracker(urgent=["/filter"])
    soon = _MAX_YIELD_SECONDS / 4
    task = Connection(request_tracker).call("/filter", lambda: asyncio.sleep(soon))
    await asyncio.sleep(0)

    assert await seconds_of(request_tracker.yield_control()) == pytest.approx(soon)
    await task


async def test_work_waits_for_an_expected_request_but_not_for_long() -> None:
    request_tracker = RequestTracker(urgent=["/filter"])

    request_tracker.expect()

    assert await seconds_of(request_tracker.yield_control()) == pytest.approx(_EXPECTED_SECONDS)
    assert await seconds_of(request_tracker.yield_control()) == 0.0


async def test_work_waits_for_the_answer_to_an_expected_request() -> None:
    request_tracker = RequestTracker(urgent=["/filter"])
    request_tracker.expect()
    work = asyncio.create_task(seconds_of(request_tracker.yield_control()))
    await asyncio.sleep(_EXPECTED_SECONDS / 2)

    longer = 2 * _EXPECTED_SECONDS
    task = Connection(request_tracker).call("/filter", lambda: asyncio.sleep(longer))

    assert await work == pytest.approx(_EXPECTED_SECONDS / 2 + longer)
    await task
    assert await seconds_of(request_tracker.yield_control()) == 0.0


async def test_work_does_not_wait_for_other_requests() -> None:
    request_tracker, over = RequestTracker(urgent=["/filter"]), asyncio.Event()
    task = await begun(Connection(request_tracker), "/metrics", over)

    assert await seconds_of(request_tracker.yield_control()) == 0.0

    assert not request_tracker.is_quiet(0.0)
    over.set()
    await task
    await asyncio.sleep(10.0)
    assert request_tracker.is_quiet(10.0)
    assert not request_tracker.is_quiet(10.5)


async def test_deferrable_work_waits_for_the_end_of_a_burst() -> None:
    request_tracker, half = RequestTracker(), _QUIET_SECONDS / 2

    async def burst() -> None:
        for _ in range(4):  # the last answer comes after seven half seconds
            await Connection(request_tracker).call("/filter", lambda: asyncio.sleep(half))
            await asyncio.sleep(half)

    asking = asyncio.create_task(burst())
    await asyncio.sleep(half / 2)

    assert await seconds_of(request_tracker.wait_for_quiet()) == pytest.approx(
        6.5 * half + _QUIET_SECONDS
    )
    await asking


async def test_the_wait_for_the_end_of_a_burst_is_limited() -> None:
    request_tracker, over = RequestTracker(), asyncio.Event()
    task = await begun(Connection(request_tracker), "/filter", over)

    assert await seconds_of(request_tracker.wait_for_quiet()) == pytest.approx(_BURST_SECONDS)

    over.set()
    await task


async def test_every_answer_during_shutdown_closes_its_connection() -> None:
    request_tracker = RequestTracker(once=["/filter"])
    connection = Connection(request_tracker)
    before = await answered(connection)
    leaving = asyncio.create_task(request_tracker.drain_connections(0.0, 60.0))
    await asyncio.sleep(1.0)

    last = await answered(connection)
    connection.close()

    assert (before.keep_alive, last.keep_alive) == (None, False)
    await leaving


async def test_an_idle_connection_is_kept_for_its_client_until_the_client_closes_it() -> None:
    request_tracker = RequestTracker(once=["/filter"])
    connection = Connection(request_tracker)
    await answered(connection)
    leaving = asyncio.create_task(seconds_of(request_tracker.drain_connections(0.0, 60.0)))

    await asyncio.sleep(50.0)
    connection.close()

    assert await leaving == pytest.approx(50.0, abs=2 * _CHECK_SECONDS)


async def test_a_client_that_repeats_its_request_is_not_waited_for() -> None:
    request_tracker = RequestTracker(once=["/filter"])
    await answered(Connection(request_tracker), "/metrics")

    assert await seconds_of(request_tracker.drain_connections(0.0, 60.0)) == 0.0


async def test_the_wait_for_idle_connections_is_limited() -> None:
    request_tracker = RequestTracker(once=["/filter"])
    await answered(Connection(request_tracker))

    waited = await seconds_of(request_tracker.drain_connections(5.0, 60.0))

    assert waited == pytest.approx(65.0, abs=2 * _CHECK_SECONDS)


async def test_the_waits_of_a_shutdown_share_one_deadline() -> None:
    request_tracker, over = RequestTracker(once=["/filter"]), asyncio.Event()
    task = await begun(Connection(request_tracker), "/filter", over)

    await request_tracker.drain_connections(0.0, 20.0)

    assert await seconds_of(request_tracker.drain_requests(60.0)) == pytest.approx(
        0.0, abs=_CHECK_SECONDS
    )
    assert request_tracker.requests == 1
    over.set()
    await task


async def test_a_hurried_shutdown_limits_the_wait_for_open_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request_tracker, over = RequestTracker(), asyncio.Event()
    task = await begun(Connection(request_tracker), "/metrics", over)

    request_tracker.shorten_drain(3.0)

    assert await seconds_of(request_tracker.drain_requests(3600)) == pytest.approx(3.0)
    assert "requests left unanswered" in caplog.text
    over.set()
    await task


# --- arriving requests ----------------------------------------------------------------------------


async def known(request_tracker: RequestTracker, path: str = "/filter") -> Connection:
    """Return a connection with an earlier request to this path."""
    connection = Connection(request_tracker)
    await answered(connection, path)
    return connection


async def test_work_waits_from_the_first_bytes_of_a_request_to_its_answer() -> None:
    request_tracker = RequestTracker(urgent=["/filter"], once=["/filter"])
    connection = await known(request_tracker)
    part = _MAX_YIELD_SECONDS / 4
    assert await seconds_of(request_tracker.yield_control()) == 0.0

    connection.receive_bytes()
    work = asyncio.create_task(seconds_of(request_tracker.yield_control()))
    await asyncio.sleep(part)
    await connection.call("/filter", lambda: asyncio.sleep(part))

    assert await work == pytest.approx(2 * part)
    assert await seconds_of(request_tracker.yield_control()) == 0.0


async def test_work_continues_when_the_connection_of_a_request_ends() -> None:
    request_tracker = RequestTracker(urgent=["/filter"], once=["/filter"])
    connection = await known(request_tracker)
    connection.receive_bytes()
    work = asyncio.create_task(seconds_of(request_tracker.yield_control()))
    await asyncio.sleep(_MAX_YIELD_SECONDS / 4)

    connection.close()

    assert await work == pytest.approx(_MAX_YIELD_SECONDS / 4)


async def test_work_does_not_wait_long_for_bytes_that_become_no_request() -> None:
    request_tracker = RequestTracker(urgent=["/filter"], once=["/filter"])
    connection = await known(request_tracker)
    connection.receive_bytes()
    await asyncio.sleep(_MAX_YIELD_SECONDS / 2)
    assert await seconds_of(request_tracker.yield_control()) > 0.0

    connection.receive_bytes()  # further bytes of the same request
    assert await seconds_of(request_tracker.yield_control()) == 0.0


async def test_work_does_not_wait_for_bytes_of_clients_without_urgent_requests() -> None:
    request_tracker = RequestTracker(urgent=["/filter"], once=["/filter"])
    connection = await known(request_tracker, "/metrics")

    connection.receive_bytes()

    assert await seconds_of(request_tracker.yield_control()) == 0.0
