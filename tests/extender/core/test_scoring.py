"""Which of the nodes that would do is best."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.policy import Strategy, Thresholds
from extender.core.request import GpuRequest
from extender.core.scoring import ENOUGH_SCORE, UNKNOWN_SCORE, WEIGHTS
from tests.builders import (
    STRATEGIES,
    Gpu,
    Node,
    busy,
    decide_on,
    gpu,
    node,
    ranking,
    request,
    score_of,
    shared,
    unknown,
)

SPREAD, PACK = STRATEGIES
IDLE_AT_MOST = gpu(utilization=0.29, memory_used=0.49, stress=1.0, spread=0.5)


def best_first(nodes: dict[str, Node], asked: GpuRequest | None = None) -> list[str]:
    """Return the nodes as they rank, asked about in the order that hides nothing."""
    return ranking(decide_on(nodes, asked, candidates=tuple(sorted(nodes, reverse=True))))


def test_the_weights_sum_to_one() -> None:
    assert sum(WEIGHTS.shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    "doubtful",
    [
        pytest.param(unknown(), id="nothing-known"),
        pytest.param(gpu(freshness=0.0), id="activity-unknown"),
        pytest.param(gpu(memory_freshness=0.0), id="memory-unknown"),
        pytest.param(gpu(freshness=0.5, memory_freshness=0.5), id="stale-good-news"),
        pytest.param(busy(freshness=0.0, memory_freshness=0.0), id="faded-bad-news"),
    ],
)
@pytest.mark.parametrize("thresholds", [Thresholds(), Thresholds(utilization=0.8, memory=0.9)])
def test_unknown_nodes_come_behind_idle_ones_and_ahead_of_busy_ones(
    doubtful: Gpu, count: int, strategy: Strategy, thresholds: Thresholds
) -> None:
    nodes = {
        "a-busy": node(*[gpu(memory_used=0.95)] * 4),
        "b-busy": node(*[gpu(utilization=0.85)] * 4),
        "c-full": node(*[busy(utilization=0.85)] * count, *[gpu(used=1)] * 4),
        "d-unknown": node(*[doubtful] * 4),
        "e-idle": node(*[IDLE_AT_MOST] * count, *[busy()] * 3),
    }

    order = best_first(nodes, request(count, strategy=strategy, thresholds=thresholds))

    assert order[:2] == ["e-idle", "d-unknown"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_that_is_not_known_at_all_ranks_with_the_unknown(strategy: Strategy) -> None:
    asked = request(strategy=strategy, preferred_models=("H100",))
    models = ("", "nvidia h100")

    idle = score_of(node(IDLE_AT_MOST), asked, models=models)
    preferred_but_busy = score_of(node(busy(), model_id=1), asked, models=models)

    assert preferred_but_busy < UNKNOWN_SCORE < idle


@given(
    devices=st.lists(st.sampled_from([gpu(), IDLE_AT_MOST, busy(), unknown()]), min_size=1),
    taken=st.integers(0, 3),
    count=st.integers(1, 4),
    strategy=st.sampled_from(STRATEGIES),
    preferred=st.sampled_from([(), ("H100",), ("A100", "H100")]),
)
def test_only_nodes_with_enough_idle_devices_score_as_such(
    devices: list[Gpu], taken: int, count: int, strategy: Strategy, preferred: tuple[str, ...]
) -> None:
    asked = request(count, strategy=strategy, preferred_models=preferred)
    described = node(*devices[:8], taken=taken, model_id=1)
    needed = min(count, len(described.gpus))

    score = score_of(described, asked, models=("", "nvidia h100"))

    idle = sum(device.freshness == 1 and device.utilization < 0.3 for device in described.gpus)
    assert (score >= ENOUGH_SCORE) == (idle - taken >= needed)


def test_spread_prefers_the_node_with_more_idle_devices() -> None:
    nodes = {name: node(*[gpu()] * int(name)) for name in "2584"}

    assert best_first(nodes, request(2)) == ["8", "5", "4", "2"]


def test_spread_counts_idle_devices_before_load() -> None:
    nodes = {"few": node(*[gpu()] * 2), "many": node(*[gpu(utilization=0.29)] * 3)}

    assert best_first(nodes) == ["many", "few"]


def test_among_as_many_idle_devices_the_lower_load_wins() -> None:
    nodes = {"a": node(gpu(utilization=0.2)), "b": node(gpu(utilization=0.1))}

    assert best_first(nodes) == ["b", "a"]


def test_the_landing_devices_count_not_the_nodes_best_nor_its_mean() -> None:
    """One idle GPU of eight free ones is a small chance; the mean says nothing either."""
    nodes = {
        "lucky": node(gpu(), *[busy()] * 7),
        "sure": node(gpu(utilization=0.2), *[busy(used=1)] * 7),
    }

    assert best_first(nodes) == ["sure", "lucky"]


def test_pack_prefers_the_fullest_node_that_still_has_enough() -> None:
    nodes = {
        "empty": node(*[gpu()] * 8),
        "half": node(*[busy(used=1)] * 4, *[gpu()] * 4),
        "one-left": node(*[busy(used=1)] * 7, gpu()),
    }

    assert best_first(nodes, request(1, strategy=PACK)) == ["one-left", "half", "empty"]
    assert best_first(nodes, request(2, strategy=PACK)) == ["half", "empty", "one-left"]


def test_pack_counts_replicas_of_shared_devices() -> None:
    nodes = {"empty": shared(gpu()), "started": shared(gpu(used=2)), "more": shared(gpu(used=4))}

    assert best_first(nodes, request(strategy=PACK)) == ["more", "started", "empty"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "worse",
    [
        pytest.param(gpu(utilization=0.1), id="utilization"),
        pytest.param(gpu(memory_used=0.1), id="memory"),
        pytest.param(gpu(spread=0.1), id="spread-of-load"),
        pytest.param(gpu(stress=0.5), id="heat-and-throttling"),
        pytest.param(gpu(penalty=0.5), id="ill-health"),
    ],
)
def test_each_smaller_term_costs_something(worse: Gpu, strategy: Strategy) -> None:
    asked = request(strategy=strategy)

    assert score_of(node(worse), asked) < score_of(node(gpu()), asked)


def test_each_tenant_of_a_shared_device_costs_something() -> None:
    scores = [score_of(shared(gpu(used=count))) for count in range(10)]

    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 10


def test_a_further_idle_card_is_worth_nothing_to_a_pod_that_lands_on_the_first() -> None:
    assert score_of(shared(gpu(), gpu(used=9))) == score_of(shared(gpu()))


def test_early_failures_take_their_share() -> None:
    assert score_of(node(suspicion=0.5)) == pytest.approx(score_of(node()) / 2)


def test_the_best_and_the_worst_node_stay_within_bounds() -> None:
    best = score_of(node(*[gpu()] * 16))
    worst = score_of(node(busy(utilization=1.0, memory_used=1.0, spread=0.5, stress=1.0)))

    assert 0.9 < best < 1.0
    assert worst == pytest.approx(0.0, abs=0.001)


MODELS = ("", "nvidia h100 80gb hbm3", "nvidia a100 sxm4 40gb", "tesla v100 sxm2 16gb")


def of_model(model_id: int, *gpus: Gpu) -> Node:
    return node(*(gpus or (gpu(),)), model_id=model_id)


def prefer(nodes: dict[str, Node], *models: str) -> list[str]:
    asked = request(preferred_models=models)
    return ranking(decide_on(nodes, asked, models=MODELS))


def test_models_are_preferred_in_the_order_of_the_pods_list() -> None:
    nodes = {
        "other": of_model(0, gpu(), gpu()),
        "v": of_model(3),
        "a": of_model(2),
        "h": of_model(1),
    }

    assert prefer(nodes, "H100", "A100", "V100") == ["h", "a", "v", "other"]


def test_an_idle_node_comes_before_a_busy_one_of_a_preferred_model() -> None:
    nodes = {
        "busy-h": of_model(1, busy()),
        "idle-v": of_model(3),
        "busy-a": of_model(2, busy()),
        "idle-other": of_model(0),
    }

    assert prefer(nodes, "H100", "A100", "V100") == ["idle-v", "idle-other", "busy-h", "busy-a"]


def test_the_order_of_models_comes_before_the_number_of_idle_devices() -> None:
    assert prefer({"a": of_model(2, *[gpu()] * 8), "h": of_model(1)}, "H100") == ["h", "a"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_that_is_full_by_our_count_comes_behind_one_with_room(strategy: Strategy) -> None:
    nodes = {
        "full": node(*[gpu()] * 8, taken=8),
        "room": node(*[gpu(utilization=0.25)] * 8, taken=7),
    }

    assert best_first(nodes, request(strategy=strategy)) == ["room", "full"]


@pytest.mark.parametrize("readings", [10, 60, 1000])
def test_a_window_without_its_one_idle_moment_scores_no_higher(readings: int) -> None:
    """The mean rises and the spread falls; together they are no less load."""
    loads = np.full(readings, 0.2)
    calmer = loads.copy()
    calmer[0] = 0.0

    steady, once_idle = (
        score_of(shared(gpu(utilization=float(each.mean()), spread=float(each.std()))))
        for each in (loads, calmer)
    )

    assert steady <= once_idle
