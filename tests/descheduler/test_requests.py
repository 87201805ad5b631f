"""Pods that the descheduler evicts by requests and labels: docs/beside.md."""

from pathlib import Path
from typing import Final

import pytest

from simulation.devices import Load
from simulation.kubelet import UTILIZATION_ANNOTATION
from simulation.models import GIB
from testkit.controlplane.descheduler import deschedule
from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World
from tests.descheduler.policies import KEEPS, affinity, by_affinity, example, policy
from tests.descheduler.replicas import Nodes, Replicas

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(180)]

FOREIGN: Final = Load(utilization=0.85, memory_bytes=30 * GIB)
REFUSED: Final = "in use by processes outside Kubernetes"
ZONE: Final = "example.com/zone"
HELD: Final = {GPU: 30}
TOO_MUCH: Final = {GPU: 60}
LEVELLING: Final = policy("LowNodeUtilization", {"thresholds": HELD, "targetThresholds": TOO_MUCH})
"""The example by requests, without its restrictions."""
GUARANTEED: Final = {"cpu": "1", "memory": "1Gi", GPU: "1"}
TAINTED: Final[Object] = {"taints": [{"key": "example.com/in-foreign-use", "effect": "NoSchedule"}]}
UNTAINTED: Final[Object] = {"taints": None}
CORDONED: Final[Object] = {"unschedulable": True}


async def join(world: World, name: str, cards: int, *, is_taken: bool = False) -> str:
    """Add a node while everything runs, wait until all programs know it, and return its name.

    Args:
        world: the cluster.
        name: name within the test.
        cards: number of GPUs.
        is_taken: whether a process outside Kubernetes uses them.
    """
    node = world.add(name, cards)
    for index in range(cards if is_taken else 0):
        world.fleet.set_foreign(node, index, FOREIGN)
    await world.register()
    await world.settled()
    if is_taken:
        for index in range(cards):
            await world.wait_state(node, index, "foreign")
    await world.scheduler_synced(node)
    return node


async def relabel(world: World, node: str, zone: str) -> None:
    """Change the zone label of a node."""
    labels = {"metadata": {"labels": {ZONE: zone}}}
    await world.client.patch({"kind": "Node", "metadata": {"name": node}}, labels)


async def change(world: World, node: str, spec: Object) -> None:
    """Change a node, and wait until kube-scheduler's cache has the change."""
    await world.client.patch({"kind": "Node", "metadata": {"name": node}}, {"spec": spec})
    await world.scheduler_synced(node)


def stayed(before: Nodes, after: Nodes) -> set[str]:
    """Return the pods that were not evicted."""
    return before.keys() & after.keys()


# --- evicted pods are placed by the extender ------------------------------------------------------


async def test_pods_that_it_evicts_are_placed_where_gpus_are_idle(
    world: World, tmp_path: Path
) -> None:
    full = world.add("full", 4)
    await world.start({"strategy": "spread"})  # it balances requests
    replicas = Replicas(world, "held", 4)
    before = await replicas.start(annotations={UTILIZATION_ANNOTATION: "0.9"})
    assert set(before.values()) == {full}
    quiet = await join(world, "quiet", 4)
    await join(world, "taken", 4, is_taken=True)

    await deschedule(world.services.plane, tmp_path, example("by-requests"))

    after = await replicas.bound()
    assert sorted(after.values()) == sorted([full, full, quiet, quiet])
    assert [after[uid] for uid in stayed(before, after)] == [full, full]
    for item in await replicas.new(before):
        assert (await world.decisions(item))[0]["node"] == quiet
    # All nodes are balanced now: it evicts no pod.
    await deschedule(world.services.plane, tmp_path, example("by-requests"))
    assert await replicas.nodes() == after


@pytest.mark.parametrize(
    ("strategy", "goes_to"),
    [
        pytest.param("pack", "fuller", id="pack-fills-it"),
        pytest.param("spread", "emptier", id="spread-goes-back"),
    ],
)
async def test_emptying_nodes_comes_to_an_end_only_where_we_pack(
    world: World, tmp_path: Path, strategy: str, goes_to: str
) -> None:
    nodes = {"emptier": world.add("emptier", 4)}
    await world.start({"strategy": strategy})
    replicas = Replicas(world, "moved", 1)
    before = await replicas.start()
    nodes["fuller"] = await join(world, "fuller", 4)
    await world.tenants(nodes["fuller"], 3)
    # without the extender kube-scheduler would choose the other one
    await world.fill_host(nodes[goes_to])
    emptying = policy("HighNodeUtilization", {"thresholds": HELD}, evictor={"nodeFit": True})

    await deschedule(world.services.plane, tmp_path, emptying)

    after = await replicas.bound()
    assert not stayed(before, after)
    assert list(after.values()) == [nodes[goes_to]]
    # The next run evicts it again, unless both prefer its node.
    await deschedule(world.services.plane, tmp_path, emptying)
    last = await replicas.bound()
    assert bool(stayed(after, last)) == (strategy == "pack")


async def test_pods_without_gpus_are_evicted_for_held_gpus_unless_a_label_decides(
    world: World, tmp_path: Path
) -> None:
    full = world.add("full", 2)
    await world.start()
    plain, holding = Replicas(world, "plain", 1), Replicas(world, "holding", 2)
    before = await plain.start(0, labels={})
    container = pod("holding")["spec"]["containers"][0] | {
        "resources": {"requests": GUARANTEED, "limits": GUARANTEED}
    }
    held = await holding.start(labels={}, containers=[container])
    assert {*before.values(), *held.values()} == {full}
    await join(world, "quiet", 2)

    await deschedule(world.services.plane, tmp_path, example("by-requests"))
    assert await plain.nodes() | await holding.nodes() == before | held

    await deschedule(world.services.plane, tmp_path, LEVELLING)

    assert not stayed(before, await plain.nodes())
    assert len(stayed(held, await holding.nodes())) == 1


# --- the descheduler does not know the extender's refusals ----------------------------------------


async def test_descheduler_evicts_repeatedly_until_a_taint_marks_the_refused_node(
    world: World, tmp_path: Path
) -> None:
    full = world.add("full", 2)
    await world.start()
    replicas = Replicas(world, "held", 2)
    pods = await replicas.start()
    taken = await join(world, "taken", 2, is_taken=True)

    for _ in range(2):
        await deschedule(world.services.plane, tmp_path, example("by-requests"))
        evicted = await replicas.bound()
        assert len(stayed(pods, evicted)) == 1
        assert set(evicted.values()) == {full}  # back on its node, restarted without benefit
        pods = evicted

    for said in (TAINTED, UNTAINTED | CORDONED):
        await change(world, taken, said)
        for policy_ in (example("by-requests"), LEVELLING):  # with nodeFit, and without
            await deschedule(world.services.plane, tmp_path, policy_)
            assert await replicas.nodes() == pods


async def zoned(world: World, cards: int) -> str:
    """Start with one node in zone a, and return its name."""
    node = world.add("left", cards)
    await world.start()
    await relabel(world, node, "a")
    await world.scheduler_synced(node)
    return node


async def exclude(world: World, left: str, cards: int) -> str:
    """Add a second node in zone a, which the extender refuses; return its name.

    The first node moves to zone b. Pods on the first node there that require zone a then violate
    their affinity.
    """
    taken = await join(world, "taken", cards, is_taken=True)
    await relabel(world, taken, "a")
    await relabel(world, left, "b")
    for node in (left, taken):
        await world.scheduler_synced(node)
    return taken


async def test_descheduler_evicts_a_pod_unless_a_mark_or_taint_prevents_it(
    world: World, tmp_path: Path
) -> None:
    left = await zoned(world, 2)
    marked, alone = Replicas(world, "marked", 1), pod("alone", affinity=affinity(ZONE, "a"))
    before = await marked.start(annotations=KEEPS, affinity=affinity(ZONE, "a"))
    assert [*before.values(), await world.place(alone)] == [left, left]
    uid = (await world.running(alone))["metadata"]["uid"]
    taken = await exclude(world, left, 2)
    plane = world.services.plane

    await deschedule(plane, tmp_path, by_affinity(noEvictionPolicy="Mandatory"))
    assert await marked.nodes() == before

    await change(world, taken, TAINTED)
    await deschedule(plane, tmp_path, by_affinity())
    assert await marked.nodes() == before

    await change(world, taken, UNTAINTED)
    await deschedule(plane, tmp_path, by_affinity(nodeFit=True))
    (waiting,) = await marked.new(before)
    assert REFUSED in await world.client.wait_unschedulable(waiting)
    # The other pod has no controller that would replace it.
    assert (await world.client.get(alone))["metadata"]["uid"] == uid
    world.fleet.set_foreign(taken, 0, None)
    assert list((await marked.bound()).values()) == [taken]


async def test_with_a_budget_one_pod_waits_and_the_others_stay(
    world: World, tmp_path: Path
) -> None:
    left = await zoned(world, 3)
    replicas = Replicas(world, "covered", 3)
    before = await replicas.start(affinity=affinity(ZONE, "a"))
    await exclude(world, left, 3)
    budget: Object = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "one-at-a-time", "namespace": "default"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": replicas.name}}},
    }
    await world.client.create(budget)

    async def allows(count: int) -> bool:
        status = (await world.client.get(budget)).get("status", {})
        return (status.get("disruptionsAllowed"), status.get("expectedPods")) == (count, 3)

    await wait_for(lambda: allows(1), "the budget allows one disruption")

    for _ in range(2):
        log = await deschedule(world.services.plane, tmp_path, by_affinity(nodeFit=True))

        assert "violate the pod's disruption budget" in log
        assert len(stayed(before, await replicas.nodes())) == 2
        (waiting,) = await replicas.new(before)
        assert REFUSED in await world.client.wait_unschedulable(waiting)
        await wait_for(lambda: allows(0), "the budget allows none")
