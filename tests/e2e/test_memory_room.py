"""Memory of shared GPUs: pods keep their declared memory, and no other pod gets it."""

from typing import Any

import pytest

from simulation.devices import Load
from simulation.kubelet import MEMORY_ANNOTATION
from simulation.models import GIB
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


async def test_declared_memory_stays_reserved_before_it_is_used(world: World) -> None:
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
