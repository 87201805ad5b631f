import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extender.api.page import device_index, fleet_feed
from extender.api.page.device_index import device_index_in_steps, is_current_in_steps
from extender.api.page.fleet_feed import (
    _ASSUMED,
    _HELD,
    _LESS,
    _LOOKS,
    FleetFeed,
    _DeviceStates,
    _looked_at,
    _rows_since,
)
from extender.core.nodes.inventory import POOL_LABELS, Taint
from extender.core.nodes.snapshot import Rows
from extender.core.steps import finish
from testkit.builders import GPU
from testkit.cards import BUSY, CARD_BYTES, IDLE, Gpu
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


def change_pods(world: World) -> None:
    """Change the pods of some nodes, whose rows the snapshot then holds apart from its arrays."""
    world.fleet.snapshot()
    world.fleet.remove_pod("uid-notebook", world.now)
    world.add_pod("new", "node-c")
    pool = world.fleet.snapshot().pools[GPU]
    assert [pool.nodes[row] for row in pool.unwritten] == ["node-b", "node-c"]


@pytest.mark.parametrize("nodes_at_once", [64, 1])
@pytest.mark.parametrize("change", [lambda _: None, change_pods], ids=["read", "changed"])
async def test_page_shows_each_gpu_as_the_api_does(
    aiohttp_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    nodes_at_once: int,
    change: Callable[[World], None],
) -> None:
    for module in (fleet_feed, device_index):
        monkeypatch.setattr(module, "_PIECE_NODES", nodes_at_once)
    world = small_world()
    change(world)
    client = await aiohttp_client(world.build_app())
    gpus = (await (await client.get("/v1/gpus")).json())["gpus"]
    counts = {node: sum(gpu["node"] == node for gpu in gpus) for node in CARDS}

    _, document = read(fresh_feed(world).since(0)[1])

    states = column(document, "state")
    assert [_LOOKS[state & 7] for state in states] == [gpu["state"] for gpu in gpus]
    assert {gpu["state"] for gpu in gpus} == set(_LOOKS)
    assert shares(document, "activity") == [gpu["utilization_latest_ratio"] for gpu in gpus]
    assert shares(document, "memory") == [
        None
        if gpu["memory_used_ratio"] is None
        else pytest.approx(gpu["memory_used_ratio"], abs=0.003)
        for gpu in gpus
    ]
    assert column(document, "used") == [gpu["replicas_used"] for gpu in gpus]
    assert [bool(state & _HELD) for state in states] == [gpu["replicas_used"] > 0 for gpu in gpus]
    assert document["nodes"] == list(counts)
    assert column(document, "counts", "u2") == list(counts.values())
    assert [document["models"][one] for one in column(document, "model", "u2")] == [
        gpu["model"] for gpu in gpus
    ]
    assert [document["resources"][one] for one in column(document, "resource")] == [GPU] * 12
    assert [document["profiles"][one] for one in column(document, "profile")] == [""] * 12
    assert column(document, "index") == column(document, "card") == [gpu["index"] for gpu in gpus]
    assert column(document, "replicas", "u2") == [1] * 12
    totals = column(document, "memory_total", "u2")
    assert [one * document["memory_unit_bytes"] for one in totals] == [CARD_BYTES] * 12
    assert document["thresholds"] == {"utilization": 0.3, "memory": 0.5}
    assert (document["version"], document["at"]) == (1, world.now)


def shares(document: dict[str, Any], name: str) -> list[float | None]:
    """Return a column of half percents as shares, None if unknown."""
    return [None if one == 255 else one / 200 for one in column(document, name)]


def test_a_viewer_with_the_previous_version_receives_only_the_changes() -> None:
    world = small_world()
    feed = fresh_feed(world)
    before = feed.version

    world.now += 10.0
    world.report(CARDS | {"node-c": [IDLE, IDLE]})
    assert finish(feed.refresh_in_steps())
    version, reported = feed.since(before)
    name, document = read(reported)

    assert (version, name) == (before + 1, "delta")
    assert (document["version"], document["at"]) == (version, world.now)
    assert feed.version == version
    assert column(document, "places", "u4") == [8, 9]
    assert [_LOOKS[state & 7] for state in column(document, "state")] == ["idle", "idle"]

    world.now += 10.0
    world.report(CARDS | {"node-c": [IDLE, IDLE], "node-d": [IDLE, IDLE]})
    assert finish(feed.refresh_in_steps())

    assert column(read(feed.since(version)[1])[1], "places", "u4") == [10]  # of node-d alone


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
    assert document["version"] == version
    assert looks_of(document) == looks_of(read(fresh_feed(world).since(0)[1])[1])


@pytest.mark.parametrize(("changes", "name"), [(3, "delta"), (4, "looks")])
def test_every_device_is_sent_if_more_than_three_in_ten_have_changed(
    changes: int, name: str
) -> None:
    world = World()
    world.add({"node": [IDLE] * 10})
    feed = fresh_feed(world)

    world.now += 10.0
    world.report({"node": [BUSY] * changes + [IDLE] * (10 - changes)})
    assert finish(feed.refresh_in_steps())

    assert read(feed.since(feed.version - 1)[1])[0] == name


def test_a_new_viewer_may_get_an_earlier_state_and_then_the_changes() -> None:
    world = small_world()
    feed = fresh_feed(world)
    first = feed.since(0)

    world.now += 10.0
    world.report(CARDS | {"node-c": [IDLE, IDLE]})
    finish(feed.refresh_in_steps())

    assert feed.since(0) == first
    assert read(feed.since(first[0])[1])[0] == "delta"


@pytest.mark.parametrize("column", ["state", "activity", "memory", "used"])
def test_a_change_of_any_value_is_a_change(column: str) -> None:
    before = _DeviceStates.blank(3)
    after = before.copy()
    getattr(after, column)[1] = 7

    assert after.changed(before).tolist() == [1]


@pytest.mark.parametrize(
    ("minutes", "bits"), [(1, _HELD + _ASSUMED), (5, _HELD)], ids=["just placed", "measured since"]
)
def test_bits_say_which_devices_are_held_and_not_measured_since(minutes: int, bits: int) -> None:
    world = World()
    world.add_node("node", 1, replicas=10)
    world.read()
    world.bind("pod", on=[world.card()])
    world.read_after(60.0, minutes)

    _, document = read(fresh_feed(world).since(0)[1])

    assert [state & ~7 for state in column(document, "state")] == [bits]


def test_a_bit_says_which_devices_count_less() -> None:
    world = World()
    world.add({"node": [Gpu(xid=63.0), IDLE], "dead": [Gpu(xid=79.0)]})

    _, document = read(fresh_feed(world).since(0)[1])

    assert [state & ~7 for state in column(document, "state")] == [0, _LESS, 0]


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


def test_a_node_that_is_not_ready_cordoned_or_tainted_shows() -> None:
    world = small_world()
    feed = fresh_feed(world)
    before = feed.version
    taints = (Taint(key="team", effect="PreferNoSchedule"), Taint(key="team", value="a"))

    world.register_node("node-a", gpus=4, is_unschedulable=True)
    world.register_node("node-b", gpus=4, taints=taints)
    world.register_node("node-c", gpus=2, is_ready=False)
    world.register_node("node-d", gpus=2, is_ready=False, is_unschedulable=True, taints=taints)
    finish(feed.refresh_in_steps())
    _, document = read(feed.since(before)[1])

    assert column(document, "node_state") == [2, 4, 1, 7]


def test_nothing_new_is_no_new_version() -> None:
    world = small_world()
    feed = fresh_feed(world)

    assert not finish(feed.refresh_in_steps())
    world.now += 10.0
    world.report(CARDS)  # the same values again
    assert not finish(feed.refresh_in_steps())
    assert feed.version == 1


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
    assert _rows_since(world.fleet.snapshot(), _looked_at(world.fleet.snapshot())) == {GPU: []}
    assert _rows_since(world.fleet.snapshot(), {}) is None
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


def test_new_thresholds_may_change_the_state_of_every_device() -> None:
    world = small_world()
    feed = fresh_feed(world)
    looks = looks_of(read(feed.since(0)[1])[1])

    limits = replace(world.policy.thresholds, utilization=0.01)
    world.fleet.policy = replace(world.policy, thresholds=limits)
    world.add_pod("new", "node-c")

    assert finish(feed.refresh_in_steps())
    _, document = read(feed.since(feed.version - 1)[1])
    for place, look in zip(column(document, "places", "u4"), looks_of(document), strict=True):
        looks[place] = look
    assert looks == looks_of(read(fresh_feed(world).since(0)[1])[1])


def test_a_large_fleet_is_not_looked_at_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_feed, "_LOOKED_A_SECOND", 1)  # so at most 12 devices each 12 seconds
    world = small_world()
    feed = fresh_feed(world)

    for seconds in (0.5, 11.0):
        world.now += seconds
        world.report(CARDS | {"node-c": [IDLE, IDLE]})
        assert not finish(feed.refresh_in_steps())

    world.now += 0.5
    world.report(CARDS | {"node-c": [IDLE, IDLE]})
    assert finish(feed.refresh_in_steps())

    world.fleet.remove_pod("uid-notebook", world.now)
    assert finish(feed.refresh_in_steps())  # its node alone costs little


def test_a_large_fleet_is_not_listed_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_feed, "_LISTED_A_SECOND", 1)
    world = small_world()
    feed = fresh_feed(world)

    world.register_node("node-a", gpus=4, is_unschedulable=True)
    world.now += 10.0
    assert not finish(feed.refresh_in_steps())

    world.now += 2.0
    world.report(CARDS)
    assert finish(feed.refresh_in_steps())


def test_without_viewers_the_state_is_dropped_and_then_built_again() -> None:
    world = small_world()
    feed = fresh_feed(world)
    before = feed.since(0)[1]

    feed.forget()
    assert not feed.is_there
    assert finish(feed.refresh_in_steps())

    assert looks_of(read(feed.since(1)[1])[1]) == looks_of(read(before)[1])


# --- the device index ----------------------------------------------------------------------------


def test_the_index_is_current_as_long_as_each_slot_has_the_same_device() -> None:
    world = small_world()
    snapshot = world.fleet.snapshot()
    index = finish(device_index_in_steps(world.fleet, snapshot))
    pool = snapshot.pools[GPU]

    def is_current(slots: Rows) -> bool:
        changed = replace(pool, batch=replace(pool.batch, slots=slots))
        return finish(
            is_current_in_steps(index, world.fleet, replace(snapshot, pools={GPU: changed}))
        )

    other = pool.batch.slots.copy()
    other[0, 0] = other[0, 1]
    assert is_current(pool.batch.slots.copy())
    assert not is_current(other)


def test_nodes_are_grouped_by_the_pools_of_clouds_and_by_roles() -> None:
    world = World()
    cloud = {POOL_LABELS[0]: "a100-pool"}
    roles = {f"node-role.kubernetes.io/{name}": "" for name in ("worker", "gpu")}
    world.register_node("a", labels=cloud)
    world.register_node("b", other_labels=roles)

    _, document = read(fresh_feed(world).since(0)[1])

    assert {label: one["values"] for label, one in document["labels"].items()} == {
        POOL_LABELS[0]: ["a100-pool", ""],
        "node-role.kubernetes.io/": ["", "gpu + worker"],
    }


def test_instances_of_a_card_share_its_number_and_a_whole_card_has_no_profile() -> None:
    world = World()
    world.add_node("node", cards=0, resource="nvidia.com/mig-1g.10gb")
    world.add_instances("node", 0, ["1g.10gb"] * 2)
    world.add_instances("node", 3, ["1g.10gb"])
    world.add_node("node", cards=0, allocatable={"nvidia.com/mig-1g.10gb": 3})
    world.read()

    _, document = read(fresh_feed(world).since(0)[1])

    assert document["profiles"] == ["", "1g.10gb"]
    assert column(document, "profile") == [1, 1, 1]
    assert column(document, "card") == [0, 0, 1]
    assert column(document, "index") == [0, 0, 3]


def test_a_card_that_no_source_shows_has_the_model_of_its_node_and_no_index() -> None:
    world = World()
    world.register_node("node", gpus=2, labels={"nvidia.com/gpu.product": "NVIDIA-A100"})

    _, document = read(fresh_feed(world).since(0)[1])

    assert [document["models"][one] for one in column(document, "model", "u2")] == ["A100"] * 2
    assert column(document, "card") == [0, 1]
    assert column(document, "index") == [255, 255]
    assert column(document, "memory_total", "u2") == [0, 0]
