"""Register the collectors that read the extender's state at each scrape."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from extender.api.agent_metrics import AgentCollector
from extender.api.certificate_metrics import CertificateCollector, certificate_ends
from extender.api.connection_metrics import ConnectionCollector
from extender.api.fleet_metrics import FleetCollector
from extender.fleet.fleet import Fleet
from extender.runtime.metrics import Metrics
from extender.server.listener import Listener
from extender.server.readiness import SourceStatus
from extender.settings.config import Settings
from extender.sources.agents.figures import AgentFigures


class Follower(Protocol):
    """Interface to the source manager."""

    def states(self) -> Iterable[SourceStatus]:
        """Return the status of each source."""

    def agent_figures(self) -> AgentFigures | None:
        """Return the figures of agent reports, None if no agents are accepted."""


def export_state(
    metrics: Metrics,
    settings: Settings,
    fleet: Fleet,
    follower: Follower,
    dropped_events: Callable[[], int],
    clock: Callable[[], float],
) -> FleetCollector:
    """Register collectors for fleet, agents and certificates; return the fleet's collector.

    Args:
        metrics: metrics with the registry.
        settings: settings with the certificate files and pool labels.
        fleet: state of the fleet.
        follower: source manager.
        dropped_events: returns the number of events that could not be written.
        clock: seconds since the epoch.
    """
    register = metrics.registry.register
    collector = FleetCollector(fleet, follower.states, dropped_events, clock)
    collector.pool_labels = settings.pool_labels
    register(collector)
    register(AgentCollector(follower.agent_figures))
    register(CertificateCollector(lambda: certificate_ends(settings)))
    return collector


def metrics_route(
    metrics: Metrics, collector: FleetCollector, yield_loop: Callable[[], Awaitable[None]]
) -> web.RouteDef:
    """Return the /metrics route, which counts in steps and yields to webhooks between them."""
    render = make_aiohttp_handler(registry=metrics.registry)

    async def show(request: web.Request) -> web.StreamResponse:
        for _ in collector.count_in_steps():
            await yield_loop()
        return await render(request)

    return web.get("/metrics", show)


def export_ports(metrics: Metrics, ports: Iterable[Listener]) -> None:
    """Register a collector for the ports' connections."""
    metrics.registry.register(ConnectionCollector(tuple(ports)))
