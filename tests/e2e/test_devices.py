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
        another, "0/2 nodes are available: 2 node(s) had too little free GPU memory (idlegpu)."
    )
    assert "FailedScheduling" in shown


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
        "3 node(s) had GPUs in use by processes outside Kubernetes (idlegpu).",
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
        "1 node(s) had too few working GPUs (idlegpu).",
    )


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
        pod(f"dying-{letter}", annotations=dying, nodeName=cursed) for letter in "abcde"
    )

    async def are_noticed() -> bool:
        node = await world.services.extender.get(f"/v1/nodes/{cursed}")
        return bool(node["early_failures"] == 5)

    await wait_for(are_noticed, "five pods died")
    await world.settled()

    assert await world.place(pod("next")) == other


async def die(world: World, *items: Object) -> None:
    """Let pods start and fail, and wait until the extender knows."""
    await world.client.create_all(items)
    for item in items:
        await world.client.wait_pod(
            item, lambda current: current["status"].get("phase") == "Failed", "failed"
        )
    await world.settled()
