"""Prometheus metrics of the fleet's state and its sources, computed at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from extender.core.decision.assessment import DeviceRequest, assess
from extender.core.decision.evaluation import estimates
from extender.core.decision.verdicts import STATES, count_states
from extender.core.nodes.batches import current_batch
from extender.core.steps import Steps, finish
from extender.fleet.fleet import Fleet
from extender.insight.demand import Supply, demand_metrics
from extender.server.readiness import SourceStatus


class FleetCollector(Collector):
    """Prometheus collector for the fleet's state.

    Args:
        fleet: state of the fleet.
        sources: returns the status of each source.
        dropped_events: returns the number of events that could not be written.
        clock: seconds since the epoch.

    Attributes:
        pool_labels: node labels that name a node pool; they override the cloud providers' labels.
    """

    def __init__(
        self,
        fleet: Fleet,
        sources: Callable[[], Iterable[SourceStatus]],
        dropped_events: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._sources = sources
        self._dropped_events = dropped_events
        self._clock = clock
        self.pool_labels: tuple[str, ...] = ()
        self._counted: list[Metric] | None = None

    def count_in_steps(self) -> Steps[None]:
        """Count GPUs and pods in steps, so that the next scrape does not block the event loop."""
        self._counted = yield from self._devices_in_steps()

    @override
    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of GPUs, sources, pods and nodes."""
        counted, self._counted = self._counted, None
        yield from finish(self._devices_in_steps()) if counted is None else counted
        yield from self._collect_sources()
        pods = GaugeMetricFamily(
            "idlegpu_assumed_pods", "Pods that count on a node before their binding is seen."
        )
        pods.add_metric([], len(self._fleet.ledger))
        yield pods
        nodes = GaugeMetricFamily("idlegpu_nodes", "Nodes that the API server knows.")
        nodes.add_metric([], len(self._fleet.nodes))
        yield nodes
        gpu_pods = GaugeMetricFamily("idlegpu_gpu_pods", "Pods that request GPUs.")
        gpu_pods.add_metric([], len(self._fleet.pods))
        yield gpu_pods
        dropped = CounterMetricFamily(
            "idlegpu_events_dropped", "Events about pods that were not written."
        )
        dropped.add_metric([], self._dropped_events())
        yield dropped

    def _devices_in_steps(self) -> Steps[list[Metric]]:
        snapshot = self._fleet.snapshot()
        states: Counter[str] = Counter()
        ask = DeviceRequest(count=1, memory_bytes=0.0, thresholds=self._fleet.policy.thresholds)
        supply = Supply(self._fleet.nodes, snapshot.models, self.pool_labels)
        for pool in snapshot.pools.values():
            batch = current_batch(pool, snapshot.telemetry)
            yield
            assessment = assess(batch, ask.columns, estimates(self._fleet.policy))
            yield
            states.update(count_states(batch, assessment))
            yield from supply.add_in_steps(pool, batch, assessment)
        devices = GaugeMetricFamily("idlegpu_devices", "GPUs by state.", labels=["state"])
        for state in STATES:
            devices.add_metric([state], states[state])
        waiting = tuple(self._fleet.unbound_pods.values())
        return [devices, *supply.metrics(), *demand_metrics(waiting, snapshot)]

    def _collect_sources(self) -> Iterable[Metric]:
        now = self._clock()
        up = GaugeMetricFamily(
            "idlegpu_source_up",
            "Whether the source's last answer was valid.",
            labels=["source"],
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
            "GPUs whose utilization says idle while other evidence says busy.",
            labels=["source"],
        )
        for name, state in self._fleet.sources.items():
            unmatched.add_metric([name], state.unmatched_series)
            disagreements.add_metric([name], state.disagreements)
        yield from (unmatched, disagreements)
