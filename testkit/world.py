"""Cluster in one process: a fleet with data from the test, the webhooks and the API."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from extender.api.json_routes import FleetRoutes, PodRoutes
from extender.core.decision.decision import Decision
from extender.core.devices.readings import DeviceInfo, DeviceKey, Readings, Signal
from extender.core.nodes.host_resources import PlacedPod
from extender.core.nodes.inventory import NodeRecord, PodPhase, PodRecord
from extender.core.nodes.snapshot import PoolRow
from extender.core.policy import Policy
from extender.core.request.annotations import AnnotationProblem
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import GpuRequest, PodRef
from extender.core.steps import finish
from extender.fleet.fleet import Fleet
from extender.insight.advice import AdviceRoutes
from extender.insight.last_hour import Plots, ShortMemory
from extender.insight.replicas import ONE, Replicas
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer
from extender.placement.request_log import RequestLog
from extender.runtime.metrics import Metrics
from extender.server.redaction import SEES_ALL, VIEWER, Viewer
from extender.webhook.handlers import Webhooks
from testkit.builders import GIB, GPU, NOW, pod_ref, request
from testkit.cards import Gpu, readings_of

MESSAGE = (
    "0/9 nodes are available: 4 Insufficient nvidia.com/gpu, 2 node(s) had untolerated taint "
    "{team: red, blue}, 3 node(s) had too few GPUs known to be idle (idlegpu). no new claims to "
    "deallocate, preemption: 0/9 nodes are available: 9 No preemption victims found for incoming "
    "pod."
)
SHARED = "nvidia.com/gpu.shared"

IDLE: Mapping[Signal, float] = {
    Signal.GPU_UTILIZATION: 0.0,
    Signal.GRAPHICS_ACTIVE: 0.0,
    Signal.MEMORY_USED: 0.0,
    Signal.MEMORY_FREE: 80 * GIB,
}
BUSY: Mapping[Signal, float] = {
    Signal.GPU_UTILIZATION: 0.9,
    Signal.GRAPHICS_ACTIVE: 0.9,
    Signal.MEMORY_USED: 60 * GIB,
    Signal.MEMORY_FREE: 20 * GIB,
}


@dataclass
class Clock:
    """Clock that a test sets."""

    now: float = NOW

    def __call__(self) -> float:
        return self.now


@dataclass
class Device:
    """Telemetry of one device; measured with the others unless it has its own time."""

    info: DeviceInfo
    values: dict[Signal, float] = field(default_factory=lambda: dict(IDLE))
    tenants: tuple[str, ...] = ()
    is_shown: bool = True
    measured_at: float | None = None


class World:
    """Parts of an extender without sources and sockets; every node is idle at first.

    A test supplies data in one of two ways: `add_node`, `card` and `read` keep the state of each
    device; `register_node` and `report` take the values of every card in each call.

    Attributes:
        is_ready: whether the inventory is complete.
        problems: annotation problems that were reported to owners of pods.
        expected: number of prioritize requests that filter has announced.
        unreadable: namespace and name of objects that cannot be read, by resource.
        plots: the queries of the last hour.
        host_pods: what all pods request of their nodes.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        in_steps: bool = False,
        max_score: int = 400,
        shortlist: int = 0,
        unreadable: Mapping[str, list[tuple[str, str]]] | None = None,
        is_ready: bool = True,
        replicas: Replicas = ONE,
    ) -> None:
        self.policy = policy or Policy()
        self.clock = Clock()
        self.fleet = Fleet(self.policy, self.clock, in_steps=in_steps)
        self.history = DecisionHistory(1000, self.clock)
        self.placer = Placer(self.fleet, self.history, self.clock)
        self.resources = ResourceNames()
        self.devices: dict[DeviceKey, Device] = {}
        self.is_mapped = True
        self.is_shown_by_shares = False
        self.max_score = max_score
        self.shortlist = shortlist
        self.is_ready = is_ready
        self.problems: list[AnnotationProblem] = []
        self.expected = 0
        self.unreadable = dict(unreadable or {})
        self.plots: Plots | None = None
        self.host_pods: dict[str, PlacedPod] = {}
        self.replicas = replicas

    @property
    def now(self) -> float:
        """Time of the clock, seconds since the epoch."""
        return self.clock.now

    @now.setter
    def now(self, at: float) -> None:
        self.clock.now = at

    # --- parts that few tests need --------------------------------------------------------------

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics()

    @cached_property
    def request_log(self) -> RequestLog:
        return RequestLog(self.fleet, clock=self.clock, monotonic=self.clock)

    @cached_property
    def why(self) -> PodRoutes:
        return PodRoutes(self.placer, lambda: self.resources, self.clock, replicas=self.replicas)

    @cached_property
    def memory(self) -> ShortMemory:
        return ShortMemory(self.fleet, self.clock)

    # --- nodes and devices ----------------------------------------------------------------------

    def add_node(
        self,
        name: str = "node",
        cards: int = 1,
        *,
        replicas: int = 1,
        resource: str = GPU,
        **changes: Any,
    ) -> NodeRecord:
        """Add a node with GFD's labels and `cards` cards, each with `replicas` replicas."""
        self.add_cards(name, cards)
        offered = {resource: cards * replicas}
        labels = {"nvidia.com/gpu.memory": str(80 * 1024)}
        if replicas > 1:
            labels["nvidia.com/gpu.replicas"] = str(replicas)
            labels["nvidia.com/gpu.sharing-strategy"] = "time-slicing"
        record = NodeRecord(name=name, allocatable=offered, capacity=offered, labels=labels)
        record = replace(record, **changes)
        self.fleet.apply_node(record)
        return record

    def add_cards(self, node: str, count: int) -> None:
        """Add cards of a node to telemetry."""
        for index in range(count):
            self.show(DeviceInfo(node=node, uuid=f"GPU-{node}-{index}", index=index))

    def add_instances(self, node: str, card: int, profiles: Iterable[str]) -> None:
        """Add MIG instances of a card to telemetry, numbered from 7."""
        for number, profile in enumerate(profiles, start=7):
            self.show(
                DeviceInfo(
                    node=node,
                    uuid=f"GPU-{node}-{card}",
                    gpu_instance_id=str(number),
                    index=card,
                    mig_profile=profile,
                )
            )

    def show(self, info: DeviceInfo) -> None:
        """Add a device to telemetry."""
        self.devices[info.key] = Device(info=info)

    def card(self, node: str = "node", index: int = 0, instance: str = "") -> Device:
        """Return a device of a node."""
        return self.devices[DeviceKey((f"GPU-{node}-{index}", instance))]

    def remove_card(self, node: str, index: int) -> None:
        """Remove a card and all its instances from telemetry."""
        uuid = f"GPU-{node}-{index}"
        self.devices = {key: device for key, device in self.devices.items() if key[0] != uuid}

    def read(
        self, *, measured_at: float | None = None, began_at: float | None = None, **values: float
    ) -> None:
        """Apply one answer of Prometheus, measured now by default.

        Args:
            measured_at: time of measurement, seconds since the epoch.
            began_at: start of the round of queries, which ends now with the devices' pods; seconds
                since the epoch.
            values: values of every device, by the name of a `Signal`.
        """
        shown = [device for device in self.devices.values() if device.is_shown]
        for device in shown:
            device.values.update({Signal[name]: value for name, value in values.items()})
        signals = {signal for device in shown for signal in device.values}
        measured = self.clock.now if measured_at is None else measured_at
        self.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=self.clock.now if began_at is None else began_at,
                devices=tuple(device.info for device in shown),
                columns={
                    signal: np.array([device.values.get(signal, np.nan) for device in shown])
                    for signal in signals
                },
                measured_at=np.array(
                    [measured if one.measured_at is None else one.measured_at for one in shown]
                ),
                tenants={device.info.key: device.tenants for device in shown if device.tenants}
                if self.is_mapped
                else None,
                tenants_at=self.clock.now,
                divided=tuple(device.info.key for device in shown if device.tenants)
                if self.is_shown_by_shares
                else (),
            )
        )

    def read_after(self, seconds: float, times: int = 1, **values: float) -> None:
        """Apply `times` answers, each `seconds` after the previous one."""
        for _ in range(times):
            self.clock.now += seconds
            self.read(**values)

    def bind(
        self,
        name: str,
        node: str = "node",
        count: int = 1,
        *,
        on: Iterable[Device] = (),
        **changes: Any,
    ) -> PodRecord:
        """Report a pod as bound and running; the next readings show it on these devices.

        Args:
            name: the pod's name.
            count: devices or replicas.
            on: its devices in the mapping.
            changes: further fields of its record.
        """
        described: dict[str, Any] = {
            "uid": f"uid-{name}",
            "namespace": "ns",
            "resources": {GPU: count},
            "phase": PodPhase.RUNNING,
            "bound_at": self.now,
            "started_at": self.now,
        }
        record = PodRecord(name=name, node=node, **{**described, **changes})
        for device in on:
            device.tenants = (*device.tenants, record.key)
        self.fleet.apply_pod(record)
        return record

    def end(self, record: PodRecord, **changes: Any) -> None:
        """Report a pod as ended now, and remove it from the mapping."""
        ended = replace(record, phase=PodPhase.SUCCEEDED, ended_at=self.clock.now)
        self.fleet.apply_pod(replace(ended, **changes))
        for device in self.devices.values():
            device.tenants = tuple(key for key in device.tenants if key != record.key)

    def add_pod(self, name: str, node: str, *, gpus: int = 1, started: float | None = 0.0) -> str:
        """Add a running pod to a node; return its UID."""
        record = self.bind(name, node, gpus, namespace="team", started_at=started, bound_at=started)
        return record.uid

    def hold(self, name: str, node: str, gpus: int, namespace: str = "team", **rest: Any) -> None:
        """Add a notebook's pod that has run on a node for ten minutes."""
        begun = self.now - 600.0
        values: dict[str, Any] = {
            "bound_at": begun,
            "started_at": begun,
            "owner": "StatefulSet notebook",
            **rest,
        }
        self.bind(name, node, gpus, namespace=namespace, **values)

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
        """Bind a pod of a Deployment to a node now; return the pod's `namespace/name`."""
        values = {"resources": {resource: gpus}, "owner": f"Deployment {name}", **rest}
        return self.bind(name, node, namespace=namespace, **values).key

    def add_waiting(self, name: str, namespace: str = "team", **rest: Any) -> str:
        """Add an unbound pod; return its UID."""
        values: dict[str, Any] = {"resources": {GPU: 2}, "created_at": self.now - 100.0, **rest}
        record = PodRecord(uid=f"uid-{name}", namespace=namespace, name=name, **values)
        self.fleet.apply_pod(record)
        return record.uid

    # --- nodes whose cards the test sets at each reading ------------------------------------------

    def register_node(self, name: str, *, gpus: int = 2, **rest: Any) -> None:
        """Add a node of whole GPUs, as the API server would show it."""
        values: dict[str, Any] = {"allocatable": {GPU: gpus}, "capacity": {GPU: gpus}, **rest}
        self.fleet.apply_node(NodeRecord(name=name, **values))

    def add_shared(self, node: str, replicas: int, gpus: int = 1) -> None:
        """Add a node of time-sliced cards."""
        counts = {SHARED: gpus * replicas}
        self.register_node(
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

    def add(self, cards: Mapping[str, Sequence[Gpu]], *, readings: int = 3) -> None:
        """Add nodes with these cards, and read each card several times, ten seconds apart."""
        for node, gpus in cards.items():
            self.register_node(node, gpus=len(gpus))
        for _ in range(readings):
            self.now += 10.0
            self.report(cards)
            self.fleet.snapshot()

    def report(self, cards: Mapping[str, Sequence[Gpu]], *, source: str = "prometheus") -> None:
        """Apply one reading of every card, by node."""
        self.fleet.apply_readings(readings_of(cards, at=self.now, source=source))

    def live(
        self, cards: Mapping[str, Sequence[Gpu]], seconds: float, *, every: float = 60.0
    ) -> None:
        """Advance the clock with regular readings, and record the devices' use."""
        until = self.now + seconds
        while self.now < until:
            self.now += every
            self.report(cards)
            self.why.idleness.look()
            finish(self.memory.note_in_steps())

    def watch(self, seconds: float, *, every: float = 60.0) -> None:
        """Advance the clock without new readings, and record the devices' use."""
        until = self.now + seconds
        while self.now < until:
            self.now += every
            self.why.idleness.look()

    # --- HTTP -------------------------------------------------------------------------------------

    def build_app(
        self, *, max_body_bytes: int = 256 << 20, viewer: Viewer = SEES_ALL
    ) -> web.Application:
        """Build the application that serves this world to a caller with these rights."""

        @web.middleware
        async def for_viewer(request: web.Request, handler: Handler) -> web.StreamResponse:
            VIEWER.set(viewer)
            return await handler(request)

        app = web.Application(client_max_size=max_body_bytes, middlewares=[for_viewer])
        app.add_routes(self.webhooks().routes())
        fleet = FleetRoutes(
            self.fleet,
            self.placer,
            lambda: self.resources,
            unreadable=lambda: self.unreadable,
            host_pods=lambda: self.host_pods,
        )
        app.add_routes(fleet.routes())
        app.add_routes(self.why.routes())
        advice = AdviceRoutes(
            self.fleet, self.memory, self.plots, self.clock, lambda: self.host_pods
        )
        app.add_routes(advice.routes())
        if self.replicas is not ONE:
            app.add_routes(self.why.peer_routes())
        return app

    def webhooks(self) -> Webhooks:
        """Handlers of the webhooks."""
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
        """Return the value of one series of the extender's metrics, 0 if there is none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    # --- answers ----------------------------------------------------------------------------------

    def row(self, node: str = "node", resource: str = GPU) -> PoolRow:
        """Return a node's row in the snapshot."""
        pool = self.fleet.snapshot().pools[resource]
        return pool.rows[pool.row_of[node]]

    def estimated(self, device: Device, column: str) -> float:
        """Return a column of a device in the snapshot."""
        row = self.fleet.store.row_of(device.info.key)
        assert row is not None
        return float(getattr(self.fleet.snapshot().telemetry, column)[row])

    def rank(
        self, requested: GpuRequest | None = None, nodes: Iterable[str] | None = None
    ) -> Decision:
        """Return the current decision for a pod."""
        names = self.fleet.nodes if nodes is None else nodes
        return self.placer.rank(requested or request(), tuple(names))

    def place(self, name: str, requested: GpuRequest | None = None) -> str | None:
        """Place a pod as kube-scheduler does, by filter and prioritize; return the first choice."""
        about, pod, names = requested or request(), pod_ref(name), tuple(self.fleet.nodes)
        passed = self.placer.place("filter", pod, about, names).decision
        feasible = tuple(passed.candidates[index] for index in passed.order)
        return self.placer.place("prioritize", pod, about, feasible).decision.best


def one_node(cards: int = 2, *, policy: Policy | None = None, **node: Any) -> World:
    """Build a world with one node, read once."""
    made = World(policy)
    made.add_node("node", cards, **node)
    made.read()
    return made


def time_sliced(nodes: int = 4, cards: int = 1, replicas: int = 10, **values: float) -> World:
    """Build equal time-sliced nodes, read once; afterwards their metrics do not change."""
    world = World()
    for index in range(nodes):
        world.add_node(f"node-{index}", cards, replicas=replicas)
    world.read(**values)
    return world
