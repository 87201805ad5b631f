"""The fleet at one instant, as columns that are written once and then only read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain, repeat
from operator import attrgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from extender.core.memo import Memo
from extender.core.roll import EMPTY_ROLL, Roll
from extender.core.steps import Steps, finish

Ratios = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

AnyColumn = TypeVar("AnyColumn", Ratios, Flags, Rows)

Patched = TypeVar("Patched", bound=npt.NDArray[np.generic])

NO_LIMIT = 1 << 60
"""CPU or memory of a node of which it is not known how much is left."""

NO_DEVICE = -1
"""Fills the slots of a pool's matrix where a node has fewer devices than the widest one."""

_SEEN_FLAGS = ("is_excluded", "is_excluded_multi", "is_out", "is_foreign", "is_in_use")
_TYPES = {**dict.fromkeys(_SEEN_FLAGS, np.bool_), "cause": np.intp}
"""Types of the columns of telemetry that are no ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What is believed of each device; one row per device.

    Freshness is 1 for a fresh value, falls to 0 while a stale one fades, and is 0 for a missing
    one; where it is 0 the value beside it means nothing (it is held at 0, never NaN).

    Attributes:
        utilization: ratio of time busy: over the window for a device with tenants, else the
            latest; the busiest evidence, power included. It orders devices.
        latest: the latest utilization, without the window.
        peak: what says idle or busy: the higher of the latest measured activity and its mean over
            the last minutes, power left out.
        spread: standard deviation of the utilization over the window.
        freshness: of the four above.
        memory_used: ratio of memory in use, 0 to 1, without what the driver reserves.
        memory_free_bytes: room left.
        memory_total_bytes: room of an empty device; 0 where unknown.
        memory_freshness: of memory_used and memory_free_bytes.
        presumed: how much it counts that the device was just freed and showed no use before its
            tenant came, 0 to 1; 0 once it is read.
        others_bytes: the part of the memory that was last seen in use and is not of pods that
            declared theirs; it counts until a newer reading, however old it is, and though a tenant
            has left. 0 where unknown.
        foreign_bytes: the part of that which no pod holds, as far as is known.
        stress: heat and throttling, 0 (none) to 1.
        penalty: share of its certainty that ill health costs, 0 to 1.
        is_excluded: cannot work.
        is_excluded_multi: cannot work for a pod with several devices.
        is_out: cannot work, or is silent while its siblings speak: what a kubelet withdraws.
        is_foreign: somebody outside Kubernetes uses it (only told where no pod holds it).
        is_in_use: memory or activity of anybody is seen on it.
        cause: what speaks most against its health, as `core.causes` puts it; 0 for nothing.
    """

    utilization: Ratios
    latest: Ratios
    peak: Ratios
    spread: Ratios
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
        """Return the telemetry of `count` devices of which nothing is known."""
        types = {column.name: _TYPES.get(column.name, np.float64) for column in fields(cls)}
        return cls(**{name: np.zeros(count, dtype=kind) for name, kind in types.items()})

    def take(self, slots: Rows) -> "Telemetry":
        """Return the columns at `slots`, in its shape; `NO_DEVICE` reads as missing."""
        return finish(self.take_in_steps(slots))

    def take_in_steps(self, slots: Rows) -> "Steps[Telemetry]":
        """Return them one in each step."""
        absent = slots == NO_DEVICE
        columns = {}
        for column in fields(self):
            columns[column.name] = _take(getattr(self, column.name), slots, absent)
            yield
        return Telemetry(**columns)

    def with_rows(self, rows: Rows, changed: "Telemetry") -> "Telemetry":
        """Return the columns with those of `changed` at `rows`."""
        names = [column.name for column in fields(self)]
        return Telemetry(
            **{name: patched(getattr(self, name), rows, getattr(changed, name)) for name in names}
        )


def patched(column: Patched, rows: Rows, values: Patched) -> Patched:
    """Return the column with `values` at `rows`: itself, to be shared, where they are there."""
    if np.array_equal(column[rows], values):
        return column
    column = column.copy(order="K")
    column[rows] = values
    return column


def _take(column: AnyColumn, slots: Rows, absent: Flags) -> AnyColumn:
    """Return the column's values at `slots`, zero or False where no device is."""
    if not len(column):
        return np.zeros(slots.shape, dtype=column.dtype)
    # In the memory order of the slots: `take` would not keep it.
    values = column[slots.T].T
    values[absent] = 0
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A pod that holds devices which the readings do not show (yet).

    Attributes:
        uid: the pod's UID.
        count: devices or replicas.
        memory_bytes: room that it takes of each, None where it did not say.
        expected_bytes: what pods like it were measured to take, None where none was.
    """

    uid: str
    count: int
    memory_bytes: int | None = None
    expected_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """One node's devices behind one resource, and who holds them.

    Attributes:
        slots: rows of the devices in the telemetry.
        used: per slot, replicas in use (0 or 1 for whole devices).
        assumed: per slot, tenants on it that the readings do not show.
        assumed_shares: per slot, how many of them are believed to take an even share of the memory:
            neither did they say how much they take, nor was any pod like them measured.
        guessed_bytes: per slot, memory that others of them are believed to take, for pods like them
            were measured to.
        declared_bytes: per slot of a shared device, memory that its tenants declared, in use or
            not.
        replicas: shares that each device is sold as; 1 for whole devices.
        allocatable: devices or replicas that the kubelet offers.
        withdrawn: devices or replicas that the node has and the kubelet does not offer.
        held: devices or replicas that pods hold, by the API's count.
        taken: of the whole devices with `used` 0, so many are held nevertheless: which is unknown.
        is_shared: whether the resource is sold in replicas.
        is_packed: whether the device plugin fills one shared device before the next.
        is_mps: whether MPS caps each replica's memory.
        is_agreed: the device-to-pod mapping and the API's count agree, pods that are too young
            to show aside; where they do not, every device may be landed on.
        is_reconfiguring: the node's operator is changing its GPUs or their driver.
        serves_claims: ResourceClaims may take devices that no count of the resource tells.
        model_id: row of the devices' model in the snapshot's models.
        zone_id: number of the node's zone, 0 where it has none.
        free_millicores: CPU of the node that no pod requests, `NO_LIMIT` where unknown.
        free_bytes: memory of the node, likewise.
        undeclared: per slot of a shared device, how many tenants did not declare any.
        kindred: per slot, how many tenants `guessed_bytes` is of; () for none.
        just_freed: so many of the whole devices that are in use were left by pods that have just
            ended, although it is unknown which.
        is_presumed: those are presumed idle: none that it may be was used before a pod came.
        leaving: the node without the pods that are being deleted; None where there are none.
        loading: per slot, tenants that the readings show and that may still get ready to work; ()
            for none.
    """

    slots: tuple[int, ...]
    used: tuple[int, ...]
    assumed: tuple[int, ...]
    assumed_shares: tuple[int, ...]
    declared_bytes: tuple[float, ...]
    replicas: int = 1
    allocatable: int = 0
    withdrawn: int = 0
    held: int = 0
    taken: int = 0
    is_shared: bool = False
    is_packed: bool = False
    is_mps: bool = False
    is_agreed: bool = True
    is_reconfiguring: bool = False
    serves_claims: bool = False
    model_id: int = 0
    zone_id: int = 0
    free_millicores: int = NO_LIMIT
    free_bytes: int = NO_LIMIT
    undeclared: tuple[int, ...] = ()
    leaving: "Leaving | None" = None
    loading: tuple[int, ...] = ()
    guessed_bytes: tuple[float, ...] = ()
    kindred: tuple[int, ...] = ()
    just_freed: int = 0
    is_presumed: bool = False

    def __post_init__(self) -> None:
        """Say of each slot that there is nothing of what nothing is said of."""
        for name in ("loading", "guessed_bytes", "kindred"):
            if len(getattr(self, name)) != len(self.slots):
                object.__setattr__(self, name, (0,) * len(self.slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """What a node is once some of its pods are gone, before any reading shows that.

    Attributes:
        row: its row without them.
        freed: per slot, the last pod on it leaves.
        released_bytes: per slot, memory in use that is theirs, as far as that is known.
        released_others: per slot, the part of it that counts as `Telemetry.others_bytes`.
        ended: per slot, all of them have ended: what is read since is not of theirs; () for none.
        foreign: per slot, foreign use was seen on it before they came; () for none.
        active: per slot, so was use or any activity: nobody may call it idle; () for none.
    """

    row: PoolRow
    freed: tuple[bool, ...]
    released_bytes: tuple[float, ...]
    released_others: tuple[float, ...]
    ended: tuple[bool, ...] = ()
    foreign: tuple[bool, ...] = ()
    active: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        """Say of each slot that there is nothing of what nothing is said of."""
        for name in ("ended", "foreign", "active"):
            if len(getattr(self, name)) != len(self.freed):
                object.__setattr__(self, name, (False,) * len(self.freed))

    def of_ended(self, row: PoolRow) -> "Leaving":
        """Return what a node of whole devices is without those of the pods that have ended.

        Args:
            row: its row with the others.
        """
        has_ended = np.array(self.ended, dtype=np.bool_)
        return replace(
            self,
            row=replace(row, leaving=None),
            freed=self.ended,
            released_bytes=tuple(np.where(has_ended, self.released_bytes, 0.0).tolist()),
            released_others=tuple(np.where(has_ended, self.released_others, 0.0).tolist()),
        )


def empty_row(slots: tuple[int, ...], *, allocatable: int | None = None) -> PoolRow:
    """Return the row of whole devices that nobody holds.

    Example:
        >>> empty_row((0, 1)).allocatable
        2
    """
    zeros = (0,) * len(slots)
    return PoolRow(
        slots=slots,
        used=zeros,
        assumed=zeros,
        assumed_shares=zeros,
        declared_bytes=(0.0,) * len(slots),
        allocatable=len(slots) if allocatable is None else allocatable,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of a pool side by side: one row per node, one column per device slot.

    Matrices lie in memory column by column: a sum over the few slots is one vector operation each.

    Attributes:
        slots: row of each device in the telemetry, `NO_DEVICE` where there is none.
        present: whether there is a device.
        telemetry: in the shape of `slots`.
        suspicion: share of its certainty that early failures cost each node, 0 to 1.
        memo: what was worked out of it for one request and serves others too.

    The others are `PoolRow`'s, as arrays.
    """

    slots: Rows
    present: Flags
    telemetry: Telemetry
    suspicion: Ratios
    used: Rows
    assumed: Rows
    assumed_shares: Rows
    loading: Rows
    guessed_bytes: Ratios
    declared_bytes: Ratios
    replicas: Rows
    allocatable: Rows
    withdrawn: Rows
    held: Rows
    taken: Rows
    just_freed: Rows
    is_shared: Flags
    is_packed: Flags
    is_mps: Flags
    is_agreed: Flags
    is_presumed: Flags
    is_reconfiguring: Flags
    model_id: Rows
    zone_id: Rows
    free_millicores: Rows
    free_bytes: Rows
    memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.replicas)


BYTES_PER_SLOT = ("guessed_bytes", "declared_bytes")
PER_SLOT = ("used", "assumed", "assumed_shares", "loading", *BYTES_PER_SLOT)
PER_NODE = (
    *("replicas", "allocatable", "withdrawn", "held", "taken", "just_freed", "model_id"),
    "zone_id",
    *("free_millicores", "free_bytes"),
)
FLAGS = ("is_shared", "is_packed", "is_mps", "is_agreed", "is_presumed", "is_reconfiguring")

_OF_NODE = attrgetter(*PER_NODE, *FLAGS)
_OF_SLOTS = attrgetter("slots", *PER_SLOT)
_BLANKS = (NO_DEVICE, 0, 0, 0, 0, 0.0, 0.0)
"""What each of these says of a slot without a device."""


def batch_rows(
    rows: tuple[PoolRow, ...], telemetry: Telemetry, suspicion: Ratios, *, width: int = 1
) -> Batch:
    """Put `rows` side by side.

    Args:
        rows: the nodes' rows.
        telemetry: of every device.
        suspicion: per node, in the order of `rows`.
        width: columns at least; wider rows widen the batch.
    """
    width = max(width, max((len(row.slots) for row in rows), default=0))
    by_slot = _by_slot(rows, width)
    of_bytes = len(BYTES_PER_SLOT)
    counts_by_slot = (column.T for column in by_slot[:-of_bytes].astype(np.intp))
    slots, used, assumed, assumed_shares, loading = counts_by_slot
    shape = len(rows), len(PER_NODE) + len(FLAGS)
    of_nodes = np.fromiter(chain.from_iterable(map(_OF_NODE, rows)), np.intp, shape[0] * shape[1])
    counts: Rows = of_nodes.reshape(shape).T.copy()
    return Batch(
        slots=slots,
        present=slots != NO_DEVICE,
        telemetry=telemetry.take(slots),
        suspicion=suspicion,
        used=used,
        assumed=assumed,
        assumed_shares=assumed_shares,
        loading=loading,
        **{name: by_slot[at - of_bytes].T for at, name in enumerate(BYTES_PER_SLOT)},
        **dict(zip(PER_NODE, counts, strict=False)),
        **dict(zip(FLAGS, counts[len(PER_NODE) :] != 0, strict=True)),
    )


def _by_slot(rows: tuple[PoolRow, ...], width: int) -> Ratios:
    """Return what rows say of their slots: by name, slot and row, filled up to so many slots.

    All at once, and as floats, in which counts are exact: most calls are about a single row.
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


def patch_batch(batch: Batch, changed: Mapping[int, PoolRow]) -> Batch:
    """Return `batch` with the rows of `changed` replaced; none may have more slots than it has.

    What is believed of the devices stays as it was.
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
        name: patched(getattr(batch, name), index, getattr(fresh, name))
        for name in (*PER_SLOT, *PER_NODE, *FLAGS)
    }
    if not np.array_equal(batch.slots[index], fresh.slots):
        slots = patched(batch.slots, index, fresh.slots)
        columns |= {"slots": slots, "present": slots != NO_DEVICE}
    return replace(batch, **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All nodes that offer one resource.

    Most changes are one pod's on one node. Such a row is patched: arrays of thousands of rows are
    not copied for it.

    Attributes:
        resource: the resource's name.
        nodes: node name by row, sorted.
        row_of: row by node name.
        rows: each node's row.
        batch: the same rows as arrays, but for the `late` ones.
        base: another for every pool that was not made by patching the one before.
        patched: rows that were patched since, the last ones last.
        believed: those of them whose devices were believed anew, likewise.
        folded: how many of the patched rows the arrays show.
    """

    resource: str
    nodes: tuple[str, ...]
    row_of: Mapping[str, int]
    rows: tuple[PoolRow, ...]
    batch: Batch
    base: int = 0
    patched: tuple[int, ...] = ()
    believed: tuple[int, ...] = ()
    folded: int = 0

    @property
    def late(self) -> list[int]:
        """Rows that the arrays show as they were before they were patched."""
        return sorted(set(self.patched[self.folded :]))


def build_pool(
    resource: str,
    rows: Mapping[str, PoolRow],
    telemetry: Telemetry,
    suspicion: Mapping[str, float],
) -> Pool:
    """Return the pool of `resource` from each node's row."""
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
        at: when it was taken, seconds since the epoch.
        nodes: every node that the API server knows.
        roll: where each of their names stands among all, and in each pool.
        pools: by resource name.
        telemetry: of every device.
        models: model names, normalized; a pool row's `model_id` points here, 0 is "unknown".
    """

    version: int
    at: float
    nodes: frozenset[str]
    pools: Mapping[str, Pool]
    telemetry: Telemetry
    models: tuple[str, ...] = ("",)
    roll: Roll = EMPTY_ROLL
