"""Nodes that come and go as with Karpenter: taints, late GPUs, waiting pods.

tests/karpenter tests Karpenter's own decisions. These tests replay the steps in which a node
becomes usable; docs/beside.md describes the rest.
"""

from collections.abc import Mapping
from typing import Final

import pytest

from simulation.devices import Load
from simulation.models import GIB
from testkit.controlplane.objects import GPU, Object, node, pod
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

FOREIGN: Final = Load(utilization=0.85, memory_bytes=30 * GIB)
JOINING: Final = [
    {"key": "karpenter.sh/unregistered", "effect": "NoExecute"},
    {"key": "example.com/starting", "effect": "NoSchedule"},  # one of a NodePool's startupTaints
]
GOING: Final = [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]

CHANGES: Final[Mapping[str, tuple[Object, str]]] = {
    "registered": ({"spec": {"taints": JOINING[1:]}}, ""),
    "started": ({"spec": {"taints": None}}, ""),
    "plugged": ({"status": {"capacity": {GPU: "1"}, "allocatable": {GPU: "1"}}}, "status"),
}
"""Changes of a node until pods may run there, in order."""


async def refused(world: World) -> Object:
    """Start with one node, whose GPU a process outside Kubernetes uses, and a waiting pod."""
    taken = world.add("taken", 1)
    await world.start()
    world.fleet.set_foreign(taken, 0, FOREIGN)
    await world.wait_state(taken, 0, "foreign")
    waiting = pod("waiting")
    await world.client.create(waiting)
    assert "1 node(s) had" in await world.client.wait_unschedulable(waiting)
    return waiting


async def change(world: World, name: str, what: str) -> None:
    """Apply one change to a node."""
    body, subresource = CHANGES[what]
    await world.client.request(
        "PATCH",
        f"/api/v1/nodes/{name}/{subresource}".rstrip("/"),
        body,
        content_type="application/merge-patch+json",  # a strategic merge patch keeps unnamed fields
    )


async def nodes_asked_about(world: World, item: Object) -> set[str]:
    """Return the nodes in kube-scheduler's requests for a pod, or for a pod of its name."""
    decisions = await world.decisions(item)
    return {row["node"] for decision in decisions for row in decision["explained"]}


async def test_a_pod_that_we_refuse_is_one_that_karpenter_makes_nodes_for(world: World) -> None:
    waiting = await refused(world)

    status = (await world.client.get(waiting))["status"]

    (scheduled,) = (each for each in status["conditions"] if each["type"] == "PodScheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "Unschedulable")
    assert (status["phase"], status.get("nominatedNodeName", "")) == ("Pending", "")


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(("registered", "started", "plugged"), id="its device plugin comes last"),
        pytest.param(("plugged", "registered", "started"), id="its taints go last"),
        pytest.param(("registered", "plugged", "started"), id="its device plugin comes between"),
    ],
)
async def test_new_node_gets_the_waiting_pod_once_it_has_gpus(
    world: World, steps: tuple[str, ...]
) -> None:
    waiting = await refused(world)
    added = f"added-{steps[0]}-{steps[-1]}"
    await world.client.create(node(added, 0, taints=JOINING))
    await world.scheduler_synced(added)

    for step in steps[:-1]:
        await change(world, added, step)
        await world.scheduler_synced(added)
        assert await world.count_bound([waiting]) == 0
        assert added not in await nodes_asked_about(world, waiting)

    await change(world, added, steps[-1])

    assert await world.bound([waiting]) == [added]


async def test_removed_idle_node_is_no_candidate(world: World) -> None:
    busy, going = world.add_shared("busy"), world.add_shared("going")
    await world.start()
    await world.tenants(busy, 2, utilization=0.45)
    await world.client.patch(node(going), {"spec": {"taints": GOING}})
    await world.scheduler_synced(going)
    stock = pod("stock-beside-going")

    assert await world.place(stock) == busy
    await world.decided(stock, more_than=0)
    assert going not in await nodes_asked_about(world, stock)
