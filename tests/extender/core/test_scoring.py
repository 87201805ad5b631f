"""Ranking of feasible nodes."""

from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.scoring import (
    _WEIGHTS,
    FIT,
    KINDS,
    UNITS,
    score,
    unknown_score,
    weighs_stranded,
)
from extender.core.policy import Strategy, Thresholds, Weights
from extender.core.request.request import GpuRequest
from testkit.builders import (
    GIB,
    STRATEGIES,
    Gpu,
    Node,
    assessment_of,
    batch_of,
    busy,
    decide_on,
    freed,
    gpu,
    node,
    ranking,
    request,
    score_of,
    shared,
    unknown,
)

AUTO, SPREAD, PACK = STRATEGIES
LIKELY, UNKNOWN = 2 / 3, 1 / 3
"""Lowest scores of nodes that likely (or possibly) have idle devices for the pod."""
IDLE_AT_MOST = gpu(utilization=0.29, memory_used=0.49, stress=1.0, next_hour=1.0)


def best_first(nodes: dict[str, Node], requested: GpuRequest | None = None) -> list[str]:
    """Return the nodes by rank, with candidates in the opposite order, so that ties show."""
    return ranking(decide_on(nodes, requested, candidates=tuple(sorted(nodes, reverse=True))))


def test_the_weights_sum_to_one() -> None:
    assert sum(_WEIGHTS.shares.values()) == pytest.approx(1.0)


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
        "d-doubtful": node(*[doubtful] * 4),
        "e-idle": node(*[IDLE_AT_MOST] * count, *[busy(used=1)] * 3),
    }

    order = best_first(nodes, request(count, strategy=strategy, thresholds=thresholds))

    assert order[:2] == ["e-idle", "d-doubtful"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_node_that_is_not_known_at_all_ranks_with_the_unknown(strategy: Strategy) -> None:
    requested = request(strategy=strategy, preferred_models=("H100",))
    models = ("", "nvidia h100")

    idle = score_of(node(IDLE_AT_MOST), requested, models=models)
    preferred_but_busy = score_of(node(busy(), model_id=1), requested, models=models)

    assert preferred_but_busy < unknown_score(0) < idle


@given(
    devices=st.lists(
        st.sampled_from([gpu(), IDLE_AT_MOST, busy(), unknown(), freed()]), min_size=1
    ),
    count=st.integers(1, 4),
    strategy=st.sampled_from(STRATEGIES),
    preferred=st.sampled_from([(), ("H100",), ("A100", "H100")]),
)
def test_nodes_score_by_the_chance_that_all_devices_are_idle(
    devices: list[Gpu], count: int, strategy: Strategy, preferred: tuple[str, ...]
) -> None:
    requested = request(count, strategy=strategy, preferred_models=preferred)
    described = node(*devices[:8], model_id=1)
    needed = min(count, len(described.gpus))

    score = score_of(described, requested, models=("", "nvidia h100"))

    choices = list(combinations([chance_of(device) for device in described.gpus], needed))
    each = (sum(map(prod, choices)) / len(choices)) ** (1 / needed)
    assert (score >= LIKELY) == (each > 2 / 3 - 1e-9)
    assert (score >= UNKNOWN) == (each > 1 / 3 - 1e-9)


def chance_of(device: Gpu) -> float:
    """Return the probability that one device is idle."""
    if device.presumed:
        return 0.95
    return 0.5 if not device.freshness else float(device.utilization < 0.3)


# --- certainty first: situations ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("count", "better", "worse"),
    [
        pytest.param(
            1,
            node(*[gpu()] * 3, *[busy(used=1)] * 5),
            node(*[gpu()] * 6, *[gpu(is_foreign=True)] * 2),
            id="three-idle-before-eight-of-which-docker-uses-two",
        ),
        pytest.param(
            2,
            node(*[gpu()] * 2, *[busy(used=1)] * 6),
            node(*[gpu()] * 6, *[gpu(is_excluded=True)] * 2),
            id="two-idle-before-eight-with-two-failed-row-remaps",
        ),
        pytest.param(
            1,
            node(*[unknown()] * 8),
            node(gpu(), *[gpu(is_excluded=True)] * 7),
            id="a-silent-node-before-seven-broken-of-eight",
        ),
        pytest.param(
            4,
            node(*[unknown()] * 8),
            node(*[gpu()] * 4, *[busy()] * 4),
            id="a-silent-node-before-four-busy-of-eight-for-four",
        ),
        pytest.param(
            1,
            node(*[gpu(utilization=0.25)] * 2, *[busy(used=1)] * 6),
            node(*[gpu()] * 7, gpu(is_excluded=True)),
            id="no-broken-one-where-none-is-possible",
        ),
        pytest.param(1, node(gpu()), node(freed()), id="known-idle-a-shade-before-just-freed"),
        pytest.param(1, node(freed()), node(unknown()), id="just-freed-before-a-silent-node"),
        pytest.param(
            4, node(*[freed()] * 4), node(*[unknown()] * 8), id="four-just-freed-before-silent-ones"
        ),
        pytest.param(1, node(gpu()), node(gpu(penalty=0.25)), id="healthy-before-ill-as-idle"),
        pytest.param(
            8,
            node(*[unknown()] * 8),
            node(*[unknown()] * 8, suspicion=0.5),
            id="early-failures-count-among-the-unknown-too",
        ),
    ],
)
def test_certainty_comes_first(count: int, better: Node, worse: Node, strategy: Strategy) -> None:
    assert best_first({"b": better, "a": worse}, request(count, strategy=strategy)) == ["b", "a"]


CROWDED, DEAD = gpu(used=3, utilization=0.25), gpu(is_excluded=True)


@pytest.mark.parametrize("strategy", [Strategy.AUTO, Strategy.SPREAD])
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param([CROWDED] * 4, [*[gpu()] * 3, DEAD], id="one-of-four"),
        pytest.param([CROWDED] * 16, [*[gpu()] * 15, DEAD], id="one-of-sixteen"),
        pytest.param([busy(used=3)] * 8, [gpu(), *[DEAD] * 7], id="seven-of-eight-before-busy"),
        pytest.param([busy(used=3)] * 8, [*[busy()] * 7, DEAD], id="busy-ones"),
        pytest.param([unknown(used=3)] * 8, [*[unknown()] * 7, DEAD], id="unknown-ones"),
        pytest.param([*[gpu()] * 7, DEAD], [*[gpu()] * 6, *[DEAD] * 2], id="the-fewer"),
        pytest.param(
            [*[gpu(utilization=0.2)] * 7, DEAD],
            [*[gpu(utilization=0.21)] * 7, DEAD],
            id="the-load-of-those-that-work",
        ),
    ],
)
def test_idle_shared_cards_do_not_offset_broken_ones(
    better: list[Gpu], worse: list[Gpu], strategy: Strategy
) -> None:
    nodes = {"b": shared(*better, replicas=4), "a": shared(*worse, replicas=4)}

    assert best_first(nodes, request(strategy=strategy)) == ["b", "a"]


def test_the_load_of_broken_cards_counts_for_nothing() -> None:
    cold = shared(gpu(utilization=0.2), DEAD)
    warm = shared(gpu(utilization=0.2), replace(DEAD, utilization=0.9))

    assert score_of(cold) == score_of(warm)


# --- the number -----------------------------------------------------------------------------------


def digits_of(score: float) -> tuple[int, int, int, int, Any]:
    """Return band, model, room, certainty, and units of fit of a score."""
    whole, units = divmod(round(score * UNITS, 4), FIT)
    rest, certain = divmod(int(whole), 17)
    rest, room = divmod(rest, 17)
    band, model = divmod(rest, 17)
    return band, model, room, certain, pytest.approx(units, abs=0.0002)


CALM = 0.003
"""Units of an idle device's load beside the fit of whole devices."""


@pytest.mark.parametrize(
    ("described", "requested", "digits"),
    [
        pytest.param(node(gpu()), request(), (2, 16, 16, 16, 80 + CALM), id="none-left"),
        pytest.param(node(*[gpu()] * 8), request(), (2, 16, 16, 16, 52 + CALM), id="seven-left"),
        pytest.param(
            node(*[gpu()] * 33), request(), (2, 16, 16, 16, 8 + CALM), id="many-instances-left"
        ),
        pytest.param(
            node(*[gpu()] * 8, free_millicores=20_000),
            request(millicores=8_000),
            (2, 16, 16, 16, 76 + CALM),
            id="cpu-for-one-more",
        ),
        pytest.param(
            node(*[gpu()] * 8, free_millicores=20_000),
            request(millicores=8_000, strategy=PACK),
            (2, 16, 16, 16, 52 + CALM),
            id="pack-counts-devices-only",
        ),
        pytest.param(
            node(*[gpu()] * 8), request(strategy=SPREAD), (2, 16, 16, 16, 32 + CALM), id="spread"
        ),
        pytest.param(
            node(gpu(), gpu(), unknown(), busy()),
            request(strategy=SPREAD),
            (1, 16, 16, 10, 10 + 0.8375 * CALM),
            id="spread-counts-half-of-unknown",
        ),
        pytest.param(
            node(gpu(), gpu(), busy(), busy()),
            request(),
            (1, 16, 16, 8, 68 + 0.7625 * CALM),
            id="half-busy",
        ),
        pytest.param(node(gpu(), suspicion=0.5), request(), (2, 16, 16, 8, 80 + CALM), id="failed"),
        pytest.param(
            node(gpu(penalty=0.5), suspicion=0.5),
            request(),
            (2, 16, 16, 4, 80 + CALM),
            id="unhealthy-and-failed",
        ),
        pytest.param(
            shared(gpu(used=2)), request(), (2, 16, 16, 11, 160 * (1 - 0.4 * 0.2)), id="shared"
        ),
        pytest.param(
            shared(gpu(utilization=0.3, next_hour=0.5, stress=0.5, memory_used=0.2)),
            request(),
            (2, 16, 16, 11, 160 * (1 - 0.05 * 0.3 - 0.25 * 0.2 - 0.25 * 0.5 - 0.05 * 0.5)),
            id="each-term-of-the-load",
        ),
        pytest.param(
            shared(gpu(used=2)),
            request(strategy=PACK),
            (2, 16, 16, 11, 80 - 4 * 0.7 + 0.92 * CALM),
            id="shared-packed",
        ),
        pytest.param(
            shared(gpu(), gpu(), gpu(), DEAD), request(), (2, 16, 16, 8, 160), id="one-of-four-dead"
        ),
    ],
)
def test_score_is_the_number_of_the_decision_page(
    described: Node, requested: GpuRequest, digits: tuple[int, int, int, int, float]
) -> None:
    assert digits_of(score_of(described, requested)) == digits


@pytest.mark.parametrize(
    ("described", "strategy", "stranded", "fit"),
    [
        (node(*[gpu()] * 8), AUTO, 1.0, 52 + 16 * 1.5 + CALM),
        (node(*[gpu()] * 8), AUTO, -9.0, 52 + 16 * 5.0 + CALM),
        (node(*[gpu()] * 8), AUTO, 9.0, 52 + CALM),
        (node(*[gpu()] * 8), SPREAD, 1.0, 32 + CALM),
        (shared(gpu()), AUTO, 1.0, 160),
        (shared(gpu()), PACK, 1.0, 0.08 * (80 - 4 * 0.9) + 16 * 3.5 + CALM),
    ],
)
def test_stranded_devices_and_price_add_units(
    described: Node, strategy: Strategy, stranded: float, fit: float
) -> None:
    one = np.array([KINDS[strategy]])

    def units(cheapness: float) -> float:
        scores, _ = score(
            batch_of(described),
            assessment_of(described),
            one,
            np.array([16]),
            np.array([0.0]),
            cheapness=cheapness,
            stranded=np.array([stranded]),
        )
        return float(scores[0]) * UNITS % FIT

    assert (units(0.0), units(0.5)) == pytest.approx((fit, fit + 60), abs=0.0002)


@pytest.mark.parametrize(
    ("nodes", "strategies", "expected"),
    [
        ((node(), node()), (SPREAD, AUTO), True),
        ((node(), node()), (SPREAD, SPREAD), False),
        ((shared(), node()), (AUTO, AUTO), True),
        ((shared(), shared()), (AUTO, SPREAD), False),
        ((shared(), shared()), (AUTO, PACK), True),
    ],
)
def test_stranded_devices_count_if_they_do_for_one_node(
    nodes: tuple[Node, ...], strategies: tuple[Strategy, ...], *, expected: bool
) -> None:
    kinds = np.array([KINDS[strategy] for strategy in strategies])

    assert weighs_stranded(batch_of(*nodes), kinds) is expected


def test_an_unknown_node_has_half_of_the_certainty() -> None:
    assert digits_of(unknown_score(3)) == (1, 3, 16, 8, 0)


# --- fit ------------------------------------------------------------------------------------------


def test_auto_leaves_as_few_whole_devices_over_as_it_can() -> None:
    nodes = {name: node(*[gpu()] * int(name)) for name in "2584"}

    assert best_first(nodes, request(2)) == ["2", "4", "5", "8"]


def test_devices_without_cpu_memory_or_storage_are_no_room() -> None:
    nodes = {
        "storage": node(*[gpu()] * 8, free_storage_bytes=int(150 * GIB)),
        "cpu": node(*[gpu()] * 6, free_millicores=15_000),
        "memory": node(*[gpu()] * 7, free_bytes=int(45 * GIB)),
        "three": node(*[gpu()] * 3, free_millicores=64_000),
    }
    requested = request(1, millicores=8_000, host_bytes=int(10 * GIB))
    stored = request(1, storage_bytes=int(100 * GIB))

    assert best_first(nodes, requested) == ["cpu", "three", "memory", "storage"]
    assert best_first(nodes, stored) == ["storage", "three", "cpu", "memory"]
    assert best_first(nodes, request(1)) == ["three", "cpu", "memory", "storage"]


def test_auto_puts_a_share_where_the_card_is_the_least_loaded() -> None:
    nodes = {
        "busier": shared(gpu(utilization=0.29, used=1)),
        "fuller": shared(gpu(utilization=0.1, memory_used=0.4, used=1)),
        "calm": shared(gpu(utilization=0.1, used=2)),
    }

    assert best_first(nodes)[0] == "calm"


def test_fewer_tenants_break_ties_between_equally_busy_cards() -> None:
    """Activity is at most 100 %; the number of active tenants decides each tenant's share."""
    nodes = {
        "three": shared(busy(used=3), replicas=4),
        "one": shared(busy(utilization=1.0, used=1), replicas=4),
    }

    assert best_first(nodes) == ["one", "three"]


def test_of_many_instances_the_fewest_left_over_come_first_too() -> None:
    nodes = {f"{left:02}": node(*[gpu()] * left) for left in (56, 17, 30, 55, 16)}

    assert best_first(nodes) == ["16", "17", "30", "55", "56"]


def test_spread_prefers_the_node_with_more_idle_devices() -> None:
    nodes = {name: node(*[gpu()] * int(name)) for name in "2584"}

    assert best_first(nodes, request(2, strategy=SPREAD)) == ["8", "5", "4", "2"]


def test_spread_counts_idle_devices_before_load() -> None:
    nodes = {"few": node(*[gpu()] * 2), "many": node(*[gpu(utilization=0.29)] * 3)}

    assert best_first(nodes, request(strategy=SPREAD)) == ["many", "few"]


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
        pytest.param(gpu(next_hour=0.1), id="next-hour"),
        pytest.param(gpu(stress=0.5), id="heat-and-throttling"),
        pytest.param(gpu(penalty=0.5), id="ill-health"),
    ],
)
def test_each_smaller_term_costs_something(worse: Gpu, strategy: Strategy) -> None:
    requested = request(strategy=strategy)

    assert score_of(node(worse), requested) < score_of(node(gpu()), requested)


def test_each_tenant_of_a_shared_device_costs_something() -> None:
    scores = [score_of(shared(gpu(used=count))) for count in range(10)]

    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 10


def test_extra_idle_cards_add_no_score() -> None:
    assert score_of(shared(gpu(), gpu(used=9))) == score_of(shared(gpu()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_best_and_the_worst_node_stay_within_bounds(strategy: Strategy) -> None:
    requested = request(strategy=strategy, preferred_models=("H100",))
    models = ("", "nvidia h100")
    worst_gpu = busy(utilization=1.0, memory_used=1.0, stress=1.0)

    best = score_of(node(*[gpu()] * 16, model_id=1), requested, models=models)
    worst = score_of(node(*[worst_gpu] * 16), requested, models=models)

    assert 0.99 < best < 1.0
    assert 0.0 <= worst < 0.02  # it has the requested memory: 0


MODELS = ("", "nvidia h100 80gb hbm3", "nvidia a100 sxm4 40gb", "tesla v100 sxm2 16gb")


def of_model(model_id: int, *gpus: Gpu) -> Node:
    return node(*(gpus or (gpu(),)), model_id=model_id)


def prefer(nodes: dict[str, Node], *models: str) -> list[str]:
    requested = request(preferred_models=models)
    return ranking(decide_on(nodes, requested, models=MODELS))


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


@given(loads=st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), min_size=2, max_size=6))
def test_the_first_is_hardly_busier_in_the_next_hour_than_the_best(
    loads: list[tuple[float, float]],
) -> None:
    """The mean of the last hour counts a fifth as much."""
    cards = {
        str(at): shared(gpu(utilization=hour, next_hour=ahead, latest=0.0, peak=0.0))
        for at, (hour, ahead) in enumerate(loads)
    }

    first = int(ranking(decide_on(cards))[0])

    assert loads[first][1] <= min(ahead for _, ahead in loads) + 0.1 + 1e-6


def test_shares_of_weights_add_up_to_one() -> None:
    shares = Weights(utilization=2, memory=1, sharing=1, bursts=0, stress=0).shares

    assert [*shares.values()] == pytest.approx([0.5, 0.25, 0.25, 0, 0])
