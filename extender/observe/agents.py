"""How node agents report, as Prometheus metrics; counted where it happens, read when scraped."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFigures:
    """How reports come in; counts are since the start.

    Attributes:
        connections: connections that there are.
        agents: agents whose reports are taken.
        devices: devices that they tell of.
        unknown_nodes: agents on nodes that the cluster does not have (yet).
        reports: reports that were taken.
        reviews: tokens that the API server was asked about.
        contested: readings that were not taken because their device is on another node.
        refused: connections that were refused or ended, by reason.
    """

    connections: int
    agents: int
    devices: int
    unknown_nodes: int
    reports: int
    reviews: int
    contested: int
    refused: Mapping[str, int]


class AgentCollector(Collector):
    """Renders how reports come in.

    Args:
        figures: says it; None where no agents report.
    """

    def __init__(self, figures: Callable[[], AgentFigures | None]) -> None:
        self._figures = figures

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        told = self._figures()
        if told is None:
            return
        for name, text, value in (
            ("agents", "Nodes whose agents report.", told.agents),
            ("agent_connections", "Connections of agents.", told.connections),
            ("agent_devices", "GPUs that agents tell of.", told.devices),
            (
                "agent_unknown_nodes",
                "Agents on nodes that the API server does not know: kept out.",
                told.unknown_nodes,
            ),
        ):
            gauge = GaugeMetricFamily(f"idlegpu_{name}", text)
            gauge.add_metric([], value)
            yield gauge
        for name, text, value in (
            ("agent_reports", "Reports of agents that were taken.", told.reports),
            ("agent_token_reviews", "Tokens that the API server was asked about.", told.reviews),
            (
                "agent_contested_devices",
                "GPUs in reports that were not taken: they are seen on another node.",
                told.contested,
            ),
        ):
            counter = CounterMetricFamily(f"idlegpu_{name}", text)
            counter.add_metric([], value)
            yield counter
        refused = CounterMetricFamily(
            "idlegpu_agent_refusals",
            "Connections of agents that were refused or ended.",
            labels=["reason"],
        )
        for reason, count in told.refused.items():
            refused.add_metric([reason], count)
        yield refused
