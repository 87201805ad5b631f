"""Advice from the past in Prometheus, and the queries for it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from extender.core.devices.readings import DeviceKey
from extender.insight import advice
from extender.insight.last_hour import Values
from extender.runtime.fair_queue import FairQueue
from testkit.api_requests import get
from testkit.cards import card
from testkit.fake_kube import eventually
from testkit.webhook_requests import MakeClient
from testkit.world import SHARED, World

HOUR = 3600.0
GIB = 1 << 30


@pytest.fixture
def world() -> World:
    return World()


@dataclass
class PastAnswer:
    times: tuple[float, ...]
    activity: Mapping[DeviceKey, Values]
    memory_bytes: Mapping[DeviceKey, Values]
    error: str = ""


@dataclass
class FakePlots:
    """Stand-in for the queries to Prometheus."""

    world: World
    error: str = ""
    requested: list[tuple[int, float]] = field(default_factory=list)
    is_configured: bool = True
    hold: asyncio.Event | None = None

    async def hour(self, devices: Sequence[DeviceKey]) -> Any:
        raise AssertionError(devices)

    async def past(self, devices: Sequence[DeviceKey], *, seconds: float, steps: int) -> PastAnswer:
        self.requested.append((len(devices), seconds))
        if self.hold is not None:
            await self.hold.wait()
        if self.error:
            return PastAnswer((), {}, {}, self.error)
        start = self.world.now - seconds
        times = tuple(start + seconds * step / (steps - 1) for step in range(steps))
        return PastAnswer(
            times,
            {key: [0.4] * steps for key in devices},
            {key: [30.0 * GIB] * steps for key in devices},
        )


async def test_periods_over_an_hour_come_from_prometheus(
    world: World, aiohttp_client: MakeClient
) -> None:
    plots = FakePlots(world)
    world.plots = plots
    world.add_shared("s", 4)
    name = world.have("p", "s", resource=SHARED)
    world.live({"s": [card(name, busy=0.1)]}, 12 * HOUR, every=600)
    client = await aiohttp_client(world.build_app())

    answer = await get(client, "/v1/advice", over="86400")
    (found,) = answer["cards"]

    assert plots.requested == [(1, 86400.0)]
    assert (answer["sources"], found["source"]) == (["prometheus"], "prometheus")
    assert (found["activity_ratio"], found["memory_bytes"]) == (0.4, 30 * GIB)
    # In half of the day the card had other tenants.
    assert found["looked_seconds"] == pytest.approx(12 * HOUR, abs=720)
    assert found["samples"] == pytest.approx(121, abs=2)


async def test_without_prometheus_the_last_hour_counts_with_a_note(
    world: World, aiohttp_client: MakeClient
) -> None:
    plots = FakePlots(world, error="cannot query Prometheus: HTTP 503")
    world.plots = plots
    for node in ("s", "t"):
        world.add_shared(node, 4, gpus=40)
    name = world.have("p", "s", resource=SHARED)
    world.live({"s": [card(name, busy=0.1)] + [card()] * 39, "t": [card()] * 40}, HOUR)
    client = await aiohttp_client(world.build_app())

    answer = await get(client, "/v1/advice", over="86400")

    assert (
        len(plots.requested) == 1
    )  # 80 cards in two batches: after a failed query no other is sent
    assert (answer["sources"], answer["note"]) == (["memory"], "cannot query Prometheus: HTTP 503")
    assert answer["samples"] == 60


@pytest.fixture
def reported(world: World) -> FakePlots:
    """Return the fake queries for a world with a shared card in use."""
    world.plots = plots = FakePlots(world)
    world.add_shared("s", 4)
    world.live({"s": [card(world.have("p", "s", resource=SHARED), busy=0.1)]}, HOUR)
    return plots


async def test_prometheus_is_queried_once_a_minute_for_all_callers(
    world: World, reported: FakePlots, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(world.build_app())

    spans = {
        (await get(client, "/v1/advice", over=str(over)))["over_seconds"]
        for over in range(70_000, 86_401, 100)
    }

    assert spans == {86400.0}
    assert reported.requested == [(1, 86400.0)]
    world.now += 60.0
    await get(client, "/v1/advice", over="86400")
    assert len(reported.requested) == 2
    for over in range(3_601, 2_592_001, 9_973):
        await get(client, "/v1/advice", over=str(over))
    assert len(reported.requested) <= 2 + 10


async def test_a_span_of_our_own_memory_is_taken_as_it_is(
    world: World, reported: FakePlots, aiohttp_client: MakeClient
) -> None:
    client = await aiohttp_client(world.build_app())

    answer = await get(client, "/v1/advice", over="1000")

    assert (answer["over_seconds"], reported.requested) == (1000.0, [])


async def test_a_caller_with_too_many_requests_is_refused_and_others_are_answered(
    world: World,
    reported: FakePlots,
    aiohttp_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[FairQueue] = []

    def seen(*arguments: Any, **options: Any) -> FairQueue:
        turns.append(FairQueue(*arguments, **options))
        return turns[-1]

    monkeypatch.setattr(advice, "FairQueue", seen)
    client = await aiohttp_client(world.build_app())
    other = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    reported.hold = asyncio.Event()
    async with aiohttp.ClientSession(connector=other) as session:
        url = client.make_url("/v1/advice?over=86400")
        greedy = [asyncio.create_task(client.get(url.path_qs)) for _ in range(10)]
        await eventually(lambda: sum(task.done() for task in greedy) == 4)
        modest = asyncio.create_task(session.get(url))
        await eventually(lambda: "127.0.0.2" in turns[0]._queues)

        reported.hold.set()
        statuses = [(await task).status for task in greedy]
        assert (await modest).status == 200

    assert sorted(statuses) == [200] * 6 + [429] * 4
