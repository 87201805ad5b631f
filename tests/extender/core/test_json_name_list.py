"""Parts of a JSON list, cut out of the text that contains it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.node_names import JsonNameList

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
