"""One round of questions to Prometheus, reduced to columns. Lives in the worker process."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from extender.core.readings import Column, DeviceKey, Signal
from extender.sources import promql
from extender.sources.dcgm import (
    IDENTITY_SIGNALS,
    Aggregation,
    Metric,
    Unit,
    build_table,
    convert,
)
from extender.sources.dcgm_devices import (
    DeviceRow,
    DeviceTable,
    Sighting,
    samples,
    sight_devices,
)
from extender.sources.dcgm_tenants import (
    Tenants,
    add_tenants,
    changes,
    frozen,
    pods_of,
    without_exporters,
)
from extender.sources.identity import NodeIdentity
from extender.sources.prometheus_common import PrometheusError
from extender.sources.prometheus_queries import Queries, outcome

if TYPE_CHECKING:
    from extender.config import Prometheus

_DISCOVERY_SECONDS: Final = 45.0  # a new metric is noticed within a minute
_NAMES_SINCE_SECONDS: Final = 3600.0
_PODS_SEEN_SECONDS: Final = 3600.0
# Clocks closer than this count as equal: the time that an answer travels is no difference, and a
# correction that trembles would make one sample look like two.
_SKEW_TOLERANCE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round found; devices and tenants as changes against the round before.

    Attributes:
        removed: positions of the devices that are gone, in the table before.
        added: new devices, which stand at the end.
        columns: by signal, one value per device in base units.
        measured_at: per device, when its values were measured, on the extender's clock.
        tenants: pods by device where they changed; None where nothing is known of tenants.
        unmatched_series: series whose labels named no node.
        unmatched_example: labels of one of them.
        failed: queries that failed, by metric (`tenants` for the pods), with the reason.
        partial_answers: answers that the server itself called incomplete.
        warning: what it said.
    """

    removed: Sequence[int] = ()
    added: Sequence[DeviceRow] = ()
    columns: Mapping[Signal, Column]
    measured_at: Column
    tenants: Tenants | None = None
    unmatched_series: int = 0
    unmatched_example: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)
    partial_answers: int = 0
    warning: str = ""


def table_of(settings: "Prometheus") -> tuple[Metric, ...]:
    """Build the table of metrics with the user's rows."""
    return build_table(
        (
            name,
            None
            if row is None
            else Metric(name=name, signal=Signal(row.signal), unit=Unit(row.unit)),
        )
        for name, row in settings.metrics.items()
    )


class Collector:
    """Remembers between rounds what spares questions and answers; used by one thread.

    Args:
        settings: `url` must not be empty.
    """

    def __init__(self, settings: "Prometheus") -> None:
        self._settings = settings
        self._selector = promql.bare_selector(settings.selector)
        self._table = table_of(settings)
        self._queries = Queries(settings)
        self._devices = DeviceTable()
        self._names: frozenset[str] = frozenset()
        self._names_at = -np.inf
        self._skew_seconds = 0.0
        self._tenants: Tenants = {}
        self._pods_seen_at = -np.inf

    def close(self) -> None:
        """End threads and connections."""
        self._queries.close()

    def collect(self, identity: NodeIdentity, now: float) -> Round:
        """Ask everything once.

        A metric whose query fails is missing in this round, and so are the tenants. Without the
        answer that says which devices there are and how old their samples are, nothing counts.

        Args:
            identity: the nodes of the cluster.
            now: time of the extender's clock, seconds since the epoch.

        Raises:
            PrometheusError: nothing usable was answered; what is remembered has not changed.
        """
        partial_before = self._queries.partial_answers
        self._queries.begin(self._settings.round_timeout_seconds)
        self._discover(now)
        metrics = [metric for metric in self._table if metric.name in self._names]
        known_by = _identity_names(metrics)
        started = time.monotonic()
        sighting = self._sight(known_by, identity)
        self._correct_clock(sighting, now + (time.monotonic() - started) / 2)
        if not sighting.devices:
            self._names_at = -np.inf  # nothing there: perhaps under new names
        removed, added = self._devices.update(sighting.devices)
        finding_tenants = self._queries.start(lambda: self._find_tenants(known_by, identity))
        columns, failed = self._measure(metrics)
        if error := outcome(finding_tenants):
            failed["tenants"] = str(error)
            tenants = None
        else:
            tenants = self._changed_tenants(finding_tenants.result(), now)
        partial_answers = self._queries.partial_answers - partial_before
        return Round(
            removed=removed,
            added=added,
            columns=columns,
            measured_at=self._measured_at(sighting, now),
            tenants=tenants,
            unmatched_series=sighting.unmatched_series,
            unmatched_example=sighting.unmatched_example,
            failed=failed,
            partial_answers=partial_answers,
            warning=self._queries.last_warning if partial_answers else "",
        )

    def _discover(self, now: float) -> None:
        """Learn now and then which metrics exist, so that only those are asked for."""
        if now - self._names_at < _DISCOVERY_SECONDS:
            return
        since = now - _NAMES_SINCE_SECONDS
        try:
            names = self._queries.using(
                lambda client, limit_seconds: client.metric_names(
                    since=since, timeout_seconds=limit_seconds
                )
            )
            self._names = frozenset(map(str, names))
        except PrometheusError:
            # Some gateways answer queries alone. Where this fails too, and names are known from
            # before, a late discovery is no reason to go without readings.
            query = promql.names_query((metric.name for metric in self._table), self._selector)
            try:
                self._names = self._queries.reduced(
                    query, lambda rows: frozenset(row["metric"]["__name__"] for row in rows)
                )
            except PrometheusError:
                if not self._names:
                    raise
                return
        self._names_at = now

    def _sight(self, known_by: Sequence[str], identity: NodeIdentity) -> Sighting:
        if not known_by:
            return Sighting()
        labels = self._settings.node_labels
        return self._queries.reduced(
            promql.devices_query(known_by, labels, self._selector),
            lambda rows: sight_devices(rows, identity, labels),
        )

    def _correct_clock(self, sighting: Sighting, asked_at: float) -> None:
        """Compare the server's clock with ours, so that ages do not depend on it."""
        if sighting.evaluated_at is None:
            return
        skew_seconds = sighting.evaluated_at - asked_at
        if abs(skew_seconds - self._skew_seconds) > _SKEW_TOLERANCE_SECONDS:
            is_skewed = abs(skew_seconds) > _SKEW_TOLERANCE_SECONDS
            self._skew_seconds = skew_seconds if is_skewed else 0.0

    def _measured_at(self, sighting: Sighting, now: float) -> Column:
        scraped = self._devices.column((key, at) for key, (_, at) in sighting.devices.items())
        with np.errstate(invalid="ignore"):
            scraped = np.where(np.isfinite(scraped) & (scraped > 0), scraped, np.nan)
        # A sample from the future is from now; an exporter's value is up to one collection
        # interval older than its scrape.
        scraped = np.minimum(scraped - self._skew_seconds, now)
        return np.maximum(scraped - self._settings.exporter_interval_seconds, 0.0)

    def _measure(self, metrics: Sequence[Metric]) -> tuple[dict[Signal, Column], dict[str, str]]:
        """Ask for each metric; several metrics of one signal are two generations of exporters."""
        columns: dict[Signal, Column] = {}
        failed: dict[str, str] = {}
        if not len(self._devices):
            return columns, failed
        work = [(metric, self._queries.start(partial(self._column, metric))) for metric in metrics]
        for metric, future in work:
            if error := outcome(future):
                failed[metric.name] = str(error)
                continue
            column = future.result()
            if metric.signal in columns:
                is_min = metric.aggregation is Aggregation.MIN
                combine = np.fmin if is_min else np.fmax
                column = combine(columns[metric.signal], column)
            columns[metric.signal] = column
        return columns, failed

    def _column(self, metric: Metric) -> Column:
        values = self._queries.reduced(
            promql.metric_query(metric, self._selector),
            lambda rows: self._devices.column(samples(rows)),
        )
        return convert(values, metric.unit, metric.signal)

    def _find_tenants(self, known_by: Sequence[str], identity: NodeIdentity) -> Tenants:
        """Ask which pods hold which device."""
        found: dict[DeviceKey, set[str]] = {}
        if not known_by:
            return {}
        ask, selector = self._queries.reduced, self._selector
        ask(
            promql.relabeled_pods_query(known_by, selector),
            lambda rows: add_tenants(found, rows, "exported_namespace", "exported_pod"),
        )
        # Most of these are exporters' own, of idle devices, and known as such at sight.
        plain = ask(
            promql.plain_pods_query(known_by, selector),
            lambda rows: without_exporters(rows, frozenset(), identity.exporter_pods),
        )
        if plain:
            exporters = ask(
                promql.exporter_pods_query(known_by, selector),
                lambda rows: pods_of(rows, "namespace", "pod"),
            )
            workloads = without_exporters(plain, exporters, identity.exporter_pods)
            add_tenants(found, workloads, "namespace", "pod")
        if any(name.islower() for name in known_by):
            ask(
                promql.old_pods_query(known_by, selector),
                lambda rows: add_tenants(found, rows, "pod_namespace", "pod_name"),
            )
        return frozen(found)

    def _changed_tenants(self, tenants: Tenants, now: float) -> Tenants | None:
        """Say which tenants changed, or None where the source cannot tell.

        An exporter without the kubelet's mapping and a cluster without a single GPU pod look the
        same. Labels of a workload that were seen within the hour tell them apart: then the mapping
        works, and no pods means that all is idle.
        """
        if tenants:
            self._pods_seen_at = now
        if now - self._pods_seen_at > _PODS_SEEN_SECONDS:
            return None
        known = {key: pods for key, pods in tenants.items() if key in self._devices}
        changed = changes(self._tenants, known)
        self._tenants = known
        return changed


def _identity_names(metrics: Sequence[Metric]) -> list[str]:
    """Choose the metrics that say which devices exist; any will do where the usual ones lack."""
    names = [metric.name for metric in metrics if metric.signal in IDENTITY_SIGNALS]
    return names or [metric.name for metric in metrics[:1]]
