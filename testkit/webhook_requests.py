"""HTTP requests as kube-scheduler sends them."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient

from testkit.builders import GPU

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[[web.Application], Awaitable[Client]]

VERBS = ("filter", "prioritize", "preempt")


async def call(client: Client, verb: str, body: object) -> Any:
    response = await client.post(f"/{verb}", data=json.dumps(body))
    assert response.status == 200
    assert response.content_type == "application/json"
    return await response.json()


def scores_of(answer: list[dict[str, Any]]) -> dict[str, int]:
    return {entry["Host"]: entry["Score"] for entry in answer}


def meta(*nodes: str, uids: tuple[str, ...] = ("uid-holder-0",)) -> dict[str, object]:
    victims = {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": 1}
    return {"NodeNameToMetaVictims": dict.fromkeys(nodes, victims)}


def pod(
    name: str = "requester", *, gpus: int | None = 1, resource: str = GPU, **annotations: str
) -> dict[str, object]:
    """Build a Pod object as kube-scheduler sends it; annotations without their prefix."""
    limits = {} if gpus is None else {resource: str(gpus)}
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "annotations": {
                f"idlegpu.io/{key.replace('_', '-')}": value for key, value in annotations.items()
            },
        },
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending"},
    }


def names_request(*nodes: str, requester: object = None) -> dict[str, object]:
    """Build ExtenderArgs with names (nodeCacheCapable: true)."""
    return {
        "Pod": pod() if requester is None else requester,
        "Nodes": None,
        "NodeNames": list(nodes),
    }


def objects_request(*nodes: str, requester: object = None) -> dict[str, object]:
    """Build ExtenderArgs with whole nodes (nodeCacheCapable: false)."""
    items = [{"metadata": {"name": node}} for node in nodes]
    return {
        "Pod": pod() if requester is None else requester,
        "Nodes": {"metadata": {}, "items": items},
        "NodeNames": None,
    }
