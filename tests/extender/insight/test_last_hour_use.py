"""Past use of devices, which the watch for idle devices takes over at its start."""

from dataclasses import replace

import numpy as np
import pytest

from extender.core.devices.readings import DeviceKey
from extender.core.nodes.snapshot import Ratios, Telemetry
from extender.insight.regret_watch import _PIECES, _ActivityLog
from testkit.api_requests import get
from testkit.cards import HOUR, card
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

CARDS = {"n": [card("team/nb"), card("team/nb")]}
FIRST, SECOND = (DeviceKey((f"GPU-n-{index}", "")) for index in range(2))

EVERY = 60.0

SPAN = _PIECES * EVERY


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


@pytest.mark.parametrize("hours", [10, 24])
async def test_a_pod_is_not_idle_for_longer_than_it_is_there(
    world: World, client: Client, hours: int
) -> None:
    learn(world, hours * HOUR, hours * HOUR, is_guess=True)

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


def seen(*latest: float, freshness: tuple[float, ...] = (1.0, 1.0)) -> Telemetry:
    blank = Telemetry.missing(len(latest))
    return replace(blank, latest=np.array(latest), freshness=np.array(freshness))


def means(*looks: Telemetry, since: float = 0.0) -> Ratios:
    """Record two devices repeatedly; return their mean activity."""
    log = _ActivityLog(SPAN)
    for number, telemetry in enumerate(looks):
        log.look(telemetry, number * EVERY)
    return log.means(np.array([0, 1]), since)


def test_reading_counts_for_the_time_since_the_last_one() -> None:
    found = means(seen(1.0, 1.0), seen(0.0, 0.6), seen(0.5, 0.0))

    assert found == pytest.approx([0.25, 0.3])


@pytest.mark.parametrize("freshness", [0.99, 0.5, 0.0])
def test_a_reading_that_is_stale_counts_neither_as_busy_nor_as_seen(freshness: float) -> None:
    stale = seen(0.9, 0.9, freshness=(freshness, 1.0))

    found = means(seen(0.0, 0.0), seen(0.2, 0.2), stale, stale)

    assert found == pytest.approx([0.2, (0.2 + 0.9 + 0.9) / 3])


def test_the_activity_of_a_device_without_fresh_readings_is_unknown() -> None:
    stale = seen(0.9, 0.9, freshness=(0.99, 1.0))

    assert np.isnan(means(stale, stale)).tolist() == [True, False]


def test_time_without_samples_counts_as_one_piece_at_most() -> None:
    log = _ActivityLog(SPAN)
    for at, busy in ((0.0, 0.0), (EVERY, 0.0), (100 * EVERY, 1.0)):
        log.look(seen(busy, busy), at)

    assert log.means(np.array([0]), 0.0) == pytest.approx([0.5])


def test_devices_that_come_later_count_from_then_on() -> None:
    log = _ActivityLog(SPAN)
    log.look(seen(0.5, freshness=(1.0,)), 0.0)
    for number in (1, 2):
        log.look(seen(0.5, 0.8), number * EVERY)

    assert log.means(np.array([0, 1]), 0.0) == pytest.approx([0.5, 0.8])


def test_mean_starts_no_earlier_than_the_span() -> None:
    log = _ActivityLog(SPAN)
    busy = [*[1.0] * 10, *[0.0] * (_PIECES + 2)]
    for number, share in enumerate(busy):
        log.look(seen(share, share), number * EVERY)

    assert log.means(np.array([0]), 0.0) == pytest.approx([0.0])


def test_nothing_is_known_of_the_time_since_the_last_look() -> None:
    log = _ActivityLog(SPAN)
    for number in range(3):
        log.look(seen(0.5, 0.5), number * EVERY)

    assert np.isnan(log.means(np.array([0]), 3 * EVERY)).all()


def test_each_look_counts_by_the_time_since_the_look_before() -> None:
    log = _ActivityLog(SPAN)
    for at, busy in ((0.0, 0.0), (10.0, 1.0), (40.0, 0.0)):
        log.look(seen(busy, busy), at)

    assert log.means(np.array([0]), 0.0) == pytest.approx([10 / 40])
