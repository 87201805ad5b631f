"""Waiting pods that are retried once a node has room, although no Kubernetes object changed.

A foreign process keeps them waiting; only metrics show its start and end.
"""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from extender.core.request.request import GATE
from extender.effects.waker import _POD_ANNOTATION
from testkit.controlplane.deployed import ExtenderServer
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.plane import EXTENDER
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World
from tests.e2e.waking import PATIENT, make_busy, make_idle, refused, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

WATCHED_SECONDS: Final = 6.0  # far longer than a wake takes: see bench/results/wakeup.md

STATE: Final[Object] = {
    "kind": "CSIStorageCapacity",
    "metadata": {"name": "idlegpu-state", "namespace": "idlegpu"},
}
LEASE: Final = "/apis/coordination.k8s.io/v1/namespaces/idlegpu/leases/idlegpu-wake"


async def stays_waiting(world: World, patient: Object) -> None:
    """Check for a while that kube-scheduler does not retry a pod."""
    tried = len(await world.decisions(patient))
    started = time.monotonic()

    async def is_over() -> bool:
        assert await world.count_bound([patient]) == 0
        assert len(await world.decisions(patient)) == tried
        return time.monotonic() - started > WATCHED_SECONDS

    await wait_for(is_over, "time is over")


def lines(server: ExtenderServer, start: int, event: str) -> list[Object]:
    """Return the log lines of an event that an extender wrote after an offset."""
    text = server.process.log.read_bytes()[start:].decode()
    *whole, _ = text.split("\n")  # the last line may not be complete yet
    logged = [json.loads(line) for line in whole if line.startswith("{")]
    return [line for line in logged if line["event"] == event]


async def woke(server: ExtenderServer, start: int) -> int:
    """Wait until an extender has logged that it woke pods; return how often it did."""

    async def has_woken() -> int:
        return len(lines(server, start, "woke waiting pods"))

    return await wait_for(has_woken, "the log has a wake of waiting pods")


def log_length(server: ExtenderServer) -> int:
    return server.process.log.stat().st_size if server.process.log.exists() else 0


async def holds_lease(world: World, server: ExtenderServer) -> None:
    """Wait until an extender holds the lease for waking."""

    async def is_holder() -> bool:
        taken = {line["identity"] for line in lines(server, 0, "took the lease")}
        if not taken:  # the lease may not exist yet
            return False
        lease = await world.client.request("GET", LEASE)
        return lease["spec"].get("holderIdentity") in taken

    await wait_for(is_holder, "the extender holds the lease")


@asynccontextmanager
async def second_replica(world: World) -> AsyncIterator[ExtenderServer]:
    """Run another extender with the same settings; kube-scheduler does not call it."""
    other = world.services.replica("extender-2")
    try:
        await other.ensure(world.services.extender.settings)
        yield other
    finally:
        other.process.kill()


async def test_a_waiting_pod_is_bound_soon_after_its_gpu_turns_idle(world: World) -> None:
    node = await start(world)
    for name in ("first", "second"):  # kube-scheduler alone would wait for minutes
        await make_busy(world, node)
        patient = await refused(world, name)
        await make_idle(world, node)
        assert await world.client.wait_bound(patient) == node
        await world.end(patient)

    annotations = (await world.client.get(STATE))["metadata"]["annotations"]
    assert annotations["idlegpu.io/state"].startswith(
        f"1 waiting pod may fit: default/second on {node}; "
    )


async def test_new_node_takes_pods_at_once_and_waiting_pods_once_idle(world: World) -> None:
    await start(world)
    patient = await refused(world)
    tried = len(await world.decisions(patient))
    node = world.add("new", cards=2)
    await world.register(are_scraped=False)

    stock = pod("stock", nodeSelector={"kubernetes.io/hostname": node})
    assert await world.place(stock) == node
    # kube-scheduler retries it because of the new node
    await world.decided(patient, more_than=tried)
    assert await world.count_bound([patient]) == 0
    world.scrape()

    assert await world.client.wait_bound(patient) == node


async def test_without_waking_the_pod_waits_on(world: World) -> None:
    node = await start(world, enabled=False)
    patient = await refused(world)
    await make_idle(world, node)

    await stays_waiting(world, patient)

    await world.touch(node)
    assert await world.bound([patient]) == [node]


async def test_without_the_rights_the_log_says_so_once_and_the_rest_works(world: World) -> None:
    server = world.services.extender
    since = log_length(server)
    node = await start(world, namespace="default")  # the rights belong to another extender
    patient = await refused(world)
    await make_idle(world, node)

    await stays_waiting(world, patient)

    (warning,) = lines(server, since, "cannot take the lease")
    assert warning["cause"].endswith(
        "RBAC must allow this identity to get leases.coordination.k8s.io"
    )
    assert await world.place(pod("stock")) == node
    assert (await server.get("/readyz"))["status"] == "ready"


async def test_a_restarted_extender_still_knows_whom_it_refused(world: World) -> None:
    node = await start(world)
    patient = await refused(world)
    extender = world.services.extender.process

    extender.kill()
    await extender.start()
    await world.settled()
    assert await world.decisions(patient) == []
    await make_idle(world, node)

    assert await world.client.wait_bound(patient) == node


async def test_of_two_replicas_one_wakes_and_the_other_takes_over(world: World) -> None:
    first = world.services.extender
    since = log_length(first)
    node = await start(world)
    async with second_replica(world) as second:
        await holds_lease(world, first)
        patient = await refused(world)
        await make_idle(world, node)
        await world.client.wait_bound(patient)
        assert await woke(first, since) == 1
        assert lines(second, 0, "woke waiting pods") == []
        await world.end(patient)

        await make_busy(world, node)
        another = await refused(world, "another")
        # Calls and the lease are independent: this extender releases the lease.
        await first.process.stop()
        await holds_lease(world, second)
        await first.process.start()
        await make_idle(world, node)
        await world.client.wait_bound(another)

        assert await woke(second, 0) == 1
        assert await woke(first, since) == 1


async def test_a_nodes_annotation_wakes_as_well(world: World) -> None:
    user = world.services.plane.users[EXTENDER]
    rules = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}]
    async with world.client.granted(user, rules):
        node = await start(world, target="node")
        patient = await refused(world)
        await make_idle(world, node)

        assert await world.client.wait_bound(patient) == node

        item = await world.client.get({"kind": "Node", "metadata": {"name": node}})
        assert "default/patient" in item["metadata"]["annotations"]["idlegpu.io/state"]


@asynccontextmanager
async def may_patch_pods(world: World) -> AsyncIterator[None]:
    """Let the extender patch pods, as the component `wake-pods` does."""
    user = world.services.plane.users[EXTENDER]
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    async with world.client.granted(user, rules):
        yield


async def test_a_pod_is_woken_by_a_change_of_its_own(world: World) -> None:
    async with may_patch_pods(world):
        node = await start(world, target="pod")
        first, second = await refused(world, "first"), await refused(world, "second")
        await make_idle(world, node)

        assert await world.client.wait_bound(first) == node

        item = await world.client.get(first)
        assert f"default/first on {node}" in item["metadata"]["annotations"][_POD_ANNOTATION]
        item = await world.client.get(second)
        assert _POD_ANNOTATION not in item["metadata"].get("annotations", {})


async def test_gated_pods_are_tried_one_for_each_gpu_the_most_urgent_first(world: World) -> None:
    async with may_patch_pods(world):
        node = await start(world, target="pod")
        urgently = await world.priority_class("urgent", 1000)
        gated: dict[str, Any] = {"schedulingGates": [{"name": GATE}]}
        pods = [pod(f"gated-{number}", annotations=PATIENT, **gated) for number in range(5)]
        pods.append(pod("urgent", annotations=PATIENT, priorityClassName=urgently, **gated))
        # One after the other: the order of pods that are created at once is open.
        for item in pods:
            await world.client.create(item)

        await make_idle(world, node)

        assert await world.client.wait_bound(pods[-1]) == node
        another = world.add("another", cards=2)
        await world.register()
        assert sorted(await world.bound(pods[:2])) == [another, another]
        for item in pods[2:-1]:
            current = await world.client.get(item)
            assert current["spec"]["schedulingGates"] == [{"name": GATE}]
            assert await world.decisions(item) == []
