"""One round of questions to Prometheus, reduced to columns. Lives in the worker process."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

from extender.core.devices.readings import Column, DeviceKey, Signal
from extender.sources.prometheus import promql
from extender.sources.prometheus.common import PrometheusError, table_of
from extender.sources.prometheus.dcgm import (
    IDENTITY_SIGNALS,
    USE_SIGNALS,
    Aggregation,
    Metric,
    convert,
)
from extender.sources.prometheus.dcgm_devices import DeviceRow, DeviceTable, device_key, number
from extender.sources.prometheus.dcgm_tenants import (
    Tenants,
    changes,
    frozen,
    pods_of,
    tenants_in,
    without_exporters,
)
from extender.sources.prometheus.dcgm_xids import graver, xids_of
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.queries import Queries, outcome
from extender.sources.prometheus.response_template import Text, digest
from extender.sources.prometheus.rows import Rows, nothing
from extender.sources.prometheus.slow_metrics import SlowColumns

# What each pod holds of the memory of devices that pods share, as DCGM series say.
#
# Exporters from 4.8.2 on split the memory in use by pod on shared devices, and tell that of the
# whole device besides.

Row = Mapping[str, Any]

PodShare = tuple[DeviceKey, str, int]
"""A device, a pod on it (`namespace/name`), and what that holds of its memory, in bytes."""


def devices_in(rows: Iterable[Row]) -> list[DeviceKey]:
    """Read which devices an answer names."""
    keys = (device_key(row["metric"]) for row in rows)
    return [key for key in keys if key is not None]


def shares_in(rows: Iterable[Row], metric: Metric) -> list[PodShare]:
    """Read what pods hold; of a pod with several shares of a device it is told of each.

    Args:
        rows: of an answer to `promql.shares_query`.
        metric: the metric that was asked for.
    """
    found: dict[tuple[DeviceKey, str], float] = {}
    for row in rows:
        labels = row["metric"]
        key = device_key(labels)
        name = labels.get("exported_pod") or labels.get("pod")
        if key is None or not name:
            continue
        prefix = "exported_" if labels.get("exported_pod") else ""
        pod = f"{labels.get(prefix + 'namespace', '')}/{name}"
        told = convert(np.array([number(row["value"][1])]), metric.unit, Signal.MEMORY_USED)
        if not np.isnan(told[0]):
            found[key, pod] = max(found.get((key, pod), 0.0), float(told[0]))
    return [(key, pod, int(held)) for (key, pod), held in found.items()]


if TYPE_CHECKING:
    from extender.settings.config import Prometheus

T = TypeVar("T")

Measuring = Sequence[tuple[Metric, "Future[Column]"]]
"""Metrics, each with its column once it is answered."""

_DISCOVERY_SECONDS: Final = 45.0  # a new metric is noticed within a minute
# Each pod that shares a device has a row: where there are many, it is not asked in each round.
_SHARES_SECONDS: Final = 45.0
_FEW_SHARES: Final = 1000
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
        tenants_at: when it was asked for them, on the extender's clock.
        shares: now and then: what each pod holds of the memory of devices that pods share.
        divided: likewise: devices of which a pod holds a named share.
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
    tenants_at: float
    shares: Sequence[PodShare] = ()
    divided: Sequence[DeviceKey] = ()
    unmatched_series: int = 0
    unmatched_example: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)
    partial_answers: int = 0
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sighted:
    """When and how it was last asked which devices there are.

    Attributes:
        at: when, seconds since the epoch.
        known_by: the metrics that say it.
        identity: the nodes of the cluster, as they were.
        unmatched_series: series whose labels named no node.
        unmatched_example: labels of one of them.
    """

    at: float = 0.0
    known_by: Sequence[str] = ()
    identity: NodeIdentity | None = None
    unmatched_series: int = 0
    unmatched_example: str = ""

    def is_same(self, known_by: Sequence[str], identity: NodeIdentity) -> bool:
        """Tell whether as much would be answered, with nothing left to find out."""
        is_asked_same = self.known_by == known_by and self.identity is identity
        return is_asked_same and not self.unmatched_series


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
        self._sighted = Sighted()
        self._steady = SlowColumns(self._column)
        self._tenants: Tenants = {}
        self._pods: dict[str, tuple[object, object]] = {}
        self._pods_seen_at = -np.inf
        self._shares_due = -np.inf

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
        started, partial_before = time.monotonic(), self._queries.partial_answers
        self._queries.begin(self._settings.round_timeout_seconds)
        self._discover(now)
        metrics = [metric for metric in self._table if metric.name in self._names]
        known_by = _identity_names(metrics)
        removed, added, scraped = self._sight(known_by, identity, now)
        if removed or added:
            self._steady.forget()
        if not len(self._devices):
            self._names_at = -np.inf  # nothing there: perhaps under new names
        using = self._start_measuring((m for m in metrics if m.signal in USE_SIGNALS), now)
        # A scrape between two questions may bring a pod and its load. Who holds what is asked last,
        # for a device in use by nobody would count beside the one kept for a pod not yet shown.
        wait([future for _, future in using], timeout=self._queries.left_seconds / 2)
        tenants_at = now + time.monotonic() - started
        finding_tenants = self._queries.start(lambda: self._find_tenants(known_by, identity))
        rest = self._start_measuring((m for m in metrics if m.signal not in USE_SIGNALS), now)
        finding_shares = self._queries.start(lambda: self._find_shares(metrics, known_by, now))
        columns, failed = _measured([*using, *rest])
        if error := outcome(finding_shares):
            failed["shares"] = str(error)
        if error := outcome(finding_tenants):
            failed["tenants"] = str(error)
            tenants = None
        else:
            tenants = self._changed_tenants(finding_tenants.result(), now)
        shares, divided = ((), ()) if "shares" in failed else finding_shares.result()
        partial_answers = self._queries.partial_answers - partial_before
        return Round(
            removed=removed,
            added=added,
            columns=columns,
            measured_at=self._measured_at(scraped, now),
            tenants=tenants,
            tenants_at=tenants_at,
            shares=shares,
            divided=divided,
            unmatched_series=self._sighted.unmatched_series,
            unmatched_example=self._sighted.unmatched_example,
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

    def _sight(
        self, known_by: Sequence[str], identity: NodeIdentity, now: float
    ) -> tuple[Sequence[int], Sequence[DeviceRow], Column]:
        """Find out which devices there are, and when each was scraped last, by the server's clock.

        Which there are is asked now and then, and once one of them is missing, or another there.

        Returns:
            Devices that are gone and new, as a `Sight` tells them, and a time for each device.
        """
        known, self._sighted = self._sighted, Sighted()
        if not known_by:
            return *self._devices.update({}), np.zeros(0)
        is_same = known.is_same(known_by, identity)
        if is_same and now - known.at < _DISCOVERY_SECONDS:
            started = time.monotonic()
            ages = self._queries.reduced(
                promql.ages_query(known_by, self._selector),
                self._devices.read,
                self._devices.recognize,
            )
            scraped = self._devices.column_of_all(ages)
            if scraped is not None:
                self._correct_clock(ages.evaluated_at, now, started)
                self._sighted = known
                return [], [], scraped
        started, labels = time.monotonic(), self._settings.node_labels
        seen = self._queries.reduced(
            promql.devices_query(known_by, labels, self._selector),
            lambda rows: self._devices.see(rows, identity, labels),
            self._devices.see_again if is_same else nothing,
        )
        self._correct_clock(seen.evaluated_at, now, started)
        self._sighted = Sighted(
            at=now,
            known_by=known_by,
            identity=identity,
            unmatched_series=seen.unmatched_series,
            unmatched_example=seen.unmatched_example,
        )
        return seen.removed, seen.added, seen.scraped

    def _correct_clock(self, evaluated_at: float | None, now: float, started: float) -> None:
        """Compare the server's clock with ours, so that ages do not depend on it.

        Args:
            evaluated_at: its clock, when it answered; None where it did not say.
            now: ours, when the round began.
            started: when it was asked, by the monotonic clock.
        """
        if evaluated_at is None:
            return
        asked_at = now + (time.monotonic() - started) / 2
        skew_seconds = evaluated_at - asked_at
        if abs(skew_seconds - self._skew_seconds) > _SKEW_TOLERANCE_SECONDS:
            is_skewed = abs(skew_seconds) > _SKEW_TOLERANCE_SECONDS
            self._skew_seconds = skew_seconds if is_skewed else 0.0

    def _measured_at(self, scraped: Column, now: float) -> Column:
        with np.errstate(invalid="ignore"):
            scraped = np.where(np.isfinite(scraped) & (scraped > 0), scraped, np.nan)
        # A sample from the future is from now; an exporter's value is up to one collection
        # interval older than its scrape.
        scraped = np.minimum(scraped - self._skew_seconds, now)
        return np.maximum(scraped - self._settings.exporter_interval_seconds, 0.0)

    def _start_measuring(self, metrics: Iterable[Metric], now: float) -> Measuring:
        """Ask for each metric in threads."""
        if not len(self._devices):
            return []
        measure = self._steady.column
        return [(one, self._queries.start(partial(measure, one, now))) for one in metrics]

    def _column(self, metric: Metric, *, is_above_zero: bool) -> Column:
        query = promql.metric_query(metric, self._selector, is_above_zero=is_above_zero)
        if metric.name == promql.XID_COUNTS:
            values = self._queries.reduced(
                query, lambda rows: self._devices.column_of(xids_of(rows))
            )
        else:
            values = self._devices.column(
                self._queries.reduced(query, self._devices.read, self._devices.recognize)
            )
        return convert(values, metric.unit, metric.signal)

    def _find_tenants(self, known_by: Sequence[str], identity: NodeIdentity) -> Tenants:
        """Ask which pods hold which device."""
        if not known_by:
            return {}
        ask, selector = self._ask_pods, self._selector
        answers = [
            ask(
                promql.relabeled_pods_query(known_by, selector),
                lambda rows: tenants_in(rows, "exported_namespace", "exported_pod"),
            )
        ]
        # Most of these are exporters' own, of idle devices, and known as such at sight.
        plain = ask(
            promql.plain_pods_query(known_by, selector),
            lambda rows: without_exporters(rows, frozenset(), identity.exporter_pods),
            identity.exporter_pods,
        )
        if plain:
            exporters = ask(
                promql.exporter_pods_query(known_by, selector),
                lambda rows: pods_of(rows, "namespace", "pod"),
            )
            workloads = without_exporters(plain, exporters, identity.exporter_pods)
            answers.append(tenants_in(workloads, "namespace", "pod"))
        if any(name.islower() for name in known_by):
            answers.append(
                ask(
                    promql.old_pods_query(known_by, selector),
                    lambda rows: tenants_in(rows, "pod_namespace", "pod_name"),
                )
            )
        return frozen(answers)

    def _find_shares(
        self, metrics: Iterable[Metric], known_by: Sequence[str], now: float
    ) -> tuple[Sequence[PodShare], Sequence[DeviceKey]]:
        """Ask now and then what pods hold of the memory of devices that they share, and of which.

        Returns:
            What each pod holds where the exporter splits it, and all devices with named shares.
        """
        if now < self._shares_due or not len(self._devices):
            return (), ()
        query = promql.divided_query(known_by, self._selector)
        divided = self._queries.reduced(query, devices_in)
        found: list[PodShare] = []
        for metric in metrics:
            if metric.signal is Signal.MEMORY_USED:
                query = promql.shares_query(metric, self._selector)
                found += self._queries.reduced(query, partial(shares_in, metric=metric))
        rows = len(found) or len(self._devices)  # none may cost the server as much
        self._shares_due = now + _SHARES_SECONDS if rows > _FEW_SHARES else -np.inf
        return found, divided

    def _ask_pods(self, query: str, reduce: Callable[[Rows], T], *about: object) -> T:
        """Ask for pods; an answer like that of the round before is not read again.

        Args:
            query: the query, whose rows have no values of their own.
            reduce: makes of the rows what is wanted.
            about: what that depends on besides.
        """

        def recognize(text: Text) -> T | None:
            word, found = self._pods.get(query, (None, None))
            return cast("T", found) if word == (digest(text), about) else None

        def read(rows: Rows) -> T:
            found = reduce(rows)
            self._pods[query] = ((digest(rows.text), about), found)
            return found

        return self._queries.reduced(query, read, recognize)

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


def _measured(work: Measuring) -> tuple[dict[Signal, Column], dict[str, str]]:
    """Wait for each metric; several metrics of one signal are two generations of exporters."""
    columns: dict[Signal, Column] = {}
    failed: dict[str, str] = {}
    for metric, future in work:
        if error := outcome(future):
            failed[metric.name] = str(error)
            continue
        column = future.result()
        if metric.signal in columns:
            column = _combine(metric)(columns[metric.signal], column)
        columns[metric.signal] = column
    return columns, failed


def _combine(metric: Metric) -> Callable[[Column, Column], Column]:
    """Return how one value is made of those of two metrics."""
    if metric.signal is Signal.XID:
        return graver
    return np.fmin if metric.aggregation is Aggregation.MIN else np.fmax


def _identity_names(metrics: Sequence[Metric]) -> list[str]:
    """Choose the metrics that say which devices exist; any will do where the usual ones lack."""
    names = [metric.name for metric in metrics if metric.signal in IDENTITY_SIGNALS]
    return names or [metric.name for metric in metrics[:1]]
