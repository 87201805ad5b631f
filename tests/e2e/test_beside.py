"""Pods and nodes as other programs leave them: scheduling gates, nodes that were just added.

docs/beside.md describes the real programs.
"""

from typing import Final

import pytest

from testkit.controlplane.client import address
from testkit.controlplane.objects import GPU, Object, node, pod
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

GATE: Final = {"name": "kueue.x-k8s.io/admission"}


async def open_gates(world: World, item: Object) -> None:
    """Remove a pod's scheduling gates, as a queue does after admitting it."""
    await world.client.request(
        "PATCH",
        address(item),
        {"spec": {"schedulingGates": None}},
        content_type="application/merge-patch+json",
    )


async def test_gated_pod_causes_no_request_and_holds_nothing(world: World) -> None:
    first, second = world.add("first", 1), world.add("second", 1)
    await world.start()
    gated = pod("gated", schedulingGates=[GATE])
    await world.client.create(gated)
    shown = await world.client.wait_pod(
        gated, lambda item: item["status"].get("conditions"), "has a condition"
    )
    assert shown["status"]["conditions"][0]["reason"] == "SchedulingGated"

    taken = await world.place(pod("other"))

    assert await world.decisions(gated) == []
    await open_gates(world, gated)
    assert await world.bound([gated]) == [second if taken == first else first]
    assert len(await world.decisions(gated)) > 0


async def test_a_node_without_its_device_plugin_is_left_to_kube_scheduler(world: World) -> None:
    full = world.add("full", 1)
    await world.start()
    await world.tenants(full, 1, utilization=0.9)
    added = node("added", 0)
    await world.client.create(added)
    await world.scheduler_synced("added")
    waiting = pod("early")
    await world.client.create(waiting)

    assert "2 Insufficient nvidia.com/gpu" in await world.client.wait_unschedulable(waiting)
    assert await world.decisions(waiting) == []

    await world.client.patch(added, {"status": {"allocatable": {GPU: "1"}}}, "status")
    assert await world.bound([waiting]) == ["added"]
