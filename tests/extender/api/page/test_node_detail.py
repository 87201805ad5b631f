"""The detail of a node: its GPUs as the API shows them, and each reading with its source."""

from typing import Any

import pytest

from extender.api.page.routes import _node_detail_in_steps
from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import Taint
from testkit.api_requests import get
from testkit.cards import IDLE, Gpu
from testkit.page.serving import Server
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

HOT = Gpu(
    busy=0.5,
    used_gib=8.0,
    age=20.0,
    signs={
        Signal.POWER: 300.0,
        Signal.POWER_LIMIT: 700.0,
        Signal.TEMPERATURE: 80.0,
        Signal.CLOCK_EVENT_REASONS: 4.0,
    },
)


@pytest.fixture
def world() -> World:
    world = World()
    world.add({"node": [IDLE, HOT, IDLE]})
    world.register_node(
        "node", gpus=3, labels={"zone": "east"}, taints=(Taint(key="team", value="a"),)
    )
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    app = world.build_app()
    Server(world).make_page().add_to(app)
    return await aiohttp_client(app)


def values_of(gpu: dict[str, Any]) -> dict[str, float]:
    return {one["signal"]: one["value"] for one in gpu["readings"]}


async def test_each_gpu_has_the_readings_that_there_are(client: Client) -> None:
    detail = await get(client, "/v1/page/nodes/node")
    cold, hot, _ = detail["gpus"]

    assert values_of(cold) == {Signal.GPU_UTILIZATION: 0.0, Signal.MEMORY_USED: 0.0}
    assert values_of(hot) == {
        Signal.GPU_UTILIZATION: 0.5,
        Signal.MEMORY_USED: 8.0 * (1 << 30),
        Signal.POWER: 300.0,
        Signal.POWER_LIMIT: 700.0,
        Signal.TEMPERATURE: 80.0,
    }
    assert {(one["source"], one["age_seconds"]) for one in cold["readings"]} == {
        ("prometheus", 0.0)
    }
    assert {(one["source"], one["age_seconds"]) for one in hot["readings"]} == {
        ("prometheus", 20.0)
    }
    assert [gpu["throttling"] for gpu in detail["gpus"]] == [None, ["software power cap"], None]


async def test_the_detail_extends_the_nodes_record_of_the_api(client: Client) -> None:
    detail = await get(client, "/v1/page/nodes/node")
    record = await get(client, "/v1/nodes/node")

    own = {"gpus", "labels", "taints"}
    assert {name: detail[name] for name in record if name not in own} == {
        name: value for name, value in record.items() if name not in own
    }
    assert [gpu["uuid"] for gpu in detail["gpus"]] == [gpu["uuid"] for gpu in record["gpus"]]
    assert detail["labels"] == {"zone": "east"}
    assert detail["taints"] == [{"key": "team", "value": "a", "effect": "NoSchedule"}]


def test_the_detail_is_built_in_steps_of_two_gpus(world: World) -> None:
    assert len(list(_node_detail_in_steps(world.fleet, "node"))) == 2


@pytest.mark.parametrize("path", ["nodes", "past"])
async def test_an_unknown_node_is_404(client: Client, path: str) -> None:
    assert (await get(client, f"/v1/page/{path}/node"))["gpus" if path == "nodes" else "series"]
    answer = await get(client, f"/v1/page/{path}/gone", 404)

    assert answer["error"] == "node 'gone' is not known"
