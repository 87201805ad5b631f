"""Test that answers cut out of the request equal encoded ones."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.decision import Decision
from extender.core.decision.filtering import SIGNATURE, Code
from extender.core.nodes.node_index import EMPTY_NODE_INDEX, NodeIndex
from extender.core.nodes.node_names import NamesIn
from extender.webhook import wire

FLEET = [f"ip-10-0-{n >> 4}-{n & 15}.eu-central-1.compute.internal" for n in range(300)]
ROLL = NodeIndex(FLEET, {})

HOSTILE = [
    "",
    ",",
    '"',
    '","',
    '\\","',
    "a,b",
    'a"b',
    "a\\",
    "]",
    "]}",
    "n\u00f6de",
    "<&>",
    "\n",
    "\x00",
]

strangers = st.lists(
    st.sampled_from(HOSTILE) | st.sampled_from(FLEET) | st.text(max_size=8), max_size=3
)
"""Names that are unknown, unusual or repeated."""


@dataclass(frozen=True)
class Asked:
    """List of candidates, and the verdict on each by name."""

    names: list[str]
    codes: dict[str, Code]

    def decision(self, candidates: Sequence[str]) -> Decision:
        codes = np.array([self.codes[name] for name in candidates], dtype=np.uint8)
        passing = np.flatnonzero(codes == Code.PASSES)
        scores = np.array(
            [crc32(name.encode(errors="surrogatepass")) % 97 / 97 for name in candidates]
        )
        return Decision(
            candidates=candidates,
            codes=codes,
            scores=scores,
            order=passing[np.argsort(-scores[passing], kind="stable")],
            zones=np.zeros(len(candidates), dtype=np.intp),
        )


@st.composite
def requested(draw: st.DrawFn, others: st.SearchStrategy[list[str]] = strangers) -> Asked:
    chance = random.Random(draw(st.integers(0, 1 << 32)))
    names = chance.sample(FLEET, chance.randint(250, len(FLEET)))
    for stranger in draw(others):
        names.insert(chance.randint(0, len(names)), stranger)
    passing = draw(st.sampled_from([0.0, 0.5, 0.97, 1.0]))
    refusals = [code for code in Code if code is not Code.PASSES]
    codes = {
        name: Code.PASSES if chance.random() < passing else chance.choice(refusals)
        for name in names
    }
    return Asked(names, codes)


def body(names: list[str], *, is_ascii: bool = False) -> bytes:
    listed = json.dumps(names, separators=(",", ":"), ensure_ascii=is_ascii)
    return f'{{"Pod":{{}},"Nodes":null,"NodeNames":{listed}}}'.encode()


def answered(request: wire.ExtenderRequest, about: Asked, shortlist: int) -> dict[str, object]:
    answer = json.loads(wire.encode_filter(request, about.decision(request.nodes), shortlist))
    assert isinstance(answer, dict)
    return answer


def expected(about: Asked, shortlist: int) -> dict[str, object]:
    names = list(dict.fromkeys(about.names))
    passing = [name for name in names if about.codes[name] is Code.PASSES]
    is_long = 0 < shortlist < len(passing)
    decision = about.decision(names)
    best = {names[at] for at in decision.shortlist(shortlist, 0.0)} if is_long else set()
    refused = {} if is_long else {name: about.codes[name] for name in names}
    reasons = [
        {
            name: f"{code.rejection.value}{SIGNATURE}"
            for name, code in refused.items()
            if code.rejection is not None and code.rejection.is_resolvable is is_resolvable
        }
        for is_resolvable in (True, False)
    ]
    return {
        "Nodes": None,
        "NodeNames": [name for name in passing if name in best] if is_long else passing,
        "FailedNodes": reasons[0],
        "FailedAndUnresolvableNodes": reasons[1],
        "Error": "",
    }


@given(about=requested(), shortlist=st.sampled_from([0, 1, 100, 1000]), is_ascii=st.booleans())
def test_a_cut_answer_equals_an_encoded_one(about: Asked, shortlist: int, is_ascii: bool) -> None:
    asking = body(about.names, is_ascii=is_ascii)

    cut = answered(wire.decode_request(asking, ROLL), about, shortlist)
    encoded = answered(wire.decode_request(asking, EMPTY_NODE_INDEX), about, shortlist)

    assert cut == encoded == expected(about, shortlist)


@given(about=requested(st.just([])), shortlist=st.sampled_from([0, 100]))
def test_the_answer_is_cut_if_all_names_are_known(about: Asked, shortlist: int) -> None:
    request = wire.decode_request(body(about.names), ROLL)

    assert isinstance(request.nodes, NamesIn)
    assert answered(request, about, shortlist) == expected(about, shortlist)
    scores = wire.encode_scores(request, about.decision(request.nodes), 10)
    assert [entry["Host"] for entry in json.loads(scores)] == about.names


@given(about=requested(), max_score=st.sampled_from([1, 10, 1_000_000]))
def test_scores_are_the_same_with_cut_and_with_encoded_names(about: Asked, max_score: int) -> None:
    cut, encoded = (
        wire.encode_scores(request, about.decision(request.nodes), max_score)
        for request in (
            wire.decode_request(body(about.names), node_index)
            for node_index in (ROLL, EMPTY_NODE_INDEX)
        )
    )

    assert json.loads(cut) == json.loads(encoded)


@given(about=requested(), shortlist=st.sampled_from([0, 100]))
def test_whole_nodes_are_returned_unchanged(about: Asked, shortlist: int) -> None:
    names = list(dict.fromkeys(about.names))
    items = [{"metadata": {"name": name}, "spec": {}} for name in names]
    asking = json.dumps({"Pod": {}, "Nodes": {"items": items}, "NodeNames": None}).encode()

    answer = answered(wire.decode_request(asking, ROLL), about, shortlist)

    plain = expected(about, shortlist)
    passed = plain["NodeNames"]
    assert isinstance(passed, list)
    assert answer == {
        **plain,
        "Nodes": {"items": [item for item in items if item["metadata"]["name"] in passed]},
        "NodeNames": None,
    }


def test_without_a_decision_the_list_is_returned_unchanged() -> None:
    asking = body(FLEET[::-1])

    answer = wire.encode_filter(wire.decode_request(asking, ROLL), None)

    assert json.loads(answer)["NodeNames"] == FLEET[::-1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_returned_with_its_reason(name: str) -> None:
    about = Asked([*FLEET, name], {**dict.fromkeys(FLEET, Code.PASSES), name: Code.NO_MEMORY})

    answer = answered(wire.decode_request(body(about.names), ROLL), about, 0)

    assert answer["FailedNodes"] == {name: f"{Code.NO_MEMORY.text}{SIGNATURE}"}
    assert answer["NodeNames"] == FLEET
