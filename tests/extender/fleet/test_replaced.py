"""Test replaced cards: readings of the old card count for no pod."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from extender.core.decision.filtering import Code
from extender.core.devices.readings import DeviceInfo, Signal
from extender.core.nodes.inventory import NodeRecord
from testkit.agent.fleet_reports import Agents
from testkit.builders import GIB, GPU, ranking, request
from testkit.world import BUSY, World, one_node

NEW = DeviceInfo(node="node", uuid="GPU-new", index=0)


def shown(made: World) -> set[str]:
    """Return the cards of the node's row, "" for each that no source shows."""
    infos = [made.fleet.store.info(slot) for slot in made.row().slots]
    return {info.uuid for info in infos if info is not None}


def swap(made: World) -> None:
    """Replace the first card of the node."""
    made.remove_card("node", 0)
    made.show(NEW)
    made.clock.now += 30.0


def test_a_replaced_card_has_no_room() -> None:
    made = one_node(1, replicas=10)
    swap(made)
    made.bind("a", on=[made.devices[NEW.key]])
    made.read(MEMORY_USED=79 * GIB, MEMORY_FREE=GIB)

    decision = made.rank(request(memory_bytes=int(20 * GIB)))

    assert shown(made) == {"GPU-new"}
    assert Code(int(decision.codes[0])) is Code.NO_MEMORY


@pytest.mark.parametrize("cards", [1, 8])
def test_an_agent_reports_a_replaced_card(cards: int) -> None:
    made = World()
    made.add_node("node", cards)
    agents = Agents(made)
    agents.report()
    swap(made)

    agents.report()

    assert len(made.row().slots) == cards
    assert "GPU-new" in shown(made)
    assert "GPU-node-0" not in shown(made)


def test_replaced_card_no_longer_excludes_its_node() -> None:
    made = one_node(2)
    made.card().values[Signal.XID] = 79.0
    made.read()
    assert made.estimated(made.card(index=1), "is_excluded")

    swap(made)
    made.read()

    assert not made.estimated(made.card(index=1), "is_excluded")


def test_card_replaced_on_an_empty_node_is_known_once_offered() -> None:
    made = one_node(1)
    node = made.fleet.nodes["node"]
    made.fleet.apply_node(replace(node, allocatable={GPU: 0}, capacity={GPU: 0}))
    swap(made)
    made.read_after(30.0)

    made.fleet.apply_node(node)

    assert shown(made) == {"GPU-new"}


def test_a_card_that_replaces_its_successor_is_known_again() -> None:
    made = one_node(1)
    swap(made)
    made.read()
    del made.devices[NEW.key]
    made.add_cards("node", 1)

    made.read_after(30.0)

    assert shown(made) == {"GPU-node-0"}


def test_a_card_missing_from_one_answer_is_not_replaced() -> None:
    made = one_node(2)
    made.card().is_shown = False
    made.read_after(30.0)
    made.bind("a")

    assert shown(made) == {"GPU-node-0", "GPU-node-1"}


def test_a_surplus_card_without_a_successor_is_kept() -> None:
    made = one_node(2, allocatable={GPU: 1}, capacity={GPU: 1})
    made.card().is_shown = False
    made.read_after(30.0)
    made.bind("a")

    assert shown(made) == {"GPU-node-0", "GPU-node-1"}


def test_a_card_that_only_another_source_reports_is_not_replaced() -> None:
    made = World()
    made.add_node("node", 1)
    agents = Agents(made)
    for _ in range(3):
        agents.report("node", NEW)
        made.clock.now += 10.0
        made.read()
        made.clock.now += 10.0

    assert shown(made) == {"GPU-new", "GPU-node-0"}


def fewer(made: World, cards: int) -> None:
    """Make the node offer only this many cards."""
    counts = {GPU: cards}
    node = made.fleet.nodes["node"]
    made.fleet.apply_node(replace(node, allocatable=counts, capacity=counts))


@pytest.mark.parametrize("is_removed", [True, False], ids=["readded", "restarted"])
@pytest.mark.parametrize("ghosts", [0, 2], ids=["gone", "series-that-linger"])
def test_node_returning_with_fewer_cards_has_them_at_the_first_reading(
    ghosts: int, *, is_removed: bool
) -> None:
    made = one_node(8)
    before, record = made.clock.now, made.fleet.nodes["node"]
    if is_removed:
        made.fleet.remove_node("node")
        made.fleet.apply_node(record)
    made.clock.now += 30
    fewer(made, 4)
    for _ in range(ghosts):  # series of a removed exporter, which Prometheus returns for minutes
        made.clock.now += 30
        made.read(measured_at=before)
    for index in range(4, 8):
        made.remove_card("node", index)

    made.read_after(30)

    assert len(shown(made)) == len(made.row().slots) == 4


def test_measured_card_stays_although_the_node_offers_fewer() -> None:
    made = one_node(2)
    fewer(made, 1)
    made.read_after(30)
    made.card().is_shown = False

    made.read_after(30)

    assert shown(made) == {"GPU-node-0", "GPU-node-1"}


def linger(made: World, cards: Iterable[int]) -> None:
    """Make cards busy, and keep reporting them in this state."""
    for index in cards:
        made.card(index=index).values |= BUSY
        made.card(index=index).measured_at = made.clock.now
    made.read_after(20)


@pytest.mark.parametrize("cards", [2, 4, 8])
def test_node_returning_with_other_cards_has_them_at_the_first_reading(cards: int) -> None:
    made = one_node(4)
    linger(made, range(4))
    made.fleet.remove_node("node")
    made.clock.now += 20
    counts = {GPU: cards}
    made.fleet.apply_node(NodeRecord(name="node", allocatable=counts, capacity=counts))
    new = {f"GPU-new-{index}" for index in range(cards)}
    for uuid in new:
        made.show(DeviceInfo(node="node", uuid=uuid))

    made.read_after(30)

    assert shown(made) == new
    assert ranking(made.rank(request(cards, requires_idle=True))) == ["node"]
    made.read_after(30, 8)
    assert ranking(made.rank(request(cards, requires_idle=True))) == ["node"]


@pytest.mark.parametrize("is_removed", [True, False], ids=["readded", "restarted"])
def test_removed_cards_that_are_still_reported_are_dropped(*, is_removed: bool) -> None:
    made = one_node(8)
    linger(made, range(4, 8))
    if is_removed:
        record = made.fleet.nodes["node"]
        made.fleet.remove_node("node")
        made.clock.now += 20
        made.fleet.apply_node(record)
    fewer(made, 4)

    made.read_after(30)

    assert shown(made) == {f"GPU-node-{index}" for index in range(4)}
    assert ranking(made.rank(request(4, requires_idle=True))) == ["node"]


def test_hung_card_counts_while_the_others_are_too_few() -> None:
    made = one_node(4)
    linger(made, [3])
    record = made.fleet.nodes["node"]
    made.fleet.remove_node("node")
    made.fleet.apply_node(record)

    made.read_after(30)

    assert "GPU-node-3" in shown(made)
