"""Read pods, shares and XIDs from the labels of DCGM series."""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from extender.core.devices.readings import LARGEST_XID, Column, DeviceKey, Signal
from extender.core.policy import SEVERITY, Health, is_of_recovery, xid_action
from extender.core.untyped import number_of
from extender.sources.prometheus.dcgm import Metric, convert
from extender.sources.prometheus.dcgm_devices import device_key, number
from extender.sources.prometheus.promql import EXPORTER_WORD, XID_LABEL

_Row = Mapping[str, Any]
Tenants = dict[DeviceKey, tuple[str, ...]]

# --- pods that hold a device ----------------------------------------------------------------------

# The meaning of `pod` depends on the scrape configuration. With `honorLabels: false` workloads are
# in `exported_pod`, and `pod` is the exporter's own. With `honorLabels: true` and in plain scrape
# configurations workloads are in `pod`. With the former, an idle GPU has the exporter's own pod
# there and looks held.


def pods_of(rows: Iterable[_Row], namespace_label: str, pod_label: str) -> set[str]:
    """Return the pods of an answer as `namespace/name`."""
    return {
        f"{row['metric'].get(namespace_label, '')}/{row['metric'][pod_label]}"
        for row in rows
        if row["metric"].get(pod_label)
    }


def tenants_in(
    rows: Iterable[_Row], namespace_label: str, pod_label: str
) -> dict[DeviceKey, set[str]]:
    """Return the pods by device, from labels that always name workloads."""
    tenants: dict[DeviceKey, set[str]] = {}
    for row in rows:
        labels = row["metric"]
        key = device_key(labels)
        if key is not None and labels.get(pod_label):
            pod = f"{labels.get(namespace_label, '')}/{labels[pod_label]}"
            tenants.setdefault(key, set()).add(pod)
    return tenants


def without_exporters(
    rows: Iterable[_Row], exporters: Container[str], exporter_names: Container[str]
) -> list[_Row]:
    """Return the series without those whose `pod` is the exporter's own.

    Args:
        rows: series with `namespace`, `pod`, `container` and `service`.
        exporters: exporters as `namespace/name`, according to Prometheus's `up`.
        exporter_names: names of exporter pods, according to the API server.
    """
    kept = []
    for row in rows:
        labels = row["metric"]
        pod = labels.get("pod", "")
        is_exporter = (
            f"{labels.get('namespace', '')}/{pod}" in exporters
            or pod in exporter_names
            or _looks_like_exporter(labels, pod)
        )
        if not is_exporter:
            kept.append(row)
    return kept


def _looks_like_exporter(labels: Mapping[str, str], pod: str) -> bool:
    """Guess from names, for servers without `up`: workloads rarely have such names.

    `job` is no evidence: it is the scrape target's, even if `pod` is a workload.
    """
    service = labels.get("service", "")
    return (
        EXPORTER_WORD in labels.get("container", "")
        or EXPORTER_WORD in pod
        or bool(service and pod.startswith(f"{service}-") and "dcgm" in service)
    )


def merge_tenants(answers: Iterable[Mapping[DeviceKey, Iterable[str]]]) -> Tenants:
    """Merge several answers; pods of a device are sorted, so that equal sets compare equal."""
    joined: dict[DeviceKey, set[str]] = {}
    for answer in answers:
        for key, pods in answer.items():
            joined.setdefault(key, set()).update(pods)
    return {key: tuple(sorted(pods)) for key, pods in joined.items()}


def changed_tenants(before: Tenants, after: Tenants) -> Tenants:
    """Return the devices whose pods changed; a device without pods has an empty tuple.

    Example:
        >>> changed_tenants({("a", ""): ("ns/x",)}, {("b", ""): ("ns/y",)})
        {('b', ''): ('ns/y',), ('a', ''): ()}
    """
    changed = {key: pods for key, pods in after.items() if before.get(key) != pods}
    changed.update({key: () for key in before if key not in after})
    return changed


# --- memory that pods use on shared devices ------------------------------------------------------

PodShare = tuple[DeviceKey, str, int]
"""A device, a pod on it (`namespace/name`), and the device memory that the pod uses, in bytes."""


def devices_in(rows: Iterable[_Row]) -> list[DeviceKey]:
    """Return the devices that an answer names."""
    keys = (device_key(row["metric"]) for row in rows)
    return [key for key in keys if key is not None]


def shares_in(rows: Iterable[_Row], metric: Metric) -> list[PodShare]:
    """Return the memory that pods use on shared devices; of several shares the largest counts.

    Exporters from 4.8.2 on report the memory in use on shared devices by pod, and for the whole
    device.

    Args:
        rows: rows of an answer to `promql.shares_query`.
        metric: the queried metric.
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
        used = convert(np.array([number(row["value"][1])]), metric.unit, Signal.MEMORY_USED)
        if not np.isnan(used[0]):
            found[key, pod] = max(found.get((key, pod), 0.0), float(used[0]))
    return [(key, pod, int(held)) for (key, pod), held in found.items()]


# --- XIDs -----------------------------------------------------------------------------------------

# `DCGM_FI_DEV_XID_ERRORS` has the last XID only, and an application's fault often follows a card's
# and hides it. `DCGM_EXP_XID_ERRORS_COUNT` has a series for each XID of the last minutes.

_SEVERITIES: Final = np.array(
    [
        2 * SEVERITY[xid_action(Health(), xid)] - is_of_recovery(Health(), xid)
        for xid in range(LARGEST_XID + 1)
    ],
    dtype=np.int8,
)
"""Severity by XID according to the built-in table, used only to choose one of several. Of two
equally severe XIDs, the cause comes before the report of a changed recovery action."""


def xids_of(rows: Iterable[_Row]) -> Iterator[tuple[DeviceKey, float]]:
    """Return the most severe XID of each device; each row names one XID."""
    found: dict[DeviceKey, int] = {}
    for row in rows:
        key, xid = device_key(row["metric"]), number_of(row["metric"].get(XID_LABEL, ""))
        if key is None or xid is None or xid > LARGEST_XID:
            continue
        if key not in found or _SEVERITIES[xid] > _SEVERITIES[found[key]]:
            found[key] = xid
    for key, xid in found.items():
        yield key, float(xid)


def more_severe(one: Column, other: Column) -> Column:
    """Return the more severe of two XIDs of each device; NaN means no XID.

    Example:
        >>> more_severe(np.array([31.0, 79.0, np.nan]), np.array([48.0, 31.0, 13.0])).tolist()
        [48.0, 79.0, 13.0]
    """
    is_other = np.isnan(one) | (_severities(other) > _severities(one))
    chosen: Column = np.where(is_other, other, one)
    return chosen


def _severities(xids: Column) -> Column:
    known = _SEVERITIES[np.nan_to_num(xids).astype(np.intp)].astype(np.float64)
    severities: Column = np.where(np.isnan(xids), -1.0, known)
    return severities
