"""Pods with several GPUs on nodes whose agents report NVLink and NUMA nodes."""

from pathlib import Path
from typing import Any

import pytest

from testkit.controlplane.agents import agents_on, tokens_of
from testkit.controlplane.objects import GPU, IMAGE, pod
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

WITHOUT_PROMETHEUS = {"prometheus": {"url": ""}}
PAIRS = ((0, 1), (2, 3))
LABELS = (("idlegpu.io/topology-policy", "single-numa-node"),)


async def test_of_equal_nodes_the_one_whose_free_gpus_are_joined_wins(
    world: World, tmp_path: Path
) -> None:
    pairs = world.add("a-pairs", 4, nvlinks=PAIRS)
    near = world.add("b-near", 4, nvlinks=PAIRS, numa_nodes=(0, 0, 0, 0))
    joined = world.add("c-joined", 4, nvlinks=((0, 1, 2, 3),), numa_nodes=(0, 0, 1, 1))
    nodes = pairs, near, joined
    async with tokens_of(world, tmp_path) as tokens, agents_on(world, tokens, *nodes):
        await world.start({**WITHOUT_PROMETHEUS, "agents": tokens.settings})
        first = pod("first", 4)

        assert await world.place(first) == joined
        explained = await world.services.extender.get("/v1/explain", {"pod": "default/first"})
        reasons = {one["node"]: one["reason"] for one in explained["nodes"]}
        assert "joined by NVLink" in reasons[joined]
        assert "on one NUMA node" in reasons[near]
        assert await world.place(pod("second", 4)) == near
        assert await world.place(pod("third", 4)) == pairs


@pytest.mark.parametrize(
    "named_by",
    [
        pytest.param({"labels": LABELS}, id="a label"),
        pytest.param({"topology_policy": "single-numa-node"}, id="its agent"),
    ],
)
async def test_a_node_is_refused_before_its_kubelet_would_refuse_the_pod(
    world: World, tmp_path: Path, named_by: dict[str, Any]
) -> None:
    node = world.add("node", 4, numa_nodes=(0, 1, 0, 1), **named_by)
    async with tokens_of(world, tmp_path) as tokens, agents_on(world, tokens, node):
        await world.start({**WITHOUT_PROMETHEUS, "agents": tokens.settings})
        held = [pod("held-0"), pod("held-1")]
        for one in held:  # one GPU of each NUMA node
            assert await world.place(one) == node
        await world.settled()
        pair = pod("pair", 2)
        await world.client.create(pair)

        message = await world.client.wait_unschedulable(pair)

        assert "too few free GPUs on one NUMA node" in message
        await world.end(held[0])
        assert await world.bound([pair]) == [node]


def containers(*gpus: int) -> list[dict[str, Any]]:
    """Build containers with these numbers of requested GPUs."""
    return [
        {"name": f"c{at}", "image": IMAGE, "resources": {"limits": {GPU: str(count)}}}
        for at, count in enumerate(gpus)
    ]
