import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from extender.core.nodes.inventory import NodeRecord, Taint
from extender.core.nodes.node_selection import read_selection
from extender.effects.wake_plan import Hope
from extender.effects.waker import WakerRunner, _describe, build_waker
from extender.kube.client import KubeClient
from extender.runtime.supervision import Tasks
from extender.settings.config import Settings
from extender.settings.service import Wake, WakeTarget
from testkit.builders import GPU, pod_ref, request
from testkit.fake_kube import FakeKube, eventually, refusal
from testkit.world import World
from tests.extender.effects.waking import (
    EAGER,
    IDLE_ONLY,
    OBJECTS,
    Recorder,
    running,
    turn_idle,
    waits,
    waker,
    wakes,
)


async def test_a_waiting_pod_is_woken_once_a_gpu_is_idle(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    waits(world)
    waking = waker(client, world)

    await waking.look()
    assert kube.writes == []
    turn_idle(world, "y")
    await waking.look()

    ((method, path, body),) = kube.writes
    assert (method, path) == ("PATCH", f"{OBJECTS}/idlegpu-state")
    assert kube.write_types == ["application/merge-patch+json"]
    assert set(body) == {"metadata"}
    assert wakes(kube) == ["1 waiting pod may fit: ns/p on y"]
    assert (waking.counts.waiting, waking.counts.wakes) == (1, 1)


async def test_the_object_is_created_where_it_is_missing(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    kube.faults["write"].append(refusal(404, "not found"))
    waits(world)
    turn_idle(world, "x")

    await waker(client, world).look()

    method, path, body = kube.writes[1]
    assert (method, path) == ("POST", OBJECTS)
    assert (body["kind"], body["metadata"]["name"]) == ("CSIStorageCapacity", "idlegpu-state")
    assert body["storageClassName"] == "idlegpu.io-no-storage"
    assert wakes(kube) == ["1 waiting pod may fit: ns/p on x"] * 2


async def test_the_node_is_annotated_where_the_setting_says_so(world: World) -> None:
    waits(world)
    turn_idle(world, "y")
    recorder = Recorder()

    await waker(recorder, world, EAGER.model_copy(update={"target": WakeTarget.NODE})).look()

    assert recorder.requested == [("PATCH", "/api/v1/nodes/y", "patch nodes")]


@pytest.mark.parametrize(
    "changes",
    [
        {"is_refused": False, "wishes": ()},
        {"node": "x"},
        {"is_deleting": True},
        {"wishes": (*IDLE_ONLY, ("idlegpu.io/enabled", "false"))},
        {"resources": {GPU: 2}},
        {"resources": {}, "has_claims": True},
    ],
    ids=["others refused it", "bound", "on its way out", "left alone", "no room", "only claims"],
)
async def test_any_other_pod_is_no_reason_to_wake(
    kube: FakeKube, client: KubeClient, world: World, changes: dict[str, Any]
) -> None:
    world.fleet.apply_pod(replace(waits(world), **changes))
    turn_idle(world, "y")

    await waker(client, world).look()

    assert kube.writes == []


async def test_a_new_node_is_a_reason_once_its_readings_show_it_idle(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    waits(world)
    waking = waker(client, world)

    offered = {GPU: 1}
    world.fleet.apply_node(NodeRecord(name="new", allocatable=offered, capacity=offered))
    world.read_after(10.0)
    await waking.look()
    assert kube.writes == []

    world.add_cards("new", 1)
    world.read_after(10.0)
    await waking.look()
    assert wakes(kube) == ["1 waiting pod may fit: ns/p on new"]


async def test_a_full_node_is_no_reason_to_wake(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    waits(world, wishes=())  # refused for a reason that is over
    world.bind("a", "x", on=[world.card("x")])
    world.bind("b", "y", on=[world.card("y")])

    await waker(client, world).look()

    assert kube.writes == []


SSD = {"disk": "ssd"}


@pytest.mark.parametrize(
    ("of_node", "spec"),
    [
        ({}, {"nodeSelector": SSD}),
        ({"taints": (Taint(key="team"),)}, {}),
        ({"taints": (Taint(key="team", effect="NoExecute"),)}, {"tolerations": [{"key": "x"}]}),
        ({"is_unschedulable": True}, {}),
    ],
    ids=["not selected", "tainted", "tainted otherwise than tolerated", "cordoned"],
)
async def test_a_node_that_the_pod_may_not_go_to_is_no_reason_to_wake(
    kube: FakeKube,
    client: KubeClient,
    world: World,
    of_node: dict[str, Any],
    spec: dict[str, object],
) -> None:
    world.fleet.apply_node(replace(world.fleet.nodes["y"], **of_node))
    waits(world, selection=read_selection({"spec": spec}))
    waking = waker(client, world)
    turn_idle(world, "y")

    await waking.look()
    assert kube.writes == []
    assert waking.counts.waiting == 1

    world.fleet.apply_node(replace(world.fleet.nodes["x"], other_labels=SSD))
    turn_idle(world, "x")
    await waking.look()
    assert wakes(kube) == ["1 waiting pod may fit: ns/p on x"]


async def test_pods_with_equal_requests_are_woken_for_different_nodes(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    for name in ("x", "y"):
        world.fleet.apply_node(replace(world.fleet.nodes[name], hostname=name))
        host = {"kubernetes.io/hostname": name}
        waits(world, f"for-{name}", selection=read_selection({"spec": {"nodeSelector": host}}))
    turn_idle(world, "x")
    turn_idle(world, "y")

    await waker(client, world).look()

    assert wakes(kube) == ["2 waiting pods may fit: ns/for-x on x, ns/for-y on y"]


async def test_own_refusal_counts_until_kube_scheduler_reports_one(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    requested = request(requires_idle=True)
    world.placer.place("filter", pod_ref("p"), requested, ("x", "y"))
    fresh = waits(world, is_unscheduled=False, is_refused=False, wishes=())
    waking = waker(client, world)

    await waking.look()
    assert waking.counts.waiting == 1
    turn_idle(world, "x")
    await waking.look()
    assert wakes(kube) == ["1 waiting pod may fit: ns/p on x"]

    # for lack of CPU, according to its message
    world.fleet.apply_pod(replace(fresh, is_unscheduled=True))
    await waking.look()
    assert waking.counts.waiting == 0


async def test_a_pod_that_passed_us_is_no_reason_to_wake(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    world.placer.place("filter", pod_ref("p"), request(), ("x", "y"))
    waits(world, is_unscheduled=False, is_refused=False, wishes=())

    await waker(client, world).look()

    assert kube.writes == []


def test_the_summary_is_short_for_any_number_of_pods() -> None:
    hopes = [Hope(pod=pod_ref(f"p{number}"), node="n", nodes=frozenset()) for number in range(9)]
    at = datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=UTC)

    assert _describe(hopes[:2], at) == (
        "2 waiting pods may fit: ns/p0 on n, ns/p1 on n; 2026-01-02T03:04:05.000600Z"
    )
    assert _describe(hopes, at) == (
        "9 waiting pods may fit: ns/p0 on n, ns/p1 on n, ns/p2 on n, ns/p3 on n, ns/p4 on n "
        "and 4 more; 2026-01-02T03:04:05.000600Z"
    )


async def test_the_setting_names_the_namespace_of_lease_and_object(world: World) -> None:
    settings = EAGER.model_copy(update={"namespace": "elsewhere"})
    recorder = Recorder()
    waits(world)
    turn_idle(world, "y")
    base = "/apis/{}/v1/namespaces/elsewhere/{}"
    lease = base.format("coordination.k8s.io", "leases/idlegpu-wake")
    state = base.format("storage.k8s.io", "csistoragecapacities/idlegpu-state")
    taken = [
        ("GET", lease, "get leases.coordination.k8s.io"),
        ("PATCH", lease, "patch leases.coordination.k8s.io"),
    ]
    changed = ("PATCH", state, "patch csistoragecapacities.storage.k8s.io")

    async with running(build_waker(recorder, world.placer, settings, kubeconfig=None)):
        await eventually(lambda: changed in recorder.requested)

    assert recorder.requested[:2] == taken
    assert {*recorder.requested} == {*taken, changed}  # the Lease may have been renewed meanwhile


async def test_pods_are_woken_while_the_setting_says_so(client: KubeClient, world: World) -> None:
    off, on = (Settings(wake=Wake(enabled=enabled)) for enabled in (False, True))
    seen: list[bool] = []
    async with Tasks() as tasks:
        runner = WakerRunner(client, world.placer, tasks, off)
        runner.start()
        for settings in (off, on, on, off):
            await runner.adopt(settings)
            names = {task.get_name() for task in asyncio.all_tasks()}
            assert ("waker" in names) is (runner.waker is not None)
            seen.append(runner.waker is not None)

    assert seen == [False, True, True, False]
