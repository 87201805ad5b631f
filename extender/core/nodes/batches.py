"""Build batches from parts of other batches, so that unchanged rows are only copied."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from extender.core.nodes.snapshot import (
    FLAGS,
    NO_DEVICE,
    PER_NODE,
    PER_SLOT,
    Batch,
    Pool,
    PoolRow,
    Rows,
    Telemetry,
    batch_rows,
    replace_rows,
    update_batch,
)
from extender.core.steps import Steps

_PIECE_ROWS = 250
"""Rows per step: about two milliseconds of work."""

_ARRANGED = ("slots", "suspicion", *PER_SLOT, *PER_NODE, *FLAGS)
"""Columns of a batch, except those derived from its slots."""

_COLUMNS = tuple(
    column.name for column in fields(Batch) if column.init and column.name != "telemetry"
)
_SEEN = tuple(column.name for column in fields(Telemetry))


def take_batch(batch: Batch, index: Rows | slice) -> Batch:
    """Return the given rows of a batch."""
    telemetry = batch.telemetry
    columns = {name: getattr(batch, name)[index] for name in _COLUMNS}
    seen = {name: getattr(telemetry, name)[index] for name in _SEEN}
    return Batch(telemetry=Telemetry(**seen), **columns)


def current_batch(pool: Pool, telemetry: Telemetry) -> Batch:
    """Return all rows of a pool as a batch, including the changes that its arrays lack."""
    unwritten = pool.unwritten
    if not unwritten:
        return pool.batch
    index = np.array(unwritten, dtype=np.intp)
    batch = update_batch(pool.batch, {row: pool.rows[row] for row in unwritten})
    seen = telemetry.take(batch.slots[index])
    return replace(batch, telemetry=batch.telemetry.with_rows(index, seen))


def with_rows(batch: Batch, at: Sequence[int], others: Batch) -> Batch:
    """Return a batch with some rows replaced by those of another batch of the same width."""
    index = np.array(at, dtype=np.intp)
    columns = {
        name: replace_rows(getattr(batch, name), index, getattr(others, name)) for name in _COLUMNS
    }
    return Batch(telemetry=batch.telemetry.with_rows(index, others.telemetry), **columns)


def batch_in_steps(rows: Sequence[PoolRow], telemetry: Telemetry) -> Steps[Batch]:
    """Build a batch from rows in steps, without suspicion against any node."""
    width = max((len(row.slots) for row in rows), default=1)
    parts = []
    for start in range(0, max(len(rows), 1), _PIECE_ROWS):
        some = tuple(rows[start : start + _PIECE_ROWS])
        parts.append(batch_rows(some, telemetry, np.zeros(len(some)), width=width))
        yield
    if len(parts) == 1:
        return parts[0]
    columns = {}
    for name in _ARRANGED:
        column = np.concatenate([getattr(part, name) for part in parts])
        columns[name] = np.asfortranarray(column)
        yield
    slots = columns["slots"]
    seen = yield from telemetry.take_in_steps(slots)
    return Batch(present=slots != NO_DEVICE, telemetry=seen, **columns)


def rearrange_in_steps(
    batch: Batch, index: Rows, fresh: Batch, telemetry: Telemetry
) -> Steps[Batch]:
    """Merge rows of `batch` and `fresh` in a new order, one column per step.

    Args:
        batch: the old batch.
        index: per row of the result, its row in `batch`; -1 takes the next row of `fresh`.
        fresh: new or changed rows; not wider than the result's widest row.
    """
    is_new = index < 0
    kept = index[~is_new]
    width = max(
        int(batch.present[kept].sum(axis=1).max(initial=1)),
        int(fresh.present.sum(axis=1).max(initial=1)),
    )
    columns = {}
    for name in _ARRANGED:
        old, new = getattr(batch, name), getattr(fresh, name)
        if old.ndim == 1:
            column = np.empty(len(index), dtype=old.dtype)
            column[~is_new], column[is_new] = old[kept], new
        else:
            blank = NO_DEVICE if name == "slots" else 0
            column = np.full((len(index), width), blank, dtype=old.dtype, order="F")
            same = min(width, old.shape[1])
            column[np.flatnonzero(~is_new), :same] = old[kept, :same]
            same = min(width, new.shape[1])
            column[np.flatnonzero(is_new), :same] = new[:, :same]
        columns[name] = column
        yield
    slots = columns["slots"]
    seen = yield from telemetry.take_in_steps(slots)
    return Batch(present=slots != NO_DEVICE, telemetry=seen, **columns)
