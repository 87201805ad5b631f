"""The fleet follows the pods of an API server."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from kubernetes_asyncio.client import ApiClient, Configuration

from simulation.apiserver import run_apiserver
from simulation.control import SimulatedControlPlane
from simulation.fleet import SimulatedFleet
from simulation.follow import follow_pods
from simulation.objects import Kind, bound_pod_object, pod_object
from testkit.controlplane.waiting import wait_for
from tests.simulation.builders import NOW, fleet, pod, spec


@pytest.fixture
def control() -> SimulatedControlPlane:
    """Return an API server with another fleet than the one that follows it."""
    return SimulatedControlPlane(fleet=fleet(spec(cards=4)))


@pytest.fixture
async def follower(control: SimulatedControlPlane) -> AsyncIterator[SimulatedFleet]:
    following = fleet(spec(cards=4))
    following.place(pod("tenant"), "node-a", "nvidia.com/gpu")
    async with (
        run_apiserver(control) as url,
        ApiClient(Configuration(host=url)) as api_client,
        asyncio.TaskGroup() as tasks,
    ):
        task = tasks.create_task(
            follow_pods(api_client, following, retry_seconds=0.01), name="follow"
        )
        yield following
        task.cancel()


async def holders(following: SimulatedFleet, *expected: str) -> None:
    """Wait until exactly these pods hold devices."""

    async def is_so() -> bool:
        keys = sorted(placed[0].pod.key for placed in following.placements.values())
        return keys == sorted(expected)

    await wait_for(is_so, f"the fleet holds {expected}", deadline_seconds=30)


async def test_bound_pods_come_and_deleted_ones_go(
    control: SimulatedControlPlane, follower: SimulatedFleet
) -> None:
    control.create_pod(pod_object("a", 2))
    control.bind("default", "a", "node-a")
    await holders(follower, "team/tenant", "default/a")

    control.delete_pod("default", "a")
    await holders(follower, "team/tenant")


async def test_a_pod_that_vanished_unseen_is_released_at_the_next_list(
    control: SimulatedControlPlane,
) -> None:
    following = fleet(spec(cards=4))
    control.create_pod(pod_object("a"))
    control.bind("default", "a", "node-a")
    control.store.expire()
    control.store.watch_seconds = 0.1

    async with (
        run_apiserver(control) as url,
        ApiClient(Configuration(host=url)) as api_client,
        asyncio.TaskGroup() as tasks,
    ):
        task = tasks.create_task(follow_pods(api_client, following, retry_seconds=0.01))
        await holders(following, "default/a")
        control.store.items[Kind.PODS].clear()  # without an event for the watches
        await holders(following)
        task.cancel()


async def test_a_pod_that_was_placed_beforehand_is_known_by_its_name(
    control: SimulatedControlPlane, follower: SimulatedFleet
) -> None:
    tenant = pod_object("tenant", namespace="team")
    control.store.put(
        Kind.PODS, bound_pod_object(tenant, uid="by-api", node="node-a", bound_at=NOW)
    )

    async def is_adopted() -> bool:
        return "by-api" in follower.placements

    await wait_for(is_adopted, "the tenant is known by its new UID", deadline_seconds=30)
    assert [len(device.tenants) for device in follower.node("node-a").devices] == [1, 0, 0, 0]
    assert follower.release("by-api")
    assert not any(device.tenants for device in follower.node("node-a").devices)
