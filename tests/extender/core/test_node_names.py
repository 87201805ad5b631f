"""Search of node names in the text of a request."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.node_names import MOST_STRANGERS, JsonNameList, NameTable, _Found
from extender.core.steps import finish
from tests.extender.core.name_lists import PLAIN, node_names, written


def found(
    table: NameTable, names: Sequence[str], around: tuple[bytes, bytes] = (b"", b"")
) -> object:
    """Return the positions of names in a text; None if they are not found."""
    before, after = around
    text = before + written(names) + after
    answer = found_in(table, text, len(before), len(text) - len(after))
    return None if answer is None else answer.places.tolist()


def found_in(table: NameTable, text: bytes, begin: int, end: int) -> _Found | None:
    """Return the names of a list in a text; None if they are not found."""
    pieces = JsonNameList.of(text, begin, end)
    return None if pieces is None else table.find(pieces)


def table_of(names: list[str]) -> NameTable:
    """Return a table that can find names."""
    table = finish(NameTable.in_steps(names, None))
    assert table is not None
    return table


@given(names=node_names, data=st.data())
def test_names_are_found_where_a_dictionary_finds_them(
    names: list[str], data: st.DataObject
) -> None:
    requested = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    around = data.draw(st.tuples(st.binary(max_size=20), st.binary(max_size=20)))

    assert found(table_of(names), requested, around) == [names.index(name) for name in requested]


@given(names=node_names, requested=st.lists(st.text(PLAIN, min_size=1), min_size=1, unique=True))
def test_unknown_names_are_distinguished_from_known_ones(
    names: list[str], requested: list[str]
) -> None:
    together = [*requested, *(name for name in names if name not in requested)]

    answer = found_in(table_of(names), written(together), 0, len(written(together)))

    assert answer is not None
    assert list(answer.strangers) == [name for name in requested if name not in names]
    known = [*names, *answer.strangers]
    assert [known[at] for at in answer.places.tolist()] == together


@given(names=node_names, data=st.data())
def test_a_name_that_differs_in_one_byte_is_another(names: list[str], data: st.DataObject) -> None:
    known = data.draw(st.sampled_from(names))
    at = data.draw(st.integers(0, len(known)))
    other = known[:at] + data.draw(st.text(PLAIN, min_size=1)) + known[at + 1 :]

    answer = found_in(table_of(names), written([other]), 0, len(written([other])))

    assert answer is not None
    assert answer.strangers == (() if other in names else (other,))


@given(names=node_names, data=st.data())
def test_index_finds_the_names_that_a_json_parser_reads(
    names: list[str], data: st.DataObject
) -> None:
    requested = data.draw(st.lists(st.sampled_from(names), min_size=1))
    text = bytearray(written(requested))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 2))
        text[at : at + gone] = data.draw(st.text('["],\\ a', max_size=2)).encode()

    answer = found_in(table_of(names), bytes(text), 0, len(text))

    if answer is not None:
        known = [*names, *answer.strangers]
        assert [known[at] for at in answer.places.tolist()] == json.loads(text)


def test_lists_with_too_many_unknown_names_are_not_looked_up() -> None:
    table = table_of([f"node-{number:03}" for number in range(300)])
    others = [f"other-{number:03}" for number in range(MOST_STRANGERS + 1)]

    assert found(table, others) is None
    assert found(table, others[1:]) == list(range(300, 300 + MOST_STRANGERS))


@pytest.mark.parametrize(
    "form",
    [
        "ip-10-{}-{}.eu-central-1.compute.internal",
        "node-{:03}-{:03}",
        "gke-prod-a100-pool-{:04x}-{:04x}",
        "{:03}-{:03}",
        "rack{:03}-node{:03}",
    ],
)
def test_thousands_of_names_are_found(form: str) -> None:
    names = [form.format(n >> 8, n & 255) for n in range(5000)]
    order = np.random.default_rng(7).permutation(len(names))

    assert found(table_of(names), [names[at] for at in order]) == order.tolist()


@given(names=node_names, gone=st.data())
def test_a_table_like_another_one_finds_as_much(names: list[str], gone: st.DataObject) -> None:
    others = gone.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))

    table = finish(NameTable.in_steps(others, table_of(names)))

    if finish(NameTable.in_steps(others, None)) is not None:
        assert table is not None
        assert found(table, others) == list(range(len(others)))


def test_a_table_that_no_other_one_is_like_is_made_in_steps() -> None:
    nodes = [f"ip-10-64-0-{number}.eu-west-1.compute.internal" for number in range(200)]
    # compares this many bytes of a name from its beginning
    ways = list(range(8, len(nodes[0]) + 2, 8))

    assert len(list(NameTable.in_steps(nodes, None))) > len(ways)


def test_a_list_with_a_name_twice_is_not_found() -> None:
    table = table_of(["node-a", "node-b"])

    assert found(table, ["node-a", "node-b"]) == [0, 1]
    assert found(table, ["node-a", "node-b", "node-a"]) is None
    assert found(table, ["node-a", "new", "new"]) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[",
        b"[]",
        b'["]',
        b'["node-a" ,"node-b"]',
        b'["node-a","node-b"',
        b'"node-a","node-b"]',
        b'["node-a",null]',
        b'["node-a"node-b"]',
        b'["node-a":"node-b"]',
        b'["node-a","node-b",]',
        b'["node\\u002da"]',
        b'["node-a\n"]',
    ],
)
def test_lists_that_go_would_not_write_so_are_not_found(text: bytes) -> None:
    table = table_of(["node-a", "node-b"])

    assert found_in(table, text, 0, len(text)) is None
    assert found_in(table, b"[" + text + b"]", 1, len(text) + 1) is None


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["short"],
        ["node-1", "ip-10-0-0-1.us-east-2.internal"],
        ["n\u00f6de-1"],
        ["node-a,node-b"],
        ['node-"a"'],
        ["node\n-a"],
    ],
)
def test_short_dissimilar_or_unusual_names_have_no_table(names: list[str]) -> None:
    assert finish(NameTable.in_steps(names, None)) is None


items = st.lists(
    st.binary(max_size=12).map(lambda item: item.replace(b",", b".")), min_size=1, max_size=40
)


@given(items=items, around=st.tuples(st.binary(max_size=9), st.binary(max_size=9)), data=st.data())
def test_some_pieces_are_cut_as_if_each_were_taken_alone(
    items: list[bytes], around: tuple[bytes, bytes], data: st.DataObject
) -> None:
    before, after = around
    text = before + b"[" + b",".join(items) + b"]" + after
    kept = [at for at in range(len(items)) if data.draw(st.booleans())]

    pieces = JsonNameList.of(text, len(before), len(text) - len(after))

    assert pieces is not None
    assert len(pieces) == len(items)
    assert pieces.split() == items
    assert pieces.joined(np.array(kept, dtype=np.intp)) == b",".join(items[at] for at in kept)


@pytest.mark.parametrize("text", [b"", b"[", b"]", b"a,b", b"[a,b", b"a,b]"])
def test_text_that_is_not_a_list_has_no_items(text: bytes) -> None:
    assert JsonNameList.of(text, 0, len(text)) is None
