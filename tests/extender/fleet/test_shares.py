"""Test the evidence that pods share cards, and how long it is valid."""

from dataclasses import replace

import pytest

from testkit.agent.fleet_reports import Agents
from testkit.builders import GIB, GPU, ranking, request
from testkit.world import World, one_node


def unlabelled(cards: int = 4, offered: int = 8) -> World:
    """Return a world with an unlabelled node that offers more devices than telemetry reports."""
    counts = {GPU: offered}
    return one_node(cards, allocatable=counts, capacity=counts, labels={})


def shape(world: World) -> tuple[int, int]:
    """Return the number of devices of the node, and of shares per device."""
    row = world.row()
    return len(row.slots), row.replicas


def test_unreported_cards_are_not_shares_of_reported_ones() -> None:
    world = unlabelled()

    assert shape(world) == (8, 1)
    assert ranking(world.rank(request(memory_bytes=int(60 * GIB)))) == ["node"]


def test_memory_that_no_device_has_leaves_its_node_usable() -> None:
    world = one_node(1, replicas=1_000_000)
    greedy = world.bind("greedy", count=1_000_000, on=[world.card()], memory_bytes=16 << 40)
    world.read_after(30)
    assert not ranking(world.rank(request(memory_bytes=int(GIB))))

    world.end(greedy)
    world.read_after(30)

    assert ranking(world.rank(request(memory_bytes=int(GIB)))) == ["node"]


def test_evidence_of_several_pods_on_one_card_outlasts_them() -> None:
    world = unlabelled()
    one, other = (world.bind(name, on=[world.card()]) for name in ("one", "other"))
    world.read_after(30)
    assert shape(world) == (4, 2)

    world.end(one)
    world.end(other)
    world.read_after(30)

    assert shape(world) == (4, 2)


def test_several_pods_on_one_card_count_before_a_late_label() -> None:
    shared = {GPU: 8}
    world = one_node(
        2, allocatable=shared, capacity=shared, labels={"nvidia.com/gpu.replicas": "1"}
    )
    for name in ("one", "other"):
        world.bind(name, on=[world.card()])

    world.read_after(30)

    assert shape(world) == (2, 4)


def test_the_device_id_of_a_single_share_is_evidence() -> None:
    world = unlabelled()
    world.bind("one", on=[world.card()])
    world.is_shown_by_shares = True
    world.read_after(30)

    assert shape(world) == (4, 2)


def test_the_evidence_expires_when_the_node_offers_another_number() -> None:
    world = unlabelled()
    pods = [world.bind(name, on=[world.card()]) for name in ("one", "other")]
    world.read_after(30)
    for pod in pods:
        world.end(pod)
    whole = {GPU: 4}

    world.fleet.apply_node(replace(world.fleet.nodes["node"], allocatable=whole, capacity=whole))
    world.read_after(30)

    assert shape(world) == (4, 1)


def test_an_agent_that_sees_fewer_cards_than_are_offered_is_no_evidence() -> None:
    world = unlabelled()

    Agents(world).report(MEMORY_USED=70 * GIB, MEMORY_FREE=10 * GIB)

    assert shape(world) == (8, 1)
    assert ranking(world.rank(request(memory_bytes=int(60 * GIB)))) == ["node"]


@pytest.mark.parametrize("seen", [4, 3], ids=["all-cards-seen", "one-card-missed"])
def test_an_agent_says_how_many_shares_of_each_card_the_kubelet_offers(seen: int) -> None:
    world = unlabelled(seen)
    agents = Agents(world)
    agents.replicas = {"": 2}
    agents.report()
    assert shape(world) == (4, 2)

    agents.replicas = {}  # the kubelet does not answer for a while
    world.clock.now += 10
    agents.report()
    assert shape(world) == (4, 2)


def test_the_kubelets_offer_counts_before_a_late_label() -> None:
    world = one_node(2, replicas=4)
    agents = Agents(world)
    agents.replicas = {"": 1}
    whole = {GPU: 2}
    world.fleet.apply_node(replace(world.fleet.nodes["node"], allocatable=whole, capacity=whole))

    agents.report()

    assert shape(world) == (2, 1)


def test_cards_are_whole_if_the_kubelet_offers_as_many_as_there_are() -> None:
    world = World()
    world.add_node("node", 4, allocatable={GPU: 4}, capacity={GPU: 8}, labels={})

    Agents(world).report()

    assert shape(world) == (8, 1)
    assert ranking(world.rank(request(4, memory_bytes=int(60 * GIB)))) == ["node"]


def test_a_pod_that_is_being_deleted_beside_the_next_one_is_no_evidence() -> None:
    world = unlabelled()
    leaver = world.bind("leaver", on=[world.card()])
    world.fleet.apply_pod(replace(leaver, is_deleting=True))
    world.bind("next", on=[world.card()])

    world.read_after(30)
    assert shape(world) == (8, 1)
    world.end(leaver)
    world.read_after(30)

    assert shape(world) == (8, 1)


def test_pods_that_share_a_card_through_a_claim_are_no_evidence() -> None:
    world = unlabelled()
    for name in ("one", "other"):
        world.bind(name, on=[world.card()], resources={}, has_claims=True)

    world.read_after(30)

    assert shape(world)[1] == 1


def test_sharing_that_was_switched_off_is_off_before_its_label() -> None:
    world = one_node(8, replicas=4)
    assert shape(world) == (8, 4)
    whole = {GPU: 8}

    world.fleet.apply_node(replace(world.fleet.nodes["node"], allocatable=whole, capacity=whole))

    assert shape(world) == (8, 1)
    assert not world.row().is_shared
