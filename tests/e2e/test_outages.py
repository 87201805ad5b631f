"""Failing parts: no pod stays without a node, and none goes to a node that is known to be bad."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from simulation.devices import Load, Loss
from simulation.models import GIB
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World, spread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

BETWEEN_PODS_SECONDS = 0.05
"""Interval between pods of a burst, so that a fault can happen in its middle."""


async def burst(
    world: World, pods: list[Object], after: int, disturb: Callable[[], Awaitable[None]]
) -> list[str]:
    """Create pods one after another, inject a fault once some are bound; return all their nodes."""

    async def create() -> None:
        for item in pods:
            await world.client.create(item)
            await asyncio.sleep(BETWEEN_PODS_SECONDS)

    async def enough_bound() -> bool:
        return await world.count_bound(pods) >= after

    async with asyncio.TaskGroup() as group:
        group.create_task(create(), name="create pods")
        await wait_for(enough_bound, f"{after} pods are bound")
        await disturb()
    return await world.bound(pods)


async def test_burst_without_prometheus_places_all_pods_on_good_nodes(world: World) -> None:
    good = [world.add_shared(f"good-{number}", cards=2, replicas=8) for number in range(2)]
    taken, dead = world.add("taken", cards=8), world.add("dead", cards=8)
    world.fleet.kill_device(dead, 3, Loss.XID_79)
    for index in range(8):
        world.fleet.set_foreign(taken, index, Load(utilization=0.8, memory_bytes=20 * GIB))
    await world.start({"freshness": {"max_age_seconds": 5}})
    await world.wait_state(dead, 0, "excluded")
    await world.wait_state(taken, 7, "foreign")
    await world.fill_host(*good)
    prometheus = world.services.prometheus.process

    async def kill_prometheus() -> None:
        prometheus.kill()

    first = [pod(f"first-{number}") for number in range(12)]
    placed = await burst(world, first, 4, kill_prometheus)
    # No reading is fresh any more, and the last known faults still count.
    await world.wait_gpu(good[0], 0, lambda gpu: gpu["freshness"] == "stale", "is stale")
    placed += await world.place_all([pod(f"second-{number}") for number in range(12)])

    assert set(placed) == set(good)

    await prometheus.start()
    await world.settled()


async def test_pods_are_bound_without_an_extender_that_may_be_ignored(world: World) -> None:
    quiet, busy = world.add_shared("quiet"), world.add_shared("busy")
    await world.start()
    await world.tenants(busy, 1, utilization=0.9)
    await world.fill_host(quiet)
    extender = world.services.extender.process

    extender.kill()

    assert await world.place(pod("meanwhile")) == busy

    await extender.start()
    await world.settled()

    assert await world.place(pod("afterwards")) == quiet


async def test_pods_wait_for_an_extender_that_may_not_be_ignored(world: World) -> None:
    quiet, busy = world.add_shared("quiet"), world.add_shared("busy")
    await world.start(extender={"ignorable": False})
    await world.tenants(busy, 1, utilization=0.9)
    await world.fill_host(quiet)
    extender = world.services.extender.process
    extender.kill()
    patient = pod("patient")
    await world.client.create(patient)
    await world.describe(patient, "connection refused")
    assert await world.count_bound([patient]) == 0

    await world.start_extender()

    assert await world.bound([patient]) == [quiet]


async def stop_gracefully(extender: ServerProcess) -> None:
    await extender.stop()
    assert "exit status 0" in extender.describe()


async def kill(extender: ServerProcess) -> None:
    extender.kill()


@pytest.mark.parametrize(
    "end", [pytest.param(stop_gracefully, id="SIGTERM"), pytest.param(kill, id="SIGKILL")]
)
async def test_an_extender_restarted_under_load_costs_no_pod(
    world: World, end: Callable[[ServerProcess], Awaitable[None]]
) -> None:
    nodes = [world.add_shared(f"equal-{number}", cards=2, replicas=8) for number in range(4)]
    await world.start(extender={"ignorable": False})
    extender = world.services.extender.process

    async def restart() -> None:
        await end(extender)
        await extender.start()

    pods = [pod(f"burst-{number}") for number in range(40)]
    placed = await burst(world, pods, 10, restart)

    # While the new process lists the cluster, kube-scheduler chooses alone among all nodes.
    assert spread(placed).keys() == set(nodes)
    assert max(spread(placed).values()) <= 13


async def test_the_extender_catches_up_after_a_restart_of_the_api_server(world: World) -> None:
    busy = world.add_shared("busy")
    await world.start()
    await world.tenants(busy, 1, utilization=0.9)
    apiserver = world.services.plane.apiserver

    apiserver.kill()
    await apiserver.start()
    quiet = world.add_shared("quiet")
    await world.register()
    await world.settled()
    await world.scheduler_synced(quiet)
    await world.fill_host(quiet)

    assert await world.place(pod("next")) == quiet
