"""The sources that the fleet is made from: followed side by side, each to be followed otherwise."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence

from extender.config import Settings
from extender.core.policy import Policy
from extender.core.snapshot import Snapshot
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.kube import KubeClient
from extender.listening import Listener, spare_for
from extender.observe.agents import AgentFigures
from extender.observe.collector import SourceStatus
from extender.settings.agents import Agents
from extender.sources.agents.source import SOURCE, AddressError, AgentSource, AgentStatus
from extender.sources.cluster import ClusterSource
from extender.sources.identity import NodeIdentity, addresses_of
from extender.sources.kube_kind import InventorySink
from extender.sources.kube_reflector import FollowSettings
from extender.sources.past_use import PastUse, Watch
from extender.sources.prometheus import PrometheusSource, PrometheusStatus
from extender.stepping import GiveWay, in_turns, next_turn
from extender.supervision import keep
from extender.tls import ServerContext, follow_certificate

INVENTORY, PROMETHEUS, AGENTS = "inventory", "prometheus", "agents"
AGENTS_CERTIFICATE, PAST_USE = "agents' certificate", "past use"
"""Names of the tasks."""

Run = Callable[[], Coroutine[None, None, None]]


class Tasks:
    """Background tasks by name, each of which may be ended and started anew."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def own(self, group: asyncio.TaskGroup) -> None:
        """Start tasks in this group from now on."""
        self._group = group

    def start(self, name: str, run: Run, fatal: tuple[type[Exception], ...] = ()) -> None:
        """Start a task; see `keep`."""
        if self._group is None:
            raise RuntimeError("tasks are started before there is a group that owns them")
        self._tasks[name] = self._group.create_task(keep(name, run, fatal=fatal), name=name)

    async def stop(self, name: str) -> None:
        """End a task, if there is one, and wait until it has ended."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class Following:
    """Follows the API server, Prometheus where one is set, and node agents where they report.

    Attributes:
        cluster: nodes and pods.
        prometheus: readings; None where no Prometheus is set.
        agents: readings, too; None where no agents report.

    Args:
        settings: how to follow.
        client: the API server.
        sink: takes what the API server says.
        fleet: takes the readings.
        tasks: run the sources.
        clock: seconds since the epoch.
        give_way: lets others have a turn.

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
        give_way: GiveWay = next_turn,
    ) -> None:
        self._settings = settings
        self._decided_by: Policy | None = settings.policy()
        self._give_way = give_way
        self._fleet = fleet
        self._tasks = tasks
        self._clock = clock
        self._telling = asyncio.Lock()
        self._identity = NodeIdentity()
        self.cluster = ClusterSource(
            client,
            sink,
            resources=settings.resource_patterns,
            early_seconds=settings.early_failures.within_seconds,
            settings=_follow_settings(settings),
            clock=clock,
            give_way=give_way,
        )
        self.prometheus = self._prometheus_source(settings) if settings.prometheus.url else None
        self._agents_certificate = _agents_certificate(settings.agents)
        self.agents = self._agent_source(settings, client) if settings.agents.listen else None

    def _agent_source(self, settings: Settings, client: KubeClient) -> AgentSource:
        self._fleet.hold(SOURCE, settings.agents.hold_seconds)
        certificate = self._agents_certificate
        source = AgentSource(
            settings.agents,
            client,
            knows=lambda node: self.cluster.is_synced and node in self.cluster.nodes,
            deliver=lambda readings: self._tell(self._fleet.readings_in_steps(readings)),
            foreign=lambda: self._fleet.policy.foreign,
            look_after_silent=self._fleet.look_after_silent,
            clock=self._clock,
            tls=certificate.context if certificate is not None else None,
            spare=spare_for(settings.max_connections),
        )
        source.on_shares = self._fleet.note_shares
        return source

    def _prometheus_source(self, settings: Settings) -> PrometheusSource:
        return PrometheusSource(
            settings.prometheus,
            identity=self.node_identity,
            deliver=lambda readings: self._tell(self._fleet.readings_in_steps(readings)),
            deliver_history=lambda past: self._tell(self._fleet.history_in_steps(past)),
            clock=self._clock,
            window_seconds=settings.window_seconds,
        )

    async def _tell(self, steps: Steps[None]) -> None:
        """Let the fleet take something over; one thing after the other, each to its end."""
        async with self._telling:
            await in_turns(steps, self._give_way)

    @property
    def ports(self) -> tuple[Listener, ...]:
        """Where agents report."""
        return () if self.agents is None else (self.agents.port,)

    def start(self) -> None:
        """Start to follow."""
        self._tasks.start(INVENTORY, self.cluster.run)
        if self.prometheus is not None:
            self._tasks.start(PROMETHEUS, self.prometheus.run)
        if self.agents is not None:
            self._tasks.start(AGENTS, self.agents.run, fatal=(AddressError,))
        if self._agents_certificate is not None:
            self._tasks.start(AGENTS_CERTIFICATE, self._agents_certificate.run)

    def tell_past_use(self, watch: Watch) -> None:
        """Tell whoever watches which devices are used what Prometheus saw before."""

        def is_history_due() -> bool:
            if self.prometheus is None or not self._settings.window_seconds:
                return False
            return not self.prometheus.status().has_history

        past_use = PastUse(self._settings.prometheus, self._clock, watch, is_busy=is_history_due)
        self._tasks.start(PAST_USE, past_use.run)

    async def adopt(self, settings: Settings) -> None:
        """Follow otherwise from now on; a source that nothing changed for is left alone."""
        before, self._settings = self._settings, settings
        if _what_pods_are(settings) != _what_pods_are(before) or settings.cluster != before.cluster:
            await self._tasks.stop(INVENTORY)
            self.cluster.change(
                resources=settings.resource_patterns,
                early_seconds=settings.early_failures.within_seconds,
                settings=_follow_settings(settings),
            )
            self._tasks.start(INVENTORY, self.cluster.run)
        if self.agents is not None and settings.agents != before.agents:
            self._fleet.hold(SOURCE, settings.agents.hold_seconds)
            self.agents.change(settings.agents)
        if settings.prometheus != before.prometheus:
            async with self._telling:  # what is being told is told to its end
                await self._tasks.stop(PROMETHEUS)
            if not settings.prometheus.url:
                self.prometheus = None
                return
            if self.prometheus is None:
                self.prometheus = self._prometheus_source(settings)
            self.prometheus.change(settings.prometheus, settings.window_seconds)
            self._tasks.start(PROMETHEUS, self.prometheus.run)
        elif self.prometheus is not None:
            self.prometheus.change(settings.prometheus, settings.window_seconds)

    async def decide_by(self, policy: Policy) -> None:
        """Let the fleet decide by other settings, from the moment on that this returns.

        Where it does so already nothing is done; after a fault nobody knows whether it does.
        """
        if policy == self._decided_by:
            return
        self._decided_by = None
        await self._tell(self._fleet.adopt_in_steps(policy))
        self._decided_by = policy

    async def renew(self, prepare: Callable[[Snapshot], Steps[None]]) -> None:
        """Let the fleet believe its devices anew, if it is time."""
        await self._tell(self._fleet.renew_in_steps(prepare))

    def node_identity(self) -> NodeIdentity:
        """Return by what names nodes are known; the same object as long as nothing changed."""
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

    def agent_figures(self) -> AgentFigures | None:
        """Return how reports of agents come in, None where none are taken."""
        if self.agents is None:
            return None
        told = self.agents.status()
        return AgentFigures(
            connections=told.connections,
            agents=told.agents,
            devices=told.devices,
            unknown_nodes=told.unknown_nodes,
            reports=told.reports,
            reviews=told.reviews,
            contested=self._fleet.contested,
            refused=told.refused,
        )

    def awaited(self) -> Iterable[str]:
        """Return from which sources first readings are still to come."""
        if self.prometheus is not None and self.prometheus.status().last_success_at is None:
            yield PROMETHEUS
        if self.agents is not None:
            reporting = self.agents.reporting
            if any(name not in reporting for name in self._nodes_with_gpus()):
                yield AGENTS

    def unset(self) -> Iterable[str]:
        """Return which sources are not followed."""
        if self.prometheus is None:
            yield PROMETHEUS
        if self.agents is None:
            yield AGENTS

    def _nodes_with_gpus(self) -> Iterable[str]:
        """Return the nodes that are up and offer GPUs."""
        nodes = self.cluster.nodes.items()
        return (name for name, node in nodes if node.is_ready and any(node.allocatable.values()))

    def unreadable(self) -> dict[str, Sequence[tuple[str, str]]]:
        """Return namespace and name of the last objects that cannot be read, by resource."""
        status = self.cluster.status.items()
        return {name: one.unreadable_names for name, one in status if one.unreadable_since_list}

    def states(self) -> Iterable[SourceStatus]:
        """Return how each source fares."""
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
            are_awaited = next(iter(self._nodes_with_gpus()), None) is not None
            yield _agents_state(self.agents.status(), are_awaited=are_awaited)


def _agents_certificate(settings: Agents) -> ServerContext | None:
    """Return what the agents' port is served with; None for without TLS.

    Raises:
        TlsError: the files cannot be used.
    """
    if not settings.listen or settings.cert_file is None or settings.key_file is None:
        return None
    return follow_certificate(settings.cert_file, settings.key_file)


def _what_pods_are(settings: Settings) -> tuple[object, ...]:
    """Return which of the other settings shape what is kept of a pod or a node."""
    return settings.resources, settings.early_failures.within_seconds


def _follow_settings(settings: Settings) -> FollowSettings:
    cluster = settings.cluster
    return FollowSettings(
        page_size=cluster.page_size,
        page_timeout_seconds=cluster.page_timeout_seconds,
        exporter_words=cluster.exporter_words,
        silence_seconds=cluster.inactivity_timeout_seconds,
        resync_seconds=cluster.resync_seconds,
        backoff_max_seconds=cluster.max_backoff_seconds,
    )


def _prometheus_state(told: PrometheusStatus) -> SourceStatus:
    """Return how Prometheus fares; a query that fails is worth telling too."""
    error = told.last_error or ("" if told.rounds else "not asked yet")
    failed = told.failed_queries
    if failed and not error:
        name, reason = next(iter(failed.items()))
        error = f"{len(failed)} queries fail, the signals are missing: {name}: {reason}"
    return SourceStatus(
        name="prometheus",
        last_success_at=told.last_success_at,
        failures=told.failures,
        error=error,
        failed_queries=len(failed),
        partial_answers=told.partial_answers,
        restarts=max(told.worker_starts - 1, 0),
        is_partial=bool(failed) and not told.last_error,
    )


def _agents_state(told: AgentStatus, *, are_awaited: bool) -> SourceStatus:
    """Return how agents fare together; one that is silent is a matter of its node."""
    error = "no agent reports" if are_awaited and not told.agents else ""
    return SourceStatus(
        name="agents",
        last_success_at=told.last_at,
        failures=sum(told.refused.values()),
        error=error,
    )
