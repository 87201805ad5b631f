"""Kubernetes' own PodGroup (beta, off by default), whose pods are placed all or none.

The coscheduling plugin, which is not built here, delays bindings instead: see
tests/e2e/test_held.py.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import pytest

from simulation.devices import Load
from simulation.models import GIB
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.shipped import MANIFESTS
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World
from tests.groups.conftest import API

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

GROUPS: Final = f"/apis/{API}/namespaces/default/podgroups"
FOREIGN: Final = Load(utilization=0.85, memory_bytes=30 * GIB)
GROUP_SIZES: Final = MANIFESTS / "components" / "group-sizes"
RACK: Final = "topology.kubernetes.io/rack"
GIVEN_BACK: Final = "pod group is unschedulable"
"""Message of kube-scheduler for a pod with a node whose group is incomplete."""


async def wait_nothing_assumed(world: World, name: str) -> None:
    """Wait until no pod is assumed on a node."""

    async def is_so() -> bool:
        shown = await world.services.extender.get(f"/v1/nodes/{name}")
        return bool(shown["resources"]["nvidia.com/gpu"]["assumed"] == 0)

    await wait_for(is_so, f"nothing is assumed on {name}", deadline_seconds=10)


async def group(
    world: World,
    name: str,
    count: int,
    *,
    topology: Mapping[str, object] | None = None,
    are_pods_first: bool = False,
    **both: Any,
) -> list[Object]:
    """Create a group whose minimum is `count`, and return its pods.

    Args:
        world: cluster of the group.
        name: name of the group, and prefix of its pods' names.
        count: number of pods.
        topology: topology constraints of the group.
        are_pods_first: create the pods, too, and the group once the extender knows all of them.
        **both: fields for the specs of both the group and its pods.
    """
    spec = {"schedulingPolicy": {"gang": {"minCount": count}}, **both}
    if topology is not None:
        spec["schedulingConstraints"] = topology
    item = {"apiVersion": API, "kind": "PodGroup", "metadata": {"name": name}, "spec": spec}
    membership = {"podGroupName": name}
    pods = [pod(f"{name}-{number}", schedulingGroup=membership, **both) for number in range(count)]
    if are_pods_first:
        await world.client.create_all(pods)

        async def are_known() -> bool:
            return bool((await world.services.extender.get("/v1/pods"))["waits"] == count)

        await wait_for(are_known, "the extender knows the group's pods")
    await world.client.request("POST", GROUPS, item)
    return pods


async def given_back(world: World, pods: list[Object]) -> list[str]:
    """Wait until kube-scheduler has refused the whole group; return its messages, sorted."""
    return sorted([await world.client.wait_unschedulable(item) for item in pods])


async def end(world: World, pods: list[Object]) -> None:
    """Delete a group's pods."""
    for item in pods:
        await world.client.delete(item)


async def test_complete_group_is_requested_and_spread_like_a_burst(world: World) -> None:
    nodes = [world.add_shared(f"shared-{number}") for number in range(3)]
    await world.start()
    *first, last = await group(world, "whole", 6)
    await world.client.create_all(first)
    await world.scheduler_synced(nodes[0])  # and of the earlier pods
    assert [await world.decisions(item) for item in first] == [[]] * 5

    await world.client.create(last)

    assert Counter(await world.bound([*first, last])) == dict.fromkeys(nodes, 2)


async def test_group_starts_once_it_fits_and_blocks_no_pods_before(world: World) -> None:
    small = world.add("small", 2)
    await world.start()
    pods = await group(world, "large", 4)
    await world.client.create_all(pods)

    messages = await given_back(world, pods)

    refused, untried, *passed = messages
    assert "Insufficient nvidia.com/gpu" in refused
    assert "minCount (4) cannot be satisfied" in untried
    assert all(GIVEN_BACK in text for text in passed)
    others = [pod("other-0"), pod("other-1")]
    assert await world.place_all(others) == [small, small]
    assert await world.count_bound(pods) == 0

    await world.client.create(node("added", 4))

    assert await world.bound(pods) == ["added"] * 4


async def test_group_too_large_by_its_object_is_reported(world: World) -> None:
    world.add("small", 2)
    for name in ("cluster-role.yaml", "cluster-role-binding.yaml"):
        await world.services.plane.kubectl("apply", "-f", str(GROUP_SIZES / name))
    await world.start({"cluster": {"group_objects": True}})
    pods = await group(world, "huge", 4)
    await world.client.create_all(pods)

    messages = await given_back(world, pods)

    assert any("could not hold the pod's whole group" in message for message in messages), messages


async def test_whole_group_waits_if_one_pod_is_refused(world: World) -> None:
    free, taken = world.add("free", 1), world.add("taken", 1)
    await world.start()
    world.fleet.set_foreign(taken, 0, FOREIGN)
    await world.wait_state(taken, 0, "foreign")
    pods = await group(world, "pair", 2)
    await world.client.create_all(pods)

    refused, passed = await given_back(world, pods)

    assert "1 Insufficient nvidia.com/gpu, 1 node(s) had" in refused
    assert GIVEN_BACK in passed
    assert await world.count_bound(pods) == 0

    world.fleet.set_foreign(taken, 0, None)

    assert sorted(await world.bound(pods)) == [free, taken]


async def test_a_group_that_is_tried_again_and_again_keeps_no_gpu_from_others(world: World) -> None:
    name = world.add("small", 2)
    await world.start()
    pods = await group(world, "again", 3)
    await world.client.create_all(pods)
    await given_back(world, pods)
    for _ in range(2):  # from the second time on, no condition of a pod changes
        tried = [len(await world.decisions(item)) for item in pods]

        async def is_tried(before: int = sum(tried)) -> bool:
            return sum([len(await world.decisions(item)) for item in pods]) > before

        await world.client.patch(node(name), {"metadata": {"labels": {"x": str(sum(tried))}}})
        await wait_for(is_tried, "kube-scheduler tries the group again")
    await wait_nothing_assumed(world, name)


async def test_a_group_goes_to_the_rack_that_has_room_for_all_of_it(world: World) -> None:
    small = [world.add(f"a-{number}", 1) for number in range(3)]
    large = [world.add(f"b-{number}", 2) for number in range(2)]
    await world.start()
    for rack, nodes in (("a", small), ("b", large)):
        for name in nodes:
            await world.client.patch(node(name), {"metadata": {"labels": {RACK: rack}}})
    await world.scheduler_synced(nodes[-1])
    # Without its object the group is as large as the pods that the extender knows.
    pods = await group(world, "near", 4, are_pods_first=True)

    assert set(await world.bound(pods)) == set(large)


async def test_group_tried_on_each_rack_counts_only_where_it_goes(world: World) -> None:
    racks = {"a": [world.add("a", 2)], "b": [world.add(f"b-{at}", 2) for at in range(2)]}
    await world.start()
    for rack, nodes in racks.items():
        for name in nodes:
            await world.client.patch(node(name), {"metadata": {"labels": {RACK: rack}}})
    await world.scheduler_synced(nodes[-1])
    topology = {"topology": [{"key": RACK}]}
    pods = await group(world, "bound", 3, topology=topology)
    await world.client.create_all(pods)

    assert set(await world.bound(pods)) <= set(racks["b"])
    requested = [each["candidates"] for item in pods for each in await world.decisions(item)]
    assert max(requested) == len(racks["b"])  # one rack at a time

    more = await group(world, "waiting", 3, topology=topology)
    await world.client.create_all(more)
    await given_back(world, more)
    assert await world.count_bound(more) == 0
    for name in (*racks["a"], *racks["b"]):
        await wait_nothing_assumed(world, name)


async def test_group_evicts_no_more_than_it_needs_without_the_preempt_verb(world: World) -> None:
    nodes = [world.add("one"), world.add("other")]
    await world.start()
    tenants = [tenant for name in nodes for tenant in await world.tenants(name, 2)]
    urgently = await world.priority_class("urgent", 1000)
    pods = await group(world, "urgent", 3, priorityClassName=urgently)
    await world.client.create_all(pods)

    assert set(await world.bound(pods)) == set(nodes)
    assert await world.count_bound(tenants) == 1
    requested = {each["verb"] for item in pods for each in await world.decisions(item)}
    assert requested == {"filter", "prioritize"}
