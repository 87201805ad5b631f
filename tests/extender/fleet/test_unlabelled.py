"""Test which devices are free if no source reports which pods hold them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.evaluation import EvaluationInputs
from extender.core.decision.filtering import Code
from extender.core.decision.landing import _BY_USE
from extender.core.decision.verdicts import explain, gather
from extender.core.devices.readings import Signal
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord
from testkit.builders import GIB, GPU, device_request, ranking, rejected, request
from testkit.world import BUSY, IDLE, World, one_node

LOADED = {Signal.MEMORY_USED: 60 * GIB, Signal.MEMORY_FREE: 20 * GIB}


def unmapped(cards: int, held: int, in_use: int, values: dict[Signal, float]) -> World:
    """Return a node whose holders no source reports; the first cards are in use."""
    world = one_node(cards)
    world.is_mapped = False
    if held:
        world.bind("tenants", count=held)
    for index in range(in_use):
        world.card(index=index).values |= values
    world.read_after(60, 5)
    return world


def landing_on(world: World, count: int = 1) -> tuple[list[int], int, float]:
    """Return the candidate devices, the number of held ones, and the chance of idle ones."""
    snapshot = world.fleet.snapshot()
    inputs = EvaluationInputs(
        request=request(count), devices=device_request(count), policy=world.policy, overlay={}
    )
    (verdict,) = explain(gather(snapshot, snapshot.pools[GPU], inputs, ["node"]))
    cards = [at for at, device in enumerate(verdict.devices) if device.can_land]
    return cards, verdict.taken, verdict.chance


@pytest.mark.parametrize("values", [dict(BUSY), LOADED], ids=["busy", "loaded"])
def test_the_idle_devices_are_free_if_as_many_are_in_use_as_pods_hold(
    values: dict[Signal, float],
) -> None:
    world = unmapped(8, held=4, in_use=4, values=values)

    assert landing_on(world, 4) == ([4, 5, 6, 7], 0, _BY_USE)


def test_a_tenant_without_load_holds_one_of_the_idle_devices() -> None:
    world = unmapped(8, held=4, in_use=3, values=dict(BUSY))

    assert landing_on(world)[:2] == ([3, 4, 5, 6, 7], 1)


def test_devices_in_use_are_candidates_if_pods_hold_fewer() -> None:
    world = unmapped(8, held=4, in_use=5, values=dict(BUSY))

    cards, taken, chance = landing_on(world)

    assert (len(cards), taken) == (4, 0)
    assert chance == pytest.approx(3 / 4 * _BY_USE)
    assert rejected(world.rank(request(4))) == {"node": Code.FOREIGN_USE}


def test_without_a_mapping_a_node_with_idle_cards_beats_a_silent_one() -> None:
    world = unmapped(8, held=4, in_use=4, values=dict(BUSY))
    world.add_node("a-silent", 8)
    for index in range(8):
        world.remove_card("a-silent", index)
    world.read_after(30)

    assert ranking(world.rank()) == ["node", "a-silent"]


def test_a_pod_that_requires_idle_devices_accepts_no_guess() -> None:
    world = unmapped(8, held=4, in_use=4, values=dict(BUSY))

    assert rejected(world.rank(request(requires_idle=True))) == {"node": Code.NOT_IDLE}


def test_nothing_is_guessed_with_a_mapping() -> None:
    world = one_node(4)
    world.bind("a", on=[world.card()])
    world.card(index=1).values |= BUSY
    world.read_after(60, 5)

    cards, _, chance = landing_on(world)

    assert cards == [1, 2, 3]
    assert chance == pytest.approx(2 / 3)


@given(
    cards=st.integers(1, 8),
    held=st.integers(0, 8),
    in_use=st.integers(0, 8),
    count=st.integers(1, 8),
)
def test_a_guess_agrees_with_the_count_of_free_devices(
    cards: int, held: int, in_use: int, count: int
) -> None:
    held, in_use = min(held, cards), min(in_use, cards)
    world = unmapped(cards, held, in_use, dict(BUSY))

    may_land, taken, chance = landing_on(world, count)

    assert 0 <= chance <= 1
    if cards - held >= count:
        assert len(may_land) - taken == cards - held
        is_used = sum(card < in_use for card in may_land)
        assert is_used == max(in_use - held, 0)


# --- pods that end --------------------------------------------------------------------------------


def full(cards: int = 8, ends: int = 1) -> World:
    """Return an unmapped node whose pods kept all cards busy; some pods have just ended."""
    world = one_node(cards)
    world.is_mapped = False
    world.read_after(30, 4)
    pods = [world.bind(f"pod-{index}") for index in range(cards)]
    for index in range(cards):
        world.card(index=index).values |= BUSY
    world.read_after(60, 5)
    world.clock.now += 1
    for pod in pods[:ends]:
        world.end(pod)
    return world


def silent(world: World) -> str:
    """Add a node that no source reports."""
    counts = {GPU: 8}
    world.fleet.apply_node(NodeRecord(name="a-silent", allocatable=counts, capacity=counts))
    return "a-silent"


JUST_FREED = _BY_USE * 0.95


@pytest.mark.parametrize("ends", [1, 3])
def test_unidentified_freed_device_is_presumed_idle(ends: int) -> None:
    world = full(ends=ends)

    assert len(landing_on(world)[0]) == ends
    assert landing_on(world)[2] == pytest.approx(JUST_FREED)
    assert ranking(world.rank(request(ends), ["node", silent(world)])) == ["node", "a-silent"]
    assert rejected(world.rank(request(memory_bytes=int(60 * GIB)), ["node"])) == {}
    assert rejected(world.rank(request(requires_idle=True), ["node"])) == {"node": Code.NOT_IDLE}


def test_the_first_reading_shows_which_device_was_freed() -> None:
    world = full()
    world.card(index=5).values |= IDLE

    world.read_after(30)

    assert landing_on(world) == ([5], 0, _BY_USE)


def test_two_readings_with_load_end_the_presumption_and_one_does_not() -> None:
    world = full()

    world.read_after(30)
    assert landing_on(world)[2] == pytest.approx(JUST_FREED)
    world.read_after(30)

    assert landing_on(world)[2] == 0.0
    assert rejected(world.rank(request())) == {"node": Code.FOREIGN_USE}


def test_memory_that_is_freed_late_is_not_foreign_after_the_next_reading() -> None:
    world = full()

    world.card(index=5).values |= {**IDLE, **LOADED}
    world.read_after(2)
    world.card(index=5).values |= IDLE
    world.read_after(15)

    assert landing_on(world) == ([5], 0, _BY_USE)
    assert rejected(world.rank(request())) == {}


def test_one_reading_counts_once_for_the_presumption_however_often_the_node_changes() -> None:
    world = full()
    world.read_after(30)

    for name in ("a", "b"):
        node = world.fleet.nodes["node"]
        world.fleet.apply_node(replace(node, labels={**node.labels, name: ""}))
        world.fleet.apply_host_use("node", HostResources(millicores=len(node.labels)))
        world.fleet.snapshot()

    assert landing_on(world)[2] == pytest.approx(JUST_FREED)


def test_the_next_pod_takes_the_device_just_freed() -> None:
    world = full(ends=2)

    world.bind("next")
    assert landing_on(world)[2] == pytest.approx(JUST_FREED)
    assert len(landing_on(world)[0]) == 1
    world.bind("after-next")

    assert landing_on(world)[2] == 0.0


def test_an_idle_node_comes_before_one_with_a_device_just_freed() -> None:
    world = full()
    world.add_node("idle", 1)
    world.read(measured_at=world.clock.now - 1)

    assert ranking(world.rank()) == ["idle", "node"]


def test_nothing_is_presumed_if_a_card_had_foreign_use_before_the_pods() -> None:
    world = one_node(8)
    world.is_mapped = False
    world.card().values |= BUSY
    world.read_after(30, 4)
    pods = [world.bind(f"pod-{index}") for index in range(8)]
    for index in range(8):
        world.card(index=index).values |= BUSY
    world.read_after(60, 5)

    world.end(pods[0])

    assert landing_on(world)[2] == pytest.approx(_BY_USE / 2)


def test_a_freed_device_counts_as_long_as_earlier_readings_would() -> None:
    world = full()

    world.clock.now += 1000

    assert landing_on(world)[2] < _BY_USE * 0.6


def test_larger_init_containers_leave_the_node_readable() -> None:
    world = one_node(8)
    world.bind("a", count=4, lasting={"nvidia.com/gpu": 2}, on=[world.card(), world.card(index=1)])
    world.read_after(60, 5)

    row = world.row()
    assert (row.is_agreed, row.held, row.taken) == (True, 4, 2)
    assert landing_on(world)[0] == [2, 3, 4, 5, 6, 7]


def test_an_unmapped_main_container_leaves_the_row_not_agreed() -> None:
    world = one_node(8)
    world.bind("a", count=4, lasting={"nvidia.com/gpu": 2}, on=[world.card()])

    world.read_after(60, 5)

    assert not world.row().is_agreed
