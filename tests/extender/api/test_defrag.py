"""Proposals of pods to move so that a node has room for a large request."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import Taint
from testkit.api_requests import get
from testkit.cards import IDLE, Gpu
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.add({"a": [IDLE] * 4, "b": [IDLE] * 4, "c": [IDLE] * 4})
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


def hold(world: World, node: str, *sizes: int, **rest: Any) -> None:
    for number, size in enumerate(sizes):
        world.hold(f"{node}-{number}", node, size, **rest)


async def test_the_fewest_moves_come_first(world: World, client: Client) -> None:
    hold(world, "a", 1, 1, 1)
    hold(world, "b", 2)
    hold(world, "c", 1, 1)

    answer = await get(client, "/v1/defrag", gpus="4")

    best = answer["plans"][0]
    assert answer["ready"] == []
    assert (best["node"], best["free"], best["fits"]) == ("b", 2, True)
    assert best["moves"] == [
        {"pod": "team/b-0", "owner": "StatefulSet notebook", "gpus": 2, "to": "c"}
    ]
    assert answer["total"] == 3


async def test_a_node_with_room_needs_no_move(world: World, client: Client) -> None:
    hold(world, "b", 2)

    answer = await get(client, "/v1/defrag", gpus="4")

    assert answer["ready"] == ["a", "c"]


async def test_a_node_with_stranded_gpus_is_not_ready(world: World, client: Client) -> None:
    record = world.fleet.nodes["a"]
    world.fleet.apply_node(replace(record, host=HostResources(16_000, 64 << 30)))
    world.fleet.apply_host_use("a", HostResources(13_000, 0))
    world.live({"a": [IDLE] * 4}, 60)

    answer = await get(client, "/v1/defrag", gpus="4")

    assert (answer["ready"], answer["total"]) == (["b", "c"], 0)


async def test_a_pod_that_fits_nowhere_has_no_target(world: World, client: Client) -> None:
    hold(world, "a", 2)
    hold(world, "b", 3)
    hold(world, "c", 3)

    answer = await get(client, "/v1/defrag", gpus="4")

    assert answer["plans"][0]["moves"][0]["to"] is None
    assert not any(plan["fits"] for plan in answer["plans"])


async def test_closed_nodes_are_neither_freed_nor_filled(world: World, client: Client) -> None:
    hold(world, "a", 2)
    hold(world, "b", 1)
    world.register_node("c", gpus=4, taints=(Taint(key="team", value="x"),))

    answer = await get(client, "/v1/defrag", gpus="4")

    assert answer["ready"] == []
    assert {plan["node"] for plan in answer["plans"]} == {"a", "b"}
    assert {move["to"] for plan in answer["plans"] for move in plan["moves"]} == {"a", "b"}


async def test_nodes_with_broken_gpus_are_neither_ready_nor_filled(
    world: World, client: Client
) -> None:
    hold(world, "a", 2)
    hold(world, "b", 1)
    world.live({"a": [IDLE] * 4, "b": [IDLE] * 4, "c": [Gpu(xid=79.0)] * 4}, 60)

    answer = await get(client, "/v1/defrag", gpus="4")

    assert answer["ready"] == []
    assert {plan["node"] for plan in answer["plans"]} == {"a", "b"}
    assert {move["to"] for plan in answer["plans"] for move in plan["moves"]} == {"a", "b"}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        pytest.param(
            {"gpus": "x"}, "gpus='x' must be a whole number from 1 to 1024", id="no-number"
        ),
        pytest.param(
            {"gpus": "5"}, "gpus='5' must be at most 4: no node offers more", id="too-many"
        ),
        pytest.param({"resource": "cpu"}, "resource='cpu' must be a GPU resource", id="no-gpu"),
        pytest.param(
            {"resource": "nvidia.com/gpu.shared"},
            "resource='nvidia.com/gpu.shared' is offered by no node",
            id="unknown",
        ),
        pytest.param({"nodes": "a"}, "is not a parameter of this path", id="parameter"),
    ],
)
async def test_bad_parameter_reports_allowed_values(
    world: World, client: Client, query: dict[str, str], message: str
) -> None:
    world.add({"small": [IDLE]})

    answer = await get(client, "/v1/defrag", 400, **query)

    assert message in answer["error"]
