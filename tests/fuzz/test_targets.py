"""Every target passes for the corpus and for variants of it."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.webhook import wire
from tests.fuzz.corpus import corpus
from tests.fuzz.judging import FaultError, Target, judged
from tests.fuzz.targets import NAMES, targets

BODIES = corpus()


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, Target]]:
    with asyncio.Runner() as runner:
        yield request.param, judged(targets(runner)[request.param]())


def test_the_corpus_is_judged_and_some_of_it_understood(named: tuple[str, Target]) -> None:
    name, target = named

    assert sum(map(target, BODIES[name]))  # all of them


@given(data=st.data())
def test_bodies_near_the_corpus_are_judged(named: tuple[str, Target], data: st.DataObject) -> None:
    name, target = named
    body = bytearray(data.draw(st.sampled_from(BODIES[name])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        length = data.draw(st.sampled_from([0, 1, 2, 20]))
        body[at : at + length] = data.draw(st.binary(max_size=4) | st.sampled_from(_PIECES))

    target(bytes(body))


_PIECES = (b"null", b"[]", b"{}", b'"a"', b"-1", b"1e400", b'"\\ud800"', b"[" * 300, b",", b":")


def _no_node(answer: Any) -> Any:
    return answer | {"NodeNames": answer["NodeNames"] and [], "Nodes": answer["Nodes"] and {}}


def _all_fail(answer: Any) -> Any:
    return _no_node(answer) | {"FailedNodes": dict.fromkeys(answer["NodeNames"] or (), "full")}


def _huge(answer: Any) -> Any:
    return [*answer[:-1], *(entry | {"Score": 10**9} for entry in answer[-1:])]


def _no_victims(answer: Any) -> Any:
    nodes = answer["NodeNameToMetaVictims"]
    return {"NodeNameToMetaVictims": {node: each | {"Pods": []} for node, each in nodes.items()}}


WRONG: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "no node passes": ("filter", "encode_filter", _no_node),
    "all nodes are refused": ("filter", "encode_filter", _all_fail),
    "a node passes twice": (
        *("filter", "encode_filter"),
        lambda answer: answer | {"NodeNames": (answer["NodeNames"] or []) * 2},
    ),
    "nodes in another order": (
        *("filter", "encode_filter"),
        lambda answer: answer | {"NodeNames": (answer["NodeNames"] or [])[::-1]},
    ),
    "the other form": (
        *("filter", "encode_filter"),
        lambda answer: answer | {"NodeNames": [], "Nodes": {"items": []}},
    ),
    "no scores": ("prioritize", "encode_scores", lambda _: []),
    "a huge score": ("prioritize", "encode_scores", _huge),
    "a host twice": ("prioritize", "encode_scores", lambda answer: answer * 2),
    "all scores are 0": (
        *("prioritize", "encode_scores"),
        lambda answer: [entry | {"Score": 0} for entry in answer],
    ),
    "no candidate": ("preempt", "encode_preemption", lambda _: {"NodeNameToMetaVictims": {}}),
    "no victims": ("preempt", "encode_preemption", _no_victims),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, encoder, change = WRONG[wrong]
    encode = getattr(wire, encoder)

    def changed(*given: Any, **rest: Any) -> bytes:
        return json.dumps(change(json.loads(encode(*given, **rest)))).encode()

    monkeypatch.setattr(wire, encoder, changed)
    with asyncio.Runner() as runner:
        target = targets(runner)[verb]()
        assert sum(_is_noticed(target, body) for body in BODIES[verb])


def _is_noticed(target: Target, body: bytes) -> bool:
    try:
        target(body)
    except FaultError:
        return True
    return False
