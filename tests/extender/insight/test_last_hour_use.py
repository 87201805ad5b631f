"""Past use of devices, which the watch for idle devices takes over at its start."""

import numpy as np
import pytest

from extender.core.devices.readings import DeviceKey
from testkit.api_requests import get
from testkit.cards import HOUR, card
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

CARDS = {"n": [card("team/nb"), card("team/nb")]}
FIRST, SECOND = (DeviceKey((f"GPU-n-{index}", "")) for index in range(2))


@pytest.fixture
def world() -> World:
    """Return a world where a pod has held two GPUs for ten hours, and a watch that starts now."""
    world = World()
    world.add(CARDS)
    world.hold("nb", "n", 2, bound_at=world.now - 10 * HOUR)
    world.why.idleness.look()
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


def learn(world: World, *ago: float, is_guess: bool = False, until: float = 0.0) -> None:
    """Report to the watch the time since each card was last used."""
    world.why.idleness.learn(
        [FIRST, SECOND][: len(ago)],
        np.array([world.now - one for one in ago]),
        np.full(len(ago), is_guess),
        until or world.now,
    )


async def test_history_before_the_start_counts(world: World, client: Client) -> None:
    learn(world, 5 * HOUR, 7 * HOUR)

    (holder,) = (await get(client, "/v1/holders"))["holders"]

    assert holder["idle_seconds"] == pytest.approx(5 * HOUR)
    assert [device["idle_seconds"] for device in holder["devices"]] == [5 * HOUR, 7 * HOUR]
    assert holder["is_at_least"] is False
    assert "for 5 h" in holder["why"]


async def test_an_unknown_past_gives_a_lower_bound(world: World, client: Client) -> None:
    learn(world, 6 * HOUR, 6 * HOUR, is_guess=True)

    (holder,) = (await get(client, "/v1/holders"))["holders"]

    assert holder["is_at_least"] is True
    assert "for at least 6 h" in holder["why"]


async def test_a_pod_is_not_idle_for_longer_than_it_is_there(world: World, client: Client) -> None:
    learn(world, 24 * HOUR, 24 * HOUR, is_guess=True)

    (holder,) = (await get(client, "/v1/holders"))["holders"]

    assert holder["idle_seconds"] == pytest.approx(10 * HOUR)
    assert holder["is_at_least"] is False


async def test_unreported_card_counts_from_the_start_only(world: World, client: Client) -> None:
    learn(world, 5 * HOUR)
    world.live(CARDS, 120.0)

    (holder,) = (await get(client, "/v1/holders", idle_for="100"))["holders"]

    assert holder["idle_seconds"] == pytest.approx(120.0)
    assert holder["is_at_least"] is True


async def test_readings_since_the_start_count_more(world: World, client: Client) -> None:
    asked_at = world.now
    world.live({"n": [card("team/nb", busy=0.9), card("team/nb")]}, 60.0)
    world.live(CARDS, 1200.0)
    learn(world, 6 * HOUR, 6 * HOUR, until=asked_at)

    (holder,) = (await get(client, "/v1/holders", idle_for="600", some="true"))["holders"]

    by_index = {device["index"]: device["idle_seconds"] for device in holder["devices"]}
    assert by_index[0] < 1201.0
    assert by_index[1] == pytest.approx(6 * HOUR)


async def test_a_time_without_readings_since_counts_as_use(world: World, client: Client) -> None:
    asked_at = world.now
    world.now += 2 * HOUR  # no reading is fresh any more
    world.why.idleness.look()
    learn(world, 6 * HOUR, 6 * HOUR, until=asked_at)
    world.live(CARDS, 600.0)

    (holder,) = (await get(client, "/v1/holders", idle_for="300"))["holders"]

    assert holder["idle_seconds"] <= 600.0
    assert holder["is_at_least"] is True


def test_a_device_that_is_not_known_is_passed_over(world: World) -> None:
    world.why.idleness.learn(
        [DeviceKey(("GPU-gone", ""))], np.array([0.0]), np.array([False]), world.now
    )

    assert world.why.idleness.idle_rows(HOUR) == []
