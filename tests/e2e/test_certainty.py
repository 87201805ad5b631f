"""Ranking by the probability that all assigned GPUs are idle, clean and healthy."""

import pytest

from simulation.devices import Load, Loss
from simulation.models import A100_40GB, GIB, V100
from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

FOREIGN = Load(utilization=0.9, memory_bytes=30 * GIB)


async def break_cards(world: World, node: str, count: int) -> None:
    """Let cards of a node fall off the bus, and wait until the extender knows."""
    for index in range(count):
        world.fleet.kill_device(node, index, Loss.XID_79)
    for index in range(count):
        await world.wait_state(node, index, "unhealthy")


async def end_at_once(world: World, item: Object) -> None:
    """End a pod without waiting until readings show its GPU as idle."""
    await world.client.delete(item)
    await world.gone(item)

    async def is_free() -> bool:
        nodes = (await world.services.extender.get("/v1/nodes"))["nodes"]
        return not any(node["resources"][GPU]["held"] for node in nodes)

    await wait_for(is_free, "the extender has seen that the pod is gone")


async def test_a_gpu_that_was_just_freed_is_before_a_less_preferred_model(world: World) -> None:
    preferred, other = world.add("z-a100", 1, A100_40GB), world.add("a-v100", 1, V100)
    await world.start()
    annotations = {"idlegpu.io/prefer-models": "A100,V100"}

    for number in range(3):
        item = pod(f"pod-{number}", annotations=annotations)
        assert await world.place(item) == preferred
        await end_at_once(world, item)

    assert other in world.fleet.nodes


async def test_a_gpu_that_was_just_freed_is_before_a_silent_node(world: World) -> None:
    live, silent = world.add("z-live", 1), world.add("a-silent", 1)
    world.fleet.silence(silent)
    await world.start()

    for number in range(3):
        item = pod(f"pod-{number}")
        assert await world.place(item) == live
        await end_at_once(world, item)


@pytest.mark.parametrize("broken", [1, 2])
async def test_few_working_gpus_rank_before_many_partly_broken_ones(
    world: World, broken: int
) -> None:
    whole, partly = world.add("z-whole", 3), world.add("a-partly", 8)
    await world.start()
    await break_cards(world, partly, broken)

    assert await world.place_all(pod(f"pod-{number}") for number in range(3)) == [whole] * 3


async def test_a_silent_node_is_before_one_with_seven_broken_gpus_of_eight(world: World) -> None:
    silent, broken = world.add("z-silent", 8), world.add("a-broken", 8)
    world.fleet.silence(silent)
    await world.start()
    await break_cards(world, broken, 7)

    assert await world.place(pod("pod")) == silent


async def test_few_idle_gpus_rank_before_many_partly_used_by_docker(world: World) -> None:
    idle, used = world.add("z-idle", 3), world.add("a-used", 8)
    for index in (0, 1):
        world.fleet.set_foreign(used, index, FOREIGN)
    await world.start()
    for index in (0, 1):
        await world.wait_state(used, index, "foreign")

    assert await world.place_all(pod(f"pod-{number}") for number in range(3)) == [idle] * 3


async def test_a_pod_that_requires_idle_gpus_takes_no_chance(world: World) -> None:
    node = world.add("node", 8)
    world.fleet.set_foreign(node, 0, FOREIGN)
    await world.start()
    await world.wait_state(node, 0, "foreign")
    item = pod("pod", annotations={"idlegpu.io/require-idle": "true"})
    await world.client.create(item)

    message = await world.client.wait_unschedulable(item)
    world.fleet.set_foreign(node, 0, None)

    assert "known to be idle" in message
    assert await world.bound([item]) == [node]
