"""Room of a shared GPU: tenants keep their declared memory, used or not."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from testkit.agent.fleet_reports import Agents
from testkit.builders import GIB, GPU, ranking, request
from testkit.world import World
from tests.extender.placement.rooms import LATER, REFUSED, refused, room, sliced, tenant, use

# --- declared memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [0.0, 20.0, 60.0])
def test_declared_memory_stays_reserved_for_a_pods_whole_life(loaded: float) -> None:
    world = sliced()
    tenant(world, "late", 60)

    use(world, loaded, LATER)

    assert room(world) == pytest.approx(20)


@pytest.mark.parametrize(
    ("cards", "declared", "most"), [(1, None, 40), (2, None, 80), (2, 50, 30), (3, 50, 80)]
)
def test_several_shares_need_their_room_wherever_they_are(
    cards: int, declared: float | None, most: float
) -> None:
    world = sliced(cards)
    if declared is not None:
        tenant(world, "a", declared)
        use(world, 0, LATER)

    assert not refused(world, most, count=2)
    assert refused(world, most + 1, count=2)


def test_use_beyond_the_declaration_also_counts() -> None:
    world = sliced()
    tenant(world, "a", 10)

    use(world, 30, LATER)

    assert room(world) == pytest.approx(50)


def test_a_pod_that_gives_memory_back_may_take_it_again() -> None:
    world = sliced()
    tenant(world, "a", 60)
    use(world, 60, LATER)

    use(world, 5)

    assert room(world) == pytest.approx(20)


def test_use_from_before_a_pod_does_not_belong_to_the_pod() -> None:
    world = sliced(in_use=40)
    tenant(world, "late", 30)

    use(world, 40, LATER)

    assert room(world) == pytest.approx(10)
    use(world, 70)
    assert room(world) == pytest.approx(10)


def test_a_pod_that_gives_some_memory_back_releases_no_foreign_memory() -> None:
    world = sliced(in_use=10)
    tenant(world, "a", 40)
    use(world, 40, LATER)

    for gib in (36, 40, 32):
        use(world, gib)

        assert room(world) == pytest.approx(80 - 10 - 40)


def test_memory_that_foreign_processes_give_back_is_room_again() -> None:
    world = sliced(in_use=40)
    tenant(world, "a", 20)
    use(world, 60, LATER)

    use(world, 20)

    assert room(world) == pytest.approx(60)


def test_undeclared_pod_counts_with_an_even_share_until_measured() -> None:
    world = sliced()
    tenant(world, "declared", 30)
    tenant(world, "other")
    use(world, 0)
    assert room(world) == pytest.approx(80 - 30 - 10)

    use(world, 0, LATER)

    assert room(world) == pytest.approx(50)


@pytest.mark.parametrize("is_waiting", [False, True])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_restarted_pod_counts_with_its_former_use_until_measured_again(
    is_mapped: bool, is_waiting: bool
) -> None:
    world = sliced()
    pod = tenant(world, "other")
    use(world, 48, LATER)
    use(world, 48, LATER)
    world.is_mapped = is_mapped

    at = inf if is_waiting else world.clock.now
    world.fleet.apply_pod(replace(pod, last_started_at=at))
    use(world, 0)
    assert room(world) == pytest.approx(80 - 48)

    world.fleet.apply_pod(replace(pod, last_started_at=world.clock.now))
    use(world, 8, LATER)
    assert room(world) == pytest.approx(72)


def test_restarted_pod_without_known_use_counts_with_an_even_share_until_measured() -> None:
    world = sliced()
    pods = [tenant(world, name) for name in "ab"]
    use(world, 40, LATER)

    world.fleet.apply_pod(replace(pods[0], last_started_at=world.clock.now))
    use(world, 5)

    assert room(world) == pytest.approx(80 - 5 - 10)


def test_growth_after_a_restart_belongs_to_the_restarted_pod_without_a_declaration() -> None:
    world = sliced()
    tenant(world, "late", 40)
    other = tenant(world, "other")
    use(world, 0, LATER)

    world.fleet.apply_pod(replace(other, last_started_at=world.clock.now))
    use(world, 30, 60)
    use(world, 30, LATER)

    assert room(world) == pytest.approx(10)


def test_earlier_use_of_a_pod_without_a_declaration_belongs_to_that_pod() -> None:
    world = sliced()
    tenant(world, "other")
    use(world, 30, LATER)
    tenant(world, "late", 40)

    use(world, 30, LATER)

    assert room(world) == pytest.approx(10)


def test_growth_while_a_pod_without_a_declaration_starts_belongs_to_that_pod() -> None:
    world = sliced()
    tenant(world, "late", 40)
    use(world, 0, LATER)
    tenant(world, "other")

    use(world, 30, 60)
    use(world, 30, LATER)

    assert room(world) == pytest.approx(10)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_pods_that_no_source_shows_count_where_they_would_be_put(is_mapped: bool) -> None:
    world = sliced(2)
    world.is_mapped = is_mapped
    for name in "ab":
        world.bind(name, memory_bytes=int(60 * GIB))

    world.read_after(LATER)

    assert room(world) == pytest.approx(20)


def test_an_mps_share_has_its_cap_whatever_others_declared() -> None:
    labels = {
        "nvidia.com/gpu.memory": str(80 * 1024),
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/gpu.sharing-strategy": "mps",
    }
    world = World()
    world.add_node("node", replicas=4, labels=labels)
    tenant(world, "a", 20)

    use(world, 0, LATER)

    assert room(world) == pytest.approx(20)


@pytest.mark.parametrize(("foreign", "expected"), [(50, 20), (60, 20), (75, 5), (80, 0)])
def test_no_cap_gives_an_mps_share_the_memory_that_foreign_processes_hold(
    foreign: float, expected: float
) -> None:
    labels = {
        "nvidia.com/gpu.memory": str(80 * 1024),
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/gpu.sharing-strategy": "mps",
    }
    world = World()
    world.add_node("node", replicas=4, labels=labels)
    use(world, foreign)
    tenant(world, "a", 20)

    use(world, foreign, LATER)

    assert room(world) == pytest.approx(expected)


# --- memory of processes --------------------------------------------------------------------------


def test_memory_that_an_agent_reports_as_foreign_is_not_declared_memory() -> None:
    world = sliced()
    pod = tenant(world, "late", 30)
    agents = Agents(world)
    agents.pods = {world.card().info.key: (pod.key,)}

    world.clock.now += LATER
    agents.report(MEMORY_USED=40 * GIB, MEMORY_FREE=40 * GIB, foreign_bytes=40 * GIB)

    assert room(world) == pytest.approx(10)
    world.end(pod)
    assert room(world) == pytest.approx(40)


def test_memory_of_a_pods_processes_belongs_to_the_pod_in_any_order_of_starts() -> None:
    world = sliced()
    late, other = tenant(world, "late", 40), tenant(world, "other")
    use(world, 30, LATER)
    assert room(world) == pytest.approx(40)  # it may be the declared memory

    shares = [
        (world.card().info.key, late.uid, 0),
        (world.card().info.key, other.uid, int(30 * GIB)),
    ]
    world.fleet.note_shares("node", shares, world.clock.now)
    use(world, 30)

    assert room(world) == pytest.approx(10)


def test_an_agents_memory_by_process_belongs_to_the_following_reading() -> None:
    world = sliced()
    late, other = tenant(world, "late", 40), tenant(world, "other")
    use(world, 0, LATER)
    agents, key = Agents(world), world.card().info.key
    agents.pods = {key: (late.key, other.key)}
    shares = [(key, late.uid, 0), (key, other.uid, int(30 * GIB))]

    world.clock.now += 5
    world.fleet.note_shares("node", shares, world.clock.now)
    agents.report(MEMORY_USED=30 * GIB, MEMORY_FREE=50 * GIB, foreign_bytes=0.0)

    assert room(world) == pytest.approx(10)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_shares_that_only_init_containers_requested_have_no_memory_once_these_have_ended(
    is_mapped: bool,
) -> None:
    world = sliced()
    world.is_mapped = is_mapped
    asked: dict[str, Any] = {"count": 3, "lasting": {GPU: 1}, "memory_bytes": int(20 * GIB)}
    world.bind("a", on=[world.card()], started_at=None, **asked)
    use(world, 0)
    assert room(world) == pytest.approx(20)

    world.bind("a", **asked)
    use(world, 0, LATER)

    assert room(world) == pytest.approx(60)
    assert world.row().used == (3,)

    asked = {"lasting": {}, "memory_bytes": int(30 * GIB)}
    world.bind("b", on=[world.card()], started_at=None, **asked)
    use(world, 0)
    assert room(world) == pytest.approx(30)
    world.bind("b", **asked)
    use(world, 0, LATER)
    assert room(world) == pytest.approx(60)


def test_a_pod_with_several_shares_of_a_card_declared_as_much_of_each() -> None:
    world = sliced()
    pod = world.bind("two", count=2, on=[world.card()], memory_bytes=int(20 * GIB))
    use(world, 40, LATER)

    held = [(world.card().info.key, pod.uid, int(40 * GIB))]
    world.fleet.note_shares("node", held, world.clock.now)

    assert room(world) == pytest.approx(40)


def test_an_incomplete_list_of_processes_shows_nothing() -> None:
    world = sliced()
    late, other = tenant(world, "late", 40), tenant(world, "other")
    use(world, 30, LATER)

    key = world.card().info.key
    world.fleet.note_shares("node", [(key, late.uid, 0), (key, other.uid, 0)], world.clock.now)
    world.fleet.note_shares("node", [(key, other.uid, int(30 * GIB))], world.clock.now)
    use(world, 30)

    assert room(world) == pytest.approx(40)


def test_memory_that_no_pods_processes_explain_is_foreign() -> None:
    world = sliced()
    pod = tenant(world, "a", 10)
    use(world, 41, LATER)
    assert room(world) == pytest.approx(39)  # it may have loaded its declared memory

    world.fleet.note_shares("node", [(world.card().info.key, pod.uid, int(GIB))], world.clock.now)

    use(world, 41)
    assert room(world) == pytest.approx(30)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_ended_pod_releases_the_memory_of_its_processes(is_deleted: bool) -> None:
    world = sliced()
    pod = tenant(world, "a")
    use(world, 41, LATER)
    held = [(world.card().info.key, pod.uid, int(30 * GIB))]
    world.fleet.note_shares("node", held, world.clock.now)

    world.clock.now += 5
    if is_deleted:
        world.fleet.remove_pod(pod.uid, world.clock.now)
    else:
        world.end(pod)

    assert room(world) == pytest.approx(80 - 11)


# --- pods that leave ------------------------------------------------------------------------------


def test_foreign_memory_is_known_although_a_pod_has_just_left() -> None:
    world = sliced(in_use=40)
    pod = tenant(world, "short", 1)
    use(world, 41, LATER)

    world.clock.now += 5
    world.end(pod)

    assert refused(world, 60) == REFUSED
    assert not refused(world, 39)
    use(world, 0)
    assert not refused(world, 60)


@pytest.mark.parametrize("declared", [1, None])
def test_a_pods_end_releases_only_memory_that_it_is_known_to_have_held(
    declared: float | None,
) -> None:
    world = sliced()
    pod = tenant(world, "short", declared)
    use(world, 41, LATER)  # a process outside Kubernetes started meanwhile

    world.clock.now += 5
    world.end(pod)

    assert refused(world, 60) == REFUSED


def test_a_shared_gpu_that_was_just_freed_ranks_as_if_its_pods_had_released_their_memory() -> None:
    world = sliced()
    pods = [tenant(world, name) for name in "ab"]
    use(world, 70, LATER)
    world.add_node("silent", replicas=8)

    for pod in pods:
        world.end(pod)

    assert ranking(world.rank()) == ["node", "silent"]
    assert refused(world, 60) == REFUSED
    tenant(world, "next", 60)
    assert ranking(world.rank(request(expected_bytes=int(30 * GIB)))) == ["silent", "node"]


@pytest.mark.parametrize("is_shown", [True, False])
@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("declared", [5, None])
def test_an_end_leaves_the_memory_of_pods_that_no_source_shows_to_them(
    declared: float | None, is_mapped: bool, is_shown: bool
) -> None:
    world = sliced()
    memory = None if declared is None else int(declared * GIB)
    pod = world.bind("ends", on=[world.card()] * is_shown, memory_bytes=memory)
    use(world, 5, LATER)
    world.bind("stays", memory_bytes=int(30 * GIB))
    use(world, 35, LATER)
    world.is_mapped = is_mapped
    use(world, 35, LATER)
    assert room(world) == pytest.approx(45)

    world.end(pod)
    assert refused(world, 51) == REFUSED
    use(world, 30)

    assert room(world) == pytest.approx(50)


def test_a_pods_end_releases_its_declared_memory() -> None:
    world = sliced()
    pod = tenant(world, "a", 60)
    use(world, 55, LATER)
    assert refused(world, 40) == REFUSED

    world.clock.now += 5
    world.end(pod)

    assert not refused(world, 79)


def test_the_declaration_of_a_staying_pod_stays_when_another_leaves() -> None:
    world = sliced()
    tenant(world, "stays", 60)
    pod = tenant(world, "leaves", 15)
    use(world, 15, LATER)
    assert room(world) == pytest.approx(5)

    world.end(pod)

    assert room(world) == pytest.approx(20)
    use(world, 0)
    assert room(world) == pytest.approx(20)


@pytest.mark.parametrize(
    ("leaves", "left"), [pytest.param("other", 20, id="its-declaration-stays"), ("declared", 40)]
)
def test_staying_pod_keeps_its_memory_after_another_ended(leaves: str, left: float) -> None:
    """One pod uses 40 GiB and declared none, the other uses 20 of its declared 40 GiB."""
    world = sliced()
    pods = {"other": tenant(world, "other")}
    use(world, 40, LATER)
    pods["declared"] = tenant(world, "declared", 40)
    use(world, 60, LATER)
    assert room(world) == pytest.approx(0)

    world.end(pods[leaves])
    use(world, left)

    assert room(world) == pytest.approx(40)


def test_a_whole_gpu_comes_back_as_it_was_before_its_pod_came() -> None:
    world = World()
    world.add_node("node", 1)
    use(world, 0)
    pod = tenant(world, "a")
    use(world, 70, LATER)

    world.clock.now += 5
    world.end(pod)

    assert not refused(world, 79)


def test_whole_gpu_without_earlier_readings_waits_for_one() -> None:
    world = World()
    world.add_node("node", 1)
    pod = tenant(world, "a")
    use(world, 41)
    use(world, 41, LATER)

    world.clock.now += 5
    world.end(pod)

    assert refused(world, 60) == REFUSED
    assert not refused(world, 39)
    use(world, 0)
    assert not refused(world, 60)
