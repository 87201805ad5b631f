"""Readings of GPUs: recent and hourly use, power, foreign use, missing signals."""

from typing import Any, Final

import pytest

from simulation.devices import Load, Loss
from simulation.models import GIB
from simulation.nodes import ExporterBuild
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MEASURED: Final = {"assumed": {"warm_up_seconds": 1, "loading_seconds": 0}}
"""Short warm-up, so that measured values count right after a pod's start."""

IDLE_ALONE: Final = {"idlegpu.io/require-idle": "true"}
WITHOUT_PODS: Final = ExporterBuild(has_pods=False)
OUTSIDE: Final = "a process outside Kubernetes uses it"


def room(memory: str) -> Object:
    """Return the annotation that requests memory."""
    return {"annotations": {"idlegpu.io/gpu-memory": memory}}


async def passed(world: World, seconds: float) -> None:
    """Wait until a time has passed on the fleet's clock."""
    until = world.fleet.clock() + seconds

    async def is_over() -> bool:
        return world.fleet.clock() >= until

    await wait_for(is_over, f"{seconds} s of work")


async def hold(world: World, node: str, count: int, *, utilization: float, memory: str) -> None:
    """Create pods that hold GPUs of a node whose exporter does not report pods."""
    annotations = {
        "simulation.idlegpu.io/utilization": str(utilization),
        "simulation.idlegpu.io/memory": memory,
    }
    for number in range(count):
        held = pod(f"{node}-tenant-{number}", annotations=annotations, nodeName=node)
        await world.client.create(held)
        await world.running(held)


async def test_use_from_outside_of_a_shared_gpu_is_load_and_refuses_nothing(world: World) -> None:
    taken, calm = world.add_shared("taken"), world.add_shared("calm")
    world.fleet.set_foreign(taken, 0, Load(utilization=0.85, memory_bytes=10 * GIB))
    await world.start()
    await world.wait_gpu(taken, 0, lambda gpu: OUTSIDE in gpu["why"], "is known to be used")
    await world.fill_host(calm)

    assert await world.place(pod("first")) == calm

    await world.tenants(calm, 3)
    assert await world.place(pod("second")) == taken

    large = pod("large", **room("18Gi"))
    await world.client.create(large)
    await world.describe(large, "1 node(s) had too little free GPU memory")


async def test_shared_gpu_is_idle_despite_a_busy_hour(
    world: World,
) -> None:
    rests, works = world.add_shared("rests"), world.add_shared("works")
    busy_from_a_tenth = {"thresholds": {"utilization": 10}, "recent_seconds": 10}
    await world.start({**MEASURED, **busy_from_a_tenth})
    await world.tenants(rests, 1, memory="100Mi")
    await world.tenants(works, 1, utilization=0.2, memory="100Mi")
    world.fleet.set_utilization(rests, 0, 0.9)
    await world.wait_state(rests, 0, "busy")
    await passed(world, 6)

    world.fleet.set_utilization(rests, 0, 0.0)
    rested: list[Any] = []

    def rests_now(gpu: Any) -> bool:
        if gpu["state"] == "idle":
            rested.append(gpu)
        return bool(rested)

    await world.wait_gpu(rests, 0, rests_now, "is idle")

    assert rested[0]["utilization_ratio"] > 0.1
    await world.covered(rests, works)
    assert await world.place(pod("asks", annotations=IDLE_ALONE)) == rests


async def test_power_alone_takes_no_gpu_away(world: World) -> None:
    hungry = world.add("hungry", cards=1)
    await world.start()
    world.fleet.card(hungry, 0).power_watts = 350.0
    await world.wait_gpu(
        hungry, 0, lambda gpu: gpu["utilization_latest_ratio"] > 0.2, "looks busy by its power"
    )
    await passed(world, 3)

    assert await world.place(pod("asks", annotations=IDLE_ALONE)) == hungry


async def test_without_labels_of_pods_the_gpus_that_are_not_in_use_are_free(world: World) -> None:
    half = world.add("half", cards=4, exporter=WITHOUT_PODS)
    silent = world.add("silent", cards=4, exporter=WITHOUT_PODS)
    world.fleet.silence(silent)
    await world.start()
    await hold(world, half, 2, utilization=0.9, memory="40Gi")
    for index in range(2):
        await world.wait_gpu(
            half, index, lambda gpu: (gpu["memory_used_ratio"] or 0) > 0.4, "is loaded"
        )
    await passed(world, 3)
    await world.fill_host(half)

    assert await world.place(pod("one")) == half
    assert await world.place(pod("other")) == half


async def test_without_gfd_gpus_that_telemetry_does_not_show_are_no_shares(world: World) -> None:
    node = world.add("plain", cards=8)
    for index in range(4, 8):
        world.fleet.kill_device(node, index, Loss.VANISHED)
    await world.register()
    item = {"kind": "Node", "metadata": {"name": node}}
    labels = (await world.client.get(item))["metadata"]["labels"]
    gone = {name: None for name in labels if name.startswith("nvidia.com/")}
    await world.client.patch(item, {"metadata": {"labels": gone}})
    await world.start()
    await world.tenants(node, 4, memory="70Gi")

    asks = pod("asks", **room("60Gi"))

    assert await world.place(asks) == node


async def test_tenants_that_still_load_are_no_idler_than_one_at_work(world: World) -> None:
    loads = world.add_shared("loads", replicas=10)
    works = world.add_shared("works", replicas=10)
    await world.start({"assumed": {"warm_up_seconds": 1}})
    await world.tenants(loads, 8, memory="10Mi")
    await world.tenants(works, 1, utilization=0.2, memory="10Mi")
    await world.covered(works)
    await passed(world, 5)
    await world.fill_host(works)

    assert await world.place(pod("asks")) == works
