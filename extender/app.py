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
from extender.api.fleet_routes import FleetRoutes
from extender.api.health_routes import health_routes
from extender.api.metrics_route import export_ports, export_state, metrics_route
from extender.api.page.routes import STREAM, PageRoutes
from extender.effects.annotation_warnings import AnnotationWarnings
from extender.effects.events import EventSettings, EventWriter
from extender.effects.peers import Peers
from extender.effects.placement_events import PlacementEvents
from extender.effects.waker import Waker, build_waker, own_namespace
from extender.fleet.fleet import Fleet
from extender.insight.bypassed_pods import BypassedPodsTable
from extender.insight.decisions import DecisionRoutes
from extender.insight.explain_routes import ExplainRoutes
from extender.insight.replicas import Replicas
from extender.insight.shadow_mode import ShadowMode
from extender.kube.client import KubeClient
from extender.kube.lease import make_identity
from extender.placement.binding_attribution import BindingAttribution
from extender.placement.bindings import InventoryTap
from extender.placement.bypassed_pods import BypassedPods
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer
from extender.placement.request_log import RequestLog
from extender.placement.warm_up import WarmUp
from extender.runtime import logs
from extender.runtime.cooperative import run_in_steps
from extender.runtime.gc_control import GcControl
from extender.runtime.metrics import Metrics
from extender.runtime.supervision import keep
from extender.server.ports import ServerPorts
from extender.server.readiness import Readiness
from extender.server.request_tracker import RequestTracker
from extender.server.tls import only_known, only_secret
from extender.settings.config import Settings
from extender.settings.reload import Reloader
from extender.settings.settings_file import SettingsFile
from extender.sources.prometheus.plots import PrometheusPlots
from extender.sources.source_manager import SourceManager, Tasks
from extender.webhook.abandoned import noting_wrong_paths
from extender.webhook.admission.webhook import PATH as ADMISSION
from extender.webhook.admission.webhook import build_webhook
from extender.webhook.handlers import Webhooks

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

VERBS = ("/filter", "/prioritize", "/preempt")
"""Paths of the webhooks. Background work yields while one of these requests is open."""

WAKER = "waker"
"""Name of the task that wakes pending pods."""


class Extender:
    """Runs the extender: sources update the fleet, and webhooks and API answer from its snapshot.

    Args:
        settings: every setting.
        client: client of the API server.
        clock: seconds since the epoch.
    """

    reloader: Reloader | None = None

    def __init__(self, settings: Settings, client: KubeClient, clock: Clock = time.time) -> None:
        self.settings = settings
        self._clock = clock
        self.fleet = Fleet(settings.policy(), clock, in_steps=True)
        self.history = DecisionHistory(settings.decisions.history, clock)
        self.placer = Placer(self.fleet, self.history, clock, settings.decisions.detailed_nodes)
        self.metrics = Metrics()
        self.metrics.settings_loaded_at.set(clock())
        self.request_log = RequestLog(self.fleet, clock=clock, monotonic=time.monotonic)
        self.peers = self._build_peers(settings) if settings.peers.is_used else None
        self.bypassed_pods = BypassedPods(
            self.request_log,
            self.metrics,
            settings.unasked,
            peers=self.peers,
            is_ready=lambda: self.is_ready,
        )
        self.events = EventWriter(
            client,
            instance=socket.gethostname(),
            settings=EventSettings(per_second=settings.events.rate_per_second),
            clock=clock,
        )
        self._client = client
        self.waker = self._build_waker(settings)
        self.tasks = Tasks()
        self.request_tracker = RequestTracker(
            urgent=VERBS, lasting=(STREAM,), once=(*VERBS, ADMISSION)
        )
        self.placement_events = PlacementEvents(
            self.events,
            lambda: self.settings.events.writes_placements,
            self.request_tracker.wait_for_quiet,
        )
        self.shadow_mode = ShadowMode(
            settings, self.placer, self.metrics, clock, self.request_tracker
        )
        self.binding_attribution = BindingAttribution(
            self.request_log,
            self.history,
            self.metrics,
            peers=self.peers,
            on_own=(self.placement_events.note, self.shadow_mode.note_own),
        )
        self.source_manager = SourceManager(
            settings,
            client,
            InventoryTap(
                self.fleet,
                self.history,
                self.binding_attribution,
                self.bypassed_pods,
                self.shadow_mode.note_bound,
            ),
            fleet=self.fleet,
            tasks=self.tasks,
            clock=clock,
            yield_control=self.request_tracker.yield_control,
        )
        self.gc_control = GcControl(
            is_idle=lambda: not self.request_tracker.requests,
            is_quiet=self.request_tracker.is_quiet,
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
        self.webhooks = Webhooks(
            placer=self.placer,
            resources=self.source_manager.resources,
            metrics=self.metrics,
            max_score=settings.wire.max_score,
            shortlist=settings.wire.shortlist,
            is_ready=lambda: self.readiness.is_allocated,
            warn_annotation=AnnotationWarnings(
                self.events, lambda: self.settings.events.enabled
            ).warn,
            request_log=self.request_log,
            expect=self.request_tracker.expect,
        )
        self.access = make_access(
            client, settings, self.fleet, self.history, self.metrics.api_requests
        )
        self.admission = build_webhook(
            client,
            settings.admission,
            own_namespace=own_namespace(settings.kubeconfig),
            resources=self.source_manager.resources,
            policy=lambda: self.fleet.policy,
            admissions=self.metrics.admissions,
        )
        replicas = Replicas.of(
            self.peers.instance if self.peers is not None else make_identity(),
            self.peers,
            answers_peers=settings.tls.is_used or self.access.is_open,
        )
        self.fleet_routes = FleetRoutes(
            self.fleet,
            self.placer,
            self.source_manager.resources,
            DecisionRoutes(self.history, replicas),
            self.source_manager.unreadable,
        )
        self._regret_table = self.shadow_mode.regret_table(replicas)
        self._bypassed_pods_table = BypassedPodsTable(self.bypassed_pods, replicas)
        self.explain_routes = ExplainRoutes(
            self.placer,
            self.source_manager.resources,
            clock,
            replicas=replicas,
            prices=settings.prices,
        )
        self.page = PageRoutes(
            self.fleet,
            self.history,
            states=self.source_manager.states,
            clock=clock,
            yield_control=self.request_tracker.yield_control,
            plots=PrometheusPlots(lambda: self.settings.prometheus, clock),
            replicas=replicas,
            pool_labels=settings.pool_labels,
        )
        self.warm_up = WarmUp(
            self.fleet,
            self.placer.evaluation_cache,
            self.source_manager,
            requests=self.webhooks.requests,
            readiness=self.readiness,
            gc_control=self.gc_control,
            yield_control=self.request_tracker.yield_control,
        )
        self._state = export_state(
            self.metrics, settings, self.fleet, self.source_manager, self._dropped, clock
        )
        self._metrics_route = metrics_route(
            self.metrics, self._state, self.request_tracker.yield_control
        )
        self.server_ports = ServerPorts(
            settings,
            self.build_app(),
            self.build_status_app(),
            self.build_admission_app(),
            watch=self.request_tracker.watch,
        )
        export_ports(self.metrics, [*self.server_ports.ports, *self.source_manager.ports])

    def _build_peers(self, settings: Settings) -> Peers:
        peers = Peers(
            settings.peers,
            self.request_log.take,
            self.metrics,
            listen=settings.listen_address[0],
            secret=settings.peer_secret(),
            tls=lambda: self.server_ports.client_context,
            faults=lambda: self.readiness.faults(),  # noqa: PLW0108 - it is built later
        )
        self.request_log.answered.subscribe(peers.report)
        return peers

    def _dropped(self) -> int:
        return self.events.counts.dropped

    def _build_waker(self, settings: Settings, before: Waker | None = None) -> Waker | None:
        if not settings.wake.enabled:
            return None
        return build_waker(
            self._client,
            self.placer,
            settings.wake,
            kubeconfig=settings.kubeconfig,
            before=before,
        )

    def follow_settings(self, file: SettingsFile) -> None:
        """Watch the settings file, and apply its changes while `run` is active."""
        self.reloader = Reloader(file, self.settings, self.adopt, self.metrics, self._clock)

    async def adopt(self, settings: Settings) -> None:
        """Apply new settings without a restart, and keep all recorded state.

        A part whose settings are unchanged is not restarted, and no webhook request waits.
        """
        before = self.settings
        await self.source_manager.adopt_policy(settings.policy())
        # No await before the last assignment: no request sees a mix of old and new settings.
        self.settings = settings
        self.placer.detailed = settings.decisions.detailed_nodes
        self.webhooks.max_score = settings.wire.max_score
        self.webhooks.shortlist = settings.wire.shortlist
        self.webhooks.max_body_bytes = settings.max_body_bytes
        self.events.settings = EventSettings(per_second=settings.events.rate_per_second)
        self.bypassed_pods.change(settings.unasked)
        self.explain_routes.set_prices(settings.prices)
        self.page.set_pool_labels(settings.pool_labels)
        self._state.pool_labels = settings.pool_labels
        if settings.log != before.log:
            logs.configure(settings.log.level, settings.log.format, in_background=True)
        await self.shadow_mode.adopt(settings)
        await run_in_steps(self.history.resize_in_steps(settings.decisions.history))
        await self.source_manager.adopt(settings)
        if settings.wake != before.wake:
            await self.tasks.stop(WAKER)
            self.waker = self._build_waker(settings, self.waker)
            if self.waker is not None:
                self.tasks.start(WAKER, self.waker.run)

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

    def build_app(self) -> web.Application:
        """Build the application of the webhooks and, without `status_listen`, of everything."""
        settings = self.settings
        middlewares = [self.request_tracker.count, noting_wrong_paths(self.request_log)]
        if settings.tls.is_used:
            middlewares.insert(1, only_known(settings.tls))
        else:
            middlewares.insert(1, only_secret(settings.peer_secret()))
        routes = [*self.webhooks.routes(), *self._regret_table.peer_routes()]
        routes += [*self.page.lost.peer_routes(), *self._bypassed_pods_table.peer_routes()]
        routes += [*self.fleet_routes.decisions.peer_routes(), *self.explain_routes.peer_routes()]
        if self.peers is not None:
            routes += self.peers.routes()
        if not settings.status_listen:
            middlewares.append(self.access.guard({route.path for route in routes}))
        app = web.Application(client_max_size=settings.max_body_bytes, middlewares=middlewares)
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
        app.add_routes([*self._bypassed_pods_table.routes(), *self._regret_table.routes()])
        app.add_routes(
            [*self.access.routes(), *self.fleet_routes.routes(), *self.explain_routes.routes()]
        )
        self.page.add_to(app)
        app.add_routes(health_routes(self.readiness.answer_probe, self._degraded))
        app.add_routes([self._metrics_route])

    def _degraded(self) -> dict[str, str]:
        """Return active problems by name that do not stop the webhooks from answering."""
        sources = list(self.source_manager.states())
        degraded = {source.name: source.error for source in sources if source.error}
        for source in sources:
            if source.is_unreadable_in_part:
                text = "some objects cannot be read, and are left out: GET /v1/nodes names them"
                degraded[f"{source.name} objects"] = text
        if self.source_manager.prometheus is None and self.source_manager.agents is None:
            degraded["telemetry"] = "not configured: set prometheus.url or agents.listen"
        if self.reloader is not None and self.reloader.problem:
            degraded["settings"] = self.reloader.problem
        return {**degraded, **self.shadow_mode.degraded(), **self.readiness.causes()}

    async def _run_binding_attribution(self) -> None:
        await self.binding_attribution.run(self.request_tracker.yield_control)

    async def run(self) -> None:
        """Run the sources and all background tasks until cancelled; restart each that fails."""
        async with asyncio.TaskGroup() as group:
            self.tasks.own(group)
            group.create_task(keep("gc", self.gc_control.run), name="gc")
            self.source_manager.start()
            self.source_manager.start_past_use(self.explain_routes.idleness)
            group.create_task(keep("allocate", self.warm_up.allocate), name="allocate")
            group.create_task(keep("evaluate", self.warm_up.evaluate), name="evaluate")
            group.create_task(keep("new pods", self.warm_up.evaluate_new_pods), name="new pods")
            group.create_task(keep("events", self.events.run), name="events")
            group.create_task(
                keep("placement events", self.placement_events.run), name="placement events"
            )
            group.create_task(keep("bypassed pods", self.bypassed_pods.run), name="bypassed pods")
            group.create_task(
                keep("binding attribution", self._run_binding_attribution),
                name="binding attribution",
            )
            group.create_task(keep("shadow mode", self.shadow_mode.run), name="shadow mode")
            group.create_task(keep("page", self.page.run), name="page")
            group.create_task(keep("idleness", self.explain_routes.run), name="idleness")
            if self.peers is not None:
                group.create_task(keep("peers", self.peers.run), name="peers")
            if self.admission is not None:
                group.create_task(keep("admission", self.admission.run), name="admission")
            if self.waker is not None:
                self.tasks.start(WAKER, self.waker.run)
            if self.reloader is not None:
                group.create_task(keep("settings", self.reloader.run), name="settings")


@asynccontextmanager
async def start(
    settings: Settings, clock: Clock = time.time, *, file: SettingsFile | None = None
) -> AsyncIterator[Extender]:
    """Run an extender while the context is open, then answer accepted requests and shut down.

    Args:
        settings: every setting.
        clock: seconds since the epoch.
        file: the settings file to watch for changes, or None to watch no file.

    Raises:
        OSError: a listen address cannot be bound.
        KubeConfigError: the kubeconfig cannot be read.
        TlsError: a certificate or key file cannot be used.
    """
    client = await KubeClient.connect(settings.kubeconfig)
    try:
        extender = Extender(settings, client, clock)
        if file is not None:
            extender.follow_settings(file)
        server_ports = extender.server_ports
        try:
            await server_ports.open()
            logger.info("serving", extra={"urls": extender.addresses})
            async with asyncio.TaskGroup() as group:
                background = group.create_task(extender.run(), name="extender")
                source_manager = group.create_task(
                    keep("certificates", server_ports.run), name="certificates"
                )
                yield extender
                # aiohttp's cleanup drops requests whose bytes still arrive. So first refuse new
                # connections, then answer the accepted requests, then clean up.
                source_manager.cancel()
                await server_ports.close_webhooks()
                await extender.request_tracker.drain_requests(extender.settings.shutdown_seconds)
                await server_ports.close()
                background.cancel()
        finally:
            await server_ports.close()
    finally:
        await client.close()


HURRY_SECONDS = 2.0
"""Time for open requests after SIGINT."""


async def _drain(extender: Extender, stopping: asyncio.Event) -> None:
    """Wait for the signal, then drain connections for `drain_seconds`."""
    await stopping.wait()
    settings = extender.settings
    if settings.drain_seconds:
        logger.info("draining", extra={"seconds": settings.drain_seconds})
        await extender.request_tracker.drain_connections(
            settings.drain_seconds, settings.shutdown_seconds, extender.server_ports.callers
        )


async def serve(settings: Settings, file: SettingsFile | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and apply changes of the settings file."""
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, hurrying.set)
    async with start(settings, file=file) as extender, asyncio.TaskGroup() as group:
        hurry = group.create_task(hurrying.wait(), name="hurry")
        leave = group.create_task(_drain(extender, stopping), name="leave")
        await asyncio.wait([hurry, leave], return_when=asyncio.FIRST_COMPLETED)
        logger.info("shutting down")
        if hurrying.is_set():
            extender.request_tracker.shorten_drain(HURRY_SECONDS)
        hurry.cancel()
        leave.cancel()
