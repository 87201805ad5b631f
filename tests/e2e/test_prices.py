"""Prices in the choice of a node, together with kube-scheduler's soft constraints."""

import pytest

from simulation.models import A100_40GB, V100
from testkit.controlplane.objects import pod
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PRICES = {"A100": 2.0, "V100": 0.5}


async def test_cheaper_idle_node_wins_unless_the_pod_names_the_other_model(
    world: World,
) -> None:
    dear, cheap = world.add("a-a100", 2, A100_40GB), world.add("z-v100", 2, V100)
    await world.start({"prices": PRICES, "price": "prefer"})

    assert await world.place(pod("any")) == cheap
    named = pod("named", annotations={"idlegpu.io/prefer-models": "A100"})
    assert await world.place(named) == dear
    # The cheap node is full after this pod, and an expensive GPU is better than none.
    assert await world.place(pod("last-cheap")) == cheap
    assert await world.place(pod("dear")) == dear


async def test_strict_prices_use_the_expensive_node_last(
    world: World,
) -> None:
    dear, cheap = world.add("a-a100", 2, A100_40GB), world.add("z-v100", 1, V100)
    await world.start({"prices": PRICES, "price": "strict"})

    assert await world.place(pod("first")) == cheap
    assert await world.place(pod("second")) == dear
