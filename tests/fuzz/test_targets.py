"""Every decoder answers every body with a typed error or rightly: the corpus and the like."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.corpus import corpus
from tests.fuzz.targets import NAMES, Target, judged, targets

BODIES = corpus()


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, Target]]:
    with asyncio.Runner() as runner:
        yield request.param, judged(targets(runner)[request.param]())


def test_the_corpus_is_judged_and_some_of_it_understood(named: tuple[str, Target]) -> None:
    name, target = named

    assert sum(map(target, BODIES[name]))  # all of them


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_bodies_near_the_corpus_are_judged(named: tuple[str, Target], data: st.DataObject) -> None:
    name, target = named
    body = bytearray(data.draw(st.sampled_from(BODIES[name])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        length = data.draw(st.sampled_from([0, 1, 2, 20]))
        body[at : at + length] = data.draw(st.binary(max_size=4) | st.sampled_from(_PIECES))

    target(bytes(body))


_PIECES = (b"null", b"[]", b"{}", b'"a"', b"-1", b"1e400", b'"\\ud800"', b"[" * 300, b",", b":")
