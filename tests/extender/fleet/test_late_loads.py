"""What pods that declared no memory are still expected to load."""

import pytest

from extender.core.readings import Signal
from tests.builders import GIB
from tests.worlds import World

SHARE = 20.0
"""An even share of a card, in GiB."""


def world_of(cards: int = 1) -> World:
    world = World()
    world.add_node("node", cards, replicas=4)
    use(world, 0)
    return world


def use(world: World, gib: float, seconds: float = 30.0) -> None:
    used = {Signal.MEMORY_USED: gib * GIB, Signal.MEMORY_FREE: (80 - gib) * GIB}
    world.card().values.update(used)
    world.read_after(seconds)


def awaited(world: World) -> float:
    """Return what is still expected of the first card's tenants, in GiB."""
    world.fleet.snapshot()
    return world.row().guessed_bytes[0] / GIB


def test_what_grows_is_of_the_pods_that_have_not_loaded_the_oldest_first() -> None:
    world = world_of()
    for name in "abc":
        world.bind(name, on=[world.card()])
        world.clock.now += 1
    use(world, 0, 130)
    assert awaited(world) == 3 * SHARE

    use(world, 15)
    assert awaited(world) == 2 * SHARE
    use(world, 15 + 8)
    assert awaited(world) == 2 * SHARE - 8
    use(world, 15 + 8 + 18)

    assert awaited(world) == SHARE - 6


def test_what_tenants_hold_that_had_loaded_before_is_not_taken_for_a_later_ones() -> None:
    world = world_of()
    world.bind("before", on=[world.card()])
    use(world, 30, 1000)
    world.bind("late", on=[world.card()])

    use(world, 31, 130)
    assert awaited(world) == SHARE - 1
    use(world, 25)
    assert awaited(world) == SHARE - 1
    use(world, 37)

    assert awaited(world) == 0


def test_what_a_pods_processes_hold_says_what_it_has_loaded() -> None:
    world = world_of()
    pods = [world.bind(name, on=[world.card()]) for name in "ab"]
    use(world, 0, 130)
    use(world, 30)
    assert awaited(world) == 0  # both may have loaded a part

    key = world.card().info.key
    held = [(key, pods[0].uid, 0), (key, pods[1].uid, int(30 * GIB))]
    world.fleet.note_shares("node", held, world.clock.now)

    assert awaited(world) == SHARE


@pytest.mark.parametrize("is_declared", [True, False])
def test_nothing_is_awaited_of_a_pod_that_may_have_loaded_before_it_was_first_seen(
    is_declared: bool,
) -> None:
    world = World()
    world.add_node("node", 1, replicas=4)
    memory = int(20 * GIB) if is_declared else None
    started = world.clock.now - 200
    world.bind("a", on=[world.card()], bound_at=started, started_at=started, memory_bytes=memory)

    use(world, 3)

    assert awaited(world) == 0


def test_nothing_is_awaited_once_a_pod_had_time_enough_or_where_devices_are_whole() -> None:
    world = world_of()
    world.add_node("whole", 1)
    world.bind("a", on=[world.card()])
    world.bind("b", "whole", on=[world.card("whole")])
    use(world, 0, 130)
    assert awaited(world) == SHARE
    assert world.row("whole").guessed_bytes == (0,)

    use(world, 0, 800)

    assert awaited(world) == 0


def test_a_pod_that_no_source_shows_is_awaited_where_it_would_be_put() -> None:
    world = world_of(2)
    world.is_mapped = False
    world.bind("two", count=2)
    use(world, 0, 130)
    assert world.row().guessed_bytes == (SHARE * GIB, SHARE * GIB)

    use(world, 25)

    assert world.row().guessed_bytes == (0, 0)
