"""Models of GPUs: from readings or node labels, one or several on a node."""

from dataclasses import replace

import pytest

from extender.core.decision.filtering import Code
from extender.core.policy import Policy, PriceMode, Prices
from extender.fleet.offers import ModelNumbers
from testkit.builders import GPU, ranking, rejected, request
from testkit.world import World

LARGE, SMALL = "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060"


def workstation(*models: str, policy: Policy | None = None, replicas: int = 1) -> World:
    """Return a world with a node of these cards, and with a node of one small card."""
    world = World(policy)
    world.add_node("mixed", len(models), replicas=replicas)
    world.add_node("small", 1, replicas=replicas)
    for index, model in enumerate(models):
        card = world.card("mixed", index)
        card.info = replace(card.info, model=model)
    card = world.card("small")
    card.info = replace(card.info, model=SMALL)
    world.read()
    return world


def required(world: World, *models: str) -> list[str]:
    return sorted(ranking(world.rank(request(required_models=models))))


def hold(world: World, index: int) -> None:
    world.bind(f"tenant-{index}", "mixed", on=[world.card("mixed", index)])
    world.read_after(30)


def test_a_node_that_reports_other_models_each_time_adds_few() -> None:
    numbers = ModelNumbers()

    for at in range(1000):
        numbers.number(f"NVIDIA X{at}", "liar")

    assert len(numbers.names) <= 65
    assert numbers.number("NVIDIA X999", "liar") == 0
    assert numbers.number("NVIDIA X0", "liar") > 0
    assert numbers.number("NVIDIA H100", "node") > 0


def test_nodes_that_come_and_go_with_other_models_add_a_limited_number() -> None:
    numbers = ModelNumbers()
    known = numbers.number(LARGE, "node")

    for count in range(5000):
        numbers.number(f"NVIDIA X{count}", f"node-{count}")

    assert len(numbers.names) <= 512 + 1
    assert numbers.number("NVIDIA X4999", "node-4999") == 0
    assert numbers.number(LARGE, "another") == known


def test_a_required_model_needs_every_free_gpu_of_a_node_with_several() -> None:
    world = workstation(LARGE, SMALL)

    assert required(world, "RTX 4090") == []
    assert required(world, "RTX 3060") == ["small"]
    assert required(world, "RTX 4090", "RTX 3060") == ["mixed", "small"]


@pytest.mark.parametrize(
    ("held", "model", "nodes"),
    [
        (0, "RTX 3060", ["mixed", "small"]),
        (0, "RTX 4090", []),
        (1, "RTX 4090", ["mixed"]),
        (1, "RTX 3060", ["small"]),
    ],
)
def test_only_models_of_free_gpus_count(held: int, model: str, nodes: list[str]) -> None:
    world = workstation(LARGE, SMALL)
    hold(world, held)

    assert required(world, model) == nodes


def test_without_known_holders_every_gpu_counts() -> None:
    world = workstation(LARGE, SMALL)
    world.is_mapped = False
    hold(world, 0)

    assert required(world, "RTX 3060") == ["small"]


def test_shared_gpus_count_until_all_their_replicas_are_held() -> None:
    world = workstation(LARGE, SMALL, replicas=2)
    assert required(world, "RTX 3060") == ["small"]

    world.bind("tenant", "mixed", 2, on=[world.card("mixed", 0)])
    world.read_after(30)

    assert required(world, "RTX 3060") == ["mixed", "small"]


def test_a_preferred_model_that_a_pod_may_get_comes_before_none() -> None:
    world = workstation(LARGE, SMALL)
    wanted = request(preferred_models=("RTX 4090",))

    assert ranking(world.rank(wanted)) == ["mixed", "small"]
    reasons = [verdict.reason for verdict in world.placer.explain_nodes(wanted, ["mixed", "small"])]
    assert "perhaps a preferred model" in reasons[0]
    assert "no preferred model" in reasons[1]


def test_a_card_that_the_kubelet_may_not_offer_changes_no_model() -> None:
    world = workstation(LARGE, SMALL)
    world.fleet.apply_node(
        replace(world.fleet.nodes["mixed"], allocatable={GPU: 1}, capacity={GPU: 1})
    )
    world.read_after(30)

    assert required(world, "RTX 4090") == ["mixed"]


def test_node_price_is_that_of_its_most_expensive_free_gpu() -> None:
    prices = Prices(mode=PriceMode.STRICT, entries={"RTX 4090": 2.0, "RTX 3060": 1.0})
    world = workstation(LARGE, SMALL, policy=Policy(prices=prices))
    assert rejected(world.rank()) == {"mixed": Code.DEARER}

    hold(world, 0)

    assert not rejected(world.rank())


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-40GB-SHARED"),
        ("cloud.google.com/gke-accelerator", "nvidia-tesla-a100"),
        ("karpenter.k8s.aws/instance-gpu-name", "a100"),
    ],
)
def test_a_node_label_names_the_model_where_no_reading_does(
    label: str, value: str, is_shown: bool
) -> None:
    world = World()
    world.add_node("node", labels={label: value})
    world.card().is_shown = is_shown
    world.read()

    assert required(world, "A100") == ["node"]
    assert required(world, "V100") == []
