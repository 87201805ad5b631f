"""A fleet fed by hand behind the real webhooks and API, for tests that ask over HTTP."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestClient
from aiohttp.typedefs import Handler

from extender.api.fleet_routes import FleetRoutes
from extender.core.devices.readings import Column, DeviceInfo, DeviceKey, Readings, Signal
from extender.core.nodes.inventory import NodeRecord, PodPhase, PodRecord
from extender.core.policy import Policy
from extender.core.request.annotations import AnnotationProblem
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import PodRef
from extender.fleet.fleet import Fleet
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer
from extender.placement.request_log import RequestLog
from extender.runtime.metrics import Metrics
from extender.server.redaction import SEES_ALL, VIEWER, Viewer
from extender.webhook.handlers import Webhooks

Client = TestClient[web.Request, web.Application]
MakeClient = Callable[[web.Application], Awaitable[Client]]

GPU = "nvidia.com/gpu"
GIB = 1 << 30
CARD_BYTES = 80 * GIB
NOW = 1_800_000_000.0
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What telemetry says of one card; None is missing. `signs` are further signals."""

    busy: float | None = 0.0
    used_gib: float | None = 0.0
    xid: float | None = 0.0
    tenants: tuple[str, ...] = ()
    age: float = 0.0
    signs: Mapping[Signal, float] = field(default_factory=dict)


IDLE = Gpu()
BUSY = Gpu(busy=0.9, used_gib=60.0)


@dataclass
class World:
    """The parts of an extender, without sources and sockets.

    Attributes:
        now: what the clock says, seconds since the epoch.
        is_ready: whether the inventory is complete.
        problems: annotations that pods' owners were told of.
        expected: how often it was told that prioritize will be asked.
        unreadable: namespace and name of objects that cannot be read, by resource.
    """

    policy: Policy = field(default_factory=Policy)
    now: float = NOW
    max_score: int = 400
    shortlist: int = 0
    is_ready: bool = True
    problems: list[AnnotationProblem] = field(default_factory=list)
    expected: int = 0
    unreadable: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.policy, lambda: self.now)
        self.history = DecisionHistory(1000, lambda: self.now)
        self.placer = Placer(self.fleet, self.history, lambda: self.now)
        self.metrics = Metrics()
        self.request_log = RequestLog(
            self.fleet, clock=lambda: self.now, monotonic=lambda: self.now
        )
        self.resources = ResourceNames()

    def add_node(self, name: str, *, gpus: int = 2, **rest: Any) -> None:
        """Add a node of whole GPUs, as the API server would show it."""
        values: dict[str, Any] = {"allocatable": {GPU: gpus}, "capacity": {GPU: gpus}, **rest}
        self.fleet.apply_node(NodeRecord(name=name, **values))

    def add_pod(self, name: str, node: str, *, gpus: int = 1, started: float | None = 0.0) -> str:
        """Add a pod that runs on a node; return its UID."""
        self.fleet.apply_pod(
            PodRecord(
                uid=f"uid-{name}",
                namespace="team",
                name=name,
                node=node,
                phase=PodPhase.RUNNING,
                resources={GPU: gpus},
                started_at=started,
                bound_at=started,
            )
        )
        return f"uid-{name}"

    def tell(self, cards: Mapping[str, Sequence[Gpu]], *, source: str = "prometheus") -> None:
        """Give the fleet one reading of every card, by node."""
        placed = [
            (
                DeviceInfo(
                    node=node,
                    uuid=f"GPU-{node}-{index}",
                    index=index,
                    model="NVIDIA H100 80GB HBM3",
                    driver_version="580.95.05",
                ),
                gpu,
            )
            for node, gpus in cards.items()
            for index, gpu in enumerate(gpus)
        ]
        tenants: dict[DeviceKey, tuple[str, ...]] = {
            info.key: gpu.tenants for info, gpu in placed if gpu.tenants
        }
        self.fleet.apply_readings(
            Readings(
                source=source,
                at=self.now,
                devices=tuple(info for info, _ in placed),
                columns={
                    Signal.GPU_UTILIZATION: _column([gpu.busy for _, gpu in placed]),
                    Signal.MEMORY_USED: _column(
                        [None if gpu.used_gib is None else gpu.used_gib * GIB for _, gpu in placed]
                    ),
                    Signal.MEMORY_TOTAL: _column([float(CARD_BYTES)] * len(placed)),
                    Signal.XID: _column([gpu.xid for _, gpu in placed]),
                    **{
                        signal: _column([gpu.signs.get(signal) for _, gpu in placed])
                        for _, shown in placed
                        for signal in shown.signs
                    },
                },
                measured_at=_column([self.now - gpu.age for _, gpu in placed]),
                tenants=tenants,
                unmatched_series=3,
                unmatched_example='{Hostname="gone"}',
            )
        )

    def add(self, cards: Mapping[str, Sequence[Gpu]], *, readings: int = 3) -> None:
        """Add nodes with these cards, and read each card some times, ten seconds apart."""
        for node, gpus in cards.items():
            self.add_node(node, gpus=len(gpus))
        for _ in range(readings):
            self.now += 10.0
            self.tell(cards)
            self.fleet.snapshot()

    def build_app(
        self, *, max_body_bytes: int = 256 * MIB, viewer: Viewer = SEES_ALL
    ) -> web.Application:
        """Return the application that serves this world, to a caller with some rights."""

        @web.middleware
        async def for_viewer(request: web.Request, handler: Handler) -> web.StreamResponse:
            VIEWER.set(viewer)
            return await handler(request)

        app = web.Application(client_max_size=max_body_bytes, middlewares=[for_viewer])
        app.add_routes(self.webhooks().routes())
        api = FleetRoutes(
            self.fleet, self.placer, lambda: self.resources, unreadable=lambda: self.unreadable
        )
        app.add_routes(api.routes())
        return app

    def webhooks(self) -> Webhooks:
        """Return the verbs."""
        return Webhooks(
            placer=self.placer,
            resources=lambda: self.resources,
            metrics=self.metrics,
            max_score=self.max_score,
            shortlist=self.shortlist,
            is_ready=lambda: self.is_ready,
            warn_annotation=self._warn,
            request_log=self.request_log,
            expect=self._expect,
        )

    def _expect(self) -> None:
        self.expected += 1

    def _warn(self, _: PodRef, problem: AnnotationProblem) -> None:
        self.problems.append(problem)

    def count(self, name: str, **labels: str) -> float:
        """Return the value of one series of our own metrics, 0 where there is none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def _column(values: Sequence[float | None]) -> Column:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def pod(
    name: str = "asker", *, gpus: int | None = 1, resource: str = GPU, **annotations: str
) -> dict[str, object]:
    """Return a Pod object as kube-scheduler sends it; annotations without their prefix."""
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


def names_question(*nodes: str, asker: object = None) -> dict[str, object]:
    """Return an ExtenderArgs with names (nodeCacheCapable: true)."""
    return {"Pod": pod() if asker is None else asker, "Nodes": None, "NodeNames": list(nodes)}


def objects_question(*nodes: str, asker: object = None) -> dict[str, object]:
    """Return an ExtenderArgs with whole nodes (nodeCacheCapable: false)."""
    items = [{"metadata": {"name": node}} for node in nodes]
    return {
        "Pod": pod() if asker is None else asker,
        "Nodes": {"metadata": {}, "items": items},
        "NodeNames": None,
    }
