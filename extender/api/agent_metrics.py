"""Prometheus metrics of the node agents' connections and reports."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from extender.sources.agents.figures import AgentFigures


class AgentCollector(Collector):
    """Prometheus collector for agent reports.

    Args:
        figures: returns the figures; None if the extender accepts no agents.
    """

    def __init__(self, figures: Callable[[], AgentFigures | None]) -> None:
        self._figures = figures

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the gauges and counters of agent reports; none if no agents are accepted."""
        figures = self._figures()
        if figures is None:
            return
        for name, text, value in (
            ("agents", "Nodes whose agents report.", figures.agents),
            ("agent_connections", "Connections of agents.", figures.connections),
            ("agent_devices", "GPUs that agents report.", figures.devices),
            (
                "agent_unknown_nodes",
                "Agents on nodes that the API server does not know: their readings are ignored.",
                figures.unknown_nodes,
            ),
        ):
            gauge = GaugeMetricFamily(f"idlegpu_{name}", text)
            gauge.add_metric([], value)
            yield gauge
        for name, text, value in (
            ("agent_reports", "Accepted reports of agents.", figures.reports),
            ("agent_token_reviews", "Tokens sent to the API server for review.", figures.reviews),
            (
                "agent_contested_devices",
                "GPUs in reports that were rejected: another node reports them.",
                figures.contested,
            ),
        ):
            counter = CounterMetricFamily(f"idlegpu_{name}", text)
            counter.add_metric([], value)
            yield counter
        refused = CounterMetricFamily(
            "idlegpu_agent_refusals",
            "Refused or ended connections of agents.",
            labels=["reason"],
        )
        for reason, count in figures.refused.items():
            refused.add_metric([reason], count)
        yield refused
