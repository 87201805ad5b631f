"""The order of docs/decision.md, computed a second time with exact fractions, node by node."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from math import comb, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.landing import STEPS, Band, bands, chance_of_all
from extender.core.policy import Strategy, Thresholds
from extender.core.request.request import GpuRequest
from testkit.builders import (
    GIB,
    Gpu,
    Node,
    assessment_of,
    busy,
    decide_on,
    freed,
    gpu,
    node,
    ranking,
    request,
    shared,
    unknown,
)

MODELS = ("", "nvidia h100", "nvidia a100")
PREFERRED = ("H100", "A100")

CHANCES: dict[Gpu, Fraction] = {
    gpu(): Fraction(1),
    gpu(utilization=0.25): Fraction(1),
    freed(): Fraction(19, 20),
    unknown(): Fraction(1, 2),
    gpu(freshness=0.5, memory_freshness=0.5): Fraction(3, 4),
    busy(freshness=0.5, memory_freshness=0.5): Fraction(1, 4),
    busy(): Fraction(0),
    gpu(is_foreign=True): Fraction(0),
    gpu(is_excluded=True): Fraction(0),
    gpu(penalty=0.5): Fraction(1),
}
"""Devices, and the probability that each is good."""

devices = st.sampled_from(list(CHANCES))
ratios = st.fractions(0, 1, max_denominator=20)


@given(chances=st.lists(ratios, min_size=1, max_size=8), data=st.data())
def test_the_chance_is_that_over_all_choices_of_the_kubelet(
    chances: list[Fraction], data: st.DataObject
) -> None:
    needed = data.draw(st.integers(1, len(chances)))
    withdrawn = data.draw(st.integers(0, len(chances) - needed))
    known = [*chances[withdrawn:], *[Fraction(0)] * withdrawn]

    found = chance_of_all(
        np.array([[float(one) for one in known]]),
        np.array([len(chances) - withdrawn]),
        np.array([needed]),
    )

    choices = list(combinations(chances[withdrawn:], needed))
    expected = sum(map(prod, choices)) / Fraction(len(choices))
    assert abs(found[0] - float(expected)) < 1e-12


@given(chances=st.lists(st.lists(ratios, min_size=6, max_size=6), min_size=2, max_size=9))
def test_nodes_score_together_as_alone(chances: list[list[Fraction]]) -> None:
    columns = np.asfortranarray([[float(one) for one in row] for row in chances])
    needed = np.arange(len(chances)) % 7
    offered = np.full(len(chances), 6)

    together = chance_of_all(columns, offered, needed)

    for at, one in enumerate(together.tolist()):
        alone = chance_of_all(columns[at : at + 1], offered[:1], needed[at : at + 1])
        assert abs(alone[0] - one) < 1e-12


def test_bands_begin_at_thirds_of_the_chance_of_each() -> None:
    for needed in (1, 2, 4, 8, 16):
        at = np.array([(1 / 3) ** needed, (2 / 3) ** needed])
        counts = np.full(2, needed)

        assert bands(at, counts).tolist() == [Band.UNKNOWN, Band.LIKELY]
        assert bands(at * 0.999, counts).tolist() == [Band.UNLIKELY, Band.UNKNOWN]
    assert bands(np.array([1.0]), np.array([0])).tolist() == [Band.UNLIKELY]


@st.composite
def whole(draw: st.DrawFn) -> Node:
    """Draw a node of whole devices, some of them held."""
    free = draw(st.lists(devices, min_size=1, max_size=6))
    held = draw(st.integers(0, 3))
    return node(
        *free,
        *[busy(used=1)] * held,
        model_id=draw(st.integers(0, 2)),
        suspicion=draw(st.sampled_from([0.0, 0.0, 0.25])),
        free_millicores=draw(st.sampled_from([2000, 9000, 64_000])),
    )


@given(
    fleet=st.lists(whole(), min_size=1, max_size=8),
    count=st.integers(1, 4),
    strategy=st.sampled_from(Strategy),
    preferred=st.sampled_from([(), PREFERRED]),
    millicores=st.sampled_from([0, 2000]),
)
def test_nodes_of_whole_devices_rank_as_the_order_is_written(
    fleet: list[Node], count: int, strategy: Strategy, preferred: tuple[str, ...], millicores: int
) -> None:
    requested = request(
        count, strategy=strategy, preferred_models=preferred, millicores=millicores * count
    )
    # kube-scheduler sends no node with fewer free devices or too little CPU.
    named = {
        f"node-{at}": one
        for at, one in enumerate(fleet)
        if len(free_of(one)) >= count and one.free_millicores >= millicores * count
    }

    order = ranking(decide_on(named, requested, models=MODELS))

    for better, worse in pairwise(order):
        assert digits(named[better], requested) >= digits(named[worse], requested)


@given(
    loads=st.lists(
        st.tuples(st.lists(devices, min_size=1, max_size=9), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ),
    strategy=st.sampled_from([Strategy.AUTO, Strategy.SPREAD]),
)
def test_nodes_of_shared_devices_rank_by_band_and_health_and_then_by_load(
    loads: list[tuple[list[Gpu], int]], strategy: Strategy
) -> None:
    named = {
        f"node-{at}": shared(*(replace(one, used=used) for one in cards))
        for at, (cards, used) in enumerate(loads)
    }
    requested = request(strategy=strategy)

    decision = decide_on(named, requested)

    order = ranking(decision)
    for better, worse in pairwise(order):
        assert digits(named[better], requested)[:3] >= digits(named[worse], requested)[:3]


def free_of(described: Node) -> list[Gpu]:
    return [one for one in described.gpus if not one.used]


def digits(described: Node, requested: GpuRequest) -> tuple[int, int, int, Fraction]:
    """Return a node's sort key: band, model, certainty and health, fit."""
    landing, k = free_of(described), requested.count
    if described.is_shared:
        landing, k = list(described.gpus), 1
    chances = [
        Fraction(1) if described.is_shared and one.is_foreign else CHANCES[without_use(one)]
        for one in landing
    ]
    all_good = sum((prod(some) for some in combinations(chances, k)), Fraction(0)) / comb(
        len(landing), k
    )
    band = sum(all_good >= Fraction(third, 3) ** k for third in (1, 2))
    penalties = sum((Fraction(one.penalty) for one in landing), Fraction(0)) / len(landing)
    left = (1 - penalties) * (1 - Fraction(described.suspicion))
    power = 1 if band == Band.LIKELY else k
    certain = of_shared(landing, band) if described.is_shared else all_good
    steps = max(
        step
        for step in range(STEPS + 1)
        if not step or certain * left**power > ((step - Fraction(1, 2)) / STEPS) ** power
    )
    place = {"": 0, "nvidia h100": 2, "nvidia a100": 1}[MODELS[described.model_id]]
    return (
        band,
        place if requested.preferred_models else 0,
        steps,
        fit(described, landing, requested),
    )


def of_shared(landing: list[Gpu], band: int) -> Fraction:
    """Return the certainty of shared devices: from the band, minus the share of broken ones."""
    certain = Fraction(11 if band == Band.LIKELY else 5, STEPS)
    working = sum(not one.is_excluded for one in landing)
    if working == len(landing):
        return certain
    return min(certain * working / len(landing), certain - Fraction(1, STEPS))


def without_use(one: Gpu) -> Gpu:
    """Return the device without tenants."""
    return replace(one, used=0)


def fit(described: Node, landing: list[Gpu], requested: GpuRequest) -> Fraction:
    """Return how well the pod fits; higher is better."""
    if requested.strategy is Strategy.SPREAD:
        idle = sum((CHANCES[one] for one in landing if not one.used), Fraction(0))
        return Fraction(round(float(idle) * 4 + 1e-9))
    room = len(landing) - requested.count
    if requested.strategy is Strategy.AUTO and requested.millicores:
        spare = described.free_millicores - requested.millicores
        room = min(room, spare * requested.count // requested.millicores)
    return Fraction(-room)


@pytest.mark.parametrize("memory_used", [0.0, 0.2, 0.9, 1.0])
def test_declared_memory_does_not_fade_with_old_readings(memory_used: float) -> None:
    declared = Gpu(
        memory_used=memory_used,
        memory_free_bytes=None,
        memory_total_bytes=80.0 * GIB,
        memory_freshness=0.01,
        freshness=0.0,
        declared_bytes=80.0 * GIB,
    )
    requested = request(thresholds=Thresholds(utilization=0.3, memory=1.0))

    decision = decide_on({"full": Node(gpus=(declared,), is_shared=True)}, requested)

    assert decision.scores[0] < 1 / 3


# --- shared devices ---------------------------------------------------------------------------


def resting(tenants: int) -> Node:
    return shared(gpu(used=tenants), replicas=4)


def working(utilization: float, memory_used: float = 0.0) -> Node:
    return shared(gpu(utilization=utilization, memory_used=memory_used, used=1), replicas=4)


@pytest.mark.parametrize(
    ("works", "first"),
    [
        pytest.param(working(0.40), "works", id="two-pods-have-room-for-their-activity"),
        pytest.param(working(0.66), "rests", id="too-busy-for-a-second-pod"),
        pytest.param(working(0.10, 0.55), "works", id="half-full"),
        pytest.param(working(0.10, 0.76), "rests", id="too-full"),
    ],
)
def test_a_shared_card_with_much_left_need_not_be_idle_to_come_first(
    works: Node, first: str
) -> None:
    requested = request(memory_bytes=GIB)

    order = ranking(decide_on({"rests": resting(3), "works": works}, requested))

    assert order[0] == first


def test_a_pod_that_requires_idle_cards_takes_no_busier_shared_one() -> None:
    nodes = {"rests": resting(3), "works": working(0.40)}

    assert ranking(decide_on(nodes, request(requires_idle=True))) == ["rests"]


@given(st.lists(st.tuples(ratios, ratios, st.integers(0, 4)), min_size=1, max_size=6))
def test_a_shared_card_is_no_worse_by_its_band_than_by_the_thresholds(
    cards: list[tuple[Fraction, Fraction, int]],
) -> None:
    described = shared(
        *(
            gpu(utilization=float(busy_ratio), memory_used=float(used), used=tenants)
            for busy_ratio, used, tenants in cards
        ),
        replicas=8,
    )
    found = assessment_of(described)

    assert found.band_chance[0] >= found.chance[0]


# --- tight memory -----------------------------------------------------------------------------


def loaded(free_gib: float, utilization: float = 0.4, **changes: object) -> Gpu:
    """Return a shared card with this much free memory, busy by any threshold."""
    used = 1 - free_gib * GIB / (80 * GIB)
    return gpu(utilization=utilization, memory_used=used, used=1, **changes)


def expecting(gib: float) -> GpuRequest:
    return request(expected_bytes=int(gib * GIB))


@pytest.mark.parametrize("strategy", tuple(Strategy))
def test_cards_with_room_rank_before_calmer_ones_without(strategy: Strategy) -> None:
    tight = shared(loaded(10, 0.35), loaded(10, 0.35), loaded(20, 0.35), replicas=4)
    roomy = shared(*[loaded(20, 0.9)] * 3, replicas=4)
    requested = request(memory_bytes=int(16 * GIB), strategy=strategy)

    assert ranking(decide_on({"tight": tight, "roomy": roomy}, requested)) == ["roomy", "tight"]


def test_a_pod_without_a_memory_request_is_estimated_from_similar_pods() -> None:
    nodes = {
        "calm": shared(loaded(25, 0.35), replicas=4),
        "roomy": shared(loaded(35, 0.9), replicas=4),
    }

    assert ranking(decide_on(nodes, request())) == ["calm", "roomy"]
    assert ranking(decide_on(nodes, expecting(30))) == ["roomy", "calm"]
    assert ranking(decide_on(nodes, expecting(5))) == ["calm", "roomy"]
    assert ranking(decide_on(nodes, request(memory_bytes=1))) == ["calm", "roomy"]


def test_without_any_like_it_an_even_share_is_expected_of_a_pod() -> None:
    nodes = {
        "calm": shared(loaded(15, 0.35), replicas=4),
        "roomy": shared(loaded(25, 0.9), replicas=4),
    }

    assert ranking(decide_on(nodes, request())) == ["roomy", "calm"]


def test_more_memory_ranks_first_if_no_card_has_the_expected() -> None:
    nodes = {
        "calm": shared(loaded(5, 0.35), replicas=4),
        "roomy": shared(loaded(15, 0.9), replicas=4),
    }

    assert ranking(decide_on(nodes, request())) == ["roomy", "calm"]
    assert ranking(decide_on(nodes, expecting(30))) == ["roomy", "calm"]
    assert ranking(decide_on(nodes, expecting(4))) == ["calm", "roomy"]


def test_expected_memory_refuses_no_node() -> None:
    nodes = {"full": shared(loaded(1), replicas=4)}

    assert ranking(decide_on(nodes, expecting(60))) == ["full"]
    assert ranking(decide_on({"idle": shared(replicas=4)}, request(
        requires_idle=True, expected_bytes=int(500 * GIB)
    ))) == ["idle"]  # fmt: skip


def test_an_idle_card_without_the_room_is_not_good() -> None:
    nodes = {
        "idle": shared(gpu(memory_used=0.45, used=1), replicas=4),
        "busy": shared(loaded(70, 0.5), replicas=4),
    }

    assert ranking(decide_on(nodes, expecting(60))) == ["busy", "idle"]
    assert ranking(decide_on(nodes, expecting(20))) == ["idle", "busy"]


def test_whole_gpus_have_no_expected_memory() -> None:
    nodes = {"a": node(gpu(memory_used=0.05), gpu(memory_used=0.05)), "b": node(unknown())}

    assert ranking(decide_on(nodes, request())) == ["a", "b"]


@given(st.lists(st.tuples(ratios, ratios), min_size=1, max_size=6), st.integers(1, 79))
def test_more_room_never_ranks_a_node_lower(
    cards: list[tuple[Fraction, Fraction]], gib: int
) -> None:
    def described(more: float) -> Node:
        return shared(
            *(
                gpu(utilization=float(busy_ratio), memory_used=max(float(used) - more, 0.0), used=1)
                for busy_ratio, used in cards
            ),
            replicas=4,
        )

    order = ranking(decide_on({"a": described(0.0), "b": described(0.3)}, expecting(gib)))

    assert order[0] == "b" or described(0.0) == described(0.3)
