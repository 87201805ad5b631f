"""Pools for the next snapshot: built anew where nodes or devices changed, else patched."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from extender.core.batches import rearrange_batch
from extender.core.snapshot import (
    Pool,
    PoolRow,
    Ratios,
    Telemetry,
    batch_rows,
    build_pool,
    patch_batch,
)

RowsByNode = Mapping[str, Mapping[str, PoolRow]]
"""Each node's row in the pool of each of its resources, by node and resource."""


def build_pools(
    rows: RowsByNode,
    telemetry: Telemetry,
    suspicion: Mapping[str, float],
    before: Mapping[str, Pool] = MappingProxyType({}),
) -> dict[str, Pool]:
    """Return the pools of all resources from every node's rows.

    Args:
        rows: the nodes' rows.
        telemetry: of every device.
        suspicion: share of its score that a node loses, by node; the others lose none.
        before: pools as they were: what has not changed of them is not put together again.
    """
    by_resource: dict[str, dict[str, PoolRow]] = {}
    for node, of_node in rows.items():
        for resource, row in of_node.items():
            by_resource.setdefault(resource, {})[node] = row
    return {
        resource: _rebuild(before[resource], of_pool, telemetry, suspicion)
        if resource in before
        else build_pool(resource, of_pool, telemetry, suspicion)
        for resource, of_pool in by_resource.items()
    }


def _rebuild(
    before: Pool,
    rows: Mapping[str, PoolRow],
    telemetry: Telemetry,
    suspicion: Mapping[str, float],
) -> Pool:
    """Return one pool after nodes came, went or changed."""
    nodes = tuple(sorted(rows))
    ordered = tuple(rows[node] for node in nodes)
    found = [before.row_of.get(node, -1) for node in nodes]
    kept = [
        at if at >= 0 and before.rows[at] is row else -1
        for at, row in zip(found, ordered, strict=True)
    ]
    fresh = tuple(row for at, row in zip(kept, ordered, strict=True) if at < 0)
    batch = rearrange_batch(
        before.batch,
        np.array(kept, dtype=np.intp),
        batch_rows(fresh, telemetry, np.zeros(len(fresh))),
        telemetry,
    )
    row_of = {node: index for index, node in enumerate(nodes)}
    return Pool(
        resource=before.resource,
        nodes=nodes,
        row_of=row_of,
        rows=ordered,
        batch=replace(batch, suspicion=suspicions(row_of, suspicion)),
    )


def renew_pools(
    pools: Mapping[str, Pool],
    changed: RowsByNode,
    telemetry: Telemetry,
    suspicion: Mapping[str, float] | None,
) -> dict[str, Pool]:
    """Return the pools with some nodes' rows replaced; their devices must be the same.

    Args:
        pools: the pools.
        changed: the rows of the nodes that changed.
        telemetry: of every device.
        suspicion: as `build_pools` takes it; None where neither it nor the telemetry of any
            other node is another than before.
    """
    return {
        resource: _renew(
            pool,
            {
                pool.row_of[node]: rows[resource]
                for node, rows in changed.items()
                if resource in rows
            },
            telemetry,
            suspicion,
        )
        for resource, pool in pools.items()
    }


def _renew(
    pool: Pool,
    changed: Mapping[int, PoolRow],
    telemetry: Telemetry,
    suspicion: Mapping[str, float] | None,
) -> Pool:
    """Return one pool with some of its rows replaced."""
    batch, rows = pool.batch, pool.rows
    if changed:
        batch = patch_batch(batch, changed)
        listed = list(rows)
        for at, row in changed.items():
            listed[at] = row
        rows = tuple(listed)
    if suspicion is not None:
        batch = replace(
            batch,
            telemetry=telemetry.take(batch.slots),
            suspicion=suspicions(pool.row_of, suspicion),
        )
    elif changed:
        at_rows = np.fromiter(changed, np.intp, len(changed))
        seen = telemetry.take(batch.slots[at_rows])
        batch = replace(batch, telemetry=batch.telemetry.with_rows(at_rows, seen))
    return replace(pool, rows=rows, batch=batch, patched=(*pool.patched, *changed))


def suspicions(row_of: Mapping[str, int], suspicion: Mapping[str, float]) -> Ratios:
    """Return the share of its score that each node of a pool loses."""
    shares = np.zeros(len(row_of))
    for node, share in suspicion.items():
        if node in row_of:
            shares[row_of[node]] = share
    return shares
