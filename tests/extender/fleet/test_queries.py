"""Test what the fleet answers about pods, devices and nodes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from extender.core.devices.readings import DeviceKey, ForeignProcess, Readings, Signal
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.pod_groups import POD_GROUP, PodGroup
from extender.fleet import fleet
from extender.fleet.latest_values import MOST_SOURCES
from extender.fleet.pods import LEAST_SAMPLES, Use
from testkit.agent.fleet_reports import Agents
from testkit.builders import GIB, GPU, request
from testkit.world import BUSY, World, one_node
from tests.extender.fleet.changes import reported, uses

KIN = ("ns/Job train", "ns images 5d8f9c")


# --- memory of pods -------------------------------------------------------------------------------


def test_memory_that_a_source_reports_for_pods_is_theirs_and_the_rest_is_foreign() -> None:
    world = one_node(1, replicas=4)
    for name in ("a", "b"):
        world.bind(name, on=[world.card()])
    uses(world, 30 * GIB)
    key, unknown = world.card().info.key, DeviceKey(("GPU-unknown", ""))

    reported(
        world,
        (key, "ns/a", int(8 * GIB)),
        (key, "ns/b", int(20 * GIB)),
        (key, "ns/stranger", int(GIB)),
        (unknown, "ns/a", int(GIB)),
    )

    memory = world.fleet.pod_memory
    assert [memory.last(f"uid-{name}", key) for name in ("a", "b", "stranger")] == [
        8 * GIB,
        20 * GIB,
        None,
    ]
    assert memory.last("uid-a", unknown) is None
    row = world.fleet.store.row_of(key)
    assert row is not None
    assert world.fleet.store.occupancy(row) == (30 * GIB, 30 * GIB, 2 * GIB)


def test_memory_beyond_all_declarations_is_foreign() -> None:
    world = one_node(1, replicas=4)
    world.bind("a", on=[world.card()], memory_bytes=int(10 * GIB))
    row = world.fleet.store.row_of(world.card().info.key)
    assert row is not None
    found = []
    for used in (10, 25):
        uses(world, used * GIB)
        world.read_after(600)
        found.append(world.fleet.store.occupancy(row))

    assert found == [(10 * GIB, 0.0, 0.0), (25 * GIB, 15 * GIB, 15 * GIB)]


def test_memory_of_pods_on_many_nodes_is_applied_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_PIECE_NODES", 2)
    world = World()
    names = [f"node-{number}" for number in range(5)]
    for name in names:
        world.add_node(name, 1, replicas=4)
        world.bind(name, name, on=[world.card(name)])
    world.read()
    shares = [(world.card(name).info.key, f"ns/{name}", 7) for name in names]
    answer = Readings(
        source="prometheus",
        at=world.now,
        devices=(),
        columns={},
        measured_at=np.zeros(0),
        tenants=None,
        shares=tuple(shares),
    )

    def count() -> int:
        last = world.fleet.pod_memory.last
        return sum(last(f"uid-{key[3:]}", device) == 7 for device, key, _ in shares)

    assert [count() for _ in world.fleet._apply_shares(answer)] == [0, 2, 4]
    assert count() == 5


def test_memory_of_some_pods_of_a_device_shows_no_foreign_use() -> None:
    world = one_node(1, replicas=4)
    for name in ("a", "b"):
        world.bind(name, on=[world.card()])
    uses(world, 30 * GIB)
    key = world.card().info.key

    reported(world, (key, "ns/a", int(8 * GIB)))

    row = world.fleet.store.row_of(key)
    assert row is not None
    assert world.fleet.store.occupancy(row)[2] == 0.0


def test_an_agents_memory_of_pods_counts_with_its_next_report() -> None:
    world = one_node(1, replicas=4)
    agents, key = Agents(world), world.card().info.key
    agents.pods = {key: ("ns/a",)}
    world.bind("a", memory_bytes=int(GIB), on=[world.card()])
    agents.report()
    world.clock.now += 60.0

    world.fleet.note_shares("node", [(key, "uid-a", int(20 * GIB))], world.now)
    agents.report(MEMORY_USED=30 * GIB, MEMORY_FREE=50 * GIB)

    row = world.fleet.store.row_of(key)
    assert row is not None
    assert world.fleet.store.occupancy(row) == (30 * GIB, 29 * GIB, 10 * GIB)
    assert world.fleet._shares == {}


@pytest.mark.parametrize(
    ("of_pods", "foreign"),
    [((28, 0), 2 * GIB), ((20, 6), 4 * GIB), ((26, 0), 0.0), ((33, 0), 0.0), ((34, 0), 0.0)],
    ids=["nearly all", "both known", "one unknown", "a bit more", "more than there is"],
)
def test_memory_of_pods_counts_only_if_it_explains_the_device(
    of_pods: tuple[int, int], foreign: float
) -> None:
    world = one_node(1, replicas=4)
    for name in ("a", "b"):
        world.bind(name, on=[world.card()])
    uses(world, 30 * GIB)
    key = world.card().info.key

    reported(
        world,
        *((key, f"ns/{name}", int(gib * GIB)) for name, gib in zip("ab", of_pods, strict=True)),
    )

    row = world.fleet.store.row_of(key)
    assert row is not None
    assert world.fleet.store.occupancy(row) == (30 * GIB, 30 * GIB, foreign)


def test_an_agents_memory_of_pods_is_known_for_advice() -> None:
    world = one_node(1, replicas=4)
    pod, key = world.bind("a", on=[world.card()]), world.card().info.key

    world.fleet.note_shares("node", [(key, pod.uid, 5)], world.now)
    world.fleet.note_shares("node", [(key, pod.uid, 4)], world.now + 60)

    assert world.fleet.pod_memory.last(pod.uid, key) == 4
    assert world.fleet.pod_memory.use(pod.uid, [key]) == Use(
        memory_most_bytes=5.0, samples=2, seconds=60.0
    )


@pytest.mark.parametrize("changes", [{"started_at": None}, {}], ids=["no", "yes"])
def test_only_a_pod_that_started_some_time_before_a_reading_is_measured(
    changes: dict[str, Any],
) -> None:
    world = one_node(1, replicas=4)
    uses(world, 30 * GIB)
    world.bind("a", on=[world.card()], owner="Job train", likeness=KIN[1:], **changes)

    world.read_after(200, times=2)
    world.fleet.snapshot()

    expected = None if changes else (KIN[1], [30 * GIB])
    assert world.fleet.measured_like(KIN[1:]) == expected


def test_a_pod_on_a_device_without_readings_is_not_measured() -> None:
    world = World()
    world.add_node("node", 1, replicas=4)
    world.card().values = {Signal.TEMPERATURE: 40.0}
    world.bind("a", on=[world.card()], likeness=KIN[1:], started_at=0.0, bound_at=None)

    world.read_after(30, times=2)
    world.fleet.snapshot()

    assert world.fleet.measured_like(KIN[1:]) is None


@pytest.mark.parametrize("is_mapped", [True, False], ids=["shown", "not shown"])
def test_use_measured_since_a_late_pods_binding_is_its_own(is_mapped: bool) -> None:
    world = one_node(2)
    world.is_mapped = is_mapped
    bound_at = world.now
    for index in (0, 1):
        world.card(index=index).values |= BUSY
    world.read_after(30, times=3)
    rows = [world.fleet.store.row_of(world.card(index=index).info.key) for index in (0, 1)]
    before = [world.fleet.store.is_foreign(row) for row in rows if row is not None]

    world.bind("late", on=[world.card()], bound_at=bound_at, started_at=bound_at)
    world.read_after(30)
    world.fleet.snapshot()

    after = [world.fleet.store.is_foreign(row) for row in rows if row is not None]
    assert (before, after) == ([True, True], [False, is_mapped])


def test_pods_like_measured_ones_are_expected_to_use_as_much() -> None:
    world = one_node(1, replicas=4)
    at = world.now - 600.0
    world.bind(
        "a", on=[world.card()], owner="Job train", likeness=KIN[1:], bound_at=at, started_at=at
    )
    uses(world, 30 * GIB)
    reported(world)
    key = world.card().info.key
    reported(world, (key, "ns/a", int(21 * GIB)))

    assert world.fleet.measured_like(KIN[1:]) == (KIN[1], [21 * GIB])
    assert world.fleet.measured_like(("ns/Job other",)) is None
    informed = world.fleet.informed(request(), KIN)
    assert informed.expected_bytes == 24 * GIB
    assert world.fleet.informed(request(memory_bytes=1), KIN).expected_bytes is None
    assert world.fleet.informed(request(memory_share=0.5), KIN).expected_bytes is None
    assert world.fleet.informed(request(), ()).expected_bytes is None


@pytest.mark.parametrize(
    ("use", "is_enough"),
    [
        (Use(activity_ratio=0.1, memory_bytes=1.0, samples=LEAST_SAMPLES), True),
        (Use(activity_ratio=0.1, memory_bytes=1.0, samples=LEAST_SAMPLES - 1), False),
        (Use(activity_ratio=0.1, samples=LEAST_SAMPLES), False),
        (Use(memory_bytes=1.0, samples=LEAST_SAMPLES), False),
    ],
    ids=["enough", "too few samples", "no memory", "no activity"],
)
def test_advice_needs_activity_and_memory_of_some_time(use: Use, is_enough: bool) -> None:
    assert use.is_enough is is_enough


def test_only_pods_that_require_a_share_of_the_memory_have_it_converted_to_bytes() -> None:
    world = one_node(1, replicas=4)
    world.bind("share", memory_share=0.25)
    world.bind("bytes", memory_bytes=int(3 * GIB))
    world.bind("none")

    found = {pod.name: pod.memory_bytes for pod in world.fleet.pods_on("node")}

    assert found == {"share": 20 * GIB, "bytes": 3 * GIB, "none": None}
    assert world.fleet.pods_on("unknown") == ()


# --- devices of pods ------------------------------------------------------------------------------


def test_the_gpus_of_a_pod_are_those_that_a_source_shows() -> None:
    world = one_node(4)
    shown = world.bind("shown", count=2, on=[world.card(index=3), world.card(index=1)])
    hidden = world.bind("hidden")
    world.read_after(30)
    world.fleet.snapshot()

    assert world.fleet.gpus_of(shown) == (1, 3)
    assert world.fleet.gpus_of(hidden) == ()
    assert [world.fleet.is_shown(uid) for uid in (shown.uid, hidden.uid, "unknown")] == [
        True,
        False,
        False,
    ]


def test_foreign_processes_are_those_of_the_last_report() -> None:
    world = one_node(2)
    first, second = world.card().info, world.card(index=1).info
    process = ForeignProcess(
        pid=7, name="a", memory_bytes=None, started_at=None, pod="", container=""
    )

    world.fleet.note_foreign("node", {first.key: (process,)})
    assert [world.fleet.foreign_on(info) for info in (first, second)] == [(process,), ()]
    world.fleet.note_foreign("node", {})

    assert world.fleet.foreign_on(first) == ()
    assert world.fleet._foreign == {}


def test_the_largest_card_and_the_offered_resources_are_those_of_the_snapshot() -> None:
    world = World()
    assert list(world.fleet.offered) == []
    assert world.fleet.largest_card() == 0
    world.add_node("node", 2)
    world.card(index=1).values[Signal.MEMORY_FREE] = 90 * GIB
    world.read()

    assert world.fleet.largest_card() == 90 * GIB
    assert list(world.fleet.offered) == [GPU]


def test_the_number_of_sources_is_limited() -> None:
    world = one_node(1)

    for number in range(2, MOST_SOURCES):  # the first is none, the second the world's
        world.fleet.prefer(f"source-{number}", 0.0)

    with pytest.raises(ValueError, match="too many sources: one-more"):
        world.fleet.prefer("one-more", 0.0)


# --- nodes ----------------------------------------------------------------------------------------


def test_what_all_pods_request_of_a_node_reduces_its_room() -> None:
    world = World()
    world.fleet.apply_host_use("node", HostResources(millicores=1000))
    world.add_node("node", 2, host=HostResources(8000, 64, 32))
    world.read()

    def room() -> tuple[int, int, int]:
        row = world.row()
        return row.free_millicores, row.free_bytes, row.free_storage_bytes

    assert room() == (7000, 64, 32)
    world.fleet.apply_host_use("node", HostResources(3000, 14, 2))
    assert room() == (5000, 50, 30)
    world.fleet.apply_host_use("node", HostResources())
    assert room() == (8000, 64, 32)
    world.fleet.apply_host_use("unknown", HostResources(1))
    assert world.fleet.is_settled


def test_a_request_for_the_next_pod_of_a_reverted_group_drops_the_pods_after_it() -> None:
    world = one_node(4)
    group = PodGroup(POD_GROUP, "ns", "train")
    for name in ("a", "b", "c", "other"):
        own = None if name == "other" else group
        world.add_waiting(name, "ns", resources={GPU: 1}, group=own)
        world.place(name, request(group=own))
    before = world.fleet.ledger.get("uid-a")
    assert before is not None
    assert before.expires_at is not None

    world.fleet.groups.note_request("uid-b", None, until=world.now + 1e6)
    world.fleet.groups.note_request("uid-b", replace(group, kind="JobSet"), until=world.now + 1e6)
    assert world.fleet.ledger.get("uid-c") is not None
    world.fleet.groups.note_request("uid-a", group, until=before.expires_at + 5.0)

    left = {name: world.fleet.ledger.get(f"uid-{name}") for name in ("a", "b", "c", "other")}
    assert (left["b"], left["c"]) == (None, None)
    assert left["other"] is not None
    assert left["a"] is not None
    assert left["a"].expires_at == before.expires_at + 5.0


def test_the_others_of_a_group_count_for_longer_once_one_of_them_is_bound() -> None:
    world = one_node(4)
    group = PodGroup(POD_GROUP, "ns", "train")
    for name in ("a", "b"):
        world.add_waiting(name, "ns", resources={GPU: 1}, group=group)
        world.place(name, request(group=group))
    world.clock.now += 1.0

    world.bind("a", group=group)

    assumed = world.fleet.ledger.get("uid-b")
    assert assumed is not None
    assert assumed.expires_at is not None
    assert assumed.expires_at >= world.now + world.policy.assumed.tentative_seconds
