"""Index of nodes by number."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from extender.core.nodes.node_index import _FEW_BYTES, _FEW_NAMES, NodeIndex
from extender.core.nodes.node_names import MOST_STRANGERS, NamesAt
from extender.core.steps import finish
from tests.extender.core.name_lists import node_names, written

NODES = [f"gpu-node-{number:05}" for number in range(2000)]


def asked_of(node_index: NodeIndex, names: list[str]) -> NamesAt:
    """Return the names of a request by their numbers."""
    text = written(names)
    numbered = node_index.find(text, 0, len(text))
    assert numbered is not None
    return numbered


@given(names=node_names, data=st.data())
def test_a_roll_knows_each_node_in_each_pool(names: list[str], data: st.DataObject) -> None:
    pools = {
        resource: data.draw(st.lists(st.sampled_from(names), unique=True)) for resource in "gm"
    }
    node_index = NodeIndex(names, pools)
    requested = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))

    numbered = node_index.number(requested)

    assert isinstance(numbered, NamesAt)
    assert list(numbered) == requested
    assert [numbered[at] for at in range(len(numbered))] == requested
    for resource, nodes in pools.items():
        rows = node_index.rows(resource, numbered)
        assert rows is not None
        assert rows.tolist() == [nodes.index(n) if n in nodes else -1 for n in requested]


def test_a_roll_finds_many_names_in_a_text() -> None:
    node_index = NodeIndex(NODES, {})

    numbered = asked_of(node_index, NODES[::-1])

    assert len(written(NODES)) >= _FEW_BYTES
    assert list(numbered) == NODES[::-1]
    assert node_index.number(numbered) is numbered


def test_a_short_list_and_one_with_odd_names_are_left_to_the_parser() -> None:
    node_index = NodeIndex(NODES, {})
    others = [f"other-{at:03}" for at in range(MOST_STRANGERS + 1)]

    for names in ([*NODES, NODES[0]], [*NODES, *others], NODES[:2]):
        text = written(names)
        assert node_index.find(text, 0, len(text)) is None


def test_numbers_of_another_roll_are_not_taken_for_those_of_this_one() -> None:
    numbered = asked_of(NodeIndex(NODES, {}), NODES)

    again = NodeIndex(NODES[1:], {}).number(numbered[1:])

    assert list(again) == NODES[1:]
    assert isinstance(again, NamesAt)
    assert again.rows[0] == 0


def test_a_few_names_that_are_not_on_the_roll_stay_names() -> None:
    node_index = NodeIndex(["a"], {"gpu": ["a"]})

    assert list(node_index.number(("a", "new"))) == ["a", "new"]
    assert node_index.rows("gpu", node_index.number(("a", "new"))) is None
    assert node_index.rows("unknown", node_index.number(("a",))) is None


@settings(max_examples=20)
@given(
    gone=st.sets(st.sampled_from(NODES), min_size=1, max_size=20),
    chance=st.randoms(use_true_random=False),
)
def test_many_names_are_found_by_number_though_some_nodes_are_gone(
    gone: set[str], chance: Random
) -> None:
    left = [node for node in NODES if node not in gone]
    node_index = NodeIndex(left, {"gpu": left[1::2]})
    row_of = {node: row for row, node in enumerate(left[1::2])}
    requested = chance.sample(NODES, len(NODES))

    for numbered in (asked_of(node_index, requested), node_index.number(tuple(requested))):
        assert isinstance(numbered, NamesAt)
        assert list(numbered) == requested
        assert node_index.number(numbered) is numbered
        rows = node_index.rows("gpu", numbered)
        assert rows is not None
        assert rows.tolist() == [row_of.get(node, -1) for node in requested]
        # Numbers follow the names, independent of the candidates, because they decide ties.
        assert [numbered[at] for at in numbered.rows.argsort()] == sorted(requested)


def test_decisions_share_the_names_of_nodes_that_are_gone() -> None:
    node_index = NodeIndex(NODES[:-3], {})

    first = asked_of(node_index, NODES)

    assert first.names is not node_index.names
    assert asked_of(node_index, NODES[5:]).names is first.names
    assert asked_of(node_index, NODES[:-1]).names is first.names
    assert node_index.rows("gpu", asked_of(node_index, [*NODES, "gpu-node-new"])) is None
    assert set(asked_of(node_index, NODES).names) == {*NODES, "gpu-node-new"}


def test_names_that_are_not_on_the_roll_do_not_pile_up() -> None:
    node_index = NodeIndex(NODES, {})

    for number in range(3):
        others = [f"other-{number}-{at:03}" for at in range(MOST_STRANGERS)]
        assert len(asked_of(node_index, [*NODES, *others]).names) == len(NODES) + MOST_STRANGERS


def test_names_stay_names_if_most_are_unknown_to_the_index() -> None:
    node_index = NodeIndex(NODES, {})
    others = tuple(f"other-{at:03}" for at in range(MOST_STRANGERS + 1))

    assert len(others) >= _FEW_NAMES
    assert node_index.number(others) is others


def test_nodes_that_go_and_come_back_leave_the_names_as_they_are() -> None:
    before = NodeIndex(NODES, {"gpu": NODES[:5]})

    fewer = finish(NodeIndex.in_steps(NODES[3:], {"gpu": NODES[3:5]}, before))
    again = finish(NodeIndex.in_steps(NODES, {"gpu": NODES[1:5]}, fewer))

    assert fewer.names is before.names
    assert again.names is before.names
    requested = asked_of(before, NODES)
    assert fewer.number(requested) is requested
    for node_index, expected in ((fewer, [-1, -1, -1, 0, 1, -1]), (again, [-1, 0, 1, 2, 3, -1])):
        rows = node_index.rows("gpu", requested)
        assert rows is not None
        assert rows[:6].tolist() == expected


def test_the_names_of_nodes_that_are_gone_do_not_pile_up() -> None:
    node_index = NodeIndex(NODES, {})

    most = finish(NodeIndex.in_steps(NODES[MOST_STRANGERS:], {}, node_index))
    fewer = finish(NodeIndex.in_steps([*NODES[MOST_STRANGERS + 1 :], "new"], {}, most))

    assert most.names is node_index.names
    assert fewer.names == (*NODES[MOST_STRANGERS + 1 :], "new")
