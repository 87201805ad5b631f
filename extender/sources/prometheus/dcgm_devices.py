"""Keep the table of devices, and read pods, shares and XIDs from the labels of their series.

The order of the devices is the order of all columns.

Runs in the worker process. Only changes are sent to the extender, so plain tuples are stored here
and the extender creates the records.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from extender.core.devices.readings import LARGEST_XID, Column, DeviceKey, Signal
from extender.core.policy import Health
from extender.core.untyped import number_of
from extender.runtime.terminal_escapes import plain_text
from extender.sources.prometheus.dcgm import Metric, convert
from extender.sources.prometheus.node_identity import NodeIdentity, match_node
from extender.sources.prometheus.promql import (
    DRIVER_LABELS,
    EXPORTER_WORD,
    INDEX_LABEL,
    INSTANCE_LABEL,
    MODEL_LABEL,
    PROFILE_LABEL,
    UUID_LABELS,
    XID_LABEL,
)
from extender.sources.prometheus.responses import (
    ResponseTemplates,
    Row,
    Rows,
    Text,
    Vector,
    evaluated_at,
    short_fingerprint,
)

_UUID, _OLD_UUID = UUID_LABELS
_NAN: Final = float("nan")

MOST_ON_NODE: Final = 256
"""Maximum number of devices of a node, as in agents' reports."""

_MAX_SHOWN: Final = 128
"""Longest identity, model, profile and driver version, in characters, as in agents' reports."""

_MAX_EXAMPLE: Final = 500
"""Longest example of a series, in characters."""
_MAX_POD: Final = 317
"""Longest `namespace/name` of a pod."""
_MAX_PODS: Final = 1024
"""Maximum number of pods on a device."""

Tenants = dict[DeviceKey, tuple[str, ...]]

PodShare = tuple[DeviceKey, str, int]
"""A device, a pod on it (`namespace/name`), and the device memory that the pod uses, in bytes."""

_SEVERITIES: Final = np.array(
    [
        2 * Health().xid_action(xid).severity - Health().only_repeats_recovery(xid)
        for xid in range(LARGEST_XID + 1)
    ],
    dtype=np.int8,
)
"""Severity by XID according to the built-in table, used only to choose one of several. Of two
equally severe XIDs, the cause comes before the report of a changed recovery action."""


class DeviceRow(NamedTuple):
    """The fields of `DeviceInfo`, in its order, in a form that is cheap to compare and to send."""

    node: str
    uuid: str
    gpu_instance_id: str
    card_index: int | None
    model: str
    mig_profile: str
    driver_version: str

    @property
    def key(self) -> DeviceKey:
        """Identity of the device."""
        return DeviceKey((self.uuid, self.gpu_instance_id))


_NO_DEVICES: Final[Mapping[DeviceKey, DeviceRow]] = MappingProxyType({})


@dataclass(slots=True)
class _ParsedDevices:
    """Devices in one answer.

    Attributes:
        scraped: time of each device's last scrape, by identity (Prometheus's clock).
        unmatched_series: number of series whose labels name no node of the cluster.
        unmatched_example: labels of one of them.
        crowded_node: a node with more than `MOST_ON_NODE` devices, "" if there is none.
        evaluated_at: time of the answer by the server's clock; None for an empty answer.
    """

    devices: dict[DeviceKey, DeviceRow] = field(default_factory=dict)
    scraped: dict[DeviceKey, float] = field(default_factory=dict)
    unmatched_series: int = 0
    unmatched_example: str = ""
    crowded_node: str = ""
    evaluated_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DeviceChanges:
    """Changes of the devices since the previous answer.

    Attributes:
        removed: positions of the removed devices in the previous table.
        added: new devices, which are at the end of the table.
        scraped: time of each device's last scrape (Prometheus's clock).
        evaluated_at: time of the answer by the server's clock; None if unknown.
        unmatched_series: number of series whose labels name no node of the cluster.
        unmatched_example: labels of one of them.
        crowded_node: a node with more than `MOST_ON_NODE` devices, "" if there is none.
    """

    removed: Sequence[int] = ()
    added: Sequence[DeviceRow] = ()
    scraped: Column
    evaluated_at: float | None
    unmatched_series: int = 0
    unmatched_example: str = ""
    crowded_node: str = ""


def device_key(labels: Mapping[str, str]) -> DeviceKey | None:
    """Return the identity of a series' device; None for NVLinks, switches and CPUs.

    None also for an identity that no driver writes: any scraped pod can invent series.
    """
    uuid, instance = labels.get(_UUID) or labels.get(_OLD_UUID), labels.get(INSTANCE_LABEL, "")
    if not uuid or not f"{uuid}{instance}".isprintable():
        return None
    return DeviceKey((uuid, instance)) if len(uuid) + len(instance) <= _MAX_SHOWN else None


def number(text: object) -> float:
    """Parse a sample's value; return NaN if it is not a number.

    Example:
        >>> number("7.5"), number("N/A")
        (7.5, nan)
    """
    try:
        return float(text)  # type: ignore[arg-type]  # any JSON value: TypeError is caught
    except (TypeError, ValueError):
        return _NAN


def _parse_devices(
    rows: Iterable[Row],
    identity: NodeIdentity,
    node_labels: Sequence[str],
    known: Mapping[DeviceKey, DeviceRow] = _NO_DEVICES,
) -> _ParsedDevices:
    """Return the devices of an answer, with their nodes and the times of their last scrapes.

    If several series are about one device (its exporter was replaced, or the card moved to another
    node), the newest one counts, and an older one adds missing fields.

    Args:
        node_labels: labels that may name a node, the preferred one first.
        known: devices of the previous answer; unchanged ones are returned as the same objects, to
            save memory.
    """
    parsed = _ParsedDevices()
    nodes: dict[tuple[str, ...], str | None] = {}
    for row in rows:
        labels = row["metric"]
        key = device_key(labels)
        if key is None:
            continue
        sampled_at = number(row["value"][1])
        parsed.evaluated_at = float(row["value"][0])
        values = tuple(labels.get(label, "") for label in node_labels)
        if values not in nodes:
            nodes[values] = match_node(identity, values)
        node = nodes[values]
        if node is None:
            parsed.unmatched_series += 1
            parsed.unmatched_example = parsed.unmatched_example or _example(
                key, node_labels, values
            )
            continue
        found, before = (_device_row(node, key, labels), sampled_at), known.get(key)
        if key in parsed.devices:
            found = _merge((parsed.devices[key], parsed.scraped[key]), found)
        elif before is not None:
            key = before.key
        parsed.devices[key] = before if before == found[0] else found[0]
        parsed.scraped[key] = found[1]
    _drop_surplus(parsed, known)
    return parsed


def _drop_surplus(parsed: _ParsedDevices, known: Mapping[DeviceKey, DeviceRow]) -> None:
    """Drop devices of nodes with too many; devices of the previous answer stay.

    Any pod that Prometheus scrapes can invent devices of any node.
    """
    by_node: dict[str, list[DeviceKey]] = {}
    for key, row in parsed.devices.items():
        by_node.setdefault(row.node, []).append(key)
    for node, keys in by_node.items():
        if len(keys) <= MOST_ON_NODE:
            continue
        parsed.crowded_node = node
        for key in sorted(keys, key=lambda key: key not in known)[MOST_ON_NODE:]:
            del parsed.devices[key], parsed.scraped[key]


def _device_row(node: str, key: DeviceKey, labels: Mapping[str, str]) -> DeviceRow:
    return DeviceRow(
        node=node,
        uuid=key[0],
        gpu_instance_id=key[1],
        card_index=number_of(labels.get(INDEX_LABEL, "")),
        model=_shown(labels.get(MODEL_LABEL, "")),
        mig_profile=_shown(labels.get(PROFILE_LABEL, "")),
        driver_version=_shown(labels.get(DRIVER_LABELS[0]) or labels.get(DRIVER_LABELS[1], "")),
    )


def _shown(label: str) -> str:
    """Return a label that messages show, without control characters; devices share a few texts."""
    return intern(plain_text(label, _MAX_SHOWN))


def _merge(one: tuple[DeviceRow, float], other: tuple[DeviceRow, float]) -> tuple[DeviceRow, float]:
    (newer, at), (older, _) = (one, other) if one[1] >= other[1] else (other, one)
    if newer.node != older.node:
        return newer, at
    index = newer.card_index if newer.card_index is not None else older.card_index
    return newer._replace(
        card_index=index,
        model=newer.model or older.model,
        mig_profile=newer.mig_profile or older.mig_profile,
        driver_version=newer.driver_version or older.driver_version,
    ), at


def _example(key: DeviceKey, names: Sequence[str], values: Sequence[str]) -> str:
    labels = {"UUID": key[0], **dict(zip(names, values, strict=True))}
    text = ", ".join(f'{name}="{value}"' for name, value in labels.items() if value)
    return plain_text(text, _MAX_EXAMPLE)


class DeviceTable:
    """The devices in the order of the columns; changed by one thread of the worker process."""

    def __init__(self) -> None:
        self._rows: dict[DeviceKey, DeviceRow] = {}
        self._positions: dict[DeviceKey, int] = {}
        self._templates = ResponseTemplates()
        # These answers are long and rarely read: store fingerprints of them.
        self._device_templates = ResponseTemplates(short_fingerprint)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: DeviceKey) -> bool:
        return key in self._positions

    def read_devices(
        self, rows: Rows, identity: NodeIdentity, node_labels: Sequence[str]
    ) -> _DeviceChanges:
        """Update the table of devices from an answer of Prometheus."""
        parsed = _parse_devices(rows, identity, node_labels, self._rows)
        removed, added = self.update(parsed.devices)
        # Several rows of one device have no fixed order: their values decide which one counts.
        if len(rows) == len(self._rows):
            positions = map(self._positions.__getitem__, parsed.devices)
            self._device_templates.learn(rows.text, np.fromiter(positions, np.intp, len(rows)))
        return _DeviceChanges(
            removed=removed,
            added=added,
            scraped=self.times(parsed.scraped),
            evaluated_at=parsed.evaluated_at,
            unmatched_series=parsed.unmatched_series,
            unmatched_example=parsed.unmatched_example,
            crowded_node=parsed.crowded_node,
        )

    def recognize_devices(self, text: Text) -> _DeviceChanges | None:
        """Read an answer with the same devices on the same nodes; None if no template matches."""
        vector = self._device_templates.read(text)
        scraped = None if vector is None else self.column_of_all(vector)
        if vector is None or scraped is None:
            return None
        return _DeviceChanges(scraped=scraped, evaluated_at=vector.evaluated_at)

    def update(self, devices: Mapping[DeviceKey, DeviceRow]) -> tuple[list[int], list[DeviceRow]]:
        """Replace the devices.

        Returns:
            Positions of the removed rows in the table before the change, and the new rows, which
            are at the end. A changed device is removed and new.
        """
        removed: list[int] = []
        kept: dict[DeviceKey, DeviceRow] = {}
        for position, (key, row) in enumerate(self._rows.items()):
            if devices.get(key) == row:
                kept[key] = row
            else:
                removed.append(position)
        added = [row for key, row in devices.items() if key not in kept]
        if removed or added:
            # Keep the previous keys and rows: new ones lie among the objects of the current answer
            # and would keep its memory from being released.
            self._rows = kept | {row.key: row for row in added}
            self._positions = {key: at for at, key in enumerate(self._rows)}
            self._templates.clear()
            self._device_templates.clear()
        return removed, added

    def recognize(self, text: Text) -> Vector | None:
        """Read a vector from its JSON text if it matches a template, else return None."""
        return self._templates.read(text)

    def read(self, rows: Rows) -> Vector:
        """Read a vector with at most one value per device."""
        positions = np.full(len(rows), -1, dtype=np.intp)
        values = np.empty(len(rows))
        for at, row in enumerate(rows):
            key = device_key(row["metric"])
            if key in self._positions:
                positions[at] = self._positions[key]
            values[at] = number(row["value"][1])
        if len(positions) >= len(self._rows) / 2:  # sparse answers rarely have the same rows again
            self._templates.learn(rows.text, positions)
        return Vector(positions, values, evaluated_at(rows.text))

    def column(self, vector: Vector) -> Column:
        """Return the values of a vector as a column; NaN for devices without a value."""
        column = np.full(len(self._rows), np.nan)
        is_known = vector.positions >= 0
        column[vector.positions[is_known]] = vector.values[is_known]
        return column

    def column_of(self, values: Iterable[tuple[DeviceKey, float]]) -> Column:
        """Return values by device as a column; NaN for devices without a value."""
        column = np.full(len(self._rows), np.nan)
        for key, value in values:
            if key in self._positions:
                column[self._positions[key]] = value
        return column

    def column_of_all(self, vector: Vector) -> Column | None:
        """Return the values of a vector as a column; None unless it has exactly these devices."""
        positions, values, _ = vector
        if len(positions) != len(self._rows) or (positions < 0).any():
            return None
        column = np.full(len(self._rows), np.nan)
        column[positions] = values
        return None if np.isnan(column).any() else column

    def times(self, scraped: Mapping[DeviceKey, float]) -> Column:
        """Return the time of each device's last scrape as a column."""
        return np.fromiter((scraped[key] for key in self._rows), np.float64, len(self))


# --- pods that hold a device ----------------------------------------------------------------------

# The meaning of `pod` depends on the scrape configuration. With `honorLabels: false` workloads are
# in `exported_pod`, and `pod` is the exporter's own. With `honorLabels: true` and in plain scrape
# configurations workloads are in `pod`. With the former, an idle GPU has the exporter's own pod
# there and looks held.


def pods_of(rows: Iterable[Row], namespace_label: str, pod_label: str) -> set[str]:
    """Return the pods of an answer as `namespace/name`."""
    return {
        f"{row['metric'].get(namespace_label, '')}/{row['metric'][pod_label]}"
        for row in rows
        if row["metric"].get(pod_label)
    }


def tenants_in(
    rows: Iterable[Row], namespace_label: str, pod_label: str
) -> dict[DeviceKey, set[str]]:
    """Return the pods by device, from labels that always name workloads."""
    tenants: dict[DeviceKey, set[str]] = {}
    for row in rows:
        labels = row["metric"]
        key = device_key(labels)
        if key is not None and labels.get(pod_label):
            pod = _pod_key(labels.get(namespace_label, ""), labels[pod_label])
            tenants.setdefault(key, set()).add(pod)
    return tenants


def without_exporters(
    rows: Iterable[Row], exporters: Container[str], exporter_names: Container[str]
) -> list[Row]:
    """Return the series without those whose `pod` is the exporter's own.

    Args:
        rows: series with `namespace`, `pod`, `container` and `service`.
        exporters: exporters as `namespace/name`, according to Prometheus's `up`.
        exporter_names: exporters as `namespace/name`, according to the API server. A name alone is
            not enough: any tenant may give it to a pod that looks like an exporter.
    """
    kept = []
    for row in rows:
        labels = row["metric"]
        pod = labels.get("pod", "")
        name = f"{labels.get('namespace', '')}/{pod}"
        is_exporter = (
            name in exporters or name in exporter_names or _looks_like_exporter(labels, pod)
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
    return {key: tuple(sorted(pods)[:_MAX_PODS]) for key, pods in joined.items()}


def _pod_key(namespace: str, name: str) -> str:
    return plain_text(f"{namespace}/{name}", _MAX_POD)


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


def devices_in(rows: Iterable[Row]) -> list[DeviceKey]:
    """Return the devices that an answer names."""
    keys = (device_key(row["metric"]) for row in rows)
    return [key for key in keys if key is not None]


def shares_in(rows: Iterable[Row], metric: Metric) -> list[PodShare]:
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
        pod = _pod_key(labels.get(prefix + "namespace", ""), name)
        used = convert(np.array([number(row["value"][1])]), metric.unit, Signal.MEMORY_USED)
        if not np.isnan(used[0]):
            found[key, pod] = max(found.get((key, pod), 0.0), float(used[0]))
    return [(key, pod, int(held)) for (key, pod), held in found.items()]


# --- XIDs -----------------------------------------------------------------------------------------

# `DCGM_FI_DEV_XID_ERRORS` has the last XID only, and an application's fault often follows a card's
# and hides it. `DCGM_EXP_XID_ERRORS_COUNT` has a series for each XID of the last minutes.


def xids_of(rows: Iterable[Row]) -> Iterator[tuple[DeviceKey, float]]:
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
