"""The fleet at one instant, as read-only columns."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain, repeat
from operator import attrgetter
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from extender.core.nodes.host_resources import NONE, HostResources
from extender.core.nodes.node_index import EMPTY_NODE_INDEX, NodeIndex
from extender.core.nodes.seen_requests import NONE_SEEN, SeenRequests
from extender.core.steps import Steps, finish

_Found = TypeVar("_Found")

_MAX_RESULTS = 24
"""Maximum number of cached results, least recently used evicted first. A result may be several
columns of all devices."""


class _SharedResults:
    """LRU cache by key; each immutable object owns one."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Hashable, object] = {}

    def get(self, key: Hashable, make: Callable[[], _Found]) -> _Found:
        """Return the cached result, computing it if missing.

        Args:
            key: everything that the result depends on besides the owner; None disables caching.
            make: computes the result; callers must not modify it.
        """
        if key is None:
            return make()
        found = self._found.pop(key, None)
        if found is None:
            found = make()
            if len(self._found) >= _MAX_RESULTS:
                del self._found[next(iter(self._found))]
        self._found[key] = found  # the most recently used is last
        return cast("_Found", found)


Ratios = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

AnyColumn = TypeVar("AnyColumn", Ratios, Flags, Rows)

_Column = TypeVar("_Column", bound=npt.NDArray[np.generic])

NO_LIMIT = 1 << 60
"""Free CPU, memory or storage of a node if unknown."""

NO_PRICE = -1
"""Price of a GPU-hour on a node if unknown."""

NO_DEVICE = -1
"""Slot value of a missing device: pads nodes with fewer devices than the widest node."""

_SEEN_FLAGS = ("is_excluded", "is_excluded_multi", "is_out", "is_foreign", "is_in_use")
_TYPES = {**dict.fromkeys(_SEEN_FLAGS, np.bool_), "cause": np.intp}
"""Types of the telemetry columns that are not ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Telemetry of each device after age weighting and cross-checks; one row per device.

    Freshness is 1 for a fresh value, falls to 0 while a stale value fades, and is 0 for a missing
    value. With freshness 0 the value itself is meaningless (0, never NaN).

    Attributes:
        utilization: ratio of time busy, the highest signal including power: the mean of the hour
            for a device with tenants, else the latest value. Only orders devices.
        latest: the latest utilization.
        peak: the higher of the latest measured activity and its mean over the last minutes, without
            power. Decides between idle and busy.
        next_hour: forecast of the utilization in the next hour for a device with tenants, else as
            `utilization`. Only orders devices.
        freshness: freshness of the four columns above.
        memory_used: ratio of memory in use, 0 to 1, without memory reserved by the driver.
        memory_total_bytes: memory of an empty device; 0 if unknown.
        memory_freshness: freshness of `memory_used` and `memory_free_bytes`.
        presumed: weight of the assumption that a device which was just freed is idle, 0 to 1; 0
            once a new reading exists.
        others_bytes: memory in use by processes other than pods that declared their memory. Valid
            until the next reading, at any age, also after a tenant has left. 0 if unknown.
        foreign_bytes: the part of `others_bytes` that belongs to no pod, as far as known.
        stress: heat and throttling, 0 (none) to 1.
        penalty: share of its certainty that ill health costs, 0 to 1.
        is_excluded: the device cannot work.
        is_excluded_multi: the device cannot work for a pod with several devices.
        is_out: the device cannot work, or only its siblings have fresh telemetry: the kubelet
            withdraws such devices.
        is_foreign: a process outside Kubernetes uses the device; set only if no pod holds it.
        is_in_use: memory or activity of any process shows on the device.
        cause: the most severe sign of ill health, encoded by `core.decision.health`; 0 for
            none.
    """

    utilization: Ratios
    latest: Ratios
    peak: Ratios
    next_hour: Ratios
    freshness: Ratios
    memory_used: Ratios
    memory_free_bytes: Ratios
    memory_total_bytes: Ratios
    memory_freshness: Ratios
    presumed: Ratios
    others_bytes: Ratios
    foreign_bytes: Ratios
    stress: Ratios
    penalty: Ratios
    is_excluded: Flags
    is_excluded_multi: Flags
    is_out: Flags
    is_foreign: Flags
    is_in_use: Flags
    cause: Rows

    @classmethod
    def missing(cls, count: int) -> "Telemetry":
        """Return telemetry of `count` devices without any data."""
        types = {column.name: _TYPES.get(column.name, np.float64) for column in fields(cls)}
        return cls(**{name: np.zeros(count, dtype=kind) for name, kind in types.items()})

    def take(self, slots: Rows) -> "Telemetry":
        """Return the columns indexed by `slots`, in its shape; `NO_DEVICE` reads as missing."""
        return finish(self.take_in_steps(slots))

    def take_in_steps(self, slots: Rows) -> "Steps[Telemetry]":
        """Do the work of `take` one column per step."""
        absent = slots == NO_DEVICE
        columns = {}
        for column in fields(self):
            columns[column.name] = _take(getattr(self, column.name), slots, absent)
            yield
        return Telemetry(**columns)

    def with_rows(self, rows: Rows, changed: "Telemetry") -> "Telemetry":
        """Return a copy with the rows of `changed` at `rows`."""
        names = [column.name for column in fields(self)]
        return Telemetry(
            **{
                name: replace_rows(getattr(self, name), rows, getattr(changed, name))
                for name in names
            }
        )


def replace_rows(column: _Column, rows: Rows, values: _Column) -> _Column:
    """Return a copy of the column with `values` at `rows`, or the column itself if equal."""
    if np.array_equal(column[rows], values):
        return column
    column = column.copy(order="K")
    column[rows] = values
    return column


def _take(column: AnyColumn, slots: Rows, absent: Flags) -> AnyColumn:
    """Index a column by `slots`; absent devices are 0 or False."""
    if not len(column):
        return np.zeros(slots.shape, dtype=column.dtype)
    # Keeps the memory order of the slots; `take` would not.
    values = column[slots.T].T
    values[absent] = 0
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A pod that holds devices and that the readings do not show yet.

    Attributes:
        count: devices or replicas.
        memory_bytes: declared memory per device, None if not declared.
        expected_bytes: measured memory use of similar pods, None without such a pod.
        placed: replicas that it is assumed to hold, by slot; the device plugin's policy selects the
            others.
        host: CPU, memory and storage that it requests, unless its node's row counts them already.
    """

    uid: str
    count: int
    memory_bytes: int | None = None
    expected_bytes: int | None = None
    placed: tuple[int, ...] = ()
    host: HostResources = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """Devices of one node behind one resource, and their allocation.

    Attributes:
        slots: telemetry row of each device.
        used: per slot, replicas in use (0 or 1 for whole devices).
        assumed: per slot, tenants that the readings do not show yet.
        assumed_shares: per slot, assumed tenants that count with an even share of the memory,
            because they declared none and no similar pod was measured.
        guessed_bytes: per slot, memory of assumed tenants, estimated from similar pods.
        declared_bytes: per slot of a shared device, memory that its tenants declared, in use or
            not.
        replicas: shares per device; 1 for whole devices.
        allocatable: devices or replicas that the kubelet offers.
        withdrawn: devices or replicas that the node has and the kubelet does not offer.
        held: devices or replicas that pods hold, by the API server's count.
        taken: number of allocated whole devices with `used` 0, without knowing which.
        is_shared: whether the resource counts replicas.
        is_packed: whether the device plugin fills one shared device before the next.
        is_mps: whether MPS caps each replica's memory.
        is_agreed: the device holders agree with the API server's count, except for pods too young
            to show. Otherwise a pod may land on any device.
        is_reconfiguring: the node's operator is changing its GPUs or their driver.
        serves_claims: ResourceClaims may hold devices outside the resource's count.
        model_id: row of the devices' model in the snapshot's models.
        zone_id: number of the node's zone, 0 without one.
        price: price of a GPU-hour in thousandths, `NO_PRICE` if unknown.
        free_millicores: CPU of the node that no pod requests, `NO_LIMIT` if unknown.
        free_bytes: memory of the node that no pod requests, `NO_LIMIT` if unknown.
        free_storage_bytes: ephemeral storage of the node that no pod requests, `NO_LIMIT` if
            unknown.
        undeclared: per slot of a shared device, tenants that declared no memory.
        kindred: per slot, number of tenants behind `guessed_bytes`; () for none.
        just_freed: whole devices still shown in use whose pods have just ended, without knowing
            which.
        is_presumed: the `just_freed` devices are presumed idle: none was in use before its pod
            came.
        joined: sets of devices that NVLink joins, as bit masks of slots, one per slot; 0 for none,
            () for none at all.
        numa: the devices of each NUMA node, likewise.
        alignment: the kubelet's alignment of devices, a `topology.Alignment`.
        leaving: the node without pods that are being deleted; None without such pods.
        loading: per slot, tenants that readings show and that may still be loading; () for none.
    """

    slots: tuple[int, ...]
    used: tuple[int, ...]
    assumed: tuple[int, ...]
    assumed_shares: tuple[int, ...]
    declared_bytes: tuple[float, ...]
    replicas: int
    allocatable: int
    withdrawn: int
    held: int
    taken: int
    is_shared: bool
    is_packed: bool
    is_mps: bool
    is_agreed: bool
    is_reconfiguring: bool
    serves_claims: bool = False
    model_id: int
    zone_id: int
    price: int = NO_PRICE
    free_millicores: int
    free_bytes: int
    free_storage_bytes: int
    undeclared: tuple[int, ...] = ()
    leaving: "Leaving | None" = None
    loading: tuple[int, ...] = ()
    guessed_bytes: tuple[float, ...] = ()
    kindred: tuple[int, ...] = ()
    just_freed: int = 0
    is_presumed: bool = False
    joined: tuple[int, ...] = ()
    numa: tuple[int, ...] = ()
    alignment: int = 0

    def __post_init__(self) -> None:
        """Fill omitted per-slot values with zeros."""
        for name in ("loading", "guessed_bytes", "kindred", "joined", "numa"):
            if len(getattr(self, name)) != len(self.slots):
                object.__setattr__(self, name, (0,) * len(self.slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A node as if some of its pods had left, before readings show it.

    Attributes:
        row: the node's row without these pods.
        freed: per slot, whether the last pod leaves.
        released_bytes: per slot, memory in use by these pods, as far as known.
        released_others: per slot, the part of `released_bytes` within `Telemetry.others_bytes`.
        ended: per slot, whether all of these pods have ended, so that newer readings do not show
            them; () for none.
        foreign: per slot, whether it was in foreign use before these pods came; () for none.
        active: per slot, whether it was in use or active before these pods came, so that it must
            not count as idle; () for none.
    """

    row: PoolRow
    freed: tuple[bool, ...]
    released_bytes: tuple[float, ...]
    released_others: tuple[float, ...]
    ended: tuple[bool, ...] = ()
    foreign: tuple[bool, ...] = ()
    active: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        """Fill omitted per-slot flags with False."""
        for name in ("ended", "foreign", "active"):
            if len(getattr(self, name)) != len(self.freed):
                object.__setattr__(self, name, (False,) * len(self.freed))

    def of_ended(self, row: PoolRow) -> "Leaving":
        """Return the state of a node of whole devices after only its ended pods have left.

        Args:
            row: the node's row with all other pods.
        """
        has_ended = np.array(self.ended, dtype=np.bool_)
        return replace(
            self,
            row=replace(row, leaving=None),
            freed=self.ended,
            released_bytes=tuple(np.where(has_ended, self.released_bytes, 0.0).tolist()),
            released_others=tuple(np.where(has_ended, self.released_others, 0.0).tolist()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of a pool as arrays: one row per node, one column per device slot.

    Matrices are stored in column order, so that a sum over the slots is one vector operation per
    slot.

    Attributes:
        slots: telemetry row of each device, `NO_DEVICE` for a missing one.
        present: whether the slot has a device.
        telemetry: telemetry in the shape of `slots`.
        suspicion: share of its certainty that early failures cost each node, 0 to 1.
        shared_results: cached results that several requests share.

    The other attributes are those of `PoolRow`, as arrays.
    """

    slots: Rows
    present: Flags
    telemetry: Telemetry
    suspicion: Ratios
    used: Rows
    assumed: Rows
    assumed_shares: Rows
    loading: Rows
    joined: Rows
    numa: Rows
    guessed_bytes: Ratios
    declared_bytes: Ratios
    replicas: Rows
    allocatable: Rows
    withdrawn: Rows
    held: Rows
    taken: Rows
    just_freed: Rows
    alignment: Rows
    is_shared: Flags
    is_packed: Flags
    is_mps: Flags
    is_agreed: Flags
    is_presumed: Flags
    is_reconfiguring: Flags
    model_id: Rows
    zone_id: Rows
    price: Rows
    free_millicores: Rows
    free_bytes: Rows
    free_storage_bytes: Rows
    shared_results: _SharedResults = field(
        default_factory=_SharedResults, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.replicas)


BYTES_PER_SLOT = ("guessed_bytes", "declared_bytes")
_COUNTS_PER_SLOT = ("used", "assumed", "assumed_shares", "loading", "joined", "numa")
PER_SLOT = (*_COUNTS_PER_SLOT, *BYTES_PER_SLOT)
PER_NODE = (
    *("replicas", "allocatable", "withdrawn", "held", "taken", "just_freed", "model_id"),
    *("zone_id", "price", "alignment"),
    *("free_millicores", "free_bytes", "free_storage_bytes"),
)
FLAGS = ("is_shared", "is_packed", "is_mps", "is_agreed", "is_presumed", "is_reconfiguring")

_OF_NODE = attrgetter(*PER_NODE, *FLAGS)
_OF_SLOTS = attrgetter("slots", *PER_SLOT)
_BLANKS = (NO_DEVICE, *[0] * len(PER_SLOT))
"""Padding value of each per-slot column for a missing device."""


def batch_rows(
    rows: tuple[PoolRow, ...], telemetry: Telemetry, suspicion: Ratios, *, width: int = 1
) -> Batch:
    """Build a batch from pool rows.

    Args:
        suspicion: suspicion per node, in the order of `rows`.
        width: minimum number of slot columns; wider rows widen the batch.
    """
    width = max(width, max((len(row.slots) for row in rows), default=0))
    by_slot = _by_slot(rows, width)
    of_bytes = len(BYTES_PER_SLOT)
    counts_by_slot = (column.T for column in by_slot[:-of_bytes].astype(np.intp))
    slots, *counts_per_slot = counts_by_slot
    shape = len(rows), len(PER_NODE) + len(FLAGS)
    of_nodes = np.fromiter(chain.from_iterable(map(_OF_NODE, rows)), np.intp, shape[0] * shape[1])
    counts: Rows = of_nodes.reshape(shape).T.copy()
    return Batch(
        slots=slots,
        present=slots != NO_DEVICE,
        telemetry=telemetry.take(slots),
        suspicion=suspicion,
        **dict(zip(_COUNTS_PER_SLOT, counts_per_slot, strict=True)),
        **{name: by_slot[at - of_bytes].T for at, name in enumerate(BYTES_PER_SLOT)},
        **dict(zip(PER_NODE, counts, strict=False)),
        **dict(zip(FLAGS, counts[len(PER_NODE) :] != 0, strict=True)),
    )


def _by_slot(rows: tuple[PoolRow, ...], width: int) -> Ratios:
    """Return the per-slot values of rows as an array (name, slot, row), padded to `width` slots.

    All values are floats, which hold counts exactly: one array is fastest for the usual single row.
    """
    columns = list(map(_OF_SLOTS, rows))
    if any(len(row.slots) < width for row in rows):
        columns = [
            tuple(
                (*values, *repeat(blank, width - len(values)))
                for values, blank in zip(named, _BLANKS, strict=True)
            )
            for named in columns
        ]
    values = chain.from_iterable(chain.from_iterable(columns))
    flat = np.fromiter(values, np.float64, len(rows) * len(_BLANKS) * width)
    return flat.reshape(len(rows), len(_BLANKS), width).transpose(1, 2, 0).copy()


def update_batch(batch: Batch, changed: Mapping[int, PoolRow]) -> Batch:
    """Return `batch` with the rows of `changed` replaced; none may have more slots than the batch.

    Telemetry is not updated.
    """
    if not changed:
        return batch
    index = np.fromiter(changed, np.intp, len(changed))
    fresh = batch_rows(
        tuple(changed.values()),
        Telemetry.missing(0),
        batch.suspicion[index],
        width=batch.slots.shape[1],
    )
    columns = {
        name: replace_rows(getattr(batch, name), index, getattr(fresh, name))
        for name in (*PER_SLOT, *PER_NODE, *FLAGS)
    }
    if not np.array_equal(batch.slots[index], fresh.slots):
        slots = replace_rows(batch.slots, index, fresh.slots)
        columns |= {"slots": slots, "present": slots != NO_DEVICE}
    return replace(batch, **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All nodes that offer one resource.

    Most changes affect one pod on one node. Such a row is only recorded as dirty, so that arrays of
    thousands of rows need no copy.

    Attributes:
        resource: the resource's name.
        nodes: node name by row, sorted.
        row_of: row by node name.
        rows: each node's row.
        batch: the rows as arrays, without the changes to `unwritten` rows.
        version: grows with every change other than the changes of `dirty` rows.
        dirty: rows that changed since `version` began, oldest change first.
        estimated: dirty rows whose telemetry was estimated again, oldest change first.
        written: number of leading changes of `dirty` that the arrays include.
        seen: requests of pods for the resource; others begin another version.
    """

    resource: str
    nodes: tuple[str, ...]
    row_of: Mapping[str, int]
    rows: tuple[PoolRow, ...]
    batch: Batch
    version: int = 0
    dirty: tuple[int, ...] = ()
    estimated: tuple[int, ...] = ()
    written: int = 0
    seen: SeenRequests = NONE_SEEN

    @property
    def unwritten(self) -> list[int]:
        """Dirty rows that the arrays do not include yet."""
        return sorted(set(self.dirty[self.written :]))


def build_pool(
    resource: str, rows: Mapping[str, PoolRow], telemetry: Telemetry, suspicion: Mapping[str, float]
) -> Pool:
    """Build the pool of `resource` from each node's row."""
    nodes = tuple(sorted(rows))
    ordered = tuple(rows[node] for node in nodes)
    suspicions = np.array([suspicion.get(node, 0.0) for node in nodes], dtype=np.float64)
    return Pool(
        resource=resource,
        nodes=nodes,
        row_of={node: index for index, node in enumerate(nodes)},
        rows=ordered,
        batch=batch_rows(ordered, telemetry, suspicions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole fleet at one instant.

    Attributes:
        version: grows with every change; equal versions are equal snapshots.
        at: time of the snapshot, seconds since the epoch.
        nodes: names of all nodes of the API server.
        node_index: node index: number of each node name, and its row in each pool.
        pools: pools by resource name.
        models: model names, normalized; a pool row's `model_id` points here, 0 is "unknown".
    """

    version: int
    at: float
    nodes: frozenset[str]
    pools: Mapping[str, Pool]
    telemetry: Telemetry
    models: tuple[str, ...] = ("",)
    node_index: NodeIndex = EMPTY_NODE_INDEX


def nan_to_zero(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Replace NaN by 0; `nan_to_num` takes ten times as long."""
    return np.where(np.isnan(values), 0.0, values)


def as_ratios(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Limit values to 0 to 1; NaN stays.

    `clip` takes longer than all other work on a handful of values.
    """
    return np.minimum(np.maximum(values, 0.0), 1.0)
