"""A fleet that is read minute by minute behind the route that gives advice."""

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from typing_extensions import override

from extender.core.nodes.inventory import PodPhase, PodRecord
from extender.core.steps import finish
from extender.insight.advice import AdviceRoutes
from extender.insight.last_hour import Plots
from extender.insight.short_memory import ShortMemory
from extender.server.redaction import SEES_ALL, Viewer
from testkit.holders import HoldersWorld
from testkit.served import GPU, Gpu

SHARED = "nvidia.com/gpu.shared"


@dataclass
class AdvisingWorld(HoldersWorld):
    """A world that remembers the last hour.

    Attributes:
        plots: asks Prometheus.
    """

    plots: Plots | None = field(default=None)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = ShortMemory(self.fleet, lambda: self.now)

    @override
    def build_app(
        self, *, max_body_bytes: int = 256 << 20, viewer: Viewer = SEES_ALL
    ) -> web.Application:
        app = super().build_app(max_body_bytes=max_body_bytes, viewer=viewer)
        advice = AdviceRoutes(self.fleet, self.memory, self.plots, lambda: self.now)
        app.add_routes(advice.routes())
        return app

    @override
    def live(self, cards: dict[str, list[Gpu]], seconds: float, *, every: float = 60.0) -> None:
        """Read the devices, look at them and remember them while time passes."""
        until = self.now + seconds
        while self.now < until:
            super().live(cards, every, every=every)
            finish(self.memory.note_in_steps())

    def add_shared(self, node: str, replicas: int, gpus: int = 1) -> None:
        """Add a node of time-sliced cards."""
        counts = {SHARED: gpus * replicas}
        self.add_node(
            node,
            allocatable=counts,
            capacity=counts,
            labels={
                "nvidia.com/gpu.count": str(gpus),
                "nvidia.com/gpu.replicas": str(replicas),
                "nvidia.com/gpu.sharing-strategy": "time-slicing",
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED",
            },
        )

    def have(
        self,
        name: str,
        node: str,
        *,
        resource: str = GPU,
        gpus: int = 1,
        namespace: str = "team",
        **rest: Any,
    ) -> str:
        """Bind a pod now; return it as telemetry names it."""
        self.fleet.apply_pod(
            PodRecord(
                uid=f"uid-{name}",
                namespace=namespace,
                name=name,
                node=node,
                phase=PodPhase.RUNNING,
                resources={resource: gpus},
                bound_at=self.now,
                started_at=self.now,
                owner=f"Deployment {name}",
                **rest,
            )
        )
        return f"{namespace}/{name}"
