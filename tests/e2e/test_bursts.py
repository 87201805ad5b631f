"""Bursts of pods, none of which any reading shows yet."""

import pytest

from testkit.controlplane.objects import pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World, spread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


async def four_frozen_nodes(
    world: World, *, kubelets: bool = True, ignorable: bool = True
) -> set[str]:
    """Start with four equal time-sliced nodes whose exporters' values do not change from now on."""
    nodes = [world.add_shared(f"equal-{number}", cards=2, replicas=8) for number in range(4)]
    await world.start(kubelets=kubelets, extender={"ignorable": ignorable})
    world.fleet.freeze()
    return set(nodes)


async def test_a_burst_spreads_evenly_although_no_metric_moves(world: World) -> None:
    nodes = await four_frozen_nodes(world)

    placed = await world.place_all([pod(f"burst-{number}") for number in range(32)])

    assert spread(placed) == dict.fromkeys(nodes, 8)


async def test_a_burst_spreads_evenly_before_any_binding_is_seen(world: World) -> None:
    nodes = await four_frozen_nodes(world, kubelets=False, ignorable=False)
    pods = [pod(f"unseen-{number}") for number in range(32)]
    services = world.services
    scheduler, apiserver = services.scheduler, services.plane.apiserver
    # First kube-scheduler cannot reach an extender, so that all pods stay in its queue.
    services.extender.process.kill()
    await world.client.create_all(pods)
    await wait_for(lambda: all_tried(world), "all pods were tried")

    # Then only the extender answers: kube-scheduler assumes the pods in its own cache, while the
    # API server hangs and sends no events.
    scheduler.pause()
    try:
        await services.extender.process.start()
        await world.settled()
        apiserver.pause()
        scheduler.resume()
        await wait_for(lambda: all_decided(world, len(pods)), "all pods are decided")
    finally:
        scheduler.resume()
        apiserver.resume()

    assert spread(await world.bound(pods)) == dict.fromkeys(nodes, 8)


async def all_tried(world: World) -> bool:
    """Return whether kube-scheduler has tried in vain to place each GPU pod."""
    return all(
        item["spec"].get("nodeName") or item["status"].get("conditions")
        for item in await world.client.list_pods()
    )


async def all_decided(world: World, count: int) -> bool:
    """Return whether the extender has chosen nodes for `count` pods since its start."""
    answer = await world.services.extender.get("/v1/decisions", {"brief": "true"})
    chosen: set[str] = {
        decision["pod"] for decision in answer["decisions"] if decision["verb"] == "prioritize"
    }
    return len(chosen) >= count


async def test_pods_that_hold_gpus_survive_a_restart_of_the_extender(world: World) -> None:
    nodes = await four_frozen_nodes(world, ignorable=False)
    pods = [pod(f"burst-{number}") for number in range(32)]
    before = await world.place_all(pods[:16])

    world.services.extender.process.kill()
    await world.client.create_all(pods[16:])
    await world.start_extender()
    after = await world.bound(pods[16:])

    assert spread(before) == dict.fromkeys(nodes, 4)
    assert spread(after) == dict.fromkeys(nodes, 4)
