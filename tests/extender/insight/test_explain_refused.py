"""Full explanation of nodes that filter refused, beside those that prioritize ranked."""

import json
from typing import Any

import pytest

from extender.core.policy import LoadFilter, Policy
from testkit.api_requests import decide, get
from testkit.cards import BUSY, IDLE, Gpu
from testkit.webhook_requests import Client, MakeClient, names_request, pod
from testkit.world import World

CARDS = {"idle": [IDLE, IDLE], "half": [IDLE, BUSY], "dead": [Gpu(xid=79.0)]}


@pytest.fixture
def world() -> World:
    world = World()
    world.add(CARDS)
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


async def attempt(client: Client, passing: list[str], refused: list[str]) -> None:
    """Call filter and prioritize as kube-scheduler does."""
    for verb, nodes in (("filter", [*passing, *refused]), ("prioritize", passing)):
        request = json.dumps(names_request(*nodes, requester=pod("p")))
        assert (await client.post(f"/{verb}", data=request)).status == 200


async def explained(client: Client, node: str) -> tuple[Any, Any]:
    """Return the whole answer, and one node of it in full."""
    answer = await get(client, "/v1/explain", pod="team/p", node=node)
    (found,) = (one for one in answer["nodes"] if one["node"] == node)
    return answer, found


async def test_a_node_that_filter_refused_is_reported_with_devices_and_signals(
    client: Client,
) -> None:
    await attempt(client, ["idle", "half"], ["dead"])

    answer, dead = await explained(client, "dead")

    assert answer["decision"]["verb"] == "prioritize"
    assert (answer["requested_node"]["kept"], answer["requested_node"]["why"]) == ("in-full", None)
    assert (dead["rank"], dead["is_bound"]) == (None, False)
    assert dead["lost_by"] == "refused: node(s) had too few working GPUs"
    (device,) = dead["devices"]
    assert device["signals"]["health"]["source"] == "prometheus"
    assert (answer["kept"]["in_full"], answer["kept"]["in_short"]) == (3, 0)


async def test_refused_node_is_shown_as_at_the_decision(world: World, client: Client) -> None:
    await attempt(client, ["idle", "half"], ["dead"])
    _, before = await explained(client, "dead")

    world.now += 10
    world.report({"dead": [IDLE]})

    assert (await explained(client, "dead"))[1] == before


async def test_each_node_is_reported_once_in_prioritize_order(client: Client) -> None:
    await attempt(client, ["idle", "half"], ["dead"])

    answer, _ = await explained(client, "dead")

    ranked = [(node["node"], node["rank"]) for node in answer["nodes"]]
    assert ranked == [("idle", 1), ("half", 2), ("dead", None)]


@pytest.mark.parametrize("seconds", [5.0, 60.0])
async def test_filter_results_of_an_earlier_attempt_are_left_out(
    world: World, client: Client, seconds: float
) -> None:
    await attempt(client, ["idle", "half"], ["dead"])
    world.now += seconds
    request = json.dumps(names_request("idle", requester=pod("p")))
    assert (await client.post("/prioritize", data=request)).status == 200

    answer = await get(client, "/v1/explain", pod="team/p")

    assert [node["node"] for node in answer["nodes"]] == ["idle"]


async def test_a_node_left_out_for_its_load_is_refused_in_full_too(
    aiohttp_client: MakeClient,
) -> None:
    world = World(policy=Policy(load_filter=LoadFilter(is_enabled=True)))
    world.add({"idle": [IDLE, IDLE], "busy": [BUSY, BUSY]}, readings=1)
    client = await aiohttp_client(world.build_app())
    await attempt(client, ["idle"], ["busy"])

    _, busy = await explained(client, "busy")

    assert (busy["rank"], busy["rejection"]) == (None, "node(s) had busier GPUs than other nodes")


async def test_a_node_shown_as_it_was_at_the_binding_says_so(aiohttp_client: MakeClient) -> None:
    world = World()
    world.add({"idle": [IDLE, IDLE], "half": [IDLE, BUSY]})
    client = await aiohttp_client(world.build_app())
    world.placer.detailed = 1
    await decide(client, "idle", "half", name="p")
    world.now += 60.0
    world.report({"half": [IDLE, IDLE]})
    await decide(client, "idle", name="another")
    world.history.note_bound(world.add_pod("p", "half"), "half")

    first, second = (await get(client, "/v1/explain", pod="team/p"))["nodes"]

    assert [first["is_late"], second["is_late"]] == [False, True]
    assert (second["node"], second["rank"], second["rejection"]) == ("half", 2, None)
    assert second["lost_by"].startswith("scored ")
    assert second["lost_by"].endswith(f"in the decision, idle {first['score']:.6f}")


async def test_a_node_that_broke_before_the_binding_was_not_refused(
    aiohttp_client: MakeClient,
) -> None:
    world = World()
    world.add({"idle": [IDLE, IDLE], "half": [IDLE, BUSY]})
    client = await aiohttp_client(world.build_app())
    world.placer.detailed = 1
    await decide(client, "idle", "half", name="p")
    world.now += 60.0
    world.report({"half": [Gpu(xid=79.0), Gpu(xid=79.0)]})
    await decide(client, "idle", name="another")
    world.history.note_bound(world.add_pod("p", "half"), "half")

    _, second = (await get(client, "/v1/explain", pod="team/p"))["nodes"]

    assert {device["state"] for device in second["devices"]} == {"unhealthy"}
    assert (second["is_late"], second["rank"], second["rejection"]) == (True, 2, None)
