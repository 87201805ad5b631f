"""Nodes by number."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from extender.core.nodes.node_index import FEW_BYTES, FEW_NAMES, Roll
from extender.core.nodes.node_names import MOST_STRANGERS, NamesAt
from extender.core.steps import finish
from tests.extender.core.test_node_names import node_names, written

NODES = [f"gpu-node-{number:05}" for number in range(2000)]


def asked_of(roll: Roll, names: list[str]) -> NamesAt:
    """Return the names of a question by their numbers."""
    text = written(names)
    numbered = roll.find(text, 0, len(text))
    assert numbered is not None
    return numbered


@given(names=node_names, data=st.data())
def test_a_roll_knows_each_node_in_each_pool(names: list[str], data: st.DataObject) -> None:
    pools = {
        resource: data.draw(st.lists(st.sampled_from(names), unique=True)) for resource in "gm"
    }
    roll = Roll(names, pools)
    asked = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))

    numbered = roll.number(asked)

    assert isinstance(numbered, NamesAt)
    assert list(numbered) == asked
    assert [numbered[at] for at in range(len(numbered))] == asked
    for resource, nodes in pools.items():
        rows = roll.rows(resource, numbered)
        assert rows is not None
        assert rows.tolist() == [nodes.index(n) if n in nodes else -1 for n in asked]


def test_a_roll_finds_many_names_in_a_text() -> None:
    roll = Roll(NODES, {})

    numbered = asked_of(roll, NODES[::-1])

    assert len(written(NODES)) >= FEW_BYTES
    assert list(numbered) == NODES[::-1]
    assert roll.number(numbered) is numbered


def test_numbers_of_another_roll_are_not_taken_for_those_of_this_one() -> None:
    numbered = asked_of(Roll(NODES, {}), NODES)

    again = Roll(NODES[1:], {}).number(numbered[1:])

    assert list(again) == NODES[1:]
    assert isinstance(again, NamesAt)
    assert again.rows[0] == 0


def test_a_few_names_that_are_not_on_the_roll_stay_names() -> None:
    roll = Roll(["a"], {"gpu": ["a"]})

    assert list(roll.number(("a", "new"))) == ["a", "new"]
    assert roll.rows("gpu", roll.number(("a", "new"))) is None
    assert roll.rows("unknown", roll.number(("a",))) is None


@settings(max_examples=20)
@given(
    gone=st.sets(st.sampled_from(NODES), min_size=1, max_size=20),
    chance=st.randoms(use_true_random=False),
)
def test_many_names_are_found_by_number_though_some_nodes_are_gone(
    gone: set[str], chance: Random
) -> None:
    left = [node for node in NODES if node not in gone]
    roll = Roll(left, {"gpu": left[1::2]})
    row_of = {node: row for row, node in enumerate(left[1::2])}
    asked = chance.sample(NODES, len(NODES))

    for numbered in (asked_of(roll, asked), roll.number(tuple(asked))):
        assert isinstance(numbered, NamesAt)
        assert list(numbered) == asked
        assert roll.number(numbered) is numbered
        rows = roll.rows("gpu", numbered)
        assert rows is not None
        assert rows.tolist() == [row_of.get(node, -1) for node in asked]
        # Numbers go by name, whoever is asked about: ties are decided by them.
        assert [numbered[at] for at in numbered.rows.argsort()] == sorted(asked)


def test_decisions_share_the_names_of_nodes_that_are_gone() -> None:
    roll = Roll(NODES[:-3], {})

    first = asked_of(roll, NODES)

    assert first.names is not roll.names
    assert asked_of(roll, NODES[5:]).names is first.names
    assert asked_of(roll, NODES[:-1]).names is first.names
    assert roll.rows("gpu", asked_of(roll, [*NODES, "gpu-node-new"])) is None
    assert set(asked_of(roll, NODES).names) == {*NODES, "gpu-node-new"}


def test_names_that_are_not_on_the_roll_do_not_pile_up() -> None:
    roll = Roll(NODES, {})

    for number in range(3):
        others = [f"other-{number}-{at:03}" for at in range(MOST_STRANGERS)]
        assert len(asked_of(roll, [*NODES, *others]).names) == len(NODES) + MOST_STRANGERS


def test_where_most_of_many_names_are_not_on_the_roll_they_stay_names() -> None:
    roll = Roll(NODES, {})
    others = tuple(f"other-{at:03}" for at in range(MOST_STRANGERS + 1))

    assert len(others) >= FEW_NAMES
    assert roll.number(others) is others


def test_nodes_that_go_and_come_back_leave_the_names_as_they_are() -> None:
    before = Roll(NODES, {"gpu": NODES[:5]})

    fewer = finish(Roll.in_steps(NODES[3:], {"gpu": NODES[3:5]}, before))
    again = finish(Roll.in_steps(NODES, {"gpu": NODES[1:5]}, fewer))

    assert fewer.names is before.names
    assert again.names is before.names
    asked = asked_of(before, NODES)
    assert fewer.number(asked) is asked
    for roll, expected in ((fewer, [-1, -1, -1, 0, 1, -1]), (again, [-1, 0, 1, 2, 3, -1])):
        rows = roll.rows("gpu", asked)
        assert rows is not None
        assert rows[:6].tolist() == expected


def test_the_names_of_nodes_that_are_gone_do_not_pile_up() -> None:
    roll = Roll(NODES, {})

    most = finish(Roll.in_steps(NODES[MOST_STRANGERS:], {}, roll))
    fewer = finish(Roll.in_steps([*NODES[MOST_STRANGERS + 1 :], "new"], {}, most))

    assert most.names is roll.names
    assert fewer.names == (*NODES[MOST_STRANGERS + 1 :], "new")
