"""Node names by number, found where they stand in a question."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.core.names import FEW, JsonNames, NamesAt, NameTable, Roll

PLAIN = st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\')
"""What Go writes into a list without escaping it; names of nodes are made of these."""

node_names = st.integers(6, 40).flatmap(
    lambda shortest: st.lists(
        st.text(PLAIN, min_size=shortest, max_size=(shortest + 2) // 8 * 16 - 2),
        min_size=1,
        max_size=60,
        unique=True,
    )
)
"""Names of nodes of a cluster, about equally long."""


def listed(names: list[str]) -> JsonNames:
    """Return names as kube-scheduler lists them."""
    found = JsonNames.read(json.dumps(names, separators=(",", ":")).encode())
    assert found is not None
    return found


def table_of(names: list[str]) -> NameTable:
    """Return a table that can find names."""
    table = NameTable.of(names)
    assert table is not None
    return table


@given(names=node_names, data=st.data())
def test_names_are_found_where_a_dictionary_finds_them(
    names: list[str], data: st.DataObject
) -> None:
    asked = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))

    found = table_of(names).find(listed(asked))

    assert found is not None
    assert found.tolist() == [names.index(name) for name in asked]


@given(names=node_names, asked=node_names)
def test_names_are_found_only_if_all_are_known(names: list[str], asked: list[str]) -> None:
    found = table_of(names).find(listed(asked))

    assert (found is not None) == (set(asked) <= set(names))


@given(names=node_names, data=st.data())
def test_a_name_that_differs_in_one_byte_is_another(names: list[str], data: st.DataObject) -> None:
    known = data.draw(st.sampled_from(names))
    at = data.draw(st.integers(0, len(known)))
    other = known[:at] + data.draw(st.text(PLAIN, min_size=1)) + known[at + 1 :]

    found = table_of(names).find(listed([other]))

    assert (found is not None) == (other in names)


even_names = st.integers(6, 40).flatmap(
    lambda length: st.lists(
        st.text("ab-,.", min_size=length, max_size=length), min_size=1, max_size=20, unique=True
    )
)
"""Names of one length; commas make it hard."""


@given(names=even_names, data=st.data())
def test_names_of_one_length_are_read_and_found_like_others(
    names: list[str], data: st.DataObject
) -> None:
    asked = data.draw(st.permutations(names))
    read = listed(asked)

    found = table_of([*names, "x" * len(names[0])]).find(read)

    assert list(read) == asked
    assert found is not None
    assert found.tolist() == [names.index(name) for name in asked]


@pytest.mark.parametrize("form", ["ip-10-{}-{}.eu-central-1.compute.internal", "node-{:03}-{:03}"])
def test_thousands_of_names_are_found(form: str) -> None:
    names = [form.format(n >> 8, n & 255) for n in range(5000)]
    order = np.random.default_rng(7).permutation(len(names))

    found = table_of(names).find(listed([names[at] for at in order]))

    assert found is not None
    assert found.tolist() == order.tolist()


def test_a_list_with_a_name_twice_is_not_found() -> None:
    table = table_of(["node-a", "node-b"])

    assert table.find(listed(["node-a", "node-b"])) is not None
    assert table.find(listed(["node-a", "node-b", "node-a"])) is None


@pytest.mark.parametrize(
    "names", [[], ["short"], ["node-1", "ip-10-0-0-1.internal"], ["n\u00f6de-1"]]
)
def test_where_names_are_short_or_most_unlike_there_is_no_table(names: list[str]) -> None:
    assert NameTable.of(names) is None


@given(
    names=st.lists(st.text(PLAIN, max_size=60), min_size=FEW, max_size=FEW + 5, unique=True),
    data=st.data(),
)
@settings(max_examples=20)
def test_many_names_of_any_lengths_get_their_numbers(names: list[str], data: st.DataObject) -> None:
    asked = data.draw(st.permutations(names))

    numbered = Roll(names, {}).number(listed(asked))

    assert isinstance(numbered, NamesAt)
    assert list(numbered) == asked


@given(st.binary(max_size=40) | st.text('["],\\ a', max_size=20).map(str.encode))
def test_what_is_read_is_what_a_json_parser_reads(text: bytes) -> None:
    read = JsonNames.read(text)

    if read is not None:
        assert list(read) == list(dict.fromkeys(json.loads(text)))
        assert len(read) == len(set(json.loads(text)))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'["]',
        b'["a" ,"b"]',
        b'["a","b"',
        b'["a",null]',
        b'["a"b"c"]',
        b'["a":"b"]',
        b'["a","b",]',
        b'["a\\u002d"]',
        b'["a\n"]',
        '["\u00e4"]'.encode(),
        b'["a\xff"]',
    ],
)
def test_lists_that_go_would_not_write_so_are_left_to_others(text: bytes) -> None:
    assert JsonNames.read(text) is None


@given(names=node_names, data=st.data())
def test_a_roll_knows_each_node_in_each_pool(names: list[str], data: st.DataObject) -> None:
    pools = {
        resource: data.draw(st.lists(st.sampled_from(names), unique=True)) for resource in "gm"
    }
    roll = Roll(names, pools)
    asked = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))

    for question in (tuple(asked), listed(asked)):
        numbered = roll.number(question)
        assert isinstance(numbered, NamesAt)
        assert list(numbered) == asked
        assert [numbered[at] for at in range(len(numbered))] == asked
        for resource, nodes in pools.items():
            rows = roll.rows(resource, numbered)
            assert rows is not None
            assert rows.tolist() == [nodes.index(n) if n in nodes else -1 for n in asked]


def test_names_that_are_not_on_the_roll_stay_names() -> None:
    roll = Roll(["a"], {"gpu": ["a"]})

    for question in (("a", "new"), listed(["a", "new"])):
        assert list(roll.number(question)) == ["a", "new"]
        assert roll.rows("gpu", roll.number(question)) is None
    assert roll.rows("unknown", roll.number(("a",))) is None


def test_a_list_names_each_node_once() -> None:
    roll = Roll(["a", "b"], {})

    assert list(roll.number(listed(["b", "a", "b"]))) == ["b", "a"]
