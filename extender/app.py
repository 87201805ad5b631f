"""Build the extender from its parts, and start and stop every background task."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from extender.api.access import make_access
from extender.api.json_routes import FleetRoutes, PodRoutes
from extender.api.page.routes import STREAM, PageRoutes
from extender.api.status_routes import export_ports, export_state, health_routes, metrics_route
from extender.effects.events import AnnotationWarnings, EventWriter, PlacementEvents
from extender.effects.peers import build_peers
from extender.effects.waker import WakerRunner
from extender.fleet.fleet import Fleet
from extender.insight.decisions import BypassedPodsTable, DecisionRoutes
from extender.insight.regret_table import RegretTable
from extender.insight.replicas import Replicas
from extender.insight.shadow_mode import ShadowMode
from extender.kube.client import KubeClient
from extender.kube.kubeconfig import own_namespace
from extender.kube.lease import make_identity
from extender.placement.binding_attribution import BindingAttribution, InventoryTap
from extender.placement.bypassed_pods import BypassedPods
from extender.placement.evaluation_cache import WarmUp
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer
from extender.placement.request_log import RequestLog
from extender.runtime import logs
from extender.runtime.cooperative import run_in_steps
from extender.runtime.gc_control import GcControl
from extender.runtime.metrics import Metrics
from extender.runtime.supervision import Tasks, keep
from extender.server.ports import ServerPorts
from extender.server.readiness import Readiness
from extender.server.request_tracker import RequestTracker
from extender.server.tls import only_known, only_secret
from extender.settings.config import Settings
from extender.settings.reload import Reloader, SettingsFile
from extender.sources.prometheus.plots import PrometheusPlots
from extender.sources.source_manager import SourceManager
from extender.webhook.admission import PATH as ADMISSION
from extender.webhook.admission import Proposals, build_webhook
from extender.webhook.handlers import MAX_BODY_BYTES, Webhooks, noting_wrong_paths

logger = logging.getLogger(__name__)

_Clock = Callable[[], float]

_VERBS = ("/filter", "/prioritize", "/preempt")
"""Paths of the webhooks. Background work yields while one of these requests is open."""


class Extender:
    """Runs the extender: sources update the fleet, and webhooks and API answer from its snapshot.

    Args:
        clock: seconds since the epoch.
        file: the settings file to watch for changes, or None to watch no file.
    """

    def __init__(
        self,
        settings: Settings,
        client: KubeClient,
        clock: _Clock = time.time,
        file: SettingsFile | None = None,
    ) -> None:
        self.settings = settings
        self._client = client
        self._clock = clock
        self.metrics = Metrics()
        self.metrics.settings_loaded_at.set(clock())
        self.tasks = Tasks()
        self.request_tracker = RequestTracker(
            urgent=_VERBS, lasting=(STREAM,), once=(*_VERBS, ADMISSION)
        )
        self.gc_control = GcControl(
            is_idle=lambda: not self.request_tracker.requests,
            is_quiet=self.request_tracker.is_quiet,
        )
        self._build_placement()
        self._build_effects()
        self._build_bookkeeping()
        self._build_sources()
        self._build_webhooks()
        self._build_api()
        self.server_ports = ServerPorts(
            settings,
            self.build_app(),
            self.build_status_app(),
            self.build_admission_app(),
            request_tracker=self.request_tracker,
        )
        export_ports(self.metrics, [*self.server_ports.ports, *self.source_manager.ports])
        self.reloader = Reloader(file, settings, self.adopt, self.metrics, clock) if file else None

    # --- build ----------------------------------------------------------------------------------

    def _build_placement(self) -> None:
        """Build the state of the fleet, the placer and the records of its answers."""
        settings, clock = self.settings, self._clock
        self.fleet = Fleet(settings.policy(), clock, in_steps=True)
        self.history = DecisionHistory(settings.decisions.history, clock)
        self.placer = Placer(self.fleet, self.history, clock)
        self.placer.adopt(settings)
        self.request_log = RequestLog(self.fleet, clock=clock, monotonic=time.monotonic)

    def _build_effects(self) -> None:
        """Build the parts that write to the API server and to other replicas."""
        settings = self.settings
        self.instance = make_identity()
        self.peers = build_peers(
            settings,
            self.request_log,
            self.metrics,
            instance=self.instance,
            tls=lambda: self.server_ports.client_context,
            faults=lambda: self.readiness.faults(),  # noqa: PLW0108 - it is built later
        )
        self.events = EventWriter(self._client, instance=socket.gethostname(), clock=self._clock)
        self.placement_events = PlacementEvents(
            self.events,
            lambda: self.settings.events.writes_placements,
            self.request_tracker.wait_for_quiet,
        )
        self.annotation_warnings = AnnotationWarnings(
            self.events, lambda: self.settings.events.enabled
        )
        self.waker_runner = WakerRunner(self._client, self.placer, self.tasks, settings)

    def _build_bookkeeping(self) -> None:
        """Build the parts that follow a pod after its answer, up to its binding."""
        self.bypassed_pods = BypassedPods(
            self.request_log, self.metrics, self.settings.bypassed, peers=self.peers
        )
        self.shadow_mode = ShadowMode(
            self.settings, self.placer, self.metrics, self._clock, self.request_tracker
        )
        self.binding_attribution = BindingAttribution(
            self.request_log,
            self.history,
            self.metrics,
            peers=self.peers,
            on_own=(self.placement_events.note, self.shadow_mode.note_own),
            yield_control=self.request_tracker.yield_control,
        )

    def _build_sources(self) -> None:
        """Build the sources, and readiness, which depends on them."""
        tap = InventoryTap(
            self.fleet,
            self.history,
            self.binding_attribution,
            self.bypassed_pods,
            self.shadow_mode.note_bound,
        )
        self.source_manager = SourceManager(
            self.settings,
            self._client,
            tap,
            fleet=self.fleet,
            tasks=self.tasks,
            clock=self._clock,
            yield_control=self.request_tracker.yield_control,
        )
        self.readiness = Readiness(
            lambda: self.settings,
            self.request_tracker,
            states=self.source_manager.states,
            pending=self._pending,
            peer_faults=lambda: self.peers.peer_faults() if self.peers is not None else (),
            unconfigured=self.source_manager.unconfigured,
            make_ready=self.gc_control.tidy,  # the first readings are many objects, and they stay
        )

    def _build_webhooks(self) -> None:
        """Build the webhooks, and the precomputation for their answers."""
        settings = self.settings
        self.webhooks = Webhooks(
            placer=self.placer,
            resources=self.source_manager.resources,
            metrics=self.metrics,
            max_score=settings.wire.max_score,
            shortlist=settings.wire.shortlist,
            is_ready=lambda: self.readiness.is_allocated,
            warn_annotation=self.annotation_warnings.warn,
            request_log=self.request_log,
            expect=self.request_tracker.expect,
        )
        self.warm_up = WarmUp(
            self.fleet,
            self.placer.evaluation_cache,
            is_synced=lambda: self.source_manager.cluster.is_synced,
            refresh=self.source_manager.refresh,
            requests=self.webhooks.requests,
            readiness=self.readiness,
            gc_control=self.gc_control,
            yield_control=self.request_tracker.yield_control,
        )
        self.admission = build_webhook(
            self._client,
            settings.admission,
            own_namespace=own_namespace(settings.kubeconfig),
            resources=self.source_manager.resources,
            policy=lambda: self.fleet.policy,
            admissions=self.metrics.admissions,
            proposals=Proposals(self.fleet.measured_like, self.fleet.largest_card),
        )

    def _build_api(self) -> None:
        """Build the API, the page and the metrics."""
        settings, clock = self.settings, self._clock
        self.access = make_access(
            self._client, settings, self.fleet, self.history, self.metrics.api_requests
        )
        replicas = Replicas.of(
            self.instance, self.peers, answers_peers=settings.tls.is_used or self.access.is_open
        )
        self.fleet_routes = FleetRoutes(
            self.fleet,
            self.placer,
            self.source_manager.resources,
            DecisionRoutes(self.history, replicas),
            self.source_manager.unreadable,
            host_pods=self.source_manager.host_pods,
        )
        self.pod_routes = PodRoutes(
            self.placer,
            self.source_manager.resources,
            clock,
            replicas=replicas,
            prices=settings.policy().prices,
            metrics=self.metrics,
        )
        self.regret_table = RegretTable(lambda: self.shadow_mode.regret, replicas)
        self.bypassed_pods_table = BypassedPodsTable(self.bypassed_pods)
        self.page = PageRoutes(
            self.fleet,
            self.history,
            states=self.source_manager.states,
            clock=clock,
            yield_control=self.request_tracker.yield_control,
            plots=PrometheusPlots(lambda: self.settings.prometheus, clock),
            host_pods=self.source_manager.host_pods,
            replicas=replicas,
            pool_labels=settings.pool_labels,
        )
        self.fleet_metrics = export_state(
            self.metrics,
            settings,
            self.fleet,
            self.source_manager,
            lambda: self.events.counts.dropped,
            clock,
        )

    # --- HTTP applications ----------------------------------------------------------------------

    def build_app(self) -> web.Application:
        """Build the application of the webhooks; without `status_listen` it serves everything."""
        settings = self.settings
        caller = (
            only_known(settings.tls)
            if settings.tls.is_used
            else only_secret(settings.peer_secret())
        )
        middlewares = [self.request_tracker.count, caller, noting_wrong_paths(self.request_log)]
        peer_parts = (
            self.regret_table,
            self.page.lost,
            self.fleet_routes.decisions,
            self.pod_routes,
        )
        routes = self.webhooks.routes()
        for part in peer_parts:
            routes += part.peer_routes()
        if self.peers is not None:
            routes += self.peers.routes()
        if not settings.status_listen:
            middlewares.append(self.access.guard({route.path for route in routes}))
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        app.add_routes(routes)
        if not settings.status_listen:
            self._add_status(app)
        return app

    def build_status_app(self) -> web.Application | None:
        """Build the application for health, metrics and API, or None without `status_listen`."""
        if not self.settings.status_listen:
            return None
        app = web.Application(middlewares=[self.request_tracker.count, self.access.guard()])
        self._add_status(app)
        return app

    def build_admission_app(self) -> web.Application | None:
        """Build the application of the admission webhook, or None if it is not configured."""
        if self.admission is None:
            return None
        return self.admission.build_app([self.request_tracker.count])

    def _add_status(self, app: web.Application) -> None:
        for part in (
            self.bypassed_pods_table,
            self.regret_table,
            self.access,
            self.fleet_routes,
            self.pod_routes,
        ):
            app.add_routes(part.routes())
        self.page.add_to(app)
        app.add_routes(health_routes(self.readiness.answer_probe, self._degraded))
        route = metrics_route(self.metrics, self.fleet_metrics, self.request_tracker.yield_control)
        app.add_routes([route])

    # --- status ---------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        """Base URLs of all ports, those of the webhooks first."""
        return self.server_ports.urls

    @property
    def is_ready(self) -> bool:
        """Whether the readiness probe reports this replica as ready for kube-scheduler."""
        return self.readiness.is_ready

    def _pending(self) -> Iterable[str]:
        """Return the names of the sources whose first data the start still waits for."""
        yield from self.source_manager.pending_sources()
        if self.peers is not None and self.peers.are_pending:
            yield "peers"

    def _degraded(self) -> dict[str, str]:
        """Return active problems by name that do not stop the webhooks from answering."""
        degraded = self.source_manager.degraded()
        if self.reloader is not None and self.reloader.problem:
            degraded["settings"] = self.reloader.problem
        return {**degraded, **self.shadow_mode.degraded(), **self.readiness.causes()}

    # --- run ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the sources and all background tasks until cancelled; restart each that fails."""
        async with self.tasks as tasks:
            tasks.start("gc", self.gc_control.run)
            self.source_manager.start(past_use=self.pod_routes.idleness)
            self.waker_runner.start()
            tasks.start("allocate", self.warm_up.allocate)
            tasks.start("evaluate", self.warm_up.evaluate)
            tasks.start("new pods", self.warm_up.evaluate_new_pods)
            tasks.start("events", self.events.run)
            tasks.start("placement events", self.placement_events.run)
            tasks.start("bypassed pods", self.bypassed_pods.run)
            tasks.start("binding attribution", self.binding_attribution.run)
            tasks.start("shadow mode", self.shadow_mode.run)
            tasks.start("page", self.page.run)
            tasks.start("idleness", self.pod_routes.run)
            tasks.start("usage", self.pod_routes.usage.run)
            if self.peers is not None:
                tasks.start("peers", self.peers.run)
            if self.admission is not None:
                tasks.start("admission", self.admission.run)
            if self.reloader is not None:
                tasks.start("settings", self.reloader.run)

    async def adopt(self, settings: Settings) -> None:
        """Apply new settings without a restart, and keep all recorded state.

        A part whose settings are unchanged is not restarted, and no webhook request waits.
        """
        before = self.settings
        await self.source_manager.adopt_policy(settings.policy())
        # No await until the next comment: no request sees a mix of old and new settings.
        self.settings = settings
        self.placer.adopt(settings)
        self.webhooks.adopt(settings)
        self.bypassed_pods.adopt(settings)
        self.pod_routes.adopt(settings)
        self.page.adopt(settings)
        self.fleet_metrics.adopt(settings)
        if settings.log != before.log:
            logs.configure(settings.log.level, settings.log.format, in_background=True)
        # These restart tasks or take time. Requests do not depend on them.
        await self.shadow_mode.adopt(settings)
        await run_in_steps(self.history.resize_in_steps(settings.decisions.history))
        await self.source_manager.adopt(settings)
        await self.waker_runner.adopt(settings)

    async def drain(self) -> None:
        """Answer for `drain_seconds` longer, and wait until all clients have disconnected."""
        settings = self.settings
        if settings.drain_seconds:
            logger.info("draining", extra={"seconds": settings.drain_seconds})
            await self.request_tracker.drain_connections(
                settings.drain_seconds, settings.shutdown_seconds, self.server_ports.callers
            )


@asynccontextmanager
async def start(
    settings: Settings, clock: _Clock = time.time, *, file: SettingsFile | None = None
) -> AsyncIterator[Extender]:
    """Run an extender while the context is open, then answer accepted requests and shut down.

    Args:
        clock: seconds since the epoch.
        file: the settings file to watch for changes, or None to watch no file.

    Raises:
        OSError: a listen address cannot be bound.
        KubeConfigError: the kubeconfig cannot be read.
        TlsError: a certificate or key file cannot be used.
    """
    client = await KubeClient.connect(settings.kubeconfig)
    try:
        extender = Extender(settings, client, clock, file)
        server_ports = extender.server_ports
        try:
            await server_ports.open()
            logger.info("serving", extra={"urls": extender.addresses})
            async with asyncio.TaskGroup() as group:
                background = group.create_task(extender.run(), name="extender")
                certificates = group.create_task(
                    keep("certificates", server_ports.run), name="certificates"
                )
                yield extender
                # aiohttp's cleanup drops requests whose bytes still arrive. So first refuse new
                # connections, then answer the accepted requests, then clean up.
                certificates.cancel()
                await server_ports.close_webhooks()
                await extender.request_tracker.drain_requests(extender.settings.shutdown_seconds)
                await server_ports.close()
                background.cancel()
        finally:
            await server_ports.close()
    finally:
        await client.close()


_HURRY_SECONDS = 2.0
"""Time for open requests after SIGINT."""


async def serve(settings: Settings, file: SettingsFile | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and apply changes of the settings file."""
    terminated, interrupted = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    async with start(settings, file=file) as extender, asyncio.TaskGroup() as group:
        interrupt = group.create_task(interrupted.wait(), name="interrupt")
        drain = group.create_task(_drain_after(terminated, extender), name="drain")
        await asyncio.wait([interrupt, drain], return_when=asyncio.FIRST_COMPLETED)
        logger.info("shutting down")
        if interrupted.is_set():
            extender.request_tracker.shorten_drain(_HURRY_SECONDS)
        interrupt.cancel()
        drain.cancel()


async def _drain_after(terminated: asyncio.Event, extender: Extender) -> None:
    await terminated.wait()
    await extender.drain()
