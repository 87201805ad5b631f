"""Karpenter's handling of waiting pods, and of nodes that idlegpu refuses: docs/beside.md."""

from typing import Final

import pytest

from simulation.devices import Load
from simulation.models import GIB
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World
from tests.karpenter.conftest import CLAIMS

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

FOREIGN: Final = Load(utilization=0.85, memory_bytes=30 * GIB)


async def claims(world: World) -> list[Object]:
    """Return Karpenter's NodeClaims."""
    listed: list[Object] = (await world.client.request("GET", CLAIMS))["items"]
    return listed


async def is_added(world: World, node: str) -> bool:
    """Return whether Karpenter has added exactly this node."""
    names = [claim.get("status", {}).get("nodeName") for claim in await claims(world)]
    return names == [node]


async def wait_event(world: World, item: Object, text: str) -> None:
    """Wait until an event of a pod has this text."""

    async def has_come() -> bool:
        return any(text in event["message"] for event in await world.client.events(item))

    await wait_for(has_come, f"an event says {text!r}")


async def test_karpenter_counts_a_refused_node_as_fitting_and_adds_none(world: World) -> None:
    taken = world.add("taken", 1)
    await world.start()
    world.fleet.set_foreign(taken, 0, FOREIGN)
    await world.wait_state(taken, 0, "foreign")
    waiting = pod("refused")
    await world.client.create(waiting)
    assert "in use by processes outside Kubernetes" in await world.client.wait_unschedulable(
        waiting
    )

    await wait_event(world, waiting, f"Pod should schedule on: node/{taken}")

    assert await claims(world) == []


async def test_a_pod_for_which_there_is_no_room_goes_to_the_node_that_it_adds(world: World) -> None:
    full = world.add("full", 1)
    await world.start()
    await world.tenants(full)
    waiting = pod("roomless")
    await world.client.create(waiting)

    (node,) = await world.bound([waiting])

    assert node != full
    await wait_for(lambda: is_added(world, node), f"Karpenter says that it added {node}")
    # It has no telemetry, and unknown is not busy.
    (decided, *_) = await world.decisions(waiting)
    assert decided["node"] == node
