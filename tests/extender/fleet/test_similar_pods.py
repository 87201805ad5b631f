"""Test the expected memory of pods from similar pods."""

from typing import Any

import pytest

from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_groups import kin_of
from extender.fleet.pods import _MOST_ALIKE, _MOST_KEYS, SimilarPods
from testkit.builders import GIB, pod_ref, request
from testkit.world import World

IMAGE, REQUESTS = "ns images a", "ns requests b"


def pod(name: str, **changes: Any) -> PodRecord:
    return PodRecord(uid=name, namespace="ns", name=name, **changes)


def in_gib(count: int | None) -> float | None:
    return None if count is None else count / GIB


def test_the_most_similar_pod_counts_with_its_maximum() -> None:
    like = SimilarPods()
    like.note(pod("a", owner="Job a", likeness=(IMAGE, REQUESTS)), 2 << 30)
    like.note(pod("b", owner="Job b", likeness=("other", REQUESTS)), 12 << 30)
    like.note(pod("a", owner="Job a", likeness=(IMAGE, REQUESTS)), 1 << 30)

    assert in_gib(like.expected(("ns/Job a", IMAGE, REQUESTS))) == 2
    assert in_gib(like.expected(("ns/Job new", IMAGE, REQUESTS))) == 2
    assert in_gib(like.expected(("ns/Job new", "new", REQUESTS))) == 12
    assert like.expected(("ns/Job new",)) is None
    assert like.expected(()) is None


@pytest.mark.parametrize("used", [1, 5, 1000, 5_000_000_001, 77 << 30])
def test_expected_memory_is_rounded_up_by_a_quarter_at_most(used: int) -> None:
    like = SimilarPods()
    like.note(pod("a"), used)

    assert used <= (like.expected(("ns/a",)) or 0) <= 1.25 * used


@pytest.mark.parametrize("step", [1, -1])
def test_newest_pods_and_last_keys_count(step: int) -> None:
    like = SimilarPods()
    pods = [
        pod(f"pod-{number}", owner="Job a", started_at=float(number))
        for number in range(2 * _MOST_ALIKE)
    ]
    for one in 2 * pods[::step]:
        like.note(one, (60 if one is pods[0] else 1) << 30)
    assert in_gib(like.expected(("ns/Job a",))) == 1

    for number in range(_MOST_KEYS):
        like.note(pod(f"other{number}"), 1)
    assert like.expected(("ns/Job a",)) is None


def test_a_pod_without_measured_memory_is_not_recorded() -> None:
    like = SimilarPods()
    like.note(pod("a"), 0)

    assert like.expected(("ns/a",)) is None


def test_pods_of_another_namespace_are_not_similar() -> None:
    def described(namespace: str) -> dict[str, object]:
        container = {"image": "a", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        metadata = {"namespace": namespace, "name": "p"}
        return {"metadata": metadata, "spec": {"containers": [container]}}

    assert not set(kin_of(described("a"))) & set(kin_of(described("b")))


# --- in the fleet ---------------------------------------------------------------------------------


def world_of(nodes: int = 2) -> World:
    world = World()
    for number in range(nodes):
        world.add_node(f"node-{number}", replicas=4)
    world.read()
    return world


def use(world: World, node: str, gib: float) -> None:
    used = {Signal.MEMORY_USED: gib * GIB, Signal.MEMORY_FREE: (80 - gib) * GIB}
    world.card(node).values.update(used)


def measured(world: World, gib: float = 30, **changes: Any) -> PodRecord:
    """Run a pod on the first node until readings show its memory."""
    described = {"owner": "ReplicaSet serve", **changes}
    record = world.bind("serve-1", "node-0", on=[world.card("node-0")], **described)
    use(world, "node-0", gib)
    world.read_after(30, times=6)
    return record


def expected(world: World, *kin: str) -> int | None:
    return world.fleet.informed(request(), kin).expected_bytes


def test_memory_of_a_lone_pod_is_expected_for_its_owners_next_pod() -> None:
    world = world_of()
    assert expected(world, "ns/ReplicaSet serve") is None

    record = measured(world)
    world.end(record)

    assert in_gib(expected(world, "ns/ReplicaSet serve")) == 32
    assert expected(world, "ns/Job other") is None
    declared = world.fleet.informed(request(memory_bytes=1), ("ns/ReplicaSet serve",))
    assert declared.expected_bytes is None


def test_measured_memory_is_forgotten_with_the_last_node() -> None:
    world = world_of()
    measured(world)

    world.fleet.remove_node("node-0")
    assert expected(world, "ns/ReplicaSet serve") is not None

    world.fleet.remove_node("node-1")
    assert expected(world, "ns/ReplicaSet serve") is None


def test_its_memory_before_it_has_loaded_is_not_expected() -> None:
    world = world_of()
    world.bind("serve-1", "node-0", on=[world.card("node-0")], owner="ReplicaSet serve")
    use(world, "node-0", 1)
    world.read_after(30, times=2)

    assert expected(world, "ns/ReplicaSet serve") is None


def test_memory_of_processes_outside_kubernetes_is_not_expected() -> None:
    world = world_of()
    use(world, "node-0", 20)
    world.read_after(30, times=3)

    measured(world, 30)

    assert in_gib(expected(world, "ns/ReplicaSet serve")) == 10


def test_each_pod_on_a_shared_card_is_measured_if_a_source_reports_its_memory() -> None:
    world = world_of()
    for name in ("a", "b"):
        world.bind(name, "node-0", on=[world.card("node-0")], owner=f"Job {name}")
    use(world, "node-0", 30)
    world.read_after(30, times=6)
    assert expected(world, "ns/Job a") is None

    key = world.card("node-0").info.key
    shares = [(key, "uid-a", 10 << 30), (key, "uid-b", 20 << 30)]
    world.fleet.note_shares("node-0", shares, world.clock.now)

    assert in_gib(expected(world, "ns/Job a")) == 10
    assert in_gib(expected(world, "ns/Job b")) == 20


def test_a_pod_without_readings_takes_the_memory_of_similar_pods() -> None:
    world = world_of()
    measured(world)
    other = request(memory_bytes=int(45 * GIB))
    kin = ("ns/ReplicaSet serve",)
    assert world.rank(other).feasible == 2

    world.placer.reserve(pod_ref("coming"), world.fleet.informed(request(), kin), "node-1")
    assert world.rank(other, ["node-1"]).feasible == 1
    world.placer.reserve(pod_ref("more"), world.fleet.informed(request(), kin), "node-1")
    assert world.rank(other, ["node-1"]).feasible == 0

    world.fleet.ledger.drop("uid-coming")
    world.fleet.ledger.drop("uid-more")
    for name in ("serve-2", "serve-3"):
        world.bind(name, "node-1", on=[world.card("node-1")], owner="ReplicaSet serve")
    world.read_after(5)
    assert world.row("node-1").guessed_bytes == (64 * GIB,)
    assert world.rank(other, ["node-1"]).feasible == 0

    world.read_after(30, times=6)
    assert world.row("node-1").guessed_bytes == (0,)
    assert world.rank(other, ["node-1"]).feasible == 1


@pytest.mark.parametrize("is_mapped", [True, False])
def test_shares_of_one_card_take_their_pods_expected_memory_once(*, is_mapped: bool) -> None:
    world = world_of()
    measured(world, count=2)
    world.is_mapped = is_mapped

    world.bind("serve-2", "node-1", count=2, on=[world.card("node-1")], owner="ReplicaSet serve")
    world.read_after(5)

    assert world.row("node-1").guessed_bytes == (32 * GIB,)


def test_an_owners_next_pod_goes_where_its_expected_memory_fits() -> None:
    world = world_of()
    record = measured(world, 60)
    world.end(record)
    for node, gib, busy in (("node-0", 30, 0.0), ("node-1", 5, 0.5)):
        world.bind(f"on-{node}", node, on=[world.card(node)])
        use(world, node, gib)
        busyness = dict.fromkeys((Signal.GPU_UTILIZATION, Signal.GRAPHICS_ACTIVE), busy)
        world.card(node).values.update(busyness)
    world.read_after(200, times=5)

    assert world.rank().best == "node-0"
    assert world.rank(world.fleet.informed(request(), ("ns/ReplicaSet serve",))).best == "node-1"
