"""Routes of the status port: health for the kubelet, and metrics of the state for Prometheus."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final

import numpy as np
from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from extender.answers import routes
from extender.answers.answer import Readiness
from extender.core.decision.assessment import DeviceRequest, assess
from extender.core.decision.evaluation import estimates
from extender.core.decision.health import short_words
from extender.core.decision.verdicts import STATES, count_states, state_codes
from extender.core.nodes.batches import current_batch
from extender.core.steps import Steps, finish
from extender.fleet.fleet import Fleet
from extender.insight.demand import Supply, demand_metrics
from extender.insight.pending import Waits
from extender.insight.stranded import HostPods, find_needs
from extender.runtime.metrics import Metrics
from extender.server.json_api import json_answer
from extender.server.listener import Listener
from extender.server.readiness import SourceStatus
from extender.settings.config import Settings
from extender.sources.agents.source import AgentStatus
from extender.sources.source_manager import SourceManager

_READY: Final = "ready"


def health_routes(
    ready_state: Callable[[], str], degraded: Callable[[], Mapping[str, str]]
) -> list[web.RouteDef]:
    """Return the routes for the kubelet's probes.

    Args:
        ready_state: returns "ready", or the state that keeps the extender from answering; called
            for each request.
        degraded: returns the cause of each degradation by component; without pod data, because
            every client may read it.
    """

    async def readyz(_: web.Request) -> web.Response:
        causes = dict(degraded())
        state = ready_state()
        is_ready = state == _READY
        return json_answer(
            Readiness(status="degraded" if causes and is_ready else state, degraded=causes),
            HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    return [web.get(routes.HEALTHZ.path, _healthz), web.get(routes.READYZ.path, readyz)]


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


# Prometheus metrics of the fleet's state and its sources, computed at each scrape.


class FleetCollector(Collector):
    """Prometheus collector for the fleet's state.

    Args:
        sources: returns the status of each source.
        dropped_events: returns the number of events that could not be written.
        clock: seconds since the epoch.
        host_pods: returns the CPU, memory and storage of the pods with a node.
        pool_labels: node labels that name a node pool; they override the cloud providers' labels.
    """

    def __init__(
        self,
        fleet: Fleet,
        sources: Callable[[], Iterable[SourceStatus]],
        dropped_events: Callable[[], int],
        clock: Callable[[], float],
        host_pods: HostPods = dict,
        pool_labels: tuple[str, ...] = (),
    ) -> None:
        self._fleet = fleet
        self._sources = sources
        self._dropped_events = dropped_events
        self._clock = clock
        self._host_pods = host_pods
        self.pool_labels = pool_labels
        self._counted: list[Metric] | None = None

    def adopt(self, settings: Settings) -> None:
        """Apply new settings."""
        self.pool_labels = settings.pool_labels

    def count_in_steps(self) -> Steps[None]:
        """Count GPUs and pods in steps, so that the next scrape does not block the event loop."""
        self._counted = yield from self._devices_in_steps()

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of GPUs, sources, pods and nodes."""
        counted, self._counted = self._counted, None
        yield from finish(self._devices_in_steps()) if counted is None else counted
        yield from self._collect_sources()
        yield GaugeMetricFamily(
            "idlegpu_assumed_pods",
            "Pods that count on a node although their binding is not visible yet.",
            len(self._fleet.ledger),
        )
        yield GaugeMetricFamily(
            "idlegpu_nodes", "Nodes that the API server knows.", len(self._fleet.nodes)
        )
        yield GaugeMetricFamily(
            "idlegpu_gpu_pods", "Pods that request GPUs.", len(self._fleet.pods)
        )
        yield CounterMetricFamily(
            "idlegpu_events_dropped",
            "Events about pods that were not written.",
            self._dropped_events(),
        )

    def _devices_in_steps(self) -> Steps[list[Metric]]:
        snapshot = self._fleet.snapshot()
        states: Counter[str] = Counter()
        unhealthy: Counter[str] = Counter()
        requested = DeviceRequest(
            count=1, memory_bytes=0.0, thresholds=self._fleet.policy.thresholds
        )
        needs = yield from find_needs(self._fleet, self._host_pods())
        supply = Supply(
            self._fleet.nodes, snapshot.models, self._fleet.store.model_of, needs, self.pool_labels
        )
        for pool in snapshot.pools.values():
            batch = current_batch(pool, snapshot.telemetry)
            yield
            assessment = assess(batch, requested.columns, estimates(self._fleet.policy))
            yield
            codes = state_codes(batch, assessment)
            states.update(count_states(batch, codes))
            ill = batch.present & (codes == STATES.index("unhealthy"))
            unhealthy.update(map(short_words, batch.telemetry.cause[ill].tolist()))
            yield from supply.add_in_steps(pool, batch, assessment)
        devices = GaugeMetricFamily(
            "idlegpu_devices", "GPUs by state; stale ones are unknown.", labels=["state"]
        )
        for state in STATES:
            devices.add_metric([state], states[state])
        reasons = GaugeMetricFamily(
            "idlegpu_unhealthy_gpus", "Unhealthy GPUs, by reason.", labels=["reason"]
        )
        for reason, count in unhealthy.items():
            reasons.add_metric([reason], count)
        waiting = tuple(self._fleet.unbound_pods.values())
        waits = Waits(self._clock())
        yield from waits.add_in_steps(waiting)
        demand = demand_metrics(waiting, snapshot)
        return [devices, reasons, *supply.metrics(), *demand, *waits.metrics()]

    def _collect_sources(self) -> Iterable[Metric]:
        now = self._clock()
        up = GaugeMetricFamily(
            "idlegpu_source_up", "Whether the source's last answer was valid.", labels=["source"]
        )
        age = GaugeMetricFamily(
            "idlegpu_source_age_seconds", "Time since the source's last answer.", labels=["source"]
        )
        failures = CounterMetricFamily(
            "idlegpu_source_failures", "Failed attempts to read the source.", labels=["source"]
        )
        queries = GaugeMetricFamily(
            "idlegpu_source_failed_queries",
            "Queries of the last round that failed: their signals are missing.",
            labels=["source"],
        )
        partial = CounterMetricFamily(
            "idlegpu_source_partial_answers",
            "Answers that the source itself marked as incomplete.",
            labels=["source"],
        )
        unreadable = CounterMetricFamily(
            "idlegpu_unreadable_objects",
            "Malformed objects of the API server, which were left out.",
            labels=["source"],
        )
        restarts = CounterMetricFamily(
            "idlegpu_source_worker_restarts",
            "Restarts of the worker process that queries the source.",
            labels=["source"],
        )
        for source in self._sources():
            up.add_metric([source.name], 0.0 if source.error else 1.0)
            failures.add_metric([source.name], source.failures)
            queries.add_metric([source.name], source.failed_queries)
            partial.add_metric([source.name], source.partial_answers)
            restarts.add_metric([source.name], source.restarts)
            unreadable.add_metric([source.name], source.unreadable)
            if source.last_success_at is not None:
                age.add_metric([source.name], max(now - source.last_success_at, 0.0))
        yield from (up, age, failures, queries, partial, restarts, unreadable)
        measured = GaugeMetricFamily(
            "idlegpu_telemetry_age_seconds",
            "Age of the source's GPU readings: median and oldest.",
            labels=["source", "stat"],
        )
        for name, ages in self._fleet.store.ages(now).items():
            if len(ages):
                measured.add_metric([name, "median"], float(np.median(ages)))
                measured.add_metric([name, "max"], float(np.max(ages)))
        yield measured
        unmatched = GaugeMetricFamily(
            "idlegpu_unmatched_series", "Series whose labels name no node.", labels=["source"]
        )
        disagreements = GaugeMetricFamily(
            "idlegpu_signal_disagreements",
            "GPUs that are idle by utilization but busy by other evidence.",
            labels=["source"],
        )
        for name, state in self._fleet.sources.items():
            unmatched.add_metric([name], state.unmatched_series)
            disagreements.add_metric([name], state.disagreements)
        yield from (unmatched, disagreements)


# Prometheus metrics of connections and refusals by port.


class _ConnectionCollector(Collector):
    """Prometheus collector for the ports' connections."""

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


# Prometheus metric of the expiry times of the extender's certificates, read at each scrape.


class CertificateCollector(Collector):
    """Prometheus collector for certificate expiry times.

    Args:
        ends: returns the expiry time by certificate purpose, seconds since the epoch.
    """

    def __init__(self, ends: Callable[[], Mapping[str, float]]) -> None:
        self._ends = ends

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the gauge of expiry times."""
        gauge = GaugeMetricFamily(
            "idlegpu_certificate_end_timestamp_seconds",
            "Earliest expiry time of the certificates in a file, by the file's purpose.",
            labels=["certificate"],
        )
        for name, end in self._ends().items():
            gauge.add_metric([name], end)
        yield gauge


def certificate_ends(settings: Settings) -> dict[str, float]:
    """Read the expiry times from the certificate files of the settings.

    A file that cannot be read is left out: the port that uses it logs the error.

    Returns:
        Earliest expiry time in each file, seconds since the epoch, by `webhooks`, `clients` (CAs of
        client certificates), `agents`, `admission` and `status`.
    """
    files = {
        "webhooks": settings.tls.cert_file,
        "clients": settings.tls.client_ca_file,
        "agents": settings.agents.cert_file,
        "admission": settings.admission.cert_file,
        "status": settings.api.cert_file,
    }
    ends = {name: _first_end(file) for name, file in files.items() if file is not None}
    return {name: end for name, end in ends.items() if end is not None}


def _first_end(file: Path) -> float | None:
    from cryptography import x509  # noqa: PLC0415 - 8 MiB that only those who use TLS pay

    try:
        found = x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError):
        return None
    return min((one.not_valid_after_utc.timestamp() for one in found), default=None)


# Prometheus metrics of the node agents' connections and reports.


class _AgentCollector(Collector):
    """Prometheus collector for agent reports.

    Args:
        status: returns the status; None if the extender accepts no agents.
    """

    def __init__(self, status: Callable[[], AgentStatus | None]) -> None:
        self._status = status

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the gauges and counters of agent reports; none if no agents are accepted."""
        status = self._status()
        if status is None:
            return
        for name, text, value in (
            ("agents", "Nodes whose agents report.", status.agents),
            ("agent_connections", "Connections of agents.", status.connections),
            ("agent_devices", "GPUs that agents report.", status.devices),
            (
                "agent_unknown_nodes",
                "Agents on nodes that the API server does not know: their readings are ignored.",
                status.unknown_nodes,
            ),
        ):
            yield GaugeMetricFamily(f"idlegpu_{name}", text, value)
        for name, text, value in (
            ("agent_reports", "Accepted reports of agents.", status.reports),
            ("agent_token_reviews", "Tokens sent to the API server for review.", status.reviews),
            (
                "agent_contested_devices",
                "GPUs in reports that were rejected: another node reports them.",
                status.contested,
            ),
        ):
            yield CounterMetricFamily(f"idlegpu_{name}", text, value)
        refused = CounterMetricFamily(
            "idlegpu_agent_refusals", "Refused or ended connections of agents.", labels=["reason"]
        )
        for reason, count in status.refused.items():
            refused.add_metric([reason], count)
        yield refused


def export_state(
    metrics: Metrics,
    settings: Settings,
    fleet: Fleet,
    follower: SourceManager,
    dropped_events: Callable[[], int],
    clock: Callable[[], float],
) -> FleetCollector:
    """Register collectors for fleet, agents and certificates; return the fleet's collector.

    Args:
        metrics: metrics with the registry.
        settings: settings with the certificate files and pool labels.
        dropped_events: returns the number of events that could not be written.
        clock: seconds since the epoch.
    """
    register = metrics.registry.register
    collector = FleetCollector(
        fleet, follower.states, dropped_events, clock, follower.host_pods, settings.pool_labels
    )
    register(collector)
    register(_AgentCollector(follower.agent_status))
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
    metrics.registry.register(_ConnectionCollector(tuple(ports)))
