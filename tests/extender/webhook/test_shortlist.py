"""Test that filter returns only the best nodes, and never leaves a pod without a node."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.decision import Decision
from extender.core.decision.filtering import SIGNATURE, Code
from extender.core.decision.scoring import UNITS
from extender.webhook import wire


def decided(codes: list[Code], scores: list[float]) -> tuple[wire.ExtenderRequest, Decision]:
    names = tuple(f"n{index}" for index in range(len(codes)))
    passing = [index for index, code in enumerate(codes) if code is Code.PASSES]
    decision = Decision(
        candidates=names,
        codes=np.array(codes, dtype=np.uint8),
        scores=np.array(scores),
        order=np.array(sorted(passing, key=lambda at: (-scores[at], at)), dtype=np.intp),
    )
    return wire.decode_request(json.dumps({"NodeNames": names}).encode()), decision


def answered(codes: list[Code], scores: list[float], shortlist: int) -> dict[str, object]:
    request, decision = decided(codes, scores)
    answer = json.loads(wire.encode_filter(request, decision, shortlist))
    assert isinstance(answer, dict)
    return answer


def test_the_best_nodes_are_returned_in_the_order_of_the_request() -> None:
    answer = answered([Code.PASSES] * 4, [0.1, 0.9, 0.3, 0.8], shortlist=2)

    assert answer["NodeNames"] == ["n1", "n3"]


VERDICTS = [Code.PASSES, Code.UNHEALTHY, Code.PASSES, Code.NO_MEMORY]


def test_no_reasons_are_given_if_the_shortlist_omits_nodes() -> None:
    answer = answered(VERDICTS, [0.1, 0.9, 0.3, 0.8], shortlist=1)

    assert answer["NodeNames"] == ["n2"]
    assert answer["FailedNodes"] == answer["FailedAndUnresolvableNodes"] == {}


@pytest.mark.parametrize("shortlist", [0, 2])
def test_reasons_are_given_if_the_shortlist_omits_no_node(shortlist: int) -> None:
    answer = answered(VERDICTS, [0.1, 0.9, 0.3, 0.8], shortlist)

    assert answer["NodeNames"] == ["n0", "n2"]
    assert answer["FailedNodes"] == {"n3": f"{Code.NO_MEMORY.text}{SIGNATURE}"}
    assert answer["FailedAndUnresolvableNodes"] == {"n1": f"{Code.UNHEALTHY.text}{SIGNATURE}"}


def test_all_reasons_are_given_if_no_node_passes() -> None:
    answer = answered([Code.UNHEALTHY, Code.NO_MEMORY], [0.1, 0.9], shortlist=1)

    assert answer["NodeNames"] == []
    assert len({**answer["FailedNodes"], **answer["FailedAndUnresolvableNodes"]}) == 2  # type: ignore[dict-item] # objects


@given(
    st.lists(st.tuples(st.sampled_from(Code), st.integers(0, 400)), min_size=1, max_size=30),
    st.integers(0, 12),
    st.booleans(),
)
def test_a_pod_that_some_node_would_take_is_never_left_without_one(
    verdicts: list[tuple[Code, int]], shortlist: int, has_preferences: bool
) -> None:
    codes = [code for code, _ in verdicts]
    scores = [units / UNITS for _, units in verdicts]
    request, decision = decided(codes, scores)

    answer = wire.encode_filter(request, decision, shortlist, has_preferences=has_preferences)
    named = json.loads(answer)["NodeNames"]

    assert bool(named) == (Code.PASSES in codes)
    assert decision.best is None or decision.best in named
    count = min(len(decision.order), shortlist or len(codes))
    if has_preferences and shortlist > 1:
        # kube-scheduler's own scores may lift these above our first choice.
        best = max((verdicts[at][1] for at in decision.order), default=0)
        liftable = {f"n{at}" for at in decision.order if verdicts[at][1] > best - 120}
        assert liftable <= set(named)
        assert len(named) >= count
    else:
        assert len(named) == count
