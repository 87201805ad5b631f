"""Serve the routes of decisions, for one replica and for several."""

import json

from aiohttp import web

from extender.insight.decisions import DecisionRoutes
from extender.insight.replicas import NoReplicas, Replicas
from extender.server.redaction import SEES_ALL, Viewer
from testkit.cards import IDLE
from testkit.others import OtherReplicas, serve_to
from testkit.webhook_requests import Client, names_request, pod
from testkit.world import World


def application(
    world: World, decisions: DecisionRoutes, viewer: Viewer = SEES_ALL
) -> web.Application:
    app = web.Application(middlewares=[serve_to(viewer)])
    app.add_routes([*world.webhooks().routes(), *decisions.routes(), *decisions.peer_routes()])
    return app


def replica(name: str, far: OtherReplicas | None = None) -> tuple[World, DecisionRoutes]:
    world = World()
    world.add({"a": [IDLE], "b": [IDLE]})
    others = far or NoReplicas()
    replicas = Replicas(name=name, host=f"pod-{name}", others=others, answers_peers=True)
    decisions = DecisionRoutes(world.history, replicas)
    return world, decisions


async def decide(client: Client, name: str, namespace: str = "team") -> None:
    requester = pod(name, prefer_models="A100")
    requester["metadata"] = {**requester["metadata"], "namespace": namespace}  # type: ignore[dict-item] # an object
    body = json.dumps(names_request("a", "b", requester=requester))
    assert (await client.post("/prioritize", data=body)).status == 200
