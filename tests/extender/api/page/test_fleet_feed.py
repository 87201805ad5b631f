import base64
from typing import Any

import numpy as np
import pytest

from extender.api.page import fleet_feed
from extender.api.page.fleet_feed import _HELD, _LOOKS, FleetFeed, _looked_at, _rows_since
from extender.core.steps import finish
from testkit.builders import GPU
from testkit.cards import BUSY, IDLE
from testkit.page.small_world import CARDS, ZONE, small_world
from testkit.webhook_requests import MakeClient
from testkit.world import World
from tests.extender.api.page.feeds import read


def column(document: dict[str, Any], name: str, kind: str = "u1") -> list[int]:
    values: list[int] = np.frombuffer(base64.b64decode(document[name]), f"<{kind}").tolist()
    return values


def fresh_feed(world: World) -> FleetFeed:
    feed = FleetFeed(world.fleet)
    assert finish(feed.refresh_in_steps())
    return feed


async def test_page_shows_each_gpu_as_the_api_does(aiohttp_client: MakeClient) -> None:
    world = small_world()
    client = await aiohttp_client(world.build_app())
    gpus = (await (await client.get("/v1/gpus")).json())["gpus"]

    _, document = read(fresh_feed(world).since(0)[1])

    looks = [_LOOKS[state & 7] for state in column(document, "state")]
    assert looks == [gpu["state"] for gpu in gpus]
    assert set(looks) == set(_LOOKS)
    activity = [None if one == 255 else one / 200 for one in column(document, "activity")]
    assert activity == [gpu["utilization_latest_ratio"] for gpu in gpus]
    assert [bool(state & _HELD) for state in column(document, "state")] == [
        gpu["replicas_used"] > 0 for gpu in gpus
    ]


def test_a_viewer_with_the_previous_version_receives_only_the_changes() -> None:
    world = small_world()
    feed = fresh_feed(world)
    before = feed.version

    world.now += 10.0
    world.report(CARDS | {"node-c": [IDLE, IDLE]})
    assert finish(feed.refresh_in_steps())
    version, reported = feed.since(before)
    name, document = read(reported)

    assert (version, name) == (feed.version, "delta")
    assert column(document, "places", "u4") == [8, 9]
    assert [_LOOKS[state & 7] for state in column(document, "state")] == ["idle", "idle"]


def test_slow_viewer_receives_every_device_once() -> None:
    world = small_world()
    feed = fresh_feed(world)
    before = feed.version

    for cards in ({"node-c": [IDLE, IDLE]}, {"node-c": [BUSY, IDLE]}):
        world.now += 10.0
        world.report(CARDS | cards)
        finish(feed.refresh_in_steps())
    version, reported = feed.since(before)
    name, document = read(reported)

    assert (version, name) == (feed.version, "looks")
    assert len(column(document, "state")) == 12


def test_all_viewers_share_one_encoding() -> None:
    feed = fresh_feed(small_world())

    assert feed.since(0)[1] is feed.since(0)[1]


def test_labels_of_pools_by_wish_come_first_and_may_change() -> None:
    world = World()
    for node, pool in (("a", "blue"), ("b", "green"), ("c", "blue")):
        world.register_node(node, labels={ZONE: "east"}, other_labels={"pool": pool})
    feed = FleetFeed(world.fleet, ("pool", "unused"))
    assert finish(feed.refresh_in_steps())
    _, document = read(feed.since(0)[1])
    assert list(document["labels"]) == ["pool", ZONE]
    assert document["labels"]["pool"]["values"] == ["blue", "green"]
    assert column(document["labels"]["pool"], "of", "u2") == [0, 1, 0]

    feed.pool_labels = ()
    world.now += 10.0
    assert finish(feed.refresh_in_steps())

    assert list(read(feed.since(feed.version - 1)[1])[1]["labels"]) == [ZONE]


def test_a_node_that_comes_brings_everything_again() -> None:
    world = small_world()
    feed = fresh_feed(world)
    before = feed.version

    world.add({"node-new": [IDLE] * 3})
    finish(feed.refresh_in_steps())
    _, reported = feed.since(before)
    name, document = read(reported)

    assert name == "fleet"
    assert document["nodes"][-1] == "node-new"
    assert column(document, "counts", "u2") == [4, 4, 2, 2, 3]


def test_a_cordon_shows() -> None:
    world = small_world()
    feed = fresh_feed(world)
    before = feed.version

    world.register_node("node-a", gpus=4, is_unschedulable=True)
    finish(feed.refresh_in_steps())
    _, document = read(feed.since(before)[1])

    assert column(document, "node_state") == [2, 0, 0, 0]


def test_nothing_new_is_no_new_version() -> None:
    feed = fresh_feed(small_world())

    assert not finish(feed.refresh_in_steps())


def looks_of(document: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return state, activity, memory and use of each device of an event."""
    names = ("state", "activity", "memory", "used")
    return list(zip(*(column(document, name) for name in names), strict=True))


def test_only_nodes_whose_pods_changed_are_evaluated_again() -> None:
    world = small_world()
    feed = fresh_feed(world)
    version, reported = feed.since(0)
    looks = looks_of(read(reported)[1])
    looked = _looked_at(world.fleet.snapshot())

    world.fleet.remove_pod("uid-notebook", world.now)
    world.add_pod("new", "node-c")
    assert _rows_since(world.fleet.snapshot(), looked) == {GPU: [1, 2]}
    assert finish(feed.refresh_in_steps())
    name, document = read(feed.since(version)[1])
    for place, look in zip(column(document, "places", "u4"), looks_of(document), strict=True):
        looks[place] = look

    assert name == "delta"
    assert looks == looks_of(read(fresh_feed(world).since(0)[1])[1])


def test_new_readings_may_change_the_state_of_every_device() -> None:
    world = small_world()
    looked = _looked_at(world.fleet.snapshot())

    world.now += 10.0
    world.report(CARDS)

    assert _rows_since(world.fleet.snapshot(), looked) is None


def test_a_large_fleet_is_not_looked_at_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_feed, "_LOOKED_A_SECOND", 1)  # so at most 12 devices each 12 seconds
    world = small_world()
    feed = fresh_feed(world)

    world.now += 10.0
    world.report(CARDS | {"node-c": [IDLE, IDLE]})
    assert not finish(feed.refresh_in_steps())

    world.now += 10.0
    world.report(CARDS | {"node-c": [IDLE, IDLE]})
    assert finish(feed.refresh_in_steps())
