"""Registers what is read of the extender's state when somebody scrapes."""

from collections.abc import Callable, Iterable
from typing import Protocol

from extender.config import Settings
from extender.fleet.fleet import Fleet
from extender.metrics import Metrics
from extender.observe.agents import AgentCollector, AgentFigures
from extender.observe.certificates import CertificateCollector, certificate_ends
from extender.observe.collector import FleetCollector, SourceStatus


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
) -> None:
    """Have the metrics show the state of these, too.

    Args:
        metrics: where it is registered.
        settings: name the certificates.
        fleet: the fleet.
        follower: of the sources.
        dropped_events: says how many events could not be written.
        clock: seconds since the epoch.
    """
    register = metrics.registry.register
    register(FleetCollector(fleet, follower.states, dropped_events, clock))
    register(AgentCollector(follower.agent_figures))
    register(CertificateCollector(lambda: certificate_ends(settings)))
