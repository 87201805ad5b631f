"""Which devices there are, and in which row each stands: rows keep their order between answers.

Lives in the worker process. Only what changed travels to the extender, so plain tuples are kept
here and the records are made there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from extender.core.devices.readings import Column, DeviceKey
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
    short,
)
from extender.sources.prometheus.rows import Rows

Row = Mapping[str, Any]

_UUID, _OLD_UUID = UUID_LABELS
_NAN: Final = float("nan")


class DeviceRow(NamedTuple):
    """What `DeviceInfo` says, in its order, in a form that is cheap to compare and to send."""

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


NONE_KNOWN: Final[Mapping[DeviceKey, DeviceRow]] = MappingProxyType({})


@dataclass(slots=True)
class Sighting:
    """What one answer says of the devices.

    Attributes:
        devices: by identity.
        scraped: by identity, when the device was last scraped (Prometheus's clock).
        unmatched_series: series whose labels named no node of the cluster.
        unmatched_example: labels of one of them.
        evaluated_at: the server's clock when it answered; None where the answer is empty.
    """

    devices: dict[DeviceKey, DeviceRow] = field(default_factory=dict)
    scraped: dict[DeviceKey, float] = field(default_factory=dict)
    unmatched_series: int = 0
    unmatched_example: str = ""
    evaluated_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sight:
    """What one answer says of the devices, as changes against the one before.

    Attributes:
        removed: positions of the devices that are gone, in the table before.
        added: new devices, which stand at the end.
        scraped: when each device was last scraped (Prometheus's clock).
        evaluated_at: the server's clock when it answered; None where it did not say.
        unmatched_series: series whose labels named no node of the cluster.
        unmatched_example: labels of one of them.
    """

    removed: Sequence[int] = ()
    added: Sequence[DeviceRow] = ()
    scraped: Column
    evaluated_at: float | None
    unmatched_series: int = 0
    unmatched_example: str = ""


def device_key(labels: Mapping[str, str]) -> DeviceKey | None:
    """Read the identity of a series' device; None for NVLinks, switches and CPUs."""
    uuid = labels.get(_UUID) or labels.get(_OLD_UUID)
    return DeviceKey((uuid, labels.get(INSTANCE_LABEL, ""))) if uuid else None


def number(text: object) -> float:
    """Read a sample's value; what is no number is NaN.

    Example:
        >>> number("7.5"), number("N/A")
        (7.5, nan)
    """
    try:
        return float(text)  # type: ignore[arg-type]  # whatever JSON holds: TypeError is caught
    except (TypeError, ValueError):
        return _NAN


def sight_devices(
    rows: Iterable[Row],
    identity: NodeIdentity,
    node_labels: Sequence[str],
    known: Mapping[DeviceKey, DeviceRow] = NONE_KNOWN,
) -> Sighting:
    """Read which devices there are, on which node, and how old their samples are.

    Where several series speak of one device (an exporter was replaced, a card moved to another
    node), the newest is right, and an older one may add what it leaves out.

    Args:
        rows: the answer's.
        identity: the nodes of the cluster.
        node_labels: the labels that may name a node, the first first.
        known: the devices of the answer before: one that is the same is told as the very object,
            so that what is read does not stand in memory twice.
    """
    sighting = Sighting()
    nodes: dict[tuple[str, ...], str | None] = {}
    for row in rows:
        labels = row["metric"]
        key = device_key(labels)
        if key is None:
            continue
        sampled_at = number(row["value"][1])
        sighting.evaluated_at = float(row["value"][0])
        values = tuple(labels.get(label, "") for label in node_labels)
        if values not in nodes:
            nodes[values] = match_node(identity, values)
        node = nodes[values]
        if node is None:
            sighting.unmatched_series += 1
            sighting.unmatched_example = sighting.unmatched_example or _example(
                key, node_labels, values
            )
            continue
        found, before = (_device_row(node, key, labels), sampled_at), known.get(key)
        if key in sighting.devices:
            found = _newest((sighting.devices[key], sighting.scraped[key]), found)
        elif before is not None:
            key = before.key
        sighting.devices[key] = before if before == found[0] else found[0]
        sighting.scraped[key] = found[1]
    return sighting


def _device_row(node: str, key: DeviceKey, labels: Mapping[str, str]) -> DeviceRow:
    index = labels.get(INDEX_LABEL, "")
    return DeviceRow(
        node=node,
        uuid=key[0],
        gpu_instance_id=key[1],
        card_index=int(index) if index.isdecimal() else None,
        # The same few texts for all devices.
        model=intern(labels.get(MODEL_LABEL, "")),
        mig_profile=intern(labels.get(PROFILE_LABEL, "")),
        driver_version=intern(labels.get(DRIVER_LABELS[0]) or labels.get(DRIVER_LABELS[1], "")),
    )


def _newest(
    one: tuple[DeviceRow, float], other: tuple[DeviceRow, float]
) -> tuple[DeviceRow, float]:
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
    """The devices in the order of the columns; changed by one thread, the worker's."""

    def __init__(self) -> None:
        self._rows: dict[DeviceKey, DeviceRow] = {}
        self._positions: dict[DeviceKey, int] = {}
        self._layouts = ResponseTemplates()
        self._sights = ResponseTemplates(
            short
        )  # asked for seldom, and twice as long: text is not kept

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: DeviceKey) -> bool:
        return key in self._positions

    def see(self, rows: Rows, identity: NodeIdentity, node_labels: Sequence[str]) -> Sight:
        """Take over which devices an answer shows; `sight_devices` says how it is read."""
        sighting = sight_devices(rows, identity, node_labels, self._rows)
        removed, added = self.update(sighting.devices)
        # Where several rows speak of one device, it depends on their values which is right.
        if len(rows) == len(self._rows):
            positions = map(self._positions.__getitem__, sighting.devices)
            self._sights.learn(rows.text, np.fromiter(positions, np.intp, len(rows)))
        return Sight(
            removed=removed,
            added=added,
            scraped=self.times(sighting.scraped),
            evaluated_at=sighting.evaluated_at,
            unmatched_series=sighting.unmatched_series,
            unmatched_example=sighting.unmatched_example,
        )

    def see_again(self, text: Text) -> Sight | None:
        """Read an answer for the same nodes that shows these very devices, as one before did."""
        vector = self._sights.read(text)
        scraped = None if vector is None else self.column_of_all(vector)
        if vector is None or scraped is None:
            return None
        return Sight(scraped=scraped, evaluated_at=vector.evaluated_at)

    def update(self, devices: Mapping[DeviceKey, DeviceRow]) -> tuple[list[int], list[DeviceRow]]:
        """Take over which devices there are now.

        Returns:
            Positions of the rows that are gone (before the change), and the new rows, which stand
            at the end. A device of which anything changed is gone and new.
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
            # The very keys and rows of before: among the objects of the answer that is read just
            # now fresh ones would keep the memory of all of them.
            self._rows = kept | {row.key: row for row in added}
            self._positions = {key: at for at, key in enumerate(self._rows)}
            self._layouts.forget()
            self._sights.forget()
        return removed, added

    def recognize(self, text: Text) -> Vector | None:
        """Read the rows of a vector, as text, that is laid out as an earlier one was."""
        return self._layouts.read(text)

    def read(self, rows: Rows) -> Vector:
        """Read a vector with at most one value for each device, whatever its layout."""
        places = np.full(len(rows), -1, dtype=np.intp)
        values = np.empty(len(rows))
        for at, row in enumerate(rows):
            key = device_key(row["metric"])
            if key in self._positions:
                places[at] = self._positions[key]
            values[at] = number(row["value"][1])
        if len(places) >= len(self._rows) / 2:  # sparse answers are others every time
            self._layouts.learn(rows.text, places)
        return Vector(places, values, evaluated_at(rows.text))

    def column(self, vector: Vector) -> Column:
        """Put values of devices into a column; devices without a value are NaN."""
        column = np.full(len(self._rows), np.nan)
        is_known = vector.places >= 0
        column[vector.places[is_known]] = vector.values[is_known]
        return column

    def column_of(self, values: Iterable[tuple[DeviceKey, float]]) -> Column:
        """Put values of some devices into a column; devices without a value are NaN."""
        column = np.full(len(self._rows), np.nan)
        for key, value in values:
            if key in self._positions:
                column[self._positions[key]] = value
        return column

    def column_of_all(self, vector: Vector) -> Column | None:
        """Put values likewise; None unless they are of all these devices, and of no others."""
        places, values, _ = vector
        if len(places) != len(self._rows) or (places < 0).any():
            return None
        column = np.full(len(self._rows), np.nan)
        column[places] = values
        return None if np.isnan(column).any() else column

    def times(self, scraped: Mapping[DeviceKey, float]) -> Column:
        """Put when devices were last scraped into a column."""
        return np.fromiter((scraped[key] for key in self._rows), np.float64, len(self))
