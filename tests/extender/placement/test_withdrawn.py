"""Devices that the kubelet has withdrawn get no pods, even with good readings."""

from typing import Any

import pytest

from extender.core.decision.filtering import Code
from extender.core.devices.readings import Signal
from testkit.builders import GIB, GPU, request
from testkit.world import World, one_node

TWENTY = int(20 * GIB)

SILENT_MINUTES = (3, 20)
"""Minutes after which its last values are stale, and after which the device is dropped and replaced
by a placeholder."""


def code(made: World, **requested: Any) -> Code:
    """Return the rejection code of the node for a pod that requests one device."""
    return Code(int(made.rank(request(**requested)).codes[0]))


def half_withdrawn(minutes: int = 1, *, is_shown: bool = True, **values: float) -> World:
    """Return a node of two shared cards: a pod is on the first, the second is withdrawn."""
    made = one_node(2, replicas=4, allocatable={GPU: 4}, capacity={GPU: 8})
    made.bind("a", on=[made.card()])
    made.card().values.update({Signal[name]: value for name, value in values.items()})
    made.card(index=1).is_shown = is_shown
    made.read_after(60.0, times=minutes)
    return made


def test_withdrawn_shared_card_does_not_block_the_other() -> None:
    made = half_withdrawn()
    made.card(index=1).values[Signal.XID] = 48.0
    made.read_after(60.0)

    assert code(made) is Code.PASSES


@pytest.mark.parametrize("minutes", SILENT_MINUTES)
def test_idle_requirement_accepts_an_idle_card_beside_a_vanished_one(minutes: int) -> None:
    made = half_withdrawn(minutes, is_shown=False)

    assert code(made, requires_idle=True) is Code.PASSES


@pytest.mark.parametrize("minutes", SILENT_MINUTES)
def test_vanished_card_has_no_room(minutes: int) -> None:
    made = half_withdrawn(minutes, is_shown=False, MEMORY_USED=79 * GIB, MEMORY_FREE=GIB)

    assert code(made, memory_bytes=TWENTY) is Code.NO_MEMORY


@pytest.mark.parametrize("minutes", SILENT_MINUTES)
def test_foreign_use_of_a_free_card_counts_beside_a_vanished_card(minutes: int) -> None:
    made = one_node(3, allocatable={GPU: 2}, capacity={GPU: 3})
    made.bind("a", on=[made.card()])
    made.card(index=1).values[Signal.MEMORY_USED] = 40 * GIB
    made.card(index=2).is_shown = False

    made.read_after(60.0, times=minutes)

    assert code(made) is Code.FOREIGN_USE


def test_missing_card_is_a_landing_device_if_the_kubelet_offers_all() -> None:
    made = one_node(2, replicas=4)
    made.bind("a", on=[made.card()])
    made.card().values.update({Signal.MEMORY_USED: 79 * GIB, Signal.MEMORY_FREE: GIB})
    made.card(index=1).is_shown = False

    made.read_after(60.0, times=20)

    assert code(made, memory_bytes=TWENTY) is Code.PASSES


def test_unseen_pods_count_on_cards_that_are_still_offered() -> None:
    made = one_node(3, replicas=4, allocatable={GPU: 8}, capacity={GPU: 12})
    made.card().values[Signal.XID] = 48.0
    made.read_after(60.0, times=2)

    made.fleet.snapshot()
    made.bind("a", count=2)

    assert made.row().used == made.row().assumed == (0, 1, 1)


def test_pods_that_are_being_placed_count_on_cards_that_are_still_offered() -> None:
    made = one_node(2, replicas=4, allocatable={GPU: 4}, capacity={GPU: 8})
    made.card(index=1).values[Signal.XID] = 48.0
    made.read_after(60.0, times=2)
    twenty = request(memory_bytes=TWENTY)

    placed = [made.place(name, twenty) for name in "abc"]

    assert placed == ["node"] * 3
    assert code(made, memory_bytes=int(30 * GIB)) is Code.NO_MEMORY


@pytest.mark.parametrize("withdrawn", [0, 3], ids=["none", "less-than-one-card"])
def test_pods_may_be_on_a_broken_card_that_the_kubelet_still_offers(withdrawn: int) -> None:
    made = one_node(2, replicas=4, allocatable={GPU: 8 - withdrawn}, capacity={GPU: 8})
    made.card(index=1).values[Signal.XID] = 48.0
    made.read_after(60.0, times=2)

    made.fleet.snapshot()
    made.bind("a", count=2)

    assert made.row().used == (1, 1)
