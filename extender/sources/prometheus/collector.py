"""Run one round of queries to Prometheus, and reduce the answers to columns.

Runs in the worker process.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from extender.core.devices.readings import Column, DeviceKey, Signal
from extender.sources.prometheus import promql
from extender.sources.prometheus.dcgm import (
    FAULT_SIGNALS,
    IDENTITY_SIGNALS,
    SIZE_SIGNALS,
    USE_SIGNALS,
    Aggregation,
    Metric,
    convert,
)
from extender.sources.prometheus.dcgm_devices import (
    MOST_ON_NODE,
    DeviceRow,
    DeviceTable,
    PodShare,
    Tenants,
    changed_tenants,
    devices_in,
    merge_tenants,
    more_severe,
    pods_of,
    shares_in,
    tenants_in,
    without_exporters,
    xids_of,
)
from extender.sources.prometheus.http import QueryPool, wait_for_error
from extender.sources.prometheus.node_identity import NodeIdentity
from extender.sources.prometheus.protocol import ROUND_TIMEOUTS, PrometheusError, table_of
from extender.sources.prometheus.responses import Rows, Text, fingerprint_rows, recognize_nothing

if TYPE_CHECKING:
    from extender.settings.sources import Prometheus

_T = TypeVar("_T")

# --- slow-changing metrics ------------------------------------------------------------------------

# Sizes stay constant, and fault counters are 0 on nearly all devices. Together they would be a
# third of each round's data. Therefore they are queried in full only every 45 seconds. In between
# only faults above 0 are queried.

_FULL_SECONDS: Final = 45.0
"""Time between two answers for all devices: a changed size is noticed within a minute."""


class _QueryColumn(Protocol):
    """Queries a metric; returns its column in base units, NaN for devices without a value."""

    def __call__(self, metric: Metric, *, is_above_zero: bool) -> Column:
        """Query a metric; with `is_above_zero`, only devices on which it is above 0."""


@dataclass(frozen=True, slots=True, eq=False)
class _SlowColumn:
    """Cached column of a slow-changing metric.

    Attributes:
        full_at: time of the last query for all devices, seconds since the epoch.
        column: last value of each device.
        is_nonzero: whether the last value of each device was above 0.
    """

    full_at: float
    column: Column
    is_nonzero: npt.NDArray[np.bool_]


class _SlowColumns:
    """Caches the columns of slow-changing metrics.

    Several threads may use it, each for different metrics.

    Args:
        query: queries the server for a column.
    """

    def __init__(self, query: _QueryColumn) -> None:
        self._query = query
        self._last: dict[str, _SlowColumn] = {}

    def clear(self) -> None:
        """Remove all columns: the devices have changed."""
        self._last.clear()

    def column(self, metric: Metric, now: float) -> Column:
        """Return the column of any metric, slow-changing or not.

        Sizes are cached for some rounds. Of faults most rounds query only the devices that have
        one, which shows each fault, and its end, in the same round as a query of all devices.

        Args:
            now: seconds since the epoch.

        Raises:
            PrometheusError: no usable answer came.
        """
        is_size = metric.signal in SIZE_SIGNALS
        is_fault = metric.signal in FAULT_SIGNALS and metric.name != promql.XID_COUNTS
        if not (is_size or is_fault):
            return self._query(metric, is_above_zero=False)
        last = self._last.get(metric.name)
        if last is not None and _is_recent(last.full_at, now, _FULL_SECONDS):
            again = last if is_size else self._with_faults(metric, last)
            if again is not None:
                self._last[metric.name] = again
                return again.column
        column = self._query(metric, is_above_zero=False)
        is_missing = np.isnan(column)
        is_nonzero = column > 0
        if last is not None:
            is_nonzero |= is_missing & last.is_nonzero
        # Query in full again soon if a size is missing, or a device with a fault.
        is_complete = not (is_missing if is_size else is_missing & is_nonzero).any()
        self._last[metric.name] = _SlowColumn(now if is_complete else -np.inf, column, is_nonzero)
        return column

    def _with_faults(self, metric: Metric, last: _SlowColumn) -> _SlowColumn | None:
        """Return the last values with the faults of this round; None if a faulty device is missing.

        Its fault may be gone, or the server may have lost the device: a full query shows which.
        """
        faults = self._query(metric, is_above_zero=True)
        is_missing = np.isnan(faults)
        if (last.is_nonzero & is_missing).any():
            return None
        return _SlowColumn(last.full_at, np.where(is_missing, last.column, faults), ~is_missing)


# --- the round ------------------------------------------------------------------------------------

_PendingColumns = Sequence[tuple[Metric, "Future[Column]"]]
"""Metrics, each with a future of its column."""

_DISCOVERY_SECONDS: Final = 45.0  # a new metric is noticed within a minute
# Each pod on a shared device has a row: many rows are not queried in each round.
_SHARES_SECONDS: Final = 45.0
_FEW_SHARES: Final = 1000
_NAMES_SINCE_SECONDS: Final = 3600.0
_PODS_SEEN_SECONDS: Final = 3600.0
# Smaller differences of the clocks are ignored: they may be network delay, and a correction that
# varies would make one sample look like two.
_SKEW_TOLERANCE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Result of one round; devices and tenants as changes since the round before.

    Attributes:
        removed: positions of the removed devices in the previous table.
        added: new devices, which are at the end of the table.
        columns: values in base units by signal, one per device.
        measured_at: time of each device's values, on the extender's clock.
        tenants: changed pods by device; None if tenants are unknown.
        tenants_at: time of the query for tenants, on the extender's clock.
        shares: memory that each pod uses on shared devices; not in each round.
        divided: devices of which a pod holds a share by its id; not in each round.
        unmatched_series: number of series whose labels name no node.
        unmatched_example: labels of one of them.
        failed: failed queries by metric (`tenants` for the pods), with the reason.
        partial_answers: number of answers that the server marked as incomplete.
        warning: the server's warning.
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
class _Discovery:
    """Time and parameters of the last query for the devices.

    Attributes:
        at: time of the query, seconds since the epoch.
        identity_metrics: metrics that show the devices.
        identity: names and addresses of the nodes at that time.
        unmatched_series: number of series whose labels name no node.
        unmatched_example: labels of one of them.
        crowded_node: a node with too many devices, "" if there is none.
    """

    at: float = 0.0
    identity_metrics: Sequence[str] = ()
    identity: NodeIdentity | None = None
    unmatched_series: int = 0
    unmatched_example: str = ""
    crowded_node: str = ""

    def is_same(self, identity_metrics: Sequence[str], identity: NodeIdentity) -> bool:
        """Return whether another query would have the same parameters, and no series to match."""
        is_same_query = self.identity_metrics == identity_metrics and self.identity is identity
        return is_same_query and not self.unmatched_series


class Collector:
    """Run rounds of queries, and keep state that saves queries and parsing. For one thread.

    Args:
        settings: settings of Prometheus; `url` must not be empty.
    """

    def __init__(self, settings: "Prometheus") -> None:
        self._settings = settings
        self._selector = promql.bare_selector(settings.selector)
        self._table = table_of(settings)
        self._queries = QueryPool(settings)
        self._devices = DeviceTable()
        self._names: frozenset[str] = frozenset()
        self._names_at = -np.inf
        self._skew_seconds = 0.0
        self._discovery = _Discovery()
        self._slow_columns = _SlowColumns(self._column)
        self._tenants: Tenants = {}
        self._pods: dict[str, tuple[object, object]] = {}
        self._pods_seen_at = -np.inf
        self._shares_at = -np.inf

    def close(self) -> None:
        """End threads and connections."""
        self._queries.close()

    def collect(self, identity: NodeIdentity, now: float) -> Round:
        """Run all queries of a round.

        If a query fails, its metric or the tenants are missing in this round. If the query for the
        devices and the times of their samples fails, the round fails.

        Args:
            now: time of the extender's clock, seconds since the epoch.

        Raises:
            PrometheusError: no usable answer came; the state is unchanged.
        """
        started, partial_before = time.monotonic(), self._queries.partial_answers
        self._queries.begin(ROUND_TIMEOUTS * self._settings.timeout_seconds)
        self._discover_metrics(now)
        metrics = [metric for metric in self._table if metric.name in self._names]
        identity_metrics = _identity_names(metrics)
        removed, added, scraped = self._update_devices(identity_metrics, identity, now)
        if removed or added:
            self._slow_columns.clear()
        if not len(self._devices):
            self._names_at = -np.inf  # no devices: perhaps the metrics have new names
        use_columns = self._start_queries((m for m in metrics if m.signal in USE_SIGNALS), now)
        # A scrape between two queries may add a pod and its load. Tenants are queried after the
        # load: load without a tenant would count as foreign use of one device, while another
        # device is still reserved for the pod.
        wait([future for _, future in use_columns], timeout=self._queries.remaining_seconds / 2)
        tenants_at = now + time.monotonic() - started
        pending_tenants = self._queries.start(
            lambda: self._find_tenants(identity_metrics, identity)
        )
        other_columns = self._start_queries(
            (m for m in metrics if m.signal not in USE_SIGNALS), now
        )
        pending_shares = self._queries.start(
            lambda: self._find_shares(metrics, identity_metrics, now)
        )
        columns, failed = _wait_for_columns([*use_columns, *other_columns])
        if self._discovery.crowded_node:
            failed["devices"] = (
                f"series name more than {MOST_ON_NODE} devices of {self._discovery.crowded_node}, "
                "and some are ignored: do all come from an exporter? narrow prometheus.selector"
            )
        if error := wait_for_error(pending_shares):
            failed["shares"] = str(error)
        if error := wait_for_error(pending_tenants):
            failed["tenants"] = str(error)
            tenants = None
        else:
            tenants = self._changed_tenants(pending_tenants.result(), now)
        shares, divided = ((), ()) if "shares" in failed else pending_shares.result()
        shares = [share for share in shares if share[0] in self._devices]
        divided = [key for key in divided if key in self._devices]
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
            unmatched_series=self._discovery.unmatched_series,
            unmatched_example=self._discovery.unmatched_example,
            failed=failed,
            partial_answers=partial_answers,
            warning=self._queries.last_warning if partial_answers else "",
        )

    def _discover_metrics(self, now: float) -> None:
        """Find out periodically which metrics exist, so that only these are queried."""
        if _is_recent(self._names_at, now, _DISCOVERY_SECONDS):
            return
        since = now - _NAMES_SINCE_SECONDS
        try:
            names = self._queries.with_client(
                lambda client, limit_seconds: client.metric_names(
                    since=since, timeout_seconds=limit_seconds
                )
            )
            self._names = frozenset(map(str, names))
        except PrometheusError:
            # Some gateways only answer queries. If this fails too, the names of the last discovery
            # are used.
            query = promql.names_query((metric.name for metric in self._table), self._selector)
            try:
                self._names = self._queries.fetch(
                    query, lambda rows: frozenset(row["metric"]["__name__"] for row in rows)
                )
            except PrometheusError:
                if not self._names:
                    raise
                return
        self._names_at = now

    def _update_devices(
        self, identity_metrics: Sequence[str], identity: NodeIdentity, now: float
    ) -> tuple[Sequence[int], Sequence[DeviceRow], Column]:
        """Query which devices exist, and when each was scraped last, by the server's clock.

        The list of devices is queried periodically, and when a device is missing or new.

        Returns:
            Removed and new devices, as in `_DeviceChanges`, and a time for each device.
        """
        last, self._discovery = self._discovery, _Discovery()
        if not identity_metrics:
            return *self._devices.update({}), np.zeros(0)
        is_same = last.is_same(identity_metrics, identity)
        if is_same and _is_recent(last.at, now, _DISCOVERY_SECONDS):
            started = time.monotonic()
            ages = self._queries.fetch(
                promql.ages_query(identity_metrics, self._selector),
                self._devices.read,
                self._devices.recognize,
            )
            scraped = self._devices.column_of_all(ages)
            if scraped is not None:
                self._correct_clock(ages.evaluated_at, now, started)
                self._discovery = last
                return [], [], scraped
        started, labels = time.monotonic(), self._settings.node_labels
        changes = self._queries.fetch(
            promql.devices_query(identity_metrics, labels, self._selector),
            lambda rows: self._devices.read_devices(rows, identity, labels),
            self._devices.recognize_devices if is_same else recognize_nothing,
        )
        self._correct_clock(changes.evaluated_at, now, started)
        self._discovery = _Discovery(
            at=now,
            identity_metrics=identity_metrics,
            identity=identity,
            unmatched_series=changes.unmatched_series,
            unmatched_example=changes.unmatched_example,
            crowded_node=changes.crowded_node,
        )
        return changes.removed, changes.added, changes.scraped

    def _correct_clock(self, evaluated_at: float | None, now: float, started: float) -> None:
        """Compare the server's clock with ours, so that ages do not depend on it.

        Args:
            evaluated_at: time of the answer by the server's clock; None if unknown.
            now: start of the round by our clock.
            started: time of the query by the monotonic clock.
        """
        if evaluated_at is None:
            return
        queried_at = now + (time.monotonic() - started) / 2
        skew_seconds = evaluated_at - queried_at
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

    def _start_queries(self, metrics: Iterable[Metric], now: float) -> _PendingColumns:
        if not len(self._devices):
            return []
        query_column = self._slow_columns.column
        return [(one, self._queries.start(partial(query_column, one, now))) for one in metrics]

    def _column(self, metric: Metric, *, is_above_zero: bool) -> Column:
        query = promql.metric_query(metric, self._selector, is_above_zero=is_above_zero)
        if metric.name == promql.XID_COUNTS:
            values = self._queries.fetch(query, lambda rows: self._devices.column_of(xids_of(rows)))
        else:
            values = self._devices.column(
                self._queries.fetch(query, self._devices.read, self._devices.recognize)
            )
        return convert(values, metric.unit, metric.signal)

    def _find_tenants(self, identity_metrics: Sequence[str], identity: NodeIdentity) -> Tenants:
        """Query the pods that hold each device."""
        if not identity_metrics:
            return {}
        query_pods, selector = self._query_pods, self._selector
        answers = [
            query_pods(
                promql.relabeled_pods_query(identity_metrics, selector),
                lambda rows: tenants_in(rows, "exported_namespace", "exported_pod"),
            )
        ]
        # Most of these are exporters' own pods on idle devices, which their names show.
        plain = query_pods(
            promql.plain_pods_query(identity_metrics, selector),
            lambda rows: without_exporters(rows, frozenset(), identity.exporter_pods),
            identity.exporter_pods,
        )
        if plain:
            exporters = query_pods(
                promql.exporter_pods_query(identity_metrics, selector),
                lambda rows: pods_of(rows, "namespace", "pod"),
            )
            workloads = without_exporters(plain, exporters, identity.exporter_pods)
            answers.append(tenants_in(workloads, "namespace", "pod"))
        if any(name.islower() for name in identity_metrics):
            answers.append(
                query_pods(
                    promql.legacy_pods_query(identity_metrics, selector),
                    lambda rows: tenants_in(rows, "pod_namespace", "pod_name"),
                )
            )
        return merge_tenants(answers)

    def _find_shares(
        self, metrics: Iterable[Metric], identity_metrics: Sequence[str], now: float
    ) -> tuple[Sequence[PodShare], Sequence[DeviceKey]]:
        """Query the shared devices, and the memory that pods use on them; not in each round.

        Returns:
            The memory by pod, if the exporter reports it, and all devices with named shares.
        """
        if _is_recent(self._shares_at, now, _SHARES_SECONDS) or not len(self._devices):
            return (), ()
        query = promql.shared_devices_query(identity_metrics, self._selector)
        divided = self._queries.fetch(query, devices_in)
        found: list[PodShare] = []
        for metric in metrics:
            if metric.signal is Signal.MEMORY_USED:
                query = promql.shares_query(metric, self._selector)
                found += self._queries.fetch(query, partial(shares_in, metric=metric))
        rows = len(found) or len(self._devices)  # an empty answer may cost the server as much
        self._shares_at = now if rows > _FEW_SHARES else -np.inf
        return found, divided

    def _query_pods(self, query: str, reduce: Callable[[Rows], _T], *about: object) -> _T:
        """Query pods; an answer with the same text as in the round before is not parsed again.

        Args:
            query: the query; its rows have constant values.
            about: other values that the result depends on.
        """

        def recognize(text: Text) -> _T | None:
            word, found = self._pods.get(query, (None, None))
            return cast("_T", found) if word == (fingerprint_rows(text), about) else None

        def read(rows: Rows) -> _T:
            found = reduce(rows)
            self._pods[query] = ((fingerprint_rows(rows.text), about), found)
            return found

        return self._queries.fetch(query, read, recognize)

    def _changed_tenants(self, tenants: Tenants, now: float) -> Tenants | None:
        """Return the changed tenants, or None if Prometheus cannot report tenants.

        An exporter without the kubelet's mapping and a cluster without GPU pods look the same. If a
        workload's labels were seen within the last hour, the mapping works, and no pods means that
        all devices are idle.
        """
        if tenants:
            self._pods_seen_at = now
        if now - self._pods_seen_at > _PODS_SEEN_SECONDS:
            return None
        current = {key: pods for key, pods in tenants.items() if key in self._devices}
        changed = changed_tenants(self._tenants, current)
        self._tenants = current
        return changed


def _is_recent(at: float, now: float, seconds: float) -> bool:
    """Return whether a time is at most so many seconds ago; False if the clock was set back."""
    return 0 <= now - at < seconds


def _wait_for_columns(work: _PendingColumns) -> tuple[dict[Signal, Column], dict[str, str]]:
    """Wait for the columns; merge metrics of one signal from two generations of exporters."""
    columns: dict[Signal, Column] = {}
    failed: dict[str, str] = {}
    for metric, future in work:
        if error := wait_for_error(future):
            failed[metric.name] = str(error)
            continue
        column = future.result()
        if metric.signal in columns:
            column = _combine(metric)(columns[metric.signal], column)
        columns[metric.signal] = column
    return columns, failed


def _combine(metric: Metric) -> Callable[[Column, Column], Column]:
    """Return the function that merges the values of two metrics."""
    if metric.signal is Signal.XID:
        return more_severe
    return np.fmin if metric.aggregation is Aggregation.MIN else np.fmax


def _identity_names(metrics: Sequence[Metric]) -> list[str]:
    """Choose the metrics that show which devices exist; if the usual ones are missing, any."""
    names = [metric.name for metric in metrics if metric.signal in IDENTITY_SIGNALS]
    return names or [metric.name for metric in metrics[:1]]
