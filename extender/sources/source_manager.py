"""Run the sources that update the fleet: API server, Prometheus and agents."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from extender.core.nodes.host_resources import PlacedPod
from extender.core.nodes.snapshot import Snapshot
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.kube.client import KubeClient
from extender.runtime.cooperative import YieldControl, run_in_steps, yield_to_loop
from extender.runtime.supervision import Tasks
from extender.server.listener import Listener, spare_for
from extender.server.readiness import SourceStatus
from extender.server.tls import ServerContext, follow_certificate
from extender.settings.config import Settings
from extender.settings.sources import Agents
from extender.sources.agents.source import AddressError, AgentSource, AgentStatus
from extender.sources.agents.states import SOURCE
from extender.sources.kubernetes.cluster import ClusterSource
from extender.sources.kubernetes.objects import InventorySink
from extender.sources.kubernetes.reflector import ReflectorSettings
from extender.sources.prometheus.node_identity import NodeIdentity, addresses_of
from extender.sources.prometheus.source import (
    PastUse,
    PrometheusSource,
    PrometheusStatus,
    UseRecorder,
)

INVENTORY, PROMETHEUS, AGENTS = "inventory", "prometheus", "agents"
AGENTS_CERTIFICATE, PAST_USE = "agents' certificate", "past use"
"""Names of the background tasks."""


class SourceManager:
    """Runs the sources: the API server, Prometheus if set, and agents if they report.

    Attributes:
        cluster: source of nodes and pods.
        prometheus: source of readings, or None if no Prometheus is set.
        agents: source of readings, or None if no port for agents is set.

    Args:
        settings: addresses and intervals of the sources.
        sink: receives nodes and pods.
        tasks: runs the sources as background tasks.
        clock: seconds since the epoch.
        yield_control: yields the event loop between steps.

    Raises:
        TlsError: the certificate of the agents' port cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        client: KubeClient,
        sink: InventorySink,
        *,
        fleet: Fleet,
        tasks: Tasks,
        clock: Callable[[], float],
        yield_control: YieldControl = yield_to_loop,
    ) -> None:
        self._settings = settings
        self._policy: Policy | None = settings.policy()
        self._yield_control = yield_control
        self._fleet = fleet
        self._tasks = tasks
        self._clock = clock
        self._delivering = asyncio.Lock()
        self._identity = NodeIdentity()
        self.cluster = ClusterSource(
            client,
            sink,
            resources=settings.resource_patterns,
            early_seconds=settings.policy().early_failures.within_seconds,
            settings=_reflector_settings(settings),
            clock=clock,
            yield_control=yield_control,
        )
        self.prometheus = self._prometheus_source(settings) if settings.prometheus.url else None
        self._agents_certificate = _agents_certificate(settings.agents)
        self.agents = self._agent_source(settings, client) if settings.agents.listen else None

    def _agent_source(self, settings: Settings, client: KubeClient) -> AgentSource:
        self._fleet.prefer(SOURCE, settings.agents.hold_seconds)
        certificate = self._agents_certificate
        return AgentSource(
            settings.agents,
            client,
            self._fleet,
            is_known_node=lambda node: self.cluster.is_synced and node in self.cluster.nodes,
            deliver=lambda readings: self._deliver(self._fleet.readings_in_steps(readings)),
            clock=self._clock,
            tls=certificate.context if certificate is not None else None,
            spare=spare_for(settings.max_connections),
        )

    def _prometheus_source(self, settings: Settings) -> PrometheusSource:
        return PrometheusSource(
            settings.prometheus,
            identity=self._node_identity,
            deliver=lambda readings: self._deliver(self._fleet.readings_in_steps(readings)),
            deliver_history=lambda past: self._deliver(self._fleet.history_in_steps(past)),
            clock=self._clock,
            window_seconds=settings.policy().window_seconds,
        )

    async def _deliver(self, steps: Steps[None]) -> None:
        """Run the steps with which the fleet takes over data, one job at a time."""
        async with self._delivering:
            await run_in_steps(steps, self._yield_control)

    @property
    def ports(self) -> tuple[Listener, ...]:
        """The port to which agents report; empty if it is not set."""
        return () if self.agents is None else (self.agents.port,)

    def start(self, past_use: UseRecorder) -> None:
        """Start the background task of each source.

        Args:
            past_use: receives Prometheus's records of earlier device use.
        """
        self._tasks.start(INVENTORY, self.cluster.run)
        if self.prometheus is not None:
            self._tasks.start(PROMETHEUS, self.prometheus.run)
        if self.agents is not None:
            self._tasks.start(AGENTS, self.agents.run, fatal=(AddressError,))
        if self._agents_certificate is not None:
            self._tasks.start(AGENTS_CERTIFICATE, self._agents_certificate.run)
        reader = PastUse(
            self._settings.prometheus, self._clock, past_use, is_busy=self._is_history_due
        )
        self._tasks.start(PAST_USE, reader.run)

    def _is_history_due(self) -> bool:
        """Return whether the windows are still to be filled from Prometheus's history."""
        return self.prometheus is not None and not self.prometheus.status().has_history

    async def adopt(self, settings: Settings) -> None:
        """Apply new settings; a source whose settings are unchanged is not restarted."""
        before, self._settings = self._settings, settings
        if settings.resources != before.resources or settings.cluster != before.cluster:
            await self._tasks.stop(INVENTORY)
            self.cluster.adopt(
                resources=settings.resource_patterns,
                early_seconds=settings.policy().early_failures.within_seconds,
                settings=_reflector_settings(settings),
            )
            self._tasks.start(INVENTORY, self.cluster.run)
        if self.agents is not None and settings.agents != before.agents:
            self._fleet.prefer(SOURCE, settings.agents.hold_seconds)
            self.agents.adopt(settings.agents)
        if settings.prometheus != before.prometheus:
            async with self._delivering:  # a delivery in progress is completed first
                await self._tasks.stop(PROMETHEUS)
            if not settings.prometheus.url:
                self.prometheus = None
                return
            if self.prometheus is None:
                self.prometheus = self._prometheus_source(settings)
            self.prometheus.adopt(settings.prometheus, settings.policy().window_seconds)
            self._tasks.start(PROMETHEUS, self.prometheus.run)

    async def adopt_policy(self, policy: Policy) -> None:
        """Apply a policy to the fleet; return when the fleet decides by it.

        An unchanged policy is not applied again, unless the last attempt failed.
        """
        if policy == self._policy:
            return
        self._policy = None
        await self._deliver(self._fleet.adopt_in_steps(policy))
        self._policy = policy

    async def refresh(self, prepare: Callable[[Snapshot], Steps[None]]) -> None:
        """Estimate the fleet's devices again if an estimate is due."""
        await self._deliver(self._fleet.refresh_in_steps(prepare))

    def _node_identity(self) -> NodeIdentity:
        """Return the names and addresses of the nodes; the same object while nothing changes."""
        nodes = self.cluster.nodes if self.cluster.is_synced else {}
        addresses = addresses_of({name: node.addresses for name, node in nodes.items()})
        identity = NodeIdentity(
            names=frozenset(nodes),
            addresses=addresses | dict(self.cluster.exporter_addresses),
            exporter_pods=self.cluster.exporter_pods,
        )
        if identity != self._identity:
            self._identity = identity
        return self._identity

    def agent_status(self) -> AgentStatus | None:
        """Return the status of agent reports, or None if no port for agents is set."""
        return None if self.agents is None else self.agents.status()

    def pending_sources(self) -> Iterable[str]:
        """Yield the sources whose first readings have not arrived."""
        if self.prometheus is not None and self.prometheus.status().last_success_at is None:
            yield PROMETHEUS
        if self.agents is not None:
            reporting = self.agents.reporting
            if any(name not in reporting for name in self._nodes_with_gpus()):
                yield AGENTS

    def host_pods(self) -> Mapping[str, PlacedPod]:
        """Return the CPU, memory and storage of the pods with a node, by `namespace/name`."""
        return self.cluster.host_pods

    def resources(self) -> ResourceNames:
        """Return the names of the GPU resources whose nodes and pods are all listed."""
        return self.cluster.resources

    def unconfigured(self) -> Iterable[str]:
        """Yield the sources that are not configured."""
        if self.prometheus is None:
            yield PROMETHEUS
        if self.agents is None:
            yield AGENTS

    def _nodes_with_gpus(self) -> Iterable[str]:
        """Return the names of the ready nodes that offer GPUs."""
        nodes = self.cluster.nodes.items()
        return (name for name, node in nodes if node.is_ready and any(node.allocatable.values()))

    def unreadable(self) -> dict[str, Sequence[tuple[str, str]]]:
        """Return namespace and name of the objects last found unreadable, by resource."""
        status = self.cluster.status.items()
        return {name: one.unreadable_names for name, one in status if one.unreadable_since_list}

    def degraded(self) -> dict[str, str]:
        """Return the current problems of the sources by name."""
        degraded: dict[str, str] = {}
        for source in self.states():
            if source.error:
                degraded[source.name] = source.error
            if source.is_unreadable_in_part:
                text = "some objects cannot be read, and are left out: GET /v1/nodes names them"
                degraded[f"{source.name} objects"] = text
        if self.prometheus is None and self.agents is None:
            degraded["telemetry"] = "not configured: set prometheus.url or agents.listen"
        return degraded

    def states(self) -> Iterable[SourceStatus]:
        """Yield the status of each source: last success, failures and current error."""
        for resource, status in self.cluster.status.items():
            yield SourceStatus(
                name=f"apiserver/{resource}",
                last_success_at=status.last_event_at,
                failures=status.errors,
                error=status.last_error,
                unreadable=status.unreadable,
                is_unreadable_in_part=status.unreadable_since_list > 0,
            )
        if self.prometheus is not None:
            yield _prometheus_state(self.prometheus.status())
        if self.agents is not None:
            are_expected = next(iter(self._nodes_with_gpus()), None) is not None
            yield _agents_state(self.agents.status(), are_expected=are_expected)


def _agents_certificate(settings: Agents) -> ServerContext | None:
    """Return the TLS context of the agents' port, or None without TLS.

    Raises:
        TlsError: the certificate or key file cannot be used.
    """
    if not settings.listen or settings.cert_file is None or settings.key_file is None:
        return None
    return follow_certificate(settings.cert_file, settings.key_file)


def _reflector_settings(settings: Settings) -> ReflectorSettings:
    cluster = settings.cluster
    return ReflectorSettings(
        exporter_words=cluster.exporter_words,
        reads_limits=cluster.memory_limits,
        reads_groups=cluster.group_objects,
        backoff_max_seconds=cluster.max_backoff_seconds,
    )


def _prometheus_state(status: PrometheusStatus) -> SourceStatus:
    """Return the status of Prometheus; a failed query is reported as an error, too."""
    error = status.last_error or ("" if status.rounds else "no request sent yet")
    failed = status.failed_queries
    if failed and not error:
        name, reason = next(iter(failed.items()))
        error = f"{len(failed)} queries fail, the signals are missing: {name}: {reason}"
    return SourceStatus(
        name="prometheus",
        last_success_at=status.last_success_at,
        failures=status.failures,
        error=error,
        failed_queries=len(failed),
        partial_answers=status.partial_answers,
        restarts=max(status.worker_starts - 1, 0),
        is_partial=bool(failed) and not status.last_error,
    )


def _agents_state(status: AgentStatus, *, are_expected: bool) -> SourceStatus:
    """Return the status of all agents together; a single silent agent is a problem of its node."""
    error = "no agent reports" if are_expected and not status.agents else ""
    return SourceStatus(
        name="agents",
        last_success_at=status.last_at,
        failures=sum(status.refused.values()),
        error=error,
    )
