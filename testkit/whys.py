"""The routes that answer why, behind a fleet that is fed by hand."""

from dataclasses import dataclass
from typing import Any

from aiohttp import web
from typing_extensions import override

from extender.core.nodes.inventory import PodRecord
from extender.insight.explain_routes import ExplainRoutes
from extender.server.redaction import SEES_ALL, Viewer
from testkit.served import GPU, World

MESSAGE = (
    "0/9 nodes are available: 4 Insufficient nvidia.com/gpu, 2 node(s) had untolerated taint "
    "{team: red, blue}, 3 node(s) had too few GPUs known to be idle. no new claims to deallocate, "
    "preemption: 0/9 nodes are available: 9 No preemption victims found for incoming pod."
)


@dataclass
class WhyWorld(World):
    """A world that answers why as well.

    Attributes:
        why: the routes.
    """

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.why = ExplainRoutes(self.placer, lambda: self.resources, lambda: self.now)

    @override
    def build_app(
        self, *, max_body_bytes: int = 256 << 20, viewer: Viewer = SEES_ALL
    ) -> web.Application:
        app = super().build_app(max_body_bytes=max_body_bytes, viewer=viewer)
        app.add_routes(self.why.routes())
        return app

    def add_waiting(self, name: str, namespace: str = "team", **rest: Any) -> str:
        """Add a pod that is not bound; return its UID."""
        values: dict[str, Any] = {
            "resources": {GPU: 2},
            "created_at": self.now - 100.0,
            **rest,
        }
        record = PodRecord(
            uid=f"uid-{name}",
            namespace=namespace,
            name=name,
            **values,
        )
        self.fleet.apply_pod(record)
        return record.uid

    def watch(self, seconds: float, *, every: float = 60.0) -> None:
        """Let time pass, looking at the devices and reading nothing new."""
        until = self.now + seconds
        while self.now < until:
            self.now += every
            self.why.idleness.look()


class SeesTeam:
    """Somebody who may read the pods of one namespace."""

    name = "somebody"

    def sees(self, namespace: str) -> bool:
        return namespace == "team"

    async def learn(self, namespaces: object) -> None:
        pass

    async def renew(self) -> None:
        pass
