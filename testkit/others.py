"""Replicas that ask each other over their real answers, and callers who may not see all of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from typing_extensions import override  # in typing from Python 3.12 on

from extender.insight.explain_routes import ExplainRoutes
from extender.insight.replicas import Replicas
from extender.server.redaction import SEES_ALL, VIEWER, Viewer
from testkit.served import IDLE, Client
from testkit.whys import WhyWorld

NEAR = "10.0.0.1:8888"
FAR = "10.0.0.2:8888"
THIRD = "10.0.0.3:8888"


@dataclass
class SeesTeam:
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


@dataclass
class Replica(WhyWorld):
    """A replica that asks others.

    Attributes:
        far: the others.
        answers_peers: whether it tells them.
        name: its short name.
    """

    far: Far = field(default_factory=Far)
    answers_peers: bool = True
    name: str = "near"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.why = ExplainRoutes(
            self.placer,
            lambda: self.resources,
            lambda: self.now,
            replicas=Replicas(name=self.name, others=self.far, answers_peers=self.answers_peers),
        )
        self.add({"a": [IDLE], "b": [IDLE]})

    @override
    def build_app(
        self, *, max_body_bytes: int = 1 << 20, viewer: Viewer = SEES_ALL
    ) -> web.Application:
        app = super().build_app(max_body_bytes=max_body_bytes, viewer=viewer)
        app.add_routes(self.why.peer_routes())
        return app


def serve_to(viewer: Viewer) -> Middleware:
    """Return the middleware that has a caller with some rights ask; replicas come as they are."""

    @web.middleware
    async def for_viewer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.startswith("/v1/peers/"):
            VIEWER.set(viewer)
        return await handler(request)

    return for_viewer
