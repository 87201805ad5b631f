"""State of the other replicas, from their last messages."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extender.effects import peers as module
from extender.effects.peer_link import _HEARTBEAT_SECONDS, PATH, encode_message, encode_receipt
from extender.effects.peers import _SILENT_SECONDS, Peers, _Address
from extender.placement.request_log import AnsweredRequest
from extender.runtime import supervision
from extender.runtime.metrics import Metrics
from extender.runtime.supervision import keep
from extender.settings import service as settings
from testkit.fake_kube import eventually
from testkit.webhook_requests import MakeClient

Report = Callable[[str, Collection[str] | None], Awaitable[None]]


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def listening(make_client: MakeClient, clock: Clock) -> tuple[Peers, Report]:
    """Return a receiver of messages, and a function that sends it a replica's faults."""
    peers = Peers(
        settings.PeersSettings(), lambda _: None, Metrics(), monotonic=clock, instance="us"
    )
    app = web.Application()
    app.add_routes(peers.routes())
    client = await make_client(app)

    async def report(instance: str, faults: Collection[str] | None) -> None:
        body = encode_message(
            instance, [], to="us", gap_at=0.0, mark=clock(), now=clock(), faults=faults
        )
        assert (await client.post(PATH, data=body)).status == 200

    return peers, report


async def test_a_replica_counts_until_it_has_missed_more_than_two_of_its_messages(
    aiohttp_client: MakeClient, clock: Clock
) -> None:
    peers, report = await listening(aiohttp_client, clock)
    await report("them", ["prometheus"])

    assert _SILENT_SECONDS > 3 * _HEARTBEAT_SECONDS
    clock.now += _SILENT_SECONDS - 0.1
    assert peers.peer_faults() == [frozenset({"prometheus"})]

    clock.now += 0.2
    assert peers.peer_faults() == []


async def test_a_replica_that_sends_again_counts_by_its_last_message(
    aiohttp_client: MakeClient, clock: Clock
) -> None:
    peers, report = await listening(aiohttp_client, clock)
    await report("them", ["prometheus"])
    clock.now += 100.0

    await report("them", [])

    assert peers.peer_faults() == [frozenset()]
    (received,) = peers._received.values()
    assert (received.since, received.until) == (clock.now - 100.0, clock.now)


async def test_one_that_is_no_help_does_not_count(aiohttp_client: MakeClient, clock: Clock) -> None:
    peers, report = await listening(aiohttp_client, clock)

    await report("starting", None)
    await report("us", [])

    assert peers.peer_faults() == []


async def test_a_delayed_record_counts_from_the_time_of_its_request(
    aiohttp_client: MakeClient, clock: Clock
) -> None:
    taken: list[AnsweredRequest] = []
    peers = Peers(settings.PeersSettings(), taken.append, Metrics(), monotonic=clock, instance="us")
    app = web.Application()
    app.add_routes(peers.routes())
    client = await aiohttp_client(app)

    for transit_seconds in (0.001, 0.6):
        asked_at = clock.now
        theirs = asked_at - 900.0  # another machine's clock
        requested = AnsweredRequest(verb="filter", uid="u", key="team/p", at=theirs, choices=1)
        body = encode_message("them", [requested], to="us", gap_at=0.0, mark=None, now=theirs)
        clock.now += transit_seconds
        assert (await client.post(PATH, data=body)).status == 200

        assert taken[-1].at == pytest.approx(asked_at, abs=0.002)
        clock.now += 1.0


async def test_after_a_failure_every_replica_gets_a_message_again(
    aiohttp_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(module, "_RESOLVE_SECONDS", 1.0)
    bodies: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(body=encode_receipt("them", 1.0))

    app = web.Application()
    app.add_routes([web.post(PATH, take)])
    client = await aiohttp_client(app)
    addresses = (f"127.0.0.1:{client.port}",)
    peers = Peers(settings.PeersSettings(addresses=addresses), lambda _: None, Metrics())
    look_up = peers._addresses

    async def fail() -> set[_Address]:
        monkeypatch.setattr(peers, "_addresses", look_up)  # fail once
        bodies.clear()
        raise UnicodeError("label empty or too long")

    running = asyncio.create_task(keep("peers", peers.run))
    await eventually(lambda: bodies)
    failures = supervision.FAULTS["peers"]
    monkeypatch.setattr(peers, "_addresses", fail)
    await eventually(lambda: supervision.FAULTS["peers"] > failures)
    bodies.clear()  # also the messages at the end

    await eventually(lambda: bodies)
    running.cancel()
    await asyncio.wait([running])


async def test_each_cause_of_failed_look_ups_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = Peers(settings.PeersSettings(), lambda _: None, Metrics())
    causes = ["no such name", "no such name", "no such name", "timed out", "", "timed out"]

    async def fail() -> set[_Address]:
        cause = causes.pop(0)
        if cause:
            raise OSError(cause)
        return set()

    monkeypatch.setattr(peers, "_addresses", fail)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        while causes:
            await peers._resolve(group, session)

    lines: list[Any] = caplog.records
    assert [line.cause for line in lines] == ["no such name", "timed out", "timed out"]
    assert {line.getMessage() for line in lines} == {"cannot look up the replicas"}


async def test_records_of_a_replica_that_leaves_before_its_first_message_are_lost(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = Peers(settings.PeersSettings(), lambda _: None, Metrics(), monotonic=clock)
    addresses: set[_Address] = {("127.0.0.1", 1)}

    async def look_up() -> set[_Address]:
        return set(addresses)

    monkeypatch.setattr(peers, "_addresses", look_up)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        await peers._resolve(group, session)
        clock.now += 10.0
        addresses.clear()
        await peers._resolve(group, session)

    assert (peers.since, peers.until) == (clock.now, clock.now)
