"""Build the pools of the next snapshot, or mark dirty rows where only rows have changed."""

from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import islice

import numpy as np

from extender.core.nodes.batches import batch_in_steps, current_batch, rearrange_in_steps
from extender.core.nodes.snapshot import (
    Batch,
    Pool,
    PoolRow,
    Ratios,
    Telemetry,
    build_pool,
    update_batch,
)
from extender.core.steps import Steps

_MAX_UNWRITTEN = 256
"""Number of dirty rows that are written into the arrays together: a millisecond or two."""

_PIECE_NODES = 1000
"""Nodes looked up per cooperative step: a millisecond at most."""

RowsByNode = Mapping[str, Mapping[str, PoolRow]]
"""Row of each node in the pool of each resource, by node and resource."""


def build_pools(
    rows: RowsByNode,
    telemetry: Telemetry,
    suspicion: Mapping[str, float],
    before: Mapping[str, Pool],
) -> Steps[dict[str, Pool]]:
    """Build the pools of all resources from the rows of all nodes, in cooperative steps.

    Args:
        rows: rows of the nodes; they must not change meanwhile.
        suspicion: share of certainty that a node loses for early failures, by node.
        before: previous pools; their unchanged parts are reused.
    """
    by_resource: dict[str, dict[str, PoolRow]] = {}
    items = iter(rows.items())
    while some := list(islice(items, _PIECE_NODES)):
        for node, of_node in some:
            for resource, row in of_node.items():
                by_resource.setdefault(resource, {})[node] = row
        yield
    pools = {}
    for resource, of_pool in by_resource.items():
        known = before.get(resource) or build_pool(resource, {}, telemetry, {})
        pools[resource] = yield from _rebuild(known, of_pool, telemetry, suspicion)
    return pools


def _rebuild(
    before: Pool, rows: Mapping[str, PoolRow], telemetry: Telemetry, suspicion: Mapping[str, float]
) -> Steps[Pool]:
    """Build one pool after nodes were added, removed or changed."""
    nodes = tuple(sorted(rows))
    ordered = tuple(rows[node] for node in nodes)
    yield
    unwritten, kept = set(before.unwritten), list[int]()
    pairs = zip(nodes, ordered, strict=True)
    while some := list(islice(pairs, _PIECE_NODES)):
        found = ((before.row_of.get(node), row) for node, row in some)
        kept += (
            -1 if at is None or at in unwritten or not _is_same(before.rows[at], row) else at
            for at, row in found
        )
        yield
    changed = [row for at, row in zip(kept, ordered, strict=True) if at < 0]
    fresh = yield from batch_in_steps(changed, telemetry)
    index = np.array(kept, dtype=np.intp)
    batch = yield from rearrange_in_steps(before.batch, index, fresh, telemetry)
    row_of = {node: at for at, node in enumerate(nodes)}
    return Pool(
        resource=before.resource,
        nodes=nodes,
        row_of=row_of,
        rows=ordered,
        batch=replace(batch, suspicion=_suspicions(row_of, suspicion)),
    )


def _is_same(one: PoolRow, other: PoolRow) -> bool:
    return one is other or one == other  # most are identical; comparing takes a microsecond


def fits_pools(
    pools: Mapping[str, Pool], node: str, rows: Mapping[str, PoolRow], capacity: int
) -> bool:
    """Return whether a node's rows can become dirty rows of the pools, even if its devices changed.

    Args:
        pools: pools by resource.
        rows: its rows, by resource.
        capacity: number of device rows in the telemetry.
    """
    return sum(node in pool.row_of for pool in pools.values()) == len(rows) and all(
        resource in pools
        and node in pools[resource].row_of
        and len(row.slots) <= pools[resource].batch.slots.shape[1]
        and max(row.slots, default=0) < capacity
        for resource, row in rows.items()
    )


def update_pools(
    pools: Mapping[str, Pool], changed: RowsByNode, estimated: Container[str], telemetry: Telemetry
) -> dict[str, Pool]:
    """Return the pools with some nodes as dirty rows; the rows must fit (`fits_pools`).

    Args:
        pools: pools by resource.
        estimated: changed nodes whose devices were estimated again.
    """
    updated = {}
    for resource, pool in pools.items():
        rows = {
            pool.row_of[node]: of_node[resource]
            for node, of_node in changed.items()
            if resource in of_node
        }
        again = tuple(row for row in rows if pool.nodes[row] in estimated)
        updated[resource] = _update(pool, rows, again, telemetry) if rows else pool
    return updated


def _update(
    pool: Pool, changed: Mapping[int, PoolRow], estimated: tuple[int, ...], telemetry: Telemetry
) -> Pool:
    after = replace(
        pool,
        rows=with_rows(pool.rows, changed),
        dirty=(*pool.dirty, *changed),
        estimated=(*pool.estimated, *estimated),
    )
    if len(after.dirty) - after.written <= _MAX_UNWRITTEN:
        return after
    return replace(after, batch=current_batch(after, telemetry), written=len(after.dirty))


def with_rows(rows: tuple[PoolRow, ...], changed: Mapping[int, PoolRow]) -> tuple[PoolRow, ...]:
    """Return the rows of a pool with some of them replaced."""
    listed = list(rows)
    for at, row in changed.items():
        listed[at] = row
    return tuple(listed)


def refresh_pools(
    pools: Mapping[str, Pool],
    changed: RowsByNode,
    telemetry: Telemetry,
    suspicion: Mapping[str, float],
) -> dict[str, Pool]:
    """Return the pools with new estimates of all devices, and new rows of the changed nodes.

    Args:
        pools: pools by resource; their devices must be the same.
        suspicion: as in `build_pools`.
    """
    estimated = {}
    for resource, pool in update_pools(pools, changed, (), telemetry).items():
        batch = written_batch(pool)
        estimated[resource] = with_estimates(pool, batch, telemetry.take(batch.slots), suspicion)
    return estimated


def written_batch(pool: Pool) -> Batch:
    """Return a pool's arrays including its dirty rows; their estimates may be out of date."""
    return update_batch(pool.batch, {row: pool.rows[row] for row in pool.unwritten})


def with_estimates(
    pool: Pool, batch: Batch, telemetry: Telemetry, suspicion: Mapping[str, float]
) -> Pool:
    """Return a pool with new arrays and no dirty rows; the caller sets its version.

    Args:
        batch: arrays of all its rows.
        telemetry: estimates in the shape of the pool's slots.
        suspicion: as in `build_pools`.
    """
    batch = replace(batch, telemetry=telemetry, suspicion=_suspicions(pool.row_of, suspicion))
    return replace(pool, batch=batch, dirty=(), estimated=(), written=0)


def _suspicions(row_of: Mapping[str, int], suspicion: Mapping[str, float]) -> Ratios:
    """Return the share of certainty that each node of a pool loses for early failures."""
    shares = np.zeros(len(row_of))
    for node, share in suspicion.items():
        if node in row_of:
            shares[row_of[node]] = share
    return shares
