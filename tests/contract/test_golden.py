"""Recorded requests of the real kube-scheduler: see golden/README.md."""

import json
from pathlib import Path
from typing import Any

import pytest

from testkit.cards import IDLE, Gpu
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

GOLDEN = Path(__file__).parent / "golden"
DEAD = Gpu(xid=79.0)


def read(name: str) -> bytes:
    return (GOLDEN / f"{name}.json").read_bytes()


def nodes_of(name: str) -> list[str]:
    request = json.loads(read(name))
    if request["NodeNames"] is not None:
        return list(request["NodeNames"])
    return [node["metadata"]["name"] for node in request["Nodes"]["items"]]


def victims_of(name: str) -> dict[str, Any]:
    """Return the candidates of a request, with victims reduced to their UIDs."""
    request = json.loads(read(name))
    whole = request["NodeNameToVictims"] or {}
    return request["NodeNameToMetaVictims"] or {
        node: {
            "Pods": [{"UID": pod["metadata"]["uid"]} for pod in victims["Pods"]],
            "NumPDBViolations": victims.get("NumPDBViolations", 0),
        }
        for node, victims in whole.items()
    }


async def post(client: Client, verb: str, body: bytes) -> Any:
    response = await client.post(f"/{verb}", data=body)
    assert response.status == 200
    return await response.json()


@pytest.fixture
def world() -> World:
    """Return a world with an idle node, one with lost GPUs, and one without telemetry."""
    world = World()
    first, second, third = sorted(nodes_of("filter-names"))
    world.register_node(third, gpus=8)
    world.add({first: [IDLE] * 8, second: [DEAD] * 8})
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


@pytest.mark.parametrize("form", ["names", "objects"])
async def test_filter_answers_in_the_form_and_order_of_the_request(
    client: Client, form: str
) -> None:
    requested = nodes_of(f"filter-{form}")
    dead = sorted(requested)[1]

    answer = await post(client, "filter", read(f"filter-{form}"))

    kept = answer["NodeNames"]
    if form == "objects":
        kept = [node["metadata"]["name"] for node in answer["Nodes"]["items"]]
        sent = json.loads(read("filter-objects"))["Nodes"]["items"]
        assert answer["Nodes"]["items"] == [
            node for node in sent if node["metadata"]["name"] != dead
        ]
    assert kept == [node for node in requested if node != dead]
    assert answer["FailedAndUnresolvableNodes"] == {
        dead: "node(s) had too few working GPUs (idlegpu)"
    }
    assert answer["Error"] == ""


@pytest.mark.parametrize("form", ["names", "objects"])
async def test_prioritize_scores_the_idle_node_highest(client: Client, form: str) -> None:
    requested = nodes_of(f"prioritize-{form}")

    answer = await post(client, "prioritize", read(f"prioritize-{form}"))

    scores = {entry["Host"]: entry["Score"] for entry in answer}
    assert list(scores) == requested
    assert scores[min(requested)] == 400
    assert sorted(scores.values()).count(400) == 1


@pytest.mark.parametrize("form", ["names", "objects"])
async def test_preempt_returns_the_victims_that_kube_scheduler_proposed(
    aiohttp_client: MakeClient, form: str
) -> None:
    expected = victims_of(f"preempt-{form}")
    client = await aiohttp_client(World().build_app())

    answer = await post(client, "preempt", read(f"preempt-{form}"))

    assert expected
    assert answer == {"NodeNameToMetaVictims": expected}


async def test_the_request_of_a_real_pod_is_understood(world: World, client: Client) -> None:
    await post(client, "filter", read("filter-names"))

    (record,) = world.history
    assert record.pod.key == "default/trainer"
    assert (record.request.resource, record.request.count) == ("nvidia.com/gpu", 2)
    assert record.request.memory_bytes == 20 << 30
