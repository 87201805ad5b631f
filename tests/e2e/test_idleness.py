"""Placement by load, where kube-scheduler without the extender would prefer the other node."""

from collections.abc import Mapping

import pytest

from testkit.controlplane.objects import pod
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


async def quiet_and_busy(
    world: World, extender: Mapping[str, object] | None = None
) -> tuple[str, str]:
    """Start with two nodes with equally many pods, and load only on the second."""
    quiet, busy = world.add_shared("quiet"), world.add_shared("busy")
    await world.start(extender=extender)
    await world.tenants(quiet, 2, utilization=0.05)
    await world.tenants(busy, 2, utilization=0.45)
    await world.fill_host(quiet)
    return quiet, busy


async def test_an_idle_node_beats_a_busy_one(world: World) -> None:
    quiet, _ = await quiet_and_busy(world)

    assert await world.place(pod("stock")) == quiet


async def test_whole_nodes_on_the_wire_lead_to_the_same_node(world: World) -> None:
    quiet, _ = await quiet_and_busy(world, {"nodeCacheCapable": False})

    assert await world.place(pod("stock")) == quiet


async def test_a_pod_that_opts_out_is_left_to_kube_scheduler(world: World) -> None:
    quiet, busy = await quiet_and_busy(world)
    left_alone = pod("left-alone", annotations={"idlegpu.io/enabled": "false"})

    assert await world.place(left_alone) == busy
    assert await world.decisions(left_alone) == []
    assert await world.place(pod("stock")) == quiet


async def test_a_bad_annotation_gives_a_warning_and_the_pod_is_bound(world: World) -> None:
    quiet, _ = await quiet_and_busy(world)
    typo = pod("typo", annotations={"idlegpu.io/gpu-memory": "20 gigs"})

    assert await world.place(typo) == quiet
    shown = await world.describe(
        typo,
        'annotation idlegpu.io/gpu-memory: "20 gigs" is not allowed: must be a quantity from '
        "1Mi to 16Ti, such as 20Gi",
    )
    assert "Warning" in shown
    assert "InvalidAnnotation" in shown


async def test_a_pod_that_requires_idle_gpus_waits_for_them(world: World) -> None:
    busy = world.add_shared("busy")
    await world.start()
    (tenant,) = await world.tenants(busy, 1, utilization=0.9)
    patient = pod("patient", annotations={"idlegpu.io/require-idle": "true"})
    await world.client.create(patient)

    assert "1 node(s) had too few GPUs known to be idle" in await world.client.wait_unschedulable(
        patient
    )

    await world.end(tenant)
    await world.touch(busy)

    assert await world.bound([patient]) == [busy]


async def test_the_first_choice_of_many_equal_nodes_wins_every_time(world: World) -> None:
    nodes = [world.add(f"equal-{number}") for number in range(6)]
    await world.start()

    for number in range(10):
        item = pod(f"pod-{number}")
        placed = await world.place(item)
        (decision, *_) = await world.decisions(item)
        assert placed == decision["node"] == nodes[0]
        await world.end(item)
