"""Replicas that ask each other over their real answers, and callers who may not see all of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from extender.insight.replicas import Replicas
from extender.server.redaction import VIEWER, Viewer
from testkit.cards import IDLE
from testkit.webhook_questions import Client
from testkit.world import World

NEAR = "10.0.0.1:8888"
FAR = "10.0.0.2:8888"
THIRD = "10.0.0.3:8888"


class SeesTeam:
    """May read the pods of one namespace."""

    name = "somebody"

    def sees(self, namespace: str) -> bool:
        return namespace == "team"

    async def learn(self, namespaces: object) -> None:
        pass

    async def renew(self) -> None:
        pass


@dataclass
class LearnsTeam:
    """May read the pods of one namespace, of which it learns on the way."""

    learnt: set[str] = field(default_factory=set)
    name: str = "somebody"

    def sees(self, namespace: str) -> bool:
        return namespace == "team" and namespace in self.learnt

    async def learn(self, namespaces: Any) -> None:
        self.learnt |= set(namespaces)

    async def renew(self) -> None:
        """There is nothing to find out."""


@dataclass
class Far:
    """Other replicas, over their real answers; None for one that does not answer.

    Attributes:
        garbage: what comes from those that do not answer.
        asked: what they were asked.
        hanging: those that told what they have, and answer nothing since.
    """

    clients: Mapping[str, Client | None] = field(default_factory=dict)
    garbage: bytes | None = None
    asked: list[str] = field(default_factory=list)
    hanging: Collection[str] = ()

    async def ask(self, path: str) -> Mapping[str, bytes | None]:
        return {address: await self.ask_one(address, path) for address in self.clients}

    async def ask_one(self, address: str, path: str) -> bytes | None:
        self.asked.append(path)
        client = self.clients[address]
        if client is None or (address in self.hanging and "id=" in path):
            return self.garbage
        response = await client.get(path)
        assert response.status == 200, await response.text()
        return await response.read()


def replica_world(
    *, name: str = "near", far: Far | None = None, answers_peers: bool = True
) -> World:
    """Return a world with two idle nodes, of a replica that asks others."""
    others = Far() if far is None else far
    world = World(replicas=Replicas(name=name, others=others, answers_peers=answers_peers))
    world.add({"a": [IDLE], "b": [IDLE]})
    return world


def far_of(world: World) -> Far:
    """Return the other replicas that a world asks."""
    others = world.replicas.others
    assert isinstance(others, Far)
    return others


def serve_to(viewer: Viewer) -> Middleware:
    """Return the middleware that has a caller with some rights ask; replicas come as they are."""

    @web.middleware
    async def for_viewer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith("/v1/peers/"):
            VIEWER.set(viewer)
        return await handler(request)

    return for_viewer
