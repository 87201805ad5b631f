"""Prices of a GPU-hour, and their effect on the choice of a node."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import NodeRecord
from extender.core.policy import Policy, PriceMode, Prices, Strategy
from extender.core.prices import PriceList
from testkit.builders import GIB, request
from testkit.world import BUSY, World

LIST = {"H100": 2.5, "A100": 1.0, "A100 80GB": 1.4, "label/pool=old": 0.3, "node/gift": 0.0}
MODELS = {"cheap": "NVIDIA A100-SXM4-40GB", "dear": "NVIDIA H100 80GB HBM3", "odd": "NVIDIA X1"}


def labelled(**labels: str) -> NodeRecord:
    return NodeRecord(name="node", labels={"pool": "new"} | labels)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, 2.5),
        (labelled(), 2.5),
        (labelled(pool="old"), 0.3),
        (replace(labelled(pool="old"), name="gift"), 0.0),
        (labelled(**{"node.kubernetes.io/lifecycle": "spot"}), 1.0),
        (labelled(**{"karpenter.sh/capacity-type": "spot"}), 1.0),
        (labelled(**{"eks.amazonaws.com/capacityType": "SPOT"}), 1.0),
        (labelled(**{"cloud.google.com/gke-spot": "true"}), 1.0),
        (labelled(**{"cloud.google.com/gke-preemptible": "true"}), 1.0),
        (labelled(**{"kubernetes.azure.com/scalesetpriority": "spot"}), 1.0),
        (labelled(**{"karpenter.sh/capacity-type": "on-demand"}), 2.5),
        (labelled(pool="old", **{"karpenter.sh/capacity-type": "spot"}), 0.3),
    ],
)
def test_a_nodes_entry_counts_before_a_labels_and_that_before_a_models(
    node: NodeRecord | None, expected: float
) -> None:
    assert PriceList(LIST, spot_share=0.4).of("NVIDIA H100 80GB HBM3", node) == expected


def test_the_first_by_name_of_equally_long_entries_counts() -> None:
    prices = PriceList({"SXM4": 9.0, "A100": 1.0})

    assert prices.of("NVIDIA A100-SXM4-80GB") == 1.0
    spot = labelled(**{"karpenter.sh/capacity-type": "spot"})
    assert prices.of("NVIDIA A100-SXM4-80GB", spot) == 1.0, "spot nodes cost as much by default"


def test_a_model_outside_the_list_has_no_price() -> None:
    assert PriceList(LIST).of("NVIDIA L4", labelled()) is None


def priced(mode: PriceMode, cards: int = 2) -> World:
    world = World(Policy(prices=Prices(mode=mode, entries=LIST)))
    for name, model in MODELS.items():
        world.add_node(name, cards)
        for index in range(cards):
            card = world.card(name, index)
            card.info = replace(card.info, model=model)
    world.read()
    return world


def ranked(world: World, **wishes: Any) -> list[str]:
    decision = world.rank(request(**wishes))
    return [decision.candidates[at] for at in decision.order]


def test_prices_mean_nothing_unless_a_setting_says_so() -> None:
    assert ranked(priced(PriceMode.IGNORE)) == ["cheap", "dear", "odd"]
    world = priced(PriceMode.IGNORE)
    world.bind("tenant", "dear")
    world.read()

    assert ranked(world)[0] == "dear"  # fits best


def test_cheaper_node_ranks_first_and_unknown_price_last() -> None:
    world = priced(PriceMode.PREFER)
    world.bind("tenant", "dear")
    world.read()

    assert ranked(world) == ["cheap", "dear", "odd"]
    assert "1 per GPU-hour" in world.placer.explain_nodes(request(), ["cheap"])[0].reason


def test_idle_expensive_node_ranks_before_a_busy_cheap_one() -> None:
    world = priced(PriceMode.PREFER)
    for index in range(2):
        world.card("cheap", index).values.update(BUSY)
    world.read()
    world.read_after(30)

    assert ranked(world)[0] == "dear"


def test_with_strict_prices_only_the_cheapest_suitable_node_passes() -> None:
    world = priced(PriceMode.STRICT)

    assert ranked(world) == ["cheap", "odd"]  # the price of the last one is unknown
    decision = world.rank(request(), ["dear"])
    assert [decision.candidates[at] for at in decision.order] == ["dear"]


def test_strict_prices_force_no_pod_onto_a_card_that_is_too_small_for_similar_pods() -> None:
    world = priced(PriceMode.STRICT)
    for index in range(2):
        world.card("cheap", index).values[Signal.MEMORY_FREE] = 16 * GIB
    world.read_after(30)

    assert ranked(world, expected_bytes=int(40 * GIB)) == ["dear", "odd", "cheap"]
    assert ranked(world, expected_bytes=int(15 * GIB)) == ["cheap", "odd"]
    assert ranked(world, expected_bytes=int(90 * GIB)) == ["odd", "cheap"]


@pytest.mark.parametrize("mode", [PriceMode.PREFER, PriceMode.STRICT])
@pytest.mark.parametrize("names", ["preferred_models", "required_models"])
def test_a_pod_that_names_a_model_gets_it_at_any_price(mode: PriceMode, names: str) -> None:
    assert ranked(priced(mode), **{names: ("H100",)})[0] == "dear"


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("models", [(), ("H100",)], ids=["any", "names-a-model"])
def test_the_parts_of_a_score_include_the_price(
    strategy: Strategy, models: tuple[str, ...]
) -> None:
    world = priced(PriceMode.PREFER)
    requested = request(strategy=strategy, preferred_models=models)

    for verdict in world.placer.explain_nodes(requested, list(MODELS)):
        assert sum(part.adds for part in verdict.parts) == pytest.approx(verdict.score)


def test_requests_evaluated_together_weigh_prices_each_for_itself() -> None:
    world = priced(PriceMode.PREFER)
    requested = [request(), request(preferred_models=("H100",)), request(memory_bytes=1 << 30)]
    before = [ranked(world, preferred_models=one.preferred_models) for one in requested]
    world.bind("tenant", "odd")
    world.read()

    after = [world.rank(one).best for one in requested]
    assert after == [names[0] for names in before] == ["cheap", "dear", "cheap"]
