"""Prometheus metrics of connections and refusals by port."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from extender.server.listener import Listener


class ConnectionCollector(Collector):
    """Prometheus collector for the ports' connections.

    Args:
        ports: listeners of the ports.
    """

    def __init__(self, ports: Iterable[Listener]) -> None:
        self._ports = tuple(ports)

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of connections, refusals and failed TLS handshakes."""
        connections = GaugeMetricFamily(
            "idlegpu_connections", "Open connections, by port.", labels=["port"]
        )
        refusals = CounterMetricFamily(
            "idlegpu_connection_refusals",
            "Connections that were refused, or closed in favor of others, because of a limit.",
            labels=["port", "reason"],
        )
        failures = CounterMetricFamily(
            "idlegpu_tls_handshake_failures",
            "Failed TLS handshakes, by port and reason.",
            labels=["port", "reason"],
        )
        for port in self._ports:
            connections.add_metric([port.name], port.figures.connections)
            for reason, count in port.figures.refusals.items():
                refusals.add_metric([port.name, reason], count)
            if port.is_tls:
                for reason, count in port.figures.failures.items():
                    failures.add_metric([port.name, reason], count)
        yield from (connections, refusals, failures)
