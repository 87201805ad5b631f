"""Room of a shared GPU on a nominated node, and after preemption."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.decision.filtering import Code
from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import PodRecord
from extender.placement.placer import Victims
from testkit.builders import GIB, pod_ref, rejected, request
from testkit.world import World
from tests.extender.placement.rooms import LATER, REFUSED, refused, room, sliced, tenant, use


def nominated(world: World, gib: float, **requested: Any) -> dict[str, int]:
    return refused(world, gib, nominated_node="node", **requested)


def delete(world: World, pod: PodRecord) -> None:
    world.fleet.apply_pod(replace(pod, is_deleting=True))


def test_a_nomination_where_no_pod_leaves_is_no_pass() -> None:
    world = sliced(in_use=20)
    tenant(world, "a", 40)
    use(world, 20, LATER)

    assert nominated(world, 30) == REFUSED
    assert not nominated(world, 20)


def test_leaving_pods_release_only_their_own_memory_on_the_nominated_node() -> None:
    world = sliced()
    tenant(world, "stays", 68)
    small = tenant(world, "small", 2)
    use(world, 2, LATER)

    delete(world, small)

    assert nominated(world, 40) == REFUSED
    assert refused(world, 12) == REFUSED
    assert not nominated(world, 12)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_ended_pod_counts_as_room_for_the_nominated_pod(is_mapped: bool) -> None:
    world = sliced()
    world.is_mapped = is_mapped
    tenant(world, "stays", 20)
    victim = tenant(world, "victim", 40)
    use(world, 60, LATER)
    world.clock.now += 5
    world.end(victim)

    assert refused(world, 50) == REFUSED
    assert not nominated(world, 50)
    use(world, 60, 1)
    assert not nominated(world, 50)
    use(world, 60, 90)
    assert nominated(world, 50) == REFUSED


@pytest.mark.parametrize("declared", [40, None])
def test_pod_that_a_source_hides_counts_as_room_for_the_nominated_pod_after_its_end(
    declared: int | None,
) -> None:
    world = sliced()
    tenant(world, "shown", 20)
    memory = None if declared is None else int(declared * GIB)
    victim = world.bind("hidden", memory_bytes=memory)
    use(world, 60, LATER)
    assert most_without(world, victim) == 60

    world.clock.now += 5
    world.end(victim)

    assert refused(world, 60) == REFUSED
    assert not nominated(world, 60)
    assert nominated(world, 61) == REFUSED


@pytest.mark.parametrize("declared", [20, None])
@pytest.mark.parametrize("cards", [1, 2])
def test_shares_that_no_source_shows_count_as_room_for_the_nominated_pod_after_their_end(
    cards: int, declared: int | None
) -> None:
    world = sliced(cards)
    world.is_mapped = False
    for index in range(cards):
        world.bind(f"stays-{index}", memory_bytes=int(20 * GIB))
    memory = None if declared is None else int(declared * GIB)
    victim = world.bind("victim", count=2, memory_bytes=memory)
    for index in range(cards):
        use(world, 20 + 40 / cards, LATER, index)
    assert most_without(world, victim) == 60

    world.clock.now += 5
    world.end(victim)

    assert refused(world, 60) == REFUSED
    assert not nominated(world, 60)
    assert nominated(world, 61) == REFUSED


def test_memory_that_another_pod_takes_after_an_end_is_not_released() -> None:
    world = sliced()
    tenant(world, "stays", 20)
    victim = tenant(world, "victim", 40)
    use(world, 60, LATER)
    world.clock.now += 5
    world.end(victim)
    use(world, 20, 2)
    tenant(world, "next", 40)

    use(world, 60, 10)

    assert nominated(world, 30) == REFUSED


def most_without(world: World, *pods: PodRecord) -> int:
    """Return the largest request that passes after these pods are evicted, in GiB."""
    victims = Victims(node="node", uids=frozenset(pod.uid for pod in pods))

    def fits(gib: int) -> bool:
        requested = request(memory_bytes=int(gib * GIB))
        return bool(world.placer.accepts_without(pod_ref("new"), requested, [victims]))

    return max(gib for gib in range(81) if fits(gib))


def test_victim_with_several_shares_releases_each_declaration() -> None:
    world = sliced()
    tenant(world, "stays", 30)
    victim = world.bind("two", count=2, on=[world.card()], memory_bytes=int(20 * GIB))
    use(world, 70, LATER)

    assert most_without(world, victim) == 50
    delete(world, victim)
    assert not nominated(world, 50)
    assert nominated(world, 51) == REFUSED
    world.end(victim)
    assert not nominated(world, 50)
    assert nominated(world, 51) == REFUSED
    use(world, 30, 5)
    assert room(world) == pytest.approx(50)


def test_last_undeclared_victims_release_all_unexplained_memory() -> None:
    world = sliced(in_use=8)
    tenant(world, "stays", 2)
    use(world, 10, LATER)
    first, second = tenant(world, "first"), tenant(world, "second")
    use(world, 70, LATER)

    assert most_without(world, first) == 10
    assert most_without(world, second) == 10
    assert most_without(world, first, second) == 70
    delete(world, first)
    assert nominated(world, 20) == REFUSED
    world.end(first)
    assert nominated(world, 20) == REFUSED
    delete(world, second)
    assert not nominated(world, 70)
    assert nominated(world, 71) == REFUSED
    world.end(second)
    assert not nominated(world, 70)
    assert nominated(world, 71) == REFUSED


@pytest.mark.parametrize("declared", [30, None])
def test_victims_release_their_memory_where_a_source_shows_only_one_of_them(
    declared: int | None,
) -> None:
    world = sliced()
    shown = tenant(world, "shown", 5)
    memory = None if declared is None else int(declared * GIB)
    hidden = world.bind("hidden", memory_bytes=memory)
    world.bind("stays", memory_bytes=int(5 * GIB))
    use(world, 0, 60)
    use(world, 40, LATER)

    assert most_without(world, shown, hidden) == 75
    assert most_without(world, shown) == 45
    assert most_without(world, hidden) == 70


def test_victims_together_release_at_most_the_undeclared_memory_in_use() -> None:
    world = sliced()
    tenant(world, "other")
    use(world, 40, LATER)
    pods = [tenant(world, name, 20) for name in "abc"]
    use(world, 60, LATER)

    assert most_without(world, *pods[:2]) == 20


@pytest.mark.parametrize("is_deleting", [False, True])
def test_idle_requirement_waits_on_its_nominated_node_unless_victims_leave(
    is_deleting: bool,
) -> None:
    world = World()
    world.add_node("node", 1)
    use(world, 0)
    pod = tenant(world, "a")
    world.card().values[Signal.GRAPHICS_ACTIVE] = 0.9
    use(world, 70, LATER)

    if is_deleting:
        delete(world, pod)

    expected = {} if is_deleting else {"node": Code.NOT_IDLE}
    assert rejected(world.rank(request(requires_idle=True, nominated_node="node"))) == expected
