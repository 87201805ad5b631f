"""Device index of the page: all devices in display order, with their slow-changing columns."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.devices.gpu_models import model_name
from extender.core.devices.readings import Column, DeviceInfo
from extender.core.nodes.inventory import POOL_LABELS, NodeRecord
from extender.core.nodes.snapshot import NO_DEVICE, Pool, Rows, Snapshot
from extender.core.steps import Steps
from extender.fleet.fleet import Fleet
from extender.insight.last_hour import NOTHING, Small
from extender.insight.views import PRODUCT_LABEL, order_of
from extender.server.json_api import chunks

_Words = npt.NDArray[np.uint16]

_PIECE_NODES: Final = 24
"""Nodes to index between two yields to the event loop: half a millisecond's work."""
_PIECE_RECORDS: Final = 512
"""Nodes to compare between two yields to the event loop."""

MEMORY_UNIT_BYTES: Final = 256 << 20
_MOST_WORD: Final = 0xFFFF
_NO_INDEX: Final = 255

_NOT_READY: Final = 1
_CORDONED: Final = 2
_TAINTED: Final = 4
"""State bits of a node that accepts no pods, or only some."""

_ROLES: Final = "node-role.kubernetes.io/"
"""Prefix of the labels for a node's roles, which name pools in clusters without a cloud."""

GROUP_LABELS: Final = (
    "topology.kubernetes.io/zone",
    "node.kubernetes.io/instance-type",
    *POOL_LABELS,
    _ROLES,
)
"""Labels by which nodes can always be grouped: zone, instance type, pools and roles."""


class _Names:
    """Numbers texts in the order in which they first occur.

    Example:
        >>> names = _Names()
        >>> names.number("a"), names.number("b"), names.number("a"), names.texts
        (0, 1, 0, ['a', 'b'])
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a text; assign the next one to a new text."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        """All texts in the order of their numbers."""
        return list(self._numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIndex:
    """Index of all devices in display order: by node name, card and instance.

    Attributes:
        nodes: node names, sorted.
        records: records of these nodes at the time of indexing.
        counts: number of devices of each node.
        node_state: state bits of each node.
        rows: telemetry row of each device.
        places: by resource, position of each device in the pool's matrix of slots; -1 (`NO_DEVICE`)
            for none.
        slots: by resource, that matrix.
        card: number of each device's card within its node.
        index: index of each device's card; 255 if unknown.
        model: number of each device's model.
        profile: number of each device's MIG profile; profile "" is a whole card.
        resource: number of each device's resource.
        replicas: replicas of each device.
        memory_total: memory of each device in units of 256 MiB; 0 if unknown.
        models: model names by number.
        profiles: MIG profiles by number.
        resources: resource names by number.
        pool_labels: custom labels for grouping.
        labels: by label, its values, and the number of each node's value.
    """

    nodes: tuple[str, ...]
    records: tuple[NodeRecord, ...]
    counts: _Words
    node_state: Small
    rows: Rows
    places: Mapping[str, Rows]
    slots: Mapping[str, Rows]
    card: Small
    index: Small
    model: _Words
    profile: Small
    resource: Small
    replicas: _Words
    memory_total: _Words
    models: tuple[str, ...]
    profiles: tuple[str, ...]
    resources: tuple[str, ...]
    pool_labels: tuple[str, ...]
    labels: Mapping[str, tuple[tuple[str, ...], _Words]]

    def __len__(self) -> int:
        return len(self.rows)


_COLUMNS: Final = ("rows", "card", "index", "model", "profile", "resource", "replicas")


class _Lister:
    """Builds the index node by node."""

    def __init__(self, fleet: Fleet, snapshot: Snapshot, labels: Iterable[str]) -> None:
        self._fleet = fleet
        self._pools = snapshot.pools
        self.models, self.profiles, self.resources = _Names(), _Names(), _Names()
        self.profiles.number("")
        for resource in snapshot.pools:
            self.resources.number(resource)
        self.places = {
            resource: np.full_like(pool.batch.slots, NO_DEVICE)
            for resource, pool in self._pools.items()
        }
        self.counts: list[int] = []
        self.node_state: list[int] = []
        self.records: list[NodeRecord] = []
        self._labels = {label: _Names() for label in labels}
        self._label_numbers: dict[str, list[int]] = {label: [] for label in self._labels}
        self._parts: list[Rows] = [np.zeros((0, len(_COLUMNS)), dtype=np.intp)]
        self._listed = 0

    def add(self, nodes: list[str]) -> None:
        """Add some nodes."""
        part: list[tuple[int, ...]] = []
        for node in nodes:
            record = self._fleet.nodes.get(node) or NodeRecord(name=node)
            self.records.append(record)
            self.node_state.append(_node_state(record))
            for label, names in self._labels.items():
                self._label_numbers[label].append(names.number(_group(record, label)))
            before = len(part)
            self._add_devices(node, record.labels.get(PRODUCT_LABEL, ""), part)
            self.counts.append(len(part) - before)
        self._listed += len(part)
        if part:
            self._parts.append(np.array(part, dtype=np.intp))

    def _add_devices(self, node: str, product: str, part: list[tuple[int, ...]]) -> None:
        here = sorted(_devices(self._fleet, self._pools, node), key=lambda one: order_of(one[0]))
        cards: dict[str, int] = {}
        for info, row, replicas, (resource, at, slot) in here:
            self.places[resource][at, slot] = self._listed + len(part)
            index = info.index if info.uuid else None
            part.append(
                (
                    row,
                    cards.setdefault(info.uuid or f"?{len(cards)}", len(cards)),
                    _NO_INDEX if index is None else index,
                    self.models.number(model_name(info.model or product)),
                    self.profiles.number(info.mig_profile),
                    self.resources.number(resource),
                    replicas,
                )
            )

    def columns(self) -> Mapping[str, Rows]:
        """Return the columns of the devices by name."""
        return dict(zip(_COLUMNS, np.concatenate(self._parts).T, strict=True))

    def labels(self) -> dict[str, tuple[tuple[str, ...], _Words]]:
        """Return the values of each label that a node has, and the number of each node's value."""
        return {
            label: (tuple(names.texts), _words(np.array(self._label_numbers[label], dtype=np.intp)))
            for label, names in self._labels.items()
            if names.texts not in ([], [""])
        }


def device_index_in_steps(
    fleet: Fleet, snapshot: Snapshot, pool_labels: tuple[str, ...] = ()
) -> Steps[DeviceIndex]:
    """Index all devices of a snapshot, in steps.

    Args:
        pool_labels: custom labels for grouping, before `GROUP_LABELS`.
    """
    pools = snapshot.pools
    # Each pool's names are sorted, and sorting sorted runs takes a tenth of the time.
    names = sorted(chain.from_iterable(pool.nodes for pool in pools.values()))
    yield
    nodes = tuple(dict.fromkeys(names))
    yield
    lister = _Lister(fleet, snapshot, (*pool_labels, *GROUP_LABELS))
    for some in chunks(nodes, _PIECE_NODES):
        lister.add(some)
        yield
    columns = lister.columns()
    yield
    rows = np.ascontiguousarray(columns["rows"])
    total = snapshot.telemetry.memory_total_bytes
    memory = np.round(total[rows] / MEMORY_UNIT_BYTES) if len(total) else np.zeros(len(rows))
    yield
    small = {}
    for name in ("card", "index", "profile", "resource"):
        small[name] = _small(columns[name])
        yield
    model, replicas = _words(columns["model"]), _words(columns["replicas"])
    yield
    return DeviceIndex(
        nodes=nodes,
        records=tuple(lister.records),
        counts=_words(np.array(lister.counts, dtype=np.intp)),
        node_state=_small(np.array(lister.node_state, dtype=np.intp)),
        rows=rows,
        places=lister.places,
        slots={resource: pool.batch.slots for resource, pool in pools.items()},
        card=small["card"],
        index=small["index"],
        model=model,
        profile=small["profile"],
        resource=small["resource"],
        replicas=replicas,
        memory_total=_words(memory),
        models=tuple(lister.models.texts),
        profiles=tuple(lister.profiles.texts),
        resources=tuple(lister.resources.texts),
        pool_labels=pool_labels,
        labels=lister.labels(),
    )


_Device = tuple[DeviceInfo, int, int, tuple[str, int, int]]
"""Identity, row, replicas, and location: resource, row in the pool, slot."""


def _devices(fleet: Fleet, pools: Mapping[str, Pool], node: str) -> Iterator[_Device]:
    """Yield the devices of a node from all resource pools."""
    for resource, pool in pools.items():
        at = pool.row_of.get(node)
        if at is None:
            continue
        pool_row = pool.rows[at]
        for slot, row in enumerate(pool_row.slots):
            info = fleet.store.info(row) or NOTHING
            yield info, row, pool_row.replicas, (resource, at, slot)


def _group(record: NodeRecord, label: str) -> str:
    """Return a node's value of a grouping label, "" if it has none."""
    if label != _ROLES:
        return record.label(label) or ""
    roles = [key.removeprefix(_ROLES) for key in record.other_labels if key.startswith(_ROLES)]
    return " + ".join(sorted(roles))


def _node_state(record: NodeRecord) -> int:
    return (
        _NOT_READY * (not record.is_ready)
        + _CORDONED * record.is_unschedulable
        + _TAINTED * any(taint.repels for taint in record.taints)
    )


def is_current_in_steps(device_index: DeviceIndex, fleet: Fleet, snapshot: Snapshot) -> Steps[bool]:
    """Check whether the index still matches the snapshot's devices and nodes.

    A changed attribute of a device, such as a model that was unknown, is noticed at the next change
    of its node.
    """
    pools = snapshot.pools
    if pools.keys() != device_index.slots.keys():
        return False
    for resource, pool in pools.items():
        before = device_index.slots[resource]
        if pool.batch.slots is not before and not np.array_equal(pool.batch.slots, before):
            return False
        dirty = pool.unwritten
        if dirty and any(
            _as_row(pool.rows[row].slots, before.shape[1]) != before[row].tolist() for row in dirty
        ):
            return False
    yield
    known = fleet.nodes
    for some in chunks(zip(device_index.nodes, device_index.records, strict=True), _PIECE_RECORDS):
        if any(known.get(name) is not record for name, record in some if name in known):
            return False
        yield
    return True


def _as_row(slots: tuple[int, ...], width: int) -> list[int]:
    return [*slots, *[NO_DEVICE] * (width - len(slots))]


def _small(values: Column | Rows) -> Small:
    small: Small = np.minimum(values, _NO_INDEX).astype(np.uint8)
    return small


def _words(values: Column | Rows) -> _Words:
    words: _Words = np.minimum(values, _MOST_WORD).astype(np.uint16)
    return words
