"""Simulate node agents: their readings are invented, their reports use the real code."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.gpu.backend import NodeReading
from agent.options import Options, ReportOptions
from agent.push.pusher import Pusher
from agent.push.updates import Digest, UpdateBuilder
from agent.report.contract import Device, Foreign, Place, Process, Report, Tenant
from agent.sampler import LatestReport
from extender.core.devices.readings import DeviceKey, ForeignProcess, Signal
from extender.sources.agents.states import AgentState
from simulation.devices import DeviceView
from simulation.fleet import SimulatedFleet
from simulation.models import MIB

PERIOD_SECONDS = 0.25
"""Time between two samples; a real agent takes one per second."""

REPORTS = ReportOptions(
    heartbeat_seconds=1.0, resolve_seconds=0.5, reconnect_seconds=0.2, max_backoff_seconds=1.0
)
"""Settings of the reports, with shorter intervals than in a real cluster."""


@dataclass(slots=True, kw_only=True)
class SimulatedAgent:
    """The agent of one node.

    Attributes:
        fleet: fleet that contains the node's devices.
        latest: the agent's latest report.
        started_at: start time, seconds since the epoch.
        is_dumb: whether the agent has stopped sampling.
        sequence: number of its last report.
        sees_foreign: whether the agent can see the pods of processes.
        sees_holders: whether its kubelet reports the holders of devices.
    """

    node: str
    fleet: SimulatedFleet
    latest: LatestReport = field(default_factory=LatestReport)
    started_at: float = 0.0
    is_dumb: bool = False
    sequence: int = 0
    sees_foreign: bool = True
    sees_holders: bool = True

    def look(self) -> Report:
        """Take a sample and publish its report."""
        self.sequence += 1
        report = report_of(
            self.fleet, self.node, sees_foreign=self.sees_foreign, sees_holders=self.sees_holders
        )
        self.latest.publish(
            _replace_report(report, sequence=self.sequence, started_at=self.started_at),
            NodeReading(),
        )
        return report


def _replace_report(report: Report, *, sequence: int, started_at: float) -> Report:
    """Copy a report with another sequence number and start time."""
    return Report(
        node=report.node,
        started_at=started_at,
        sequence=sequence,
        at=report.at,
        driver_version=report.driver_version,
        topology_policy=report.topology_policy,
        devices=report.devices,
        signals=report.signals,
    )


def report_of(
    fleet: SimulatedFleet, node: str, *, sees_foreign: bool = True, sees_holders: bool = True
) -> Report:
    """Build the report that a node's agent would send now."""
    views = fleet.views(node)
    rows = [_signals(view) for view in views]
    names = sorted({name for row in rows for name in row})
    spec = fleet.node(node).spec
    return Report(
        node=node,
        at=fleet.clock(),
        driver_version=spec.driver_version,
        topology_policy=spec.topology_policy,
        devices=tuple(
            _device(fleet, node, view, sees_foreign=sees_foreign, sees_holders=sees_holders)
            for view in views
        ),
        signals={name: tuple(row.get(name) for row in rows) for name in names},
    )


def _signals(view: DeviceView) -> dict[str, float]:
    """Return a device's signals as NVML would report them."""
    total, reserved = view.memory_mib * MIB, view.reserved_mib * MIB
    said: dict[Signal, float] = {
        Signal.GRAPHICS_ACTIVE: view.utilization,
        Signal.SM_ACTIVE: 0.9 * view.utilization,
        Signal.MEMORY_TOTAL: total,
        Signal.MEMORY_RESERVED: reserved,
        Signal.MEMORY_USED: view.memory_used_bytes,
        Signal.MEMORY_FREE: total - reserved - view.memory_used_bytes,
        Signal.TEMPERATURE: view.temperature_celsius,
        Signal.ROW_REMAP_PENDING: view.row_remap_pending,
        Signal.ROW_REMAP_FAILURE: view.row_remap_failure,
        Signal.UNCORRECTABLE_REMAPPED_ROWS: view.uncorrectable_remapped_rows,
        Signal.ECC_DOUBLE_BIT_VOLATILE: view.double_bit_errors,
        Signal.CLOCK_EVENT_REASONS: view.clock_event_reasons,
    }
    if not view.gpu_instance_id:
        said[Signal.GPU_UTILIZATION] = view.utilization
        said[Signal.POWER] = view.power_watts
    if view.xid:
        said[Signal.XID] = view.xid
    return {signal.value: float(value) for signal, value in said.items()}


def _device(
    fleet: SimulatedFleet, node: str, view: DeviceView, *, sees_foreign: bool, sees_holders: bool
) -> Device:
    device, spec = fleet.device(node, view.index, view.gpu_instance_id), fleet.node(node).spec
    foreign = device.foreign
    strangers = (
        (
            Process(
                pid=4711 + view.index,
                name="python3",
                memory_bytes=foreign.memory_bytes,
                place=Place.HOST,
                container="docker-3f2a1b4c5d6e.scope",
                started_at=device.foreign_since,
            ),
        )
        if foreign.memory_bytes
        else ()
    )
    of_pods = tuple(
        Process(
            pid=5000 + number,
            memory_bytes=tenant.load.memory_bytes,
            place=Place.POD,
            uid=tenant.pod.uid,
            namespace=tenant.pod.namespace,
            pod=tenant.pod.name,
            container=tenant.pod.container,
        )
        for number, tenant in enumerate(view.tenants)
        if tenant.load.memory_bytes
    )
    return Device(
        uuid=view.uuid,
        gpu_instance_id=view.gpu_instance_id,
        index=view.index,
        model=view.model.name,
        mig_profile=view.profile,
        pci_bus_id=view.pci_bus_id,
        numa_node=spec.numa_nodes[view.index] if spec.numa_nodes else None,
        nvlink_peers=tuple(
            fleet.node(node).cards[peer].uuid
            for joined in spec.nvlinks
            if view.index in joined
            for peer in joined
            if peer != view.index
        ),
        activity_source="gpm",
        age_seconds=0.0,
        xid_age_seconds=0.0 if view.xid else None,
        allocated_to=tuple(
            Tenant(
                namespace=tenant.pod.namespace,
                pod=tenant.pod.name,
                container=tenant.pod.container,
                uid=tenant.pod.uid,
            )
            for tenant in view.tenants
        )
        if sees_holders
        else None,
        used_by=(*strangers, *of_pods) if sees_foreign else None,
        foreign=Foreign(
            memory_bytes=foreign.memory_bytes,
            utilization_ratio=foreign.utilization,
            pids=tuple(one.pid for one in strangers),
        )
        if sees_foreign
        else None,
        replicas=device.replicas if sees_holders else None,
    )


def foreign_processes_of(
    fleet: SimulatedFleet, node: str
) -> Mapping[DeviceKey, tuple[ForeignProcess, ...]]:
    """Return a node's foreign processes as the extender decodes them from a report."""
    report, state = report_of(fleet, node), AgentState(node)
    update = UpdateBuilder().build(report, Digest(), is_news=False, sent_at=report.at)
    state.apply(update, report.at)
    return state.foreign


@asynccontextmanager
async def run_agents(
    fleet: SimulatedFleet,
    nodes: Iterable[str],
    service: str,
    token_file: Callable[[str], Path],
    *,
    reports: ReportOptions = REPORTS,
    period_seconds: float = PERIOD_SECONDS,
) -> AsyncIterator[Mapping[str, SimulatedAgent]]:
    """Run the agents of some nodes while the context is open; yield them by node.

    Args:
        fleet: fleet that contains the nodes.
        nodes: names of the nodes with an agent.
        service: host:port to which the agents report.
        token_file: returns the path of a node's token.
        reports: other settings of the reports.
        period_seconds: time between two passes.
    """
    agents = {
        name: SimulatedAgent(node=name, fleet=fleet, started_at=fleet.clock()) for name in nodes
    }

    async def look(agent: SimulatedAgent) -> None:
        while True:
            if not agent.is_dumb:
                agent.look()
            await asyncio.sleep(period_seconds)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for name, agent in agents.items():
            how = replace(reports, service=service, token_file=str(token_file(name)))
            pusher = Pusher(Options(node=name, reports=how), agent.latest, clock=fleet.clock)
            tasks += [
                group.create_task(look(agent), name=f"agent of {name}"),
                group.create_task(pusher.run(), name=f"reports of {name}"),
            ]
        yield agents
        for task in tasks:
            task.cancel()
