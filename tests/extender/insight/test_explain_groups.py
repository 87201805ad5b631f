"""Explanation of a pod's group: its pods, and the nodes with room for the rest."""

import asyncio
import json
from io import BytesIO
from typing import Any

import pytest

from extender.core.nodes.pod_groups import PodGroup
from extender.webhook.handlers import _BETWEEN_VERBS_SECONDS
from testkit.api_requests import get, strict
from testkit.cli_serving import runner, serving
from testkit.others import SeesTeam
from testkit.webhook_requests import Client, MakeClient, names_request, pod
from testkit.world import World

RACK = "topology.kubernetes.io/rack"
NODES = {"a-1": "a", "a-2": "a", "b-1": "b", "b-2": "b"}
GROUP = PodGroup("Kueue group", "team", "train", 4)


def member(name: str, size: int = 4) -> dict[str, Any]:
    found: dict[str, Any] = pod(name)
    found["metadata"]["labels"] = {"kueue.x-k8s.io/pod-group-name": "train"}
    found["kind"] = "Pod"
    found["metadata"].setdefault("annotations", {})
    found["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] = str(size)
    return found


@pytest.fixture
def world() -> World:
    world = World()
    for name, rack in NODES.items():
        world.add_node(name, 2, other_labels={RACK: rack})
    world.read()
    world.bind("other", "a-1", 1)
    world.read()
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


async def call(client: Client, verb: str, requester: object, *nodes: str) -> Any:
    request = names_request(*(nodes or NODES), requester=requester)
    response = await client.post(f"/{verb}", data=json.dumps(request))
    assert response.status == 200
    await asyncio.sleep(2 * _BETWEEN_VERBS_SECONDS)  # then it is recorded in full
    return await response.json(content_type=None)


async def test_explanation_names_the_group_and_domains_with_room(client: Client) -> None:
    await call(client, "filter", member("p-0"))

    answer = await get(client, "/v1/explain", pod="team/p-0")

    assert answer["decision"]["group"] == {
        "name": "Kueue group train",
        "size": 4,
        "placed": {},
        "rest": 4,
        "fitting": [{"label": RACK, "name": "b", "pods": 4}],
        "too_few": None,
    }
    first, second, *others = answer["nodes"]
    assert {first["node"], second["node"]} == {"b-1", "b-2"}
    assert "rack with room for the rest of its group" in first["reason"]
    assert {node["lost_by"] for node in others} == {"no room near it for the rest of its group"}
    for node in answer["nodes"]:
        assert sum(part["adds"] for part in node["parts"]) == pytest.approx(node["score"])


async def test_explanation_names_the_nodes_of_placed_pods(world: World, client: Client) -> None:
    for name, node in (("p-1", "a-1"), ("p-2", "a-2")):
        world.bind(name, node, namespace="team", group=GROUP)
    world.read()
    await call(client, "filter", member("p-0"))

    answer = await get(client, "/v1/explain", pod="team/p-0")

    assert answer["decision"]["group"]["placed"] == {"a-1": 1, "a-2": 1}
    assert answer["decision"]["group"]["rest"] == 2
    assert answer["nodes"][0]["node"] == "a-2"
    assert "same node as its group" in answer["nodes"][0]["reason"]


async def test_a_group_that_can_never_fit_is_refused_with_its_reason(client: Client) -> None:
    found = await call(client, "filter", member("p-0", 9))

    reason = "node(s) could not hold the pod's whole group, even without other pods"
    assert found["FailedAndUnresolvableNodes"] == dict.fromkeys(NODES, f"{reason} (idlegpu)")
    answer = await get(client, "/v1/explain", pod="team/p-0")
    assert answer["decision"]["group"]["too_few"] == 8
    assert {node["rejection"] for node in answer["nodes"]} == {reason}
    assert answer["rejected"][0]["count"] == 4


async def test_hypothetical_pod_is_placed_like_the_first_of_its_group(client: Client) -> None:
    data = BytesIO(json.dumps(member("new")).encode())

    answer = strict(await (await client.post("/v1/explain", data=data)).text())

    assert answer["decision"]["node"] in {"b-1", "b-2"}
    assert answer["decision"]["group"]["size"] == 4
    assert "its group" in answer["nodes"][0]["reason"]


async def test_group_is_hidden_from_callers_without_rights(
    world: World, client: Client, aiohttp_client: MakeClient
) -> None:
    requester = member("p-0")
    requester["metadata"]["namespace"] = "other"
    await call(client, "filter", requester)
    limited = await aiohttp_client(world.build_app(viewer=SeesTeam()))

    (seen,) = (await get(limited, "/v1/decisions"))["decisions"]

    assert seen["group"] is None
    assert "train" not in json.dumps(seen)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (4, "group Kueue group train: 1 of 4 pods placed: a-1; room for 3 with this pod by"),
        (2, "group Kueue group train: 1 of 2 pods placed: a-1; room for this pod by node: "),
        (9, "no domain has room for 8 with this pod"),
    ],
)
def test_command_line_prints_the_group_in_one_line(world: World, size: int, expected: str) -> None:
    world.bind("p-1", "a-1", namespace="team", group=GROUP)
    world.read()
    with serving(world.build_app()) as url:
        shown = runner(url)("explain", "-f", "-", standard_input=json.dumps(member("p-0", size)))

    assert expected in " ".join(shown.stdout.split())


def test_command_line_prints_the_number_of_pods_that_fit(world: World) -> None:
    with serving(world.build_app()) as url:
        shown = runner(url)("explain", "-f", "-", standard_input=json.dumps(member("p-0", 9)))

    said = " ".join(shown.stdout.split())
    assert "0 of 9 pods placed; the cluster has GPUs for 8 of them, held or not" in said
