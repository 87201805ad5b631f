"""Past use of similar pods, for callers who may know it."""

import io
from dataclasses import replace
from typing import Any

import pytest

from extender.core.nodes.pod_groups import likeness_of
from testkit.others import SeesTeam
from testkit.webhook_requests import MakeClient
from testkit.world import World

GIB = 1 << 30


def requested(image: str, namespace: str = "team") -> dict[str, Any]:
    return {"metadata": {"namespace": namespace}, "spec": {"containers": [{"image": image}]}}


@pytest.fixture
def measured() -> World:
    """Return a world with measurements of two pods of a Deployment."""
    world = World()
    world.add_node("node")
    for namespace in ("team", "hidden"):
        for number, used in enumerate((5 * GIB, 9 * GIB)):
            record = replace(
                world.fleet.pods[world.add_pod(f"chat-{number}", "node")],
                namespace=namespace,
                owner="Deployment chat",
                likeness=likeness_of(requested("team/chat", namespace)),
            )
            world.fleet._allocations.similar_pods.note(record, used)
    return world


@pytest.mark.parametrize(
    ("query", "pod", "by"),
    [
        ("?owner=Deployment%20chat", requested("other"), "owner"),
        ("", requested("team/chat"), "images"),
        ("?owner=Deployment%20new", requested("team/chat"), "images"),
    ],
)
async def test_the_most_similar_pods_are_reported(
    measured: World, aiohttp_client: MakeClient, query: str, pod: dict[str, Any], by: str
) -> None:
    client = await aiohttp_client(measured.build_app())

    answer = await (await client.post(f"/v1/size{query}", json=pod)).json()

    assert answer == {
        "measured": {
            "by": by, "pods": 2, "memory_bytes": 9 * GIB, "least_bytes": 5 * GIB,
        }
    }  # fmt: skip


@pytest.mark.parametrize("pod", [requested("new"), requested("team/chat", "hidden")])
async def test_size_uses_only_pods_that_the_caller_may_read(
    measured: World, aiohttp_client: MakeClient, pod: dict[str, Any]
) -> None:
    client = await aiohttp_client(measured.build_app(viewer=SeesTeam()))

    response = await client.post("/v1/size", json=pod)

    assert (response.status, await response.json()) == (200, {"measured": None})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 5000, b"{}", b'{"spec": []}', b" " * (1 + (1 << 20))]
)
async def test_a_body_that_is_no_pod_is_refused(
    measured: World, aiohttp_client: MakeClient, body: bytes
) -> None:
    client = await aiohttp_client(measured.build_app())

    assert (await client.post("/v1/size", data=io.BytesIO(body))).status in {400, 413}
