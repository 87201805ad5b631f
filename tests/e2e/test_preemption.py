"""Preemption with the extender: load evicts no pod, and readings of victims do not count."""

import pytest

from simulation.devices import Loss
from testkit.controlplane.client import address
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


async def test_no_pod_is_evicted_for_load(world: World) -> None:
    full, busy = world.add_shared("full"), world.add_shared("busy")
    await world.start()
    tenants = await world.tenants(full, 4, utilization=0.2)
    tenants += await world.tenants(busy, 1, utilization=0.9)
    urgently = await world.priority_class("urgent", 1000)
    urgent = pod(
        "urgent", annotations={"idlegpu.io/require-idle": "true"}, priorityClassName=urgently
    )
    await world.client.create(urgent)

    message = await world.client.wait_unschedulable(urgent)
    for node in (full, busy):
        tried = len(await world.decisions(urgent))
        await world.touch(node)
        await world.decided(urgent, more_than=tried)

    assert "1 node(s) had too few GPUs known to be idle" in message
    waiting = await world.client.get(urgent)
    assert not waiting["status"].get("nominatedNodeName")
    left = {item["metadata"]["name"] for item in await world.client.list_pods()}
    assert {item["metadata"]["name"] for item in tenants} <= left


async def test_a_preemptor_gets_its_node_while_metrics_still_show_its_victims(world: World) -> None:
    full, other = world.add("full"), world.add("other")
    await world.start()
    victims = await world.tenants(full, 2, utilization=0.95, memory="70Gi")
    world.fleet.kill_device(other, 0, Loss.XID_79)
    await world.wait_state(other, 1, "excluded")
    world.fleet.freeze()
    for victim in victims:
        await set_finalizers(world, victim, ["test.idlegpu.io/still-ending"])
    urgently = await world.priority_class("urgent", 1000)
    urgent = pod(
        "urgent", 2, annotations={"idlegpu.io/gpu-memory": "20Gi"}, priorityClassName=urgently
    )
    await world.client.create(urgent)
    await world.client.wait_pod(
        urgent, lambda item: item["status"].get("nominatedNodeName") == full, "is nominated"
    )

    for victim in victims:
        await world.client.wait_pod(
            victim, lambda item: item["metadata"].get("deletionTimestamp"), "is being deleted"
        )

    # kube-scheduler retries only once the victims are gone, and readings newer than their end still
    # show their memory.
    scheduler = world.services.scheduler
    scheduler.pause()
    try:
        for victim in victims:
            await set_finalizers(world, victim, None)
            await world.gone(victim)
        for index in range(2):
            await world.wait_gpu(
                full,
                index,
                lambda gpu: not gpu["tenants"] and (gpu["memory_used_ratio"] or 0) > 0.8,
                "shows its former pod's memory",
            )
    finally:
        scheduler.resume()

    assert await world.bound([urgent]) == [full]


async def set_finalizers(world: World, item: Object, finalizers: list[str] | None) -> None:
    """Set finalizers, with which a deleted pod stays until they are removed."""
    await world.client.request(
        "PATCH",
        address(item),
        {"metadata": {"finalizers": finalizers}},
        content_type="application/merge-patch+json",
    )
