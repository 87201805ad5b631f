"""Pods of a group, placed near each other by a real kube-scheduler."""

from typing import Any

import pytest

from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

RACK = "topology.kubernetes.io/rack"


def group(name: str, size: int, **annotations: str) -> list[Object]:
    """Build the pods of a Kueue group."""
    own = {f"idlegpu.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return [
        pod(
            f"{name}-{number}",
            labels={"kueue.x-k8s.io/pod-group-name": name},
            annotations={"kueue.x-k8s.io/pod-group-total-count": str(size)} | own,
        )
        for number in range(size)
    ]


async def set_rack(world: World, rack: str, *nodes: str) -> None:
    """Label nodes with a rack, and wait until kube-scheduler's cache has the last label."""
    for name in nodes:
        await world.client.patch(node(name), {"metadata": {"labels": {RACK: rack}}})
    probe = pod(f"probe-{rack}", 0, nodeSelector={RACK: rack, "kubernetes.io/hostname": nodes[-1]})
    assert await world.place(probe) == nodes[-1]
    await world.client.delete(probe)


async def explained(world: World, item: Object) -> Any:
    name = item["metadata"]["name"]
    answer = await world.services.extender.get(f"/v1/explain?pod=default/{name}")
    return answer["filter"]["group"] if answer["filter"] else answer["decision"]["group"]


async def test_a_group_goes_to_the_one_rack_of_two_that_has_room_for_all_of_it(
    world: World,
) -> None:
    small = [world.add(f"a-small-{number}", 1) for number in range(4)]
    large = [world.add(f"b-large-{number}", 2) for number in range(2)]
    await world.start()
    await set_rack(world, "a", *small)
    await set_rack(world, "b", *large)
    assert await world.place(pod("alone")) in small  # it leaves no GPU free there
    pods = group("train", 4)

    assert sorted(await world.place_all(pods)) == sorted([*large, *large])

    found = [await explained(world, item) for item in pods]
    first, *_, last = sorted(found, key=lambda one: sum(one["placed"].values()))
    assert (first["name"], first["size"], first["placed"]) == ("Kueue group train", 4, {})
    assert first["fitting"] == [{"label": RACK, "name": "b", "pods": 4}]
    assert sum(last["placed"].values()) == 3
    assert last["rest"] == 1


async def test_a_group_that_the_cluster_can_never_hold_starts_no_pod(world: World) -> None:
    nodes = [world.add(name, 1) for name in ("one", "other")]
    await world.start()
    pods = group("large", 3)
    await world.client.create_all(pods)

    messages = [await world.client.wait_unschedulable(item) for item in pods]

    said = "2 node(s) could not hold the pod's whole group, even without other pods"
    assert all(said in message for message in messages)
    assert (await explained(world, pods[0]))["too_few"] == 2
    assert await world.place(group("loose", 3, group_policy="prefer")[0]) in nodes

    await world.client.create(node("added", 2))

    assert await world.client.wait_bound(pods[0])
