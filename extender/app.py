"""Joins the parts; owns every background task."""

import asyncio
import logging
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import orjson
from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from extender.config import Settings
from extender.core.annotations import AnnotationProblem
from extender.core.request import PodRef
from extender.effects.events import EventSettings, EventWriter
from extender.effects.wakeup import build_waker
from extender.fleet.fleet import Fleet
from extender.fleet.steps import Steps
from extender.in_flight import InFlight
from extender.kube import KubeClient
from extender.metrics import Metrics
from extender.observe.api import Api
from extender.observe.collector import FleetCollector, SourceStatus
from extender.placement.bindings import InventoryTap
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer
from extender.sources.cluster import ClusterSource
from extender.sources.identity import NodeIdentity
from extender.sources.kube_reflector import FollowSettings
from extender.sources.prometheus import PrometheusSource, PrometheusStatus
from extender.webhook.handlers import Webhooks

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

WARNINGS_REMEMBERED = 10_000
"""Annotations that were complained about, so that each is complained about once."""

LAY_OUT_SECONDS = 0.05
"""Time between looks for nodes that have changed in bulk."""

LAST_WORDS_SECONDS = 2.0
"""Time for answers that are on their way when everything accepted has been answered."""


class Extender:
    """The running extender: sources feed the fleet, webhooks and API answer from it.

    Args:
        settings: every setting.
        client: the API server.
        clock: seconds since the epoch.
    """

    def __init__(self, settings: Settings, client: KubeClient, clock: Clock = time.time) -> None:
        self.settings = settings
        self.fleet = Fleet(settings.policy(), clock, in_steps=True)
        self._is_laid_out = False
        self.history = DecisionHistory(settings.decisions.history)
        self.placer = Placer(
            self.fleet, self.history, clock, detailed=settings.decisions.detailed_nodes
        )
        self.metrics = Metrics()
        self.events = EventWriter(
            client,
            instance=socket.gethostname(),
            settings=EventSettings(per_second=settings.events.rate_per_second),
            clock=clock,
        )
        self.waker = (
            build_waker(client, self.placer, settings.wake, kubeconfig=settings.kubeconfig)
            if settings.wake.enabled
            else None
        )
        self.cluster = ClusterSource(
            client,
            InventoryTap(self.fleet, self.history, self.metrics),
            resources=settings.resource_patterns,
            early_seconds=settings.early_failures.within_seconds,
            settings=FollowSettings(
                page_size=settings.cluster.page_size,
                page_timeout_seconds=settings.cluster.page_timeout_seconds,
                exporter_words=settings.cluster.exporter_words,
                silence_seconds=settings.cluster.inactivity_timeout_seconds,
                resync_seconds=settings.cluster.resync_seconds,
                backoff_max_seconds=settings.cluster.max_backoff_seconds,
            ),
            clock=clock,
        )
        self.prometheus = self._prometheus_source(clock) if settings.prometheus.url else None
        self.addresses: tuple[str, ...] = ()
        self.in_flight = InFlight()
        self._warned: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._identity = NodeIdentity()
        self.metrics.registry.register(
            FleetCollector(
                self.fleet, self.source_states, lambda: self.events.counts.dropped, clock
            )
        )

    def _prometheus_source(self, clock: Clock) -> PrometheusSource:
        return PrometheusSource(
            self.settings.prometheus,
            identity=self.node_identity,
            deliver=lambda readings: in_turns(self.fleet.readings_in_steps(readings)),
            deliver_history=lambda past: in_turns(self.fleet.history_in_steps(past)),
            clock=clock,
            window_seconds=self.settings.window_seconds,
        )

    def node_identity(self) -> NodeIdentity:
        """Return by what names nodes are known; the same object as long as nothing changed."""
        nodes = self.cluster.nodes if self.cluster.is_synced else {}
        addresses = {ip: name for name, node in nodes.items() for ip in node.addresses}
        identity = NodeIdentity(
            names=frozenset(nodes),
            addresses=addresses | dict(self.cluster.exporter_addresses),
            exporter_pods=self.cluster.exporter_pods,
        )
        if identity != self._identity:
            self._identity = identity
        return self._identity

    def source_states(self) -> Iterable[SourceStatus]:
        """Return how each source fares."""
        for resource, status in self.cluster.status.items():
            yield SourceStatus(
                name=f"apiserver/{resource}",
                last_success_at=status.last_event_at,
                failures=status.errors,
                error=status.last_error,
            )
        if self.prometheus is not None:
            yield _prometheus_state(self.prometheus.status())

    @property
    def is_ready(self) -> bool:
        """Whether the inventory is complete and laid out, and questions are still taken."""
        return self._is_laid_out and not self.in_flight.is_draining

    def build_app(self) -> web.Application:
        """Return the HTTP side: webhooks, health, metrics and API."""
        app = web.Application(
            client_max_size=self.settings.max_body_bytes, middlewares=[self.in_flight.count]
        )
        webhooks = Webhooks(
            placer=self.placer,
            resources=self.settings.resource_patterns,
            metrics=self.metrics,
            max_score=self.settings.wire.max_score,
            shortlist=self.settings.wire.shortlist,
            is_ready=lambda: self._is_laid_out,
            warn_annotation=self._warn_annotation,
        )
        app.add_routes(webhooks.routes())
        app.add_routes(Api(self.fleet, self.placer, self.settings.resource_patterns).routes())
        app.add_routes(
            [
                web.get("/healthz", _healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", make_aiohttp_handler(registry=self.metrics.registry)),
            ]
        )
        return app

    def _warn_annotation(self, pod: PodRef, problem: AnnotationProblem) -> None:
        """Tell the pod's owner of an annotation that cannot be used: once for each value."""
        key = (pod.uid, problem.annotation, problem.value)
        if key in self._warned:
            return
        self._warned[key] = None
        if len(self._warned) > WARNINGS_REMEMBERED:
            self._warned.popitem(last=False)
        logger.warning(
            "annotation cannot be used",
            extra={
                "pod": pod.key,
                "annotation": problem.annotation,
                "value": problem.value,
                "allowed": problem.allowed,
                "used_instead": problem.default_used,
            },
        )
        if self.settings.events.enabled:
            self.events.warn_annotation(pod, problem)

    async def _readyz(self, _: web.Request) -> web.Response:
        """Tell whether questions can be answered well; telemetry that is down only degrades."""
        sources = list(self.source_states())
        degraded = {source.name: source.error for source in sources if source.error}
        if self.prometheus is None:
            degraded["prometheus"] = "not configured: set prometheus.url"
        body = {
            "status": ("degraded" if degraded else "ready") if self.is_ready else "starting",
            "degraded": degraded,
        }
        return web.Response(
            body=orjson.dumps(body),
            status=200 if self.is_ready else 503,
            content_type="application/json",
        )

    async def _lay_out(self) -> None:
        """Lay out what changes in bulk, so that no question has to wait for it."""
        while True:
            await in_turns(self.fleet.settle_in_steps())
            if self.cluster.is_synced and not self._is_laid_out:
                self.fleet.snapshot()
                self._is_laid_out = True
            await asyncio.sleep(LAY_OUT_SECONDS)

    async def run(self) -> None:
        """Follow the sources and write events until cancelled; none of these ends by itself."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.cluster.run(), name="inventory")
            group.create_task(self._lay_out(), name="layouts")
            group.create_task(self.events.run(), name="events")
            if self.waker is not None:
                group.create_task(self.waker.run(), name="waker")
            if self.prometheus is not None:
                group.create_task(self.prometheus.run(), name="prometheus")


async def in_turns(steps: Steps[None]) -> None:
    """Do work in steps, and let whoever waits have a turn between them."""
    for _ in steps:
        await asyncio.sleep(0)


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
    )


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


@asynccontextmanager
async def start(settings: Settings, clock: Clock = time.time) -> AsyncIterator[Extender]:
    """Run an extender while the context is open; on the way out it answers what it accepted.

    Raises:
        OSError: the listen address cannot be used.
        KubeConfigError: the kubeconfig cannot be read.
    """
    client = await KubeClient.connect(settings.kubeconfig)
    try:
        extender = Extender(settings, client, clock)
        runner = web.AppRunner(
            extender.build_app(),
            access_log=None,
            keepalive_timeout=settings.keepalive_seconds,
            shutdown_timeout=LAST_WORDS_SECONDS,
            handler_cancellation=False,
        )
        await runner.setup()
        try:
            host, port = settings.listen_address
            site = web.TCPSite(runner, host, port)
            await site.start()
            extender.addresses = tuple(_url(address) for address in runner.addresses)
            logger.info("serving", extra={"urls": extender.addresses})
            # A background task that ends in a fault takes the extender down: it starts anew.
            async with asyncio.TaskGroup() as group:
                background = group.create_task(extender.run(), name="extender")
                yield extender
                # aiohttp throws away what still arrives of a question once it cleans up: first no
                # new connections, then the answers, then the end.
                await site.stop()
                await extender.in_flight.drain(settings.shutdown_seconds)
                await runner.cleanup()
                background.cancel()
        finally:
            await runner.cleanup()
    finally:
        await client.close()


def _url(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the base URL behind a socket's address."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with start(settings):
        await stopping.wait()
        logger.info("shutting down")
