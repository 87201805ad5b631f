"""Keep the table of devices: their order is the order of all columns.

Runs in the worker process. Only changes are sent to the extender, so plain tuples are stored here
and the extender creates the records.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from extender.core.devices.readings import Column, DeviceKey
from extender.core.untyped import number_of
from extender.sources.prometheus.node_identity import NodeIdentity, match_node
from extender.sources.prometheus.promql import (
    DRIVER_LABELS,
    INDEX_LABEL,
    INSTANCE_LABEL,
    MODEL_LABEL,
    PROFILE_LABEL,
    UUID_LABELS,
)
from extender.sources.prometheus.response_template import (
    ResponseTemplates,
    Text,
    Vector,
    evaluated_at,
    short_fingerprint,
)
from extender.sources.prometheus.rows import Rows

_Row = Mapping[str, Any]

_UUID, _OLD_UUID = UUID_LABELS
_NAN: Final = float("nan")


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
        devices: devices by identity.
        scraped: time of each device's last scrape, by identity (Prometheus's clock).
        unmatched_series: number of series whose labels name no node of the cluster.
        unmatched_example: labels of one of them.
        evaluated_at: time of the answer by the server's clock; None for an empty answer.
    """

    devices: dict[DeviceKey, DeviceRow] = field(default_factory=dict)
    scraped: dict[DeviceKey, float] = field(default_factory=dict)
    unmatched_series: int = 0
    unmatched_example: str = ""
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
    """

    removed: Sequence[int] = ()
    added: Sequence[DeviceRow] = ()
    scraped: Column
    evaluated_at: float | None
    unmatched_series: int = 0
    unmatched_example: str = ""


def device_key(labels: Mapping[str, str]) -> DeviceKey | None:
    """Return the identity of a series' device; None for NVLinks, switches and CPUs."""
    uuid = labels.get(_UUID) or labels.get(_OLD_UUID)
    return DeviceKey((uuid, labels.get(INSTANCE_LABEL, ""))) if uuid else None


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
    rows: Iterable[_Row],
    identity: NodeIdentity,
    node_labels: Sequence[str],
    known: Mapping[DeviceKey, DeviceRow] = _NO_DEVICES,
) -> _ParsedDevices:
    """Return the devices of an answer, with their nodes and the times of their last scrapes.

    If several series are about one device (its exporter was replaced, or the card moved to another
    node), the newest one counts, and an older one adds missing fields.

    Args:
        rows: rows of the answer.
        identity: names and addresses of the nodes.
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
    return parsed


def _device_row(node: str, key: DeviceKey, labels: Mapping[str, str]) -> DeviceRow:
    return DeviceRow(
        node=node,
        uuid=key[0],
        gpu_instance_id=key[1],
        card_index=number_of(labels.get(INDEX_LABEL, "")),
        # All devices share a few texts.
        model=intern(labels.get(MODEL_LABEL, "")),
        mig_profile=intern(labels.get(PROFILE_LABEL, "")),
        driver_version=intern(labels.get(DRIVER_LABELS[0]) or labels.get(DRIVER_LABELS[1], "")),
    )


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
    return ", ".join(f'{name}="{value}"' for name, value in labels.items() if value)


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
        """Apply an answer with the devices, as read by `_parse_devices`."""
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
