"""What is kept of the requests of the last minutes is brought up to date in small steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from extender.core.decision import cached_evaluation
from extender.core.decision.evaluation import evaluate_for
from extender.core.memo import Memo
from extender.core.steps import Steps, finish
from extender.fleet.snapshots import REFRESH_SECONDS
from extender.placement import evaluation_cache
from extender.placement.evaluation_cache import EXPECTED, EXPECTED_SECONDS
from testkit.builders import pod_ref, request
from testkit.world import World


@pytest.fixture
def world() -> World:
    world = World(in_steps=True)
    for number in range(3):
        world.add_node(f"node-{number}", 4)
    world.read()
    return world


@pytest.fixture
def pools_evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how many nodes are evaluated each time that a whole pool is."""
    counted: list[int] = []
    evaluate: Callable[..., Any] = evaluate_for

    def count(question: Any, batch: Any, *rest: Any) -> Any:
        counted.append(len(batch))
        return evaluate(question, batch, *rest)

    monkeypatch.setattr(cached_evaluation, "evaluate_for", count)
    return counted


@pytest.fixture
def rows_evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how many rows are evaluated each time that some are because they changed."""
    counted: list[int] = []
    batch_under: Callable[..., Any] = cached_evaluation.batch_under

    def count(snapshot: Any, pool: Any, rows: Any) -> Any:
        counted.append(len(rows))
        return batch_under(snapshot, pool, rows)

    monkeypatch.setattr(cached_evaluation, "batch_under", count)
    return counted


def most_at_once(steps: Steps[None], counted: list[int]) -> int:
    """Do some work; return how many pools were evaluated at most in one of its steps."""
    most = 0
    for _ in steps:
        most = max(most, len(counted))
        counted.clear()
    return most


def test_what_no_renewal_prepared_is_evaluated_one_request_in_each_step(
    world: World, pools_evaluated: list[int]
) -> None:
    for count in (1, 2, 3):
        world.rank(request(count))
    world.clock.now += REFRESH_SECONDS
    finish(world.fleet.refresh_in_steps())
    pools_evaluated.clear()

    assert most_at_once(world.placer.evaluation_cache.warm_in_steps(), pools_evaluated) == 1

    for count in (1, 2, 3):
        world.rank(request(count))
    assert not pools_evaluated


def test_who_asks_between_the_steps_gets_what_is_so_by_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 2, 3):
        world.rank(request(count))
    world.clock.now += REFRESH_SECONDS
    finish(world.fleet.refresh_in_steps())

    for number, _ in enumerate(world.placer.evaluation_cache.warm_in_steps()):
        world.place(f"pod-{number}", request(2))

    names = sorted(world.fleet.nodes)
    for count in (1, 2, 3):
        warm = world.placer.rank(request(count), names)
        with monkeypatch.context() as patch:
            patch.setattr(Memo, "get", lambda _, __, make: make())
            afresh = finish(world.placer.guess_in_steps(request(count), names))
        assert warm.scores.tolist() == afresh.scores.tolist()


def test_what_has_changed_is_evaluated_for_all_requests_together_before_the_next_pod_asks(
    world: World, rows_evaluated: list[int]
) -> None:
    for count in (1, 2, 3):
        world.rank(request(count))
    world.place("another", request(1))
    rows_evaluated.clear()

    finish(world.placer.evaluation_cache.warm_in_steps())
    assert rows_evaluated == [3]

    for count in (1, 2, 3):
        world.rank(request(count))
    assert rows_evaluated == [3]


def test_what_prioritize_asks_was_evaluated_for_filter_though_another_pod_asked_meanwhile(
    world: World, rows_evaluated: list[int]
) -> None:
    names = tuple(world.fleet.nodes)
    world.placer.place("filter", pod_ref("a"), request(1), names)
    world.rank(request(1))
    rows_evaluated.clear()

    world.placer.place("prioritize", pod_ref("a"), request(1), names)

    assert rows_evaluated == []


def expect(world: World, *counts: int) -> None:
    """Let somebody be expected to ask for so many devices each."""
    for count in counts:
        finish(world.placer.evaluation_cache.expect_in_steps(request(count)))


def test_who_was_expected_finds_all_evaluated(world: World, pools_evaluated: list[int]) -> None:
    expect(world, 2)
    world.place("another", request(1))
    pools_evaluated.clear()

    warm = world.rank(request(2))

    assert not pools_evaluated
    afresh = finish(world.placer.guess_in_steps(request(2), sorted(world.fleet.nodes)))
    assert warm.scores.tolist() == afresh.scores.tolist()


def test_what_is_kept_already_is_not_evaluated_for_who_is_expected(
    world: World, pools_evaluated: list[int]
) -> None:
    world.rank(request(1))
    expect(world, 2)
    pools_evaluated.clear()

    expect(world, 1, 2)

    assert not pools_evaluated


def test_so_many_are_expected_at_once_until_they_ask_or_their_time_is_up(
    world: World, pools_evaluated: list[int]
) -> None:
    expect(world, *range(1, EXPECTED + 1))
    pools_evaluated.clear()

    expect(world, 100)
    assert not pools_evaluated

    world.rank(request(1))
    expect(world, 100)
    assert len(pools_evaluated) == 1

    world.clock.now += EXPECTED_SECONDS
    expect(world, 101)
    assert len(pools_evaluated) == 2


def test_who_was_expected_first_loses_the_place_first(
    world: World, pools_evaluated: list[int]
) -> None:
    expect(world, 1)
    world.clock.now += EXPECTED_SECONDS / 2
    expect(world, *range(2, EXPECTED + 1))
    world.clock.now += EXPECTED_SECONDS / 2
    expect(world, 100)
    pools_evaluated.clear()

    expect(world, *range(2, EXPECTED + 1))
    assert not pools_evaluated
    expect(world, 1)
    assert not pools_evaluated  # all places are taken
    world.rank(request(1))
    assert len(pools_evaluated) == 1


def test_a_pod_that_is_nominated_finds_what_others_of_its_request_were_evaluated_for(
    world: World, pools_evaluated: list[int]
) -> None:
    world.rank(request(1))
    pools_evaluated.clear()

    world.rank(replace(request(1), nominated_node="node-1"))

    assert not pools_evaluated


def test_who_asks_while_it_is_evaluated_gets_what_is_so_by_then(world: World) -> None:
    steps = world.placer.evaluation_cache.expect_in_steps(request(2))
    next(steps)
    world.place("another", request(1))

    warm = world.rank(request(2))
    finish(steps)

    afresh = finish(world.placer.guess_in_steps(request(2), sorted(world.fleet.nodes)))
    for found in (warm, world.rank(request(2))):
        assert found.scores.tolist() == afresh.scores.tolist()


def test_what_a_renewal_prepares_is_not_evaluated_again(
    world: World, pools_evaluated: list[int]
) -> None:
    for count in (1, 2, 3):
        world.rank(request(count))
    world.clock.now += REFRESH_SECONDS
    pools_evaluated.clear()

    finish(world.fleet.refresh_in_steps(world.placer.evaluation_cache.prepare_in_steps))

    assert len(pools_evaluated) == 3
    pools_evaluated.clear()
    for count in (1, 2, 3):
        world.rank(request(count))
    assert not pools_evaluated


def test_what_was_asked_for_longest_ago_is_forgotten_first(
    world: World, pools_evaluated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_cache, "CACHED_EVALUATIONS", 2)
    for count in (1, 2, 1, 3):
        world.rank(request(count))
    pools_evaluated.clear()

    for count in (1, 3):
        world.rank(request(count))
    assert not pools_evaluated

    world.rank(request(2))
    assert len(pools_evaluated) == 1
