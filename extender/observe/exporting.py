"""Registers what is read of the extender's state when somebody scrapes."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler

from extender.config import Settings
from extender.fleet.fleet import Fleet
from extender.listening import Listener
from extender.metrics import Metrics
from extender.observe.agents import AgentCollector, AgentFigures
from extender.observe.certificates import CertificateCollector, certificate_ends
from extender.observe.collector import FleetCollector, SourceStatus
from extender.observe.connections import ConnectionCollector


class Follower(Protocol):
    """Follows the sources."""

    def states(self) -> Iterable[SourceStatus]:
        """Return how each source fares."""

    def agent_figures(self) -> AgentFigures | None:
        """Return how agents report, None where none do."""


def export_state(
    metrics: Metrics,
    settings: Settings,
    fleet: Fleet,
    follower: Follower,
    dropped_events: Callable[[], int],
    clock: Callable[[], float],
) -> FleetCollector:
    """Have the metrics show the state of these, too; return what shows the fleet's.

    Args:
        metrics: where it is registered.
        settings: name the certificates.
        fleet: the fleet.
        follower: of the sources.
        dropped_events: says how many events could not be written.
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
    metrics: Metrics, collector: FleetCollector, give_way: Callable[[], Awaitable[None]]
) -> web.RouteDef:
    """Return the route of the metrics; what takes long to count is counted between questions."""
    render = make_aiohttp_handler(registry=metrics.registry)

    async def show(request: web.Request) -> web.StreamResponse:
        for _ in collector.count_in_steps():
            await give_way()
        return await render(request)

    return web.get("/metrics", show)


def export_ports(metrics: Metrics, ports: Iterable[Listener]) -> None:
    """Have the metrics show who comes to the ports."""
    metrics.registry.register(ConnectionCollector(tuple(ports)))
