"""Replicas that query each other, and callers with limited rights."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from extender.insight.replicas import Replicas
from extender.server.redaction import VIEWER, Viewer
from testkit.cards import IDLE
from testkit.webhook_requests import Client
from testkit.world import World

NEAR = "10.0.0.1:8888"
FAR = "10.0.0.2:8888"
THIRD = "10.0.0.3:8888"


class SeesTeam:
    """Viewer that may read the pods of one namespace."""

    name = "caller"

    def sees(self, namespace: str) -> bool:
        return namespace == "team"

    async def learn(self, namespaces: object) -> None:
        pass

    async def renew(self) -> None:
        pass


@dataclass
class LearnsTeam:
    """Viewer that may read the pods of one namespace, once `learn` was called."""

    learnt: set[str] = field(default_factory=set)
    name: str = "caller"

    def sees(self, namespace: str) -> bool:
        return namespace == "team" and namespace in self.learnt

    async def learn(self, namespaces: Any) -> None:
        self.learnt |= set(namespaces)

    async def renew(self) -> None:
        """Do nothing: the rights do not change."""


@dataclass
class OtherReplicas:
    """Other replicas with their real answers; None for a replica that does not answer.

    Attributes:
        garbage: malformed answer that replicas send instead of their real one.
        requested: received requests.
        hanging: replicas that answered with their list and then stopped answering.
    """

    clients: Mapping[str, Client | None] = field(default_factory=dict)
    garbage: bytes | None = None
    requested: list[str] = field(default_factory=list)
    hanging: Collection[str] = ()

    async def query(self, path: str) -> Mapping[str, bytes | None]:
        return {address: await self.query_one(address, path) for address in self.clients}

    async def query_one(self, address: str, path: str) -> bytes | None:
        self.requested.append(path)
        client = self.clients[address]
        if client is None or (address in self.hanging and "id=" in path):
            return self.garbage
        response = await client.get(path)
        assert response.status == 200, await response.text()
        return await response.read()


def replica_world(
    *, name: str = "near", far: OtherReplicas | None = None, answers_peers: bool = True
) -> World:
    """Build a world with two idle nodes whose replica queries others."""
    others = OtherReplicas() if far is None else far
    world = World(replicas=Replicas(name=name, others=others, answers_peers=answers_peers))
    world.add({"a": [IDLE], "b": [IDLE]})
    return world


def far_of(world: World) -> OtherReplicas:
    """Return the other replicas of a world."""
    others = world.replicas.others
    assert isinstance(others, OtherReplicas)
    return others


def serve_to(viewer: Viewer) -> Middleware:
    """Return middleware that sets a caller's rights; requests of replicas pass unchanged."""

    @web.middleware
    async def for_viewer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith("/v1/peers/"):
            VIEWER.set(viewer)
        return await handler(request)

    return for_viewer
