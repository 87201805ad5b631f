import json
from collections.abc import Iterable
from typing import Final

import pytest
from aiohttp import web

from extender.answers import routes
from extender.api.json_routes import FleetRoutes, PodRoutes
from extender.core.nodes.inventory import NodeRecord
from extender.core.policy import Prices
from extender.settings.config import Settings
from testkit.api_requests import decide, get
from testkit.builders import GIB, GPU
from testkit.cards import CARD_BYTES, IDLE
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient, names_request, pod
from testkit.world import World

SPOT_LABEL: Final = "karpenter.sh/capacity-type"


# --- nodes and GPUs -------------------------------------------------------------------------------


async def test_every_node_with_gpus_is_listed_by_name(world: World, client: Client) -> None:
    world.register_node("unseen", gpus=4)

    answer = await get(client, "/v1/nodes")

    assert [node["name"] for node in answer["nodes"]] == ["busy", "dead", "full", "idle", "unseen"]
    assert "gpus" not in answer["nodes"][0]
    assert answer["sources"]["prometheus"]["unmatched_series"] == 3
    assert answer["sources"]["prometheus"]["devices"] == 8


async def test_unreadable_objects_are_named_to_callers_with_rights(
    aiohttp_client: MakeClient,
) -> None:
    world = World(unreadable={"pods": [("team", "a"), ("other", "b")], "nodes": [("", "n")]})
    client = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    answer = await get(client, "/v1/nodes")

    assert answer["unreadable"] == {"pods": ["team/a", None], "nodes": ["n"]}


async def test_a_fleet_without_nodes_is_an_empty_list(aiohttp_client: MakeClient) -> None:
    client = await aiohttp_client(World().build_app())

    assert await get(client, "/v1/nodes") == {"nodes": [], "sources": {}, "unreadable": {}}
    assert await get(client, "/v1/gpus") == {"gpus": []}
    assert await get(client, "/v1/decisions") == {"decisions": [], "unreachable": []}
    assert (await get(client, "/v1/best"))["best"] == []


async def test_node_shows_its_gpus_and_their_use(client: Client) -> None:
    node = await get(client, "/v1/nodes/idle")

    assert node["model"] == "H100 80GB HBM3"
    assert node["driver_version"] == "580.95.05"
    assert node["resources"] == {GPU: {"capacity": 3, "allocatable": 3, "held": 0, "assumed": 0}}
    assert (node["gpu_states"]["idle"], sum(node["gpu_states"].values())) == (2, 3)
    assert node["utilization_mean_ratio"] == pytest.approx(0.2 / 3)
    assert node["memory_used_mean_ratio"] == pytest.approx(0.1 / 3)
    assert node["is_ready"] is True


async def test_each_gpu_has_values_in_base_units_with_their_source(client: Client) -> None:
    gpu = (await get(client, "/v1/nodes/idle"))["gpus"][2]

    assert (gpu["node"], gpu["resource"], gpu["index"]) == ("idle", GPU, 2)
    assert gpu["uuid"] == "GPU-idle-2"
    assert gpu["utilization_ratio"] == pytest.approx(0.2)
    assert gpu["memory_used_ratio"] == pytest.approx(0.1)
    assert gpu["memory_free_bytes"] == 72 * GIB
    assert gpu["memory_total_bytes"] == CARD_BYTES
    assert (gpu["freshness"], gpu["source"], gpu["age_seconds"]) == ("fresh", "prometheus", 0.0)
    assert gpu["temperature_celsius"] is None


async def test_the_source_is_the_one_that_reported(world: World, client: Client) -> None:
    world.register_node("watched", gpus=1)
    world.report({"watched": [IDLE]}, source="agent")

    node = await get(client, "/v1/nodes/watched")

    assert [gpu["source"] for gpu in node["gpus"]] == ["agent"]


@pytest.mark.parametrize(
    ("node", "at", "state", "why"),
    [
        ("idle", 0, "idle", "utilization 0% is below 30%, memory 0% is below 50%"),
        ("idle", 2, "foreign", "8.0 GiB and 20% in use, and no pod holds it"),
        ("busy", 0, "busy", "utilization 90% is not below 30%"),
        ("dead", 0, "unhealthy", "cannot work: XID 79: fallen off the bus"),
        ("dead", 1, "excluded", "excluded with its node: GPU 0 has XID 79: fallen off the bus"),
    ],
)
async def test_each_gpu_has_a_state_and_a_reason(
    client: Client, node: str, at: int, state: str, why: str
) -> None:
    gpu = (await get(client, f"/v1/nodes/{node}"))["gpus"][at]

    assert (gpu["state"], gpu["why"]) == (state, why)


async def test_a_gpu_that_no_source_shows_is_unknown_and_has_no_numbers(
    world: World, client: Client
) -> None:
    world.register_node("unseen", gpus=1, labels={"nvidia.com/gpu.product": "NVIDIA-A100"})

    node = await get(client, "/v1/nodes/unseen")
    (gpu,) = node["gpus"]

    assert (gpu["state"], gpu["why"]) == ("unknown", "no source has shown it")
    assert (gpu["source"], gpu["freshness"]) == ("none", "missing")
    assert gpu["utilization_ratio"] is gpu["memory_used_ratio"] is gpu["index"] is None
    assert node["utilization_mean_ratio"] is None
    assert node["model"] == "A100"


async def test_a_stale_gpu_says_how_old_its_reading_is(world: World, client: Client) -> None:
    world.now += 200

    gpu = (await get(client, "/v1/nodes/idle"))["gpus"][0]

    assert (gpu["state"], gpu["freshness"], gpu["age_seconds"]) == ("stale", "stale", 200.0)
    assert gpu["why"] == "its last reading is stale: it was measured 200 s ago"


async def test_gpus_are_listed_of_all_nodes_or_of_one(client: Client) -> None:
    every = (await get(client, "/v1/gpus"))["gpus"]
    some = (await get(client, "/v1/gpus", node="busy"))["gpus"]

    assert len(every) == 8
    assert [gpu["uuid"] for gpu in some] == ["GPU-busy-0", "GPU-busy-1"]
    assert some == [gpu for gpu in every if gpu["node"] == "busy"]


async def test_many_nodes_are_listed_whole(world: World, client: Client) -> None:
    world.add({f"n{index:03}": [IDLE] for index in range(100)}, readings=1)

    assert len((await get(client, "/v1/nodes"))["nodes"]) == 104
    assert len((await get(client, "/v1/gpus"))["gpus"]) == 108


def test_every_route_of_the_api_has_a_handler(world: World) -> None:
    def paths(of: Iterable[web.RouteDef]) -> set[str]:
        return {one.path for one in of}

    fleet = FleetRoutes(world.fleet, world.placer, lambda: world.resources)
    served = paths((*fleet.routes(), *world.why.routes(), *fleet.decisions.routes()))
    own_class = {"/v1/advice", "/v1/bypassed", "/v1/regret", "/v1/session"}

    listed = {one.path for one in vars(routes).values() if isinstance(one, routes.Route)}
    assert {one for one in listed if one.startswith("/v1/")} - served == own_class
    assert paths(world.why.peer_routes()) == {"/v1/peers/explain", "/v1/peers/last"}


def test_prices_are_those_of_the_latest_settings(world: World) -> None:
    priced = PodRoutes(
        world.placer,
        lambda: world.resources,
        world.clock,
        prices=Prices(entries={"H100": 2.0}, spot_share=0.5),
    )
    plain, spot = NodeRecord(name="n"), NodeRecord(name="n", labels={SPOT_LABEL: "spot"})

    def prices() -> list[float | None]:
        return [priced.holders.prices.of("H100", node) for node in (plain, spot)]

    assert prices() == [2.0, 1.0]
    priced.adopt(Settings(prices={"H100": 4.0}, spot_share=0.25))
    assert prices() == [4.0, 1.0]
    priced.set_prices({"H100": 3.0})
    assert prices() == [3.0, 3.0]


async def test_a_head_request_has_no_body(client: Client) -> None:
    response = await client.head("/v1/nodes")

    assert response.status == 200
    assert await response.read() == b""


@pytest.mark.parametrize("path", ["/v1/nodes/gone", "/v1/gpus?node=gone", "/v1/decisions/9"])
async def test_unknown_node_is_404(client: Client, path: str) -> None:
    response = await client.get(path)

    assert response.status == 404
    assert "is not " in (await response.json())["error"]


@pytest.mark.parametrize(
    "name", ["%2e%2e", "<script>", "a%2fb", "%00", "%F0%9F%92%A9", "{}", "%25s"]
)
async def test_a_hostile_name_is_404_and_nothing_worse(client: Client, name: str) -> None:
    response = await client.get(f"/v1/nodes/{name}")

    assert response.status == 404
    assert "Traceback" not in await response.text()


# --- decisions ------------------------------------------------------------------------------------


async def test_decisions_are_listed_the_newest_first_each_in_full(client: Client) -> None:
    await decide(client, "idle", "dead", "busy", name="first")
    await decide(client, "idle", "full", name="second", gpu_memory="20Gi")

    second, first = (await get(client, "/v1/decisions"))["decisions"]

    assert (second["pod"], first["pod"]) == ("team/second", "team/first")
    assert second["request"]["gpu_memory_bytes"] == 20 * GIB
    assert first["request"]["resources"] == {GPU: 1}
    assert first["verb"] == "prioritize"
    assert first["node"] == first["explained"][0]["node"]
    assert {name: verdict["rejection"] for name, verdict in first["nodes"].items()} == {
        "idle": None,
        "dead": "node(s) had too few working GPUs",
        "busy": None,
    }
    assert all(0 <= verdict["score"] <= 1 for verdict in first["nodes"].values())
    (device, *_) = first["explained"][0]["devices"]
    assert device["uuid"].startswith("GPU-")


async def test_the_best_twenty_and_the_one_bound_are_explained_in_full(
    world: World, client: Client
) -> None:
    world.add({f"n{index:03}": [IDLE] for index in range(40)}, readings=1)
    names = [f"n{index:03}" for index in range(40)]
    await decide(client, *names)

    world.history.note_bound("uid-requester", "n039")
    (decision,) = (await get(client, "/v1/decisions"))["decisions"]

    assert len(decision["explained"]) == 21
    assert decision["explained"][-1]["node"] == "n039"
    assert decision["bound_node"] == "n039"
    assert decision["is_followed"] is False
    assert set(decision["nodes"]) == set(names)


async def test_decisions_are_chosen_by_pod_and_number_and_shortened(client: Client) -> None:
    for name in ("a", "b", "a"):
        await decide(client, "idle", name=name)

    by_name = (await get(client, "/v1/decisions", pod="team/a", brief="true"))["decisions"]
    by_uid = (await get(client, "/v1/decisions", pod="uid-b"))["decisions"]
    latest = (await get(client, "/v1/decisions", limit="1"))["decisions"]
    one = await get(client, f"/v1/decisions/{by_uid[0]['number']}")

    assert [decision["number"] for decision in by_name] == [3, 1]
    assert "nodes" not in by_name[0]
    assert latest[0]["number"] == 3
    assert one == by_uid[0]


async def test_a_thousand_decisions_are_kept(world: World, client: Client) -> None:
    for number in range(1005):
        await world.webhooks().prioritize(
            json.dumps(names_request("idle", requester=pod(f"p{number}"))).encode()
        )

    decisions = (await get(client, "/v1/decisions", brief="true"))["decisions"]

    assert len(decisions) == 1000
    assert (decisions[0]["pod"], decisions[-1]["pod"]) == ("team/p1004", "team/p5")


async def test_hostile_names_stay_text(client: Client) -> None:
    hostile = '"}]<script>\u2028\x00%s\\'
    await decide(client, hostile, "idle", name=hostile)

    (decision,) = (await get(client, "/v1/decisions", pod=f"team/{hostile}"))["decisions"]

    assert decision["pod"] == f"team/{hostile}"
    assert list(decision["nodes"]) == [hostile, "idle"]
