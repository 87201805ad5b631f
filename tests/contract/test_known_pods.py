"""Pods that the watch has already delivered, which are not parsed again from the request."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.node_index import NodeIndex
from extender.core.request.gpu_resources import ResourceNames
from extender.sources.kubernetes.records import reduce_pod
from extender.webhook import wire
from testkit.cards import IDLE
from testkit.webhook_requests import Client, MakeClient
from testkit.world import World

BODY = (Path(__file__).parent / "golden" / "filter-names.json").read_bytes()
"""Request of the real kube-scheduler."""
REQUEST: dict[str, Any] = json.loads(BODY)
NODES = sorted(REQUEST["NodeNames"])
ROLL = NodeIndex(NODES, {})


def known(pod: dict[str, Any] | None = None) -> PodRecord:
    record = reduce_pod(pod or REQUEST["Pod"], ResourceNames(), early_seconds=60)
    assert record is not None
    return record


def decode(body: bytes, *records: PodRecord) -> wire.ExtenderRequest:
    return wire.decode_request(body, ROLL, {record.uid: record for record in records})


def written(pod: dict[str, Any]) -> bytes:
    """Return the request for another pod, as Go writes it."""
    return json.dumps(REQUEST | {"Pod": pod}, separators=(",", ":")).encode()


def test_request_uses_the_record_of_a_known_pod() -> None:
    record = known()

    request = decode(BODY, record)

    assert request.pod is record
    assert sorted(request.nodes) == NODES


def test_a_generated_name_is_passed_over() -> None:
    metadata = REQUEST["Pod"]["metadata"]
    pod = REQUEST["Pod"] | {
        "metadata": {"name": metadata["name"], "generateName": "trainer-"} | metadata
    }

    assert decode(written(pod), known()).pod == known()


def test_another_version_of_the_pod_is_read() -> None:
    pod = decode(BODY, replace(known(), version="207")).pod

    assert pod == REQUEST["Pod"]


def test_another_pod_is_read() -> None:
    assert decode(BODY, replace(known(), uid="another")).pod == REQUEST["Pod"]


def test_incomplete_record_makes_the_pod_be_decoded() -> None:
    pod = json.loads(BODY)["Pod"]
    pod["metadata"]["annotations"]["idlegpu.io/prefer-models"] = "H100," * 1000

    assert known(pod).version == ""
    assert decode(written(pod), known(pod)).pod == pod


@pytest.mark.parametrize(
    "body",
    [
        BODY.replace(b'"uid"', b'"UID"', 1),
        BODY.replace(b'{"metadata"', b'{ "metadata"', 1),
        BODY.replace(b'"Nodes":null', b'"Nodes":{"items":[]}', 1),
        BODY.replace(b'"name":"trainer"', b'"name":"\\u0074rainer"', 1),
    ],
)
def test_request_in_unusual_json_is_decoded(body: bytes) -> None:
    assert body != BODY
    assert not isinstance(decode(body, known()).pod, PodRecord)


@pytest.fixture
def world() -> World:
    """Return a world whose first node is idle; the others have no telemetry."""
    world = World()
    for name in NODES[1:]:
        world.register_node(name, gpus=8)
    world.add({NODES[0]: [IDLE] * 8})
    return world


@pytest.fixture
async def client(world: World, aiohttp_client: MakeClient) -> Client:
    return await aiohttp_client(world.build_app())


async def answers(client: Client) -> list[Any]:
    return [
        await (await client.post(f"/{verb}", data=BODY)).json() for verb in ("filter", "prioritize")
    ]


async def test_known_pod_gets_the_same_answer(client: Client, world: World) -> None:
    read = await answers(client)
    world.fleet.apply_pod(known())

    assert await answers(client) == read
    decided = world.placer.history.last_of(known().uid)
    assert decided is not None
    assert decided.pod.key == "default/trainer"
    assert decided.request.memory_bytes == 20 << 30


async def test_an_invalid_annotation_is_reported_all_the_same(client: Client, world: World) -> None:
    pod = json.loads(BODY)["Pod"]
    pod["metadata"]["annotations"] = {"idlegpu.io/gpu-memory": "20"}
    world.fleet.apply_pod(known(pod))

    response = await client.post("/filter", data=written(pod))

    assert response.status == 200
    assert [problem.annotation for problem in world.problems] == ["idlegpu.io/gpu-memory"]
