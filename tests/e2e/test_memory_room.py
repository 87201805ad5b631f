"""Memory of shared GPUs: pods keep their declared memory, and no other pod gets it."""

from typing import Any

import pytest

from simulation.devices import Load
from simulation.kubelet import MEMORY_ANNOTATION
from simulation.models import GIB
from testkit.controlplane.client import unschedulable
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

BRIEF = {"assumed": {"warm_up_seconds": 1}}
"""Short warm-up. The API server stores whole seconds: a pod may start up to one second later than
its status says."""
NO_MEMORY = "1 node(s) had too little free GPU memory"


def asking(name: str, gib: int, **spec: Any) -> Object:
    """Build a pod that declares `gib` GiB of memory of each GPU."""
    return pod(name, annotations={"idlegpu.io/gpu-memory": f"{gib}Gi"}, **spec)


async def tenant(world: World, node: str, declared: int, used: str = "1Mi", **spec: Any) -> Object:
    """Create a pod that holds a share of a GPU, with declared and used memory."""
    item = asking(f"{node}-{declared}", declared, nodeName=node, **spec)
    item["metadata"]["annotations"][MEMORY_ANNOTATION] = used
    await world.client.create(item)
    await world.running(item)
    await world.settled()
    return item


async def refused(world: World, item: Object) -> str:
    """Create a pod that no node accepts, and return kube-scheduler's message."""
    await world.client.create(item)
    return await world.client.wait_unschedulable(item)


async def test_declared_memory_stays_reserved_before_it_is_used(
    world: World,
) -> None:
    card = world.add_shared("card")
    await world.start(BRIEF)
    await tenant(world, card, 16)
    await world.covered(card)

    assert NO_MEMORY in await refused(world, asking("large", 10))
    extender = world.services.extender

    async def explained() -> Any:
        # The extender records devices only after its answer to kube-scheduler.
        return (await extender.get("/v1/explain", {"pod": "default/large"}))["nodes"]

    (device,) = (await wait_for(explained, "the decision is recorded in full"))[0]["devices"]
    assert device["declared_bytes"] == 16 * GIB
    assert device["memory_free_bytes"] > 20 * GIB
    assert await world.place(asking("small", 6)) == card


async def test_a_limit_of_vllm_counts_as_declared_memory(world: World) -> None:
    card, other = world.add_shared("card"), world.add_shared("other")
    await world.start({**BRIEF, "cluster": {"memory_limits": True}})
    await tenant(world, card, 10)
    first, second = pod("vllm-1"), pod("vllm-2")
    for item in (first, second):
        item["spec"]["containers"][0]["args"] = ["--gpu-memory-utilization", "0.7"]
    await world.covered(card, other)

    # 0.7 of 24 GiB does not fit beside 10 GiB, nor beside another 0.7.
    assert await world.place(first) == other
    assert NO_MEMORY.replace("1", "2", 1) in await refused(world, second)
    assert await world.place(asking("small", 6)) in {card, other}


async def test_foreign_memory_is_not_free_after_a_pod_has_left(world: World) -> None:
    card = world.add_shared("card")
    world.fleet.set_foreign(card, 0, Load(memory_bytes=12 * GIB))
    await world.start(BRIEF)
    short = await tenant(world, card, 1)
    await world.covered(card)

    # For some seconds after the pod's end, no reading is newer than the end.
    prometheus = world.services.prometheus.process
    prometheus.pause()
    try:
        await world.client.delete(short)
        await world.gone(short)
        await world.wait_gpu(card, 0, lambda gpu: not gpu["tenants"], "is free")
        large = asking("large", 16)
        assert NO_MEMORY in await refused(world, large)
    finally:
        prometheus.resume()

    world.fleet.set_foreign(card, 0, None)
    await world.wait_gpu(card, 0, lambda gpu: gpu["state"] == "idle", "is idle")
    await world.touch(card)
    assert await world.bound([large]) == [card]


async def test_memory_beyond_the_pods_processes_is_foreign_while_pods_load(
    world: World,
) -> None:
    """Newer exporters report each pod's memory on a shared GPU."""
    card = world.add_shared("card")
    await world.start(BRIEF)
    await tenant(world, card, 12)
    world.fleet.set_foreign(card, 0, Load(memory_bytes=8 * GIB))
    await world.settled()
    await world.covered(card)

    assert NO_MEMORY in await refused(world, asking("large", 5))
    assert await world.place(asking("small", 2)) == card


@pytest.mark.parametrize(("gib", "is_evicted"), [(10, False), (5, True)])
async def test_no_pod_is_evicted_if_declared_memory_leaves_no_room(
    world: World, gib: int, is_evicted: bool
) -> None:
    card = world.add_shared("card", replicas=2)
    await world.start(BRIEF)
    urgently = await world.priority_class("urgent", 1000)
    await tenant(world, card, 17, priorityClassName=urgently)
    small = await tenant(world, card, 1)
    await world.covered(card)
    urgent = asking("urgent", gib, priorityClassName=urgently)
    await world.client.create(urgent)

    if is_evicted:
        assert await world.bound([urgent]) == [card]
        return
    await world.client.wait_unschedulable(urgent)
    waiting = await world.client.get(urgent)
    kept = await world.client.get(small)
    assert not waiting["status"].get("nominatedNodeName")
    assert not kept["metadata"].get("deletionTimestamp")


async def test_a_node_that_is_named_in_expectation_lets_no_pod_pass(world: World) -> None:
    card = world.add_shared("card")
    await world.start(BRIEF)
    await tenant(world, card, 16)
    await world.covered(card)
    large = asking("expected", 10)
    assert NO_MEMORY in await refused(world, large)

    for _ in range(3):
        # Kueue and Karpenter set the nominated node, and so does kube-scheduler before binding. The
        # nomination stays until kube-scheduler has retried the pod.
        tried = len(await world.decisions(large))
        await world.client.patch(large, {"status": {"nominatedNodeName": card}}, "status")
        await world.touch(card)
        await world.decided(large, more_than=tried)

    assert {decision["feasible"] for decision in await world.decisions(large)} == {0}
    waiting = await world.client.get(large)
    assert not waiting["spec"].get("nodeName")
    assert NO_MEMORY in unschedulable(waiting)


async def test_next_pod_of_an_owner_goes_where_its_usual_memory_fits(world: World) -> None:
    own, calm, roomy = (world.add_shared(name) for name in ("own", "calm", "roomy"))
    await world.start(BRIEF)
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "serve", "uid": "serve"}
    first = pod("serve-1", nodeName=own, annotations={MEMORY_ANNOTATION: "12Gi"})
    first["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    await world.client.create(first)
    await world.running(first)
    await world.tenants(calm, 1, utilization=0.35, memory="14Gi")
    await world.tenants(roomy, 1, utilization=0.8, memory="1Gi")
    await world.covered(own, calm, roomy)
    following = pod("serve-2")
    following["metadata"]["ownerReferences"] = [{**owner, "controller": True}]

    assert await world.place(following) == roomy
