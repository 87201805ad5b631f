import json
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.decision import Decision
from extender.core.decision.filtering import Code
from extender.core.decision.scoring import UNITS
from extender.webhook import wire

ARGS = {"Pod": None, "Nodes": None, "NodeNames": None}


def decode(document: object) -> wire.ExtenderRequest:
    return wire.decode_request(json.dumps(document).encode())


def verdict(*codes: Code, scores: tuple[float, ...] | None = None) -> Decision:
    """Return a decision about this many candidates, named by letters."""
    passing = [index for index, code in enumerate(codes) if code is Code.PASSES]
    values = np.array(scores or [0.5] * len(codes))
    return Decision(
        candidates=tuple("abcdefgh"[: len(codes)]),
        codes=np.array(codes, dtype=np.uint8),
        scores=values,
        order=np.array(sorted(passing, key=lambda at: -values[at]), dtype=np.intp),
    )


def asked_about(nodes: Sequence[str]) -> wire.ExtenderRequest:
    return wire.ExtenderRequest(pod={}, nodes=nodes, node_objects=None)


def scores(decision: Decision | None, max_score: int = 10) -> list[int]:
    nodes = decision.candidates if decision else ("a", "b")
    answer = json.loads(wire.encode_scores(asked_about(nodes), decision, max_score))
    assert [entry["Host"] for entry in answer] == list(nodes)
    return [entry["Score"] for entry in answer]


# --- filter ---------------------------------------------------------------------------------------


def test_names_are_returned_in_the_order_of_the_request() -> None:
    request = decode({"NodeNames": ["c", "a", "b"]})

    decided = replace(verdict(*[Code.PASSES] * 3), candidates=request.nodes)
    answer = json.loads(wire.encode_filter(request, decided))

    assert answer == {
        "Nodes": None,
        "NodeNames": ["c", "a", "b"],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }


def test_refused_nodes_are_kept_apart_by_whether_preemption_could_help() -> None:
    request = decode({"NodeNames": list("abcd")})
    decision = verdict(Code.UNHEALTHY, Code.PASSES, Code.NO_MEMORY, Code.FOREIGN_USE)

    answer = json.loads(wire.encode_filter(request, decision))

    assert answer["NodeNames"] == ["b"]
    assert answer["FailedNodes"] == {"c": "node(s) had too little free GPU memory (idlegpu)"}
    assert answer["FailedAndUnresolvableNodes"] == {
        "a": "node(s) had too few working GPUs (idlegpu)",
        "d": "node(s) had GPUs in use by processes outside Kubernetes (idlegpu)",
    }


@pytest.mark.parametrize("code", [code for code in Code if code])
def test_a_reason_contains_no_node_data_and_no_format_verb(code: Code) -> None:
    assert code.rejection is not None
    assert "%" not in code.text
    assert not any(character.isdigit() for character in code.text)


def test_an_answer_without_feasible_nodes_has_an_empty_list() -> None:
    by_name = wire.encode_filter(decode({"NodeNames": ["a"]}), verdict(Code.UNHEALTHY))
    whole = wire.encode_filter(
        decode({"Nodes": {"items": [{"metadata": {"name": "a"}}]}}), verdict(Code.UNHEALTHY)
    )

    assert b'"NodeNames":[]' in by_name
    assert b'"Nodes":null' in by_name
    assert b'"Nodes":{"items":[]}' in whole
    assert b'"NodeNames":null' in whole


def test_whole_nodes_are_returned_byte_for_byte() -> None:
    first = (
        '{ "metadata": {"name":"a", "name2":"\\u00e9\\/"},\n "big": 18446744073709551617,'
        ' "tiny":1e-400, "huge":1E400, "exact":0.10000000000000000555, "zero":-0.0 ,'
        ' "twice":1,"twice":2}'
    )
    second = '{"metadata":{"name":"b"}}'
    body = f'{{"Nodes":{{"items":[{first} , {second}]}}}}'.encode()

    answer = wire.encode_filter(wire.decode_request(body), None)

    assert f'"Nodes":{{"items":[{first},{second}]}}'.encode() in answer


@pytest.mark.parametrize("error", ["100%", "%s %d %!v(MISSING)"])
def test_an_error_contains_no_format_verb(error: str) -> None:
    answer = json.loads(wire.encode_filter_error(error))

    assert answer["Error"]
    assert "%" not in answer["Error"]
    assert answer["Nodes"] is None
    assert answer["NodeNames"] is None


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_score", [1, 2, 10, 100, 1_000_000])
def test_only_the_first_choice_has_the_highest_score_even_among_equals(max_score: int) -> None:
    answer = scores(verdict(*[Code.PASSES] * 4, scores=(1.0,) * 4), max_score)

    assert answer[0] == max_score
    assert max(answer[1:]) < max_score


def test_scores_are_relative_to_the_first_choice_in_units_of_the_score() -> None:
    behind = (0, 0, 4, 80, 160, 396.5, 100_000)
    values = tuple((200_000 - units) / UNITS for units in behind)

    assert scores(verdict(*[Code.PASSES] * 7, scores=values), 400) == [
        400, 398, 394, 318, 238, 1, 1,
    ]  # fmt: skip


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(2, 1000))
def test_no_feasible_node_scores_zero(values: list[float], max_score: int) -> None:
    answer = scores(verdict(*[Code.PASSES] * len(values), scores=tuple(values)), max_score)

    assert min(answer) >= 1


def test_a_single_candidate_has_the_highest_score() -> None:
    assert scores(verdict(Code.PASSES, scores=(0.0,))) == [10]


def test_no_candidates_have_no_scores() -> None:
    assert scores(verdict()) == []


def test_refused_nodes_score_zero() -> None:
    codes = (Code.UNHEALTHY, Code.PASSES, Code.NO_MEMORY)

    assert scores(verdict(*codes, scores=(0.9, 0.2, 0.9))) == [0, 10, 0]
    assert scores(verdict(*[Code.BUSY] * 3)) == [0, 0, 0]


def test_without_a_decision_every_score_is_0() -> None:
    assert scores(None) == [0, 0]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=8),
    st.integers(min_value=1, max_value=1000),
)
def test_scores_are_integers_within_bounds_in_the_order_of_the_ranking(
    candidates: list[tuple[float, bool]], max_score: int
) -> None:
    decision = verdict(
        *[Code.PASSES if passes else Code.UNHEALTHY for _, passes in candidates],
        scores=tuple(value for value, _ in candidates),
    )

    answer = scores(decision, max_score)

    assert all(type(value) is int and 0 <= value <= max_score for value in answer)
    ranked = [answer[at] for at in decision.order]
    assert ranked == sorted(ranked, reverse=True)
    assert ranked.count(max_score) == min(len(ranked), 1)
    assert all(not answer[at] for at, (_, passes) in enumerate(candidates) if not passes)


@given(st.lists(st.text(), unique=True, max_size=20))
def test_any_name_is_returned_unchanged(names: list[str]) -> None:
    request = wire.decode_request(msgspec.json.encode({"NodeNames": names}))

    assert json.loads(wire.encode_filter(request, None))["NodeNames"] == names
    assert [entry["Host"] for entry in json.loads(wire.encode_scores(request, None, 10))] == names
