"""Unsuitable GPUs (too little memory, foreign use, dead), and parts of GPUs."""

import pytest

from simulation.devices import Load, Loss
from simulation.models import A100_40GB, GIB
from testkit.controlplane.kubelets import ENDS_AFTER, FAILS
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOM_OF_20_GIB = {"idlegpu.io/gpu-memory": "20Gi"}
FOREIGN = Load(utilization=0.85, memory_bytes=30 * GIB)


async def test_a_pod_never_lands_where_its_memory_does_not_fit(world: World) -> None:
    tight, roomy = world.add_shared("tight"), world.add_shared("roomy")
    # The API server stores whole seconds: a pod may start up to one second later than its status
    # says.
    await world.start({"assumed": {"warm_up_seconds": 1}})
    await world.tenants(tight, 1, memory="12Gi")
    await world.tenants(roomy, 1, utilization=0.9)
    await world.covered(tight, roomy)
    await world.fill_host(roomy)

    # Idle and with fewer requests, the node with little memory would otherwise be the better one.
    little = {"idlegpu.io/gpu-memory": "2Gi"}
    assert await world.place(pod("small", annotations=little)) == tight
    assert await world.place(pod("large", annotations=ROOM_OF_20_GIB)) == roomy

    another = pod("another", annotations=ROOM_OF_20_GIB)
    await world.client.create(another)
    shown = await world.describe(
        another, "0/2 nodes are available: 2 node(s) had too little free GPU memory."
    )
    assert "FailedScheduling" in shown


async def test_a_pod_waits_while_no_node_has_room_for_it(world: World) -> None:
    tight = world.add_shared("tight")
    await world.start()
    (tenant,) = await world.tenants(tight, 1, memory="12Gi")
    large = pod("large", annotations=ROOM_OF_20_GIB)
    await world.client.create(large)

    assert "1 node(s) had too little free GPU memory" in await world.client.wait_unschedulable(
        large
    )

    await world.end(tenant)
    await world.touch(tight)

    assert await world.bound([large]) == [tight]


async def test_a_gpu_that_others_use_is_refused_and_kubectl_says_so(world: World) -> None:
    taken = [world.add(f"taken-{number}") for number in range(3)]
    clean = world.add("clean", cards=1)
    for node in taken:
        for index in range(2):
            world.fleet.set_foreign(node, index, FOREIGN)
    await world.start()
    for node in taken:
        await world.wait_state(node, 1, "foreign")
    await world.fill_host(clean)

    assert await world.place(pod("first")) == clean

    second = pod("second")
    await world.client.create(second)
    shown = await world.describe(
        second,
        "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, "
        "3 node(s) had GPUs in use by processes outside Kubernetes.",
    )
    assert "FailedScheduling" in shown


async def test_a_node_with_a_gpu_fallen_off_the_bus_is_refused(world: World) -> None:
    dead, healthy = world.add("dead"), world.add("healthy", cards=1)
    world.fleet.kill_device(dead, 0, Loss.XID_79)
    await world.start()
    await world.wait_state(dead, 1, "excluded")
    await world.fill_host(healthy)

    assert await world.place(pod("first")) == healthy

    second = pod("second")
    await world.client.create(second)
    await world.describe(
        second,
        "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, "
        "1 node(s) had too few working GPUs.",
    )


async def test_a_node_whose_gpu_vanished_from_telemetry_comes_last(world: World) -> None:
    lost, healthy = world.add("lost"), world.add("healthy")
    world.fleet.kill_device(lost, 0, Loss.VANISHED)
    await world.start()
    await world.fill_host(healthy)

    assert await world.place_all([pod("first"), pod("second")]) == [healthy] * 2
    assert await world.place(pod("third")) == lost


async def test_a_mig_pod_goes_where_instances_of_its_profile_are_idle(world: World) -> None:
    profile = "nvidia.com/mig-1g.5gb"
    layout = (("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"),)
    free = world.add("free", cards=1, model=A100_40GB, mig=layout)
    held = world.add("held", cards=1, model=A100_40GB, mig=layout)
    await world.start({"strategy": "spread"})
    await world.tenants(held, 1, gpus={profile: 1}, utilization=0.6)
    await world.tenants(free, 1, gpus={"nvidia.com/mig-3g.20gb": 1}, utilization=0.9)
    small = pod("small", {profile: 1})

    assert await world.place(small) == free
    await world.running(small)
    await world.settled()
    gpus = await world.gpus()
    holders = {
        (gpu["node"], gpu["mig_profile"])
        for gpu in gpus.values()
        if "default/small" in gpu["tenants"]
    }
    assert holders == {(free, "1g.5gb")}


async def test_a_node_where_pods_die_at_once_is_no_longer_first_choice(world: World) -> None:
    cursed, other = world.add("cursed", cards=5), world.add("other", cards=8)
    await world.start()
    await world.fill_host(other)
    first = pod("first")
    assert await world.place(first) == cursed
    await world.end(first)

    dying = {ENDS_AFTER: "100ms", FAILS: "true"}
    await world.client.create_all(
        pod(f"dying-{number}", annotations=dying, nodeName=cursed) for number in range(5)
    )

    async def are_noticed() -> bool:
        node = await world.services.extender.get(f"/v1/nodes/{cursed}")
        return bool(node["early_failures"] == 5)

    await wait_for(are_noticed, "five pods died")
    await world.settled()

    assert await world.place(pod("next")) == other


def of_job(name: str, node: str) -> Object:
    """Build a pod of the Job `train` that runs on a node and fails at once."""
    dying = pod(name, annotations={ENDS_AFTER: "100ms", FAILS: "true"}, nodeName=node)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "train"}
    dying["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    return dying


async def die(world: World, *items: Object) -> None:
    """Let pods start and fail, and wait until the extender knows."""
    await world.client.create_all(items)
    for item in items:
        await world.client.wait_pod(
            item, lambda current: current["status"].get("phase") == "Failed", "failed"
        )
    await world.settled()


async def idle_and_lively(world: World) -> tuple[str, str]:
    """Start with an unused shared card and one that a tenant keeps at 28 %."""
    idle, lively = world.add_shared("idle"), world.add_shared("lively")
    await world.start({"assumed": {"warm_up_seconds": 1}})
    await world.tenants(lively, 1, utilization=0.28)
    await world.covered(lively)
    return idle, lively


async def test_a_job_that_dies_anywhere_pushes_no_other_pod_to_a_busier_card(world: World) -> None:
    idle, lively = await idle_and_lively(world)
    await world.fill_host(idle)

    await die(world, of_job("train-1", idle), of_job("train-2", idle))
    first = pod("first")
    assert await world.place(first) == idle
    await world.end(first)

    await die(world, of_job("train-3", lively))
    assert await world.place(pod("second")) == idle


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"reason": "TopologyAffinityError"}, id="refused by the kubelet"),
        pytest.param(
            {
                "containerStatuses": [
                    {
                        "name": "main",
                        "image": "",
                        "imageID": "",
                        "ready": False,
                        "restartCount": 0,
                        "state": {
                            "terminated": {
                                "exitCode": 128,
                                "reason": "StartError",
                                "message": "nvidia-container-cli: initialization error: nvml "
                                "error: driver/library version mismatch: unknown",
                            }
                        },
                    }
                ]
            },
            id="not started for want of the device",
        ),
    ],
)
async def test_one_pod_that_fails_by_a_device_sends_the_next_elsewhere(
    world: World, status: Object
) -> None:
    idle, lively = await idle_and_lively(world)
    await world.fill_host(lively)
    victim = pod("victim")
    assert await world.place(victim) == idle
    uid = (await world.running(victim))["metadata"]["uid"]

    async def is_off_its_gpu() -> bool:
        return uid not in world.fleet.placements

    await world.client.set_phase(victim, "Failed", **status)
    await wait_for(is_off_its_gpu, "the failed pod holds no GPU")
    await world.settled()

    assert await world.place(pod("next")) == lively


async def test_a_failing_jobs_next_pods_try_another_node(world: World) -> None:
    idle, lively = await idle_and_lively(world)
    await die(world, of_job("train-1", idle))
    retry = of_job("train-2", "")
    del retry["spec"]["nodeName"]

    assert await world.place(retry) == lively
    assert await world.place(pod("other")) == idle
