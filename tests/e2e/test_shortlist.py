"""Shortlists: filter returns only some of the best nodes, and never leaves a pod without a node."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from simulation.devices import Loss
from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.scheduler import extender
from testkit.controlplane.world import World, spread
from testkit.serving import serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ONE: Mapping[str, object] = {"wire": {"shortlist": 1}}
REFUSED = "node(s) were refused by the other extender"


async def start_scheduler(world: World, *others: Object, **changes: object) -> None:
    """Restart kube-scheduler with further extenders after idlegpu, and with other settings."""
    config = world.services.scheduler_config()
    config["extenders"] += others
    config |= {"podInitialBackoffSeconds": 1, "podMaxBackoffSeconds": 2, **changes}
    await world.services.ensure_scheduler(config)


# --- kube-scheduler's own filters run first -------------------------------------------------------


def tolerant(name: str) -> Object:
    return pod(name, tolerations=[{"key": "reserved", "operator": "Exists"}])


def anywhere_but(name: str, node: str) -> Object:
    elsewhere = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [node]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return pod(name, affinity=affinity)


def hungry(name: str) -> Object:
    item = pod(name)
    item["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "100", GPU: "1"}
    return item


async def test_where_our_best_nodes_are_ruled_out_the_pod_gets_the_next(world: World) -> None:
    best, good, last = world.add("best", 8), world.add("good", 4), world.add("last", 2)
    await world.start({**ONE, "strategy": "spread"})
    assert await world.place(pod("anywhere")) == best

    # By affinity, by CPU, then by a taint: each filter removes more of the best nodes.
    assert await world.place(anywhere_but("picky", best)) == good
    await world.fill_host(best)
    assert await world.place(hungry("hungry")) == good
    for node in (best, good):
        taints = [{"key": "reserved", "effect": "NoSchedule"}]
        await world.client.patch(
            {"kind": "Node", "metadata": {"name": node}}, {"spec": {"taints": taints}}
        )
    await world.scheduler_synced(best, good)
    assert await world.place(pod("stock")) == last
    assert await world.place(tolerant("tolerant")) == best


# --- bursts ---------------------------------------------------------------------------------------


async def test_a_burst_fills_the_fleet_to_the_last_gpu(world: World) -> None:
    sizes = {
        world.add(f"of-{cards}-{number}", cards): cards for cards in (2, 4, 8) for number in (0, 1)
    }
    await world.start(ONE, extender={"ignorable": False})

    placed = await world.place_all(pod(f"burst-{number}") for number in range(sum(sizes.values())))

    assert spread(placed) == sizes


async def test_so_does_one_while_kube_scheduler_looks_at_a_part_of_the_nodes(world: World) -> None:
    nodes = [world.add(f"node-{number}", 1) for number in range(104)]
    await world.start(ONE, extender={"ignorable": False})
    await start_scheduler(world, percentageOfNodesToScore=5)
    pods = [pod(f"burst-{number}") for number in range(len(nodes))]

    placed = await world.place_all(pods)

    assert spread(placed) == dict.fromkeys(nodes, 1)
    first = (await world.decisions(pods[0]))[-1]
    assert first["candidates"] < len(nodes)


async def test_a_pod_preempts_although_it_is_offered_one_node(world: World) -> None:
    nodes = [world.add(f"full-{number}") for number in range(3)]
    await world.start(ONE)
    urgently = await world.priority_class("urgent", 1000)
    victims = [pod(f"victim-{number}") for number in range(6)]
    assert spread(await world.place_all(victims)) == dict.fromkeys(nodes, 2)
    urgent = [pod(f"urgent-{number}", 2, priorityClassName=urgently) for number in range(2)]

    placed = await world.place_all(urgent)

    assert len(set(placed)) == len(urgent)
    assert await world.count_bound(victims) == 2


# --- if no node passes ----------------------------------------------------------------------------


async def test_where_none_passes_each_node_is_counted_with_its_reason(world: World) -> None:
    for number in range(3):
        world.add(f"small-{number}")
    dead, tainted = world.add("dead"), world.add("tainted")
    world.fleet.kill_device(dead, 0, Loss.XID_79)
    await world.start(ONE)
    await world.wait_state(dead, 1, "excluded")
    await world.client.patch(
        {"kind": "Node", "metadata": {"name": tainted}},
        {"spec": {"taints": [{"key": "reserved", "effect": "NoSchedule"}]}},
    )
    await world.scheduler_synced(tainted)
    big = pod("big", annotations={"idlegpu.io/gpu-memory": "100Gi"})
    await world.client.create(big)

    message = await world.client.wait_unschedulable(big)

    reasons = message.partition(": ")[2].partition(". ")[0].split(", ")
    assert message.startswith("0/5 nodes are available: ")
    assert sorted(reasons) == [
        "1 node(s) had too few working GPUs (idlegpu)",
        "1 node(s) had untolerated taint(s)",
        "3 node(s) had GPUs with less memory than the pod requests (idlegpu)",
    ]


# --- another extender -----------------------------------------------------------------------------


@asynccontextmanager
async def refusing(node: str) -> AsyncIterator[str]:
    """Run an extender that refuses one node; yield its URL."""

    async def answer(request: web.Request) -> web.Response:
        names = (await request.json())["NodeNames"]
        kept = [name for name in names if name != node]
        failed = {node: REFUSED} if node in names else {}
        return web.json_response({"NodeNames": kept, "FailedNodes": failed})

    app = web.Application()
    app.router.add_post("/filter", answer)
    async with serve(app) as url:
        yield url


def other(url: str, *, ignorable: bool) -> Object:
    return extender(url, verbs=["filter"], ignorable=ignorable, managed_resources=[])


async def best_of_three(world: World, shortlist: int) -> tuple[str, str]:
    """Start with three nodes; return the extender's best and second best."""
    best, second = world.add("best", 8), world.add("second", 4)
    world.add("third", 2)
    await world.start({"wire": {"shortlist": shortlist}, "strategy": "spread"})
    assert await world.place(pod("alone")) == best
    return best, second


async def test_other_extender_is_called_before_ours_if_not_ignorable(world: World) -> None:
    best, second = await best_of_three(world, 1)
    async with refusing(best) as url:
        # It comes after idlegpu in the configuration, and idlegpu is ignorable.
        await start_scheduler(world, other(url, ignorable=False))

        assert await world.place(pod("stock")) == second


async def test_pod_waits_if_a_later_extender_refuses_the_whole_shortlist(world: World) -> None:
    best, _ = await best_of_three(world, 1)
    async with refusing(best) as url:
        await start_scheduler(world, other(url, ignorable=True))
        stock = pod("stock")
        await world.client.create(stock)

        message = await world.client.wait_unschedulable(stock)

        # Nodes outside the shortlist have no reason, and preemption skips them.
        assert message.startswith(f"0/3 nodes are available: 1 {REFUSED}. ")
