"""Update the evaluation of a pool for a request: evaluate only its dirty rows again.

Invariant: the entry that is returned equals, to the last bit, an evaluation from scratch of the
given snapshot with the given tentative tenants. It holds because

- each row is evaluated on its own (`evaluation`);
- `Pool.dirty` lists every row that changed since `Pool.version` began, and any other change of the
  pool begins another version;
- an entry is used only with the version, the models and the policy that it was made with, and rows
  with other tentative tenants count as dirty.

Rows of removed nodes are exempt until the pool's next version: their devices' rows may be reused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from extender.core.decision.assessment import assess_in_steps
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationInputs,
    Others,
    Overlay,
    Wants,
    batch_of,
    estimates,
    evaluate_batch_in_steps,
    evaluate_for_in_steps,
    row_with_tenants,
)
from extender.core.decision.landing import count_freed
from extender.core.nodes.snapshot import Flags, Pool, PoolRow, Snapshot
from extender.core.policy import Policy
from extender.core.steps import Steps, finish

_MAX_DIRTY_ROWS = 256
"""Limit of dirty rows of an entry: with more, evaluating the whole pool is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A pool's evaluation for one request, and its inputs.

    Attributes:
        evaluation: evaluation by row, tentative tenants included.
        version: the pool's version.
        rows: the pool's rows.
        dirty_count: length of the pool's `dirty`.
        estimated_count: length of the pool's `estimated`.
        models: the snapshot's models; a new model may change every score.
        overlay: the tentative tenants.
    """

    evaluation: Evaluation
    version: int
    rows: tuple[PoolRow, ...]
    dirty_count: int
    estimated_count: int
    models: tuple[str, ...]
    policy: Policy
    overlay: Overlay

    @classmethod
    def of(
        cls, evaluation: Evaluation, snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs
    ) -> "CacheEntry":
        """Create an entry from an evaluation of the current pool."""
        return cls(
            evaluation=evaluation,
            version=pool.version,
            rows=pool.rows,
            dirty_count=len(pool.dirty),
            estimated_count=len(pool.estimated),
            models=snapshot.models,
            policy=inputs.policy,
            overlay=inputs.overlay,
        )

    def is_usable(self, snapshot: Snapshot, pool: Pool, policy: Policy) -> bool:
        """Return whether the entry can be updated for a pool faster than by a new evaluation."""
        is_same = (self.version, self.models) == (pool.version, snapshot.models)
        has_few_dirty = len(pool.dirty) - self.dirty_count <= _MAX_DIRTY_ROWS
        return is_same and has_few_dirty and self.policy is policy


def evaluate_cached(
    snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs, entries: Iterable[CacheEntry] = ()
) -> CacheEntry:
    """Evaluate a pool for a request: update the cached entry that has the fewest dirty rows.

    The pod's nomination is not included; `nominate` adds it.

    Args:
        entries: earlier entries for the same request.
    """
    (entry,) = evaluate_together(snapshot, pool, [inputs], [entries])
    return entry


def evaluate_together(
    snapshot: Snapshot,
    pool: Pool,
    all_inputs: Sequence[EvaluationInputs],
    entries: Sequence[Iterable[CacheEntry]],
) -> list[CacheEntry]:
    """Evaluate a pool for several requests: the dirty rows of all cached entries in one batch.

    One batch for all requests takes little longer than a batch for one.

    Args:
        all_inputs: the requests, all with the same policy.
        entries: earlier entries of each request.
    """
    current: list[CacheEntry] = []
    outdated: list[int] = []
    changed: list[tuple[EvaluationInputs, list[int]]] = []
    for at, (inputs, earlier) in enumerate(zip(all_inputs, entries, strict=True)):
        nearest = _nearest(snapshot, pool, inputs, earlier)
        if nearest is None:
            current.append(finish(evaluate_in_steps(snapshot, pool, inputs)))
            continue
        entry, dirty = nearest
        current.append(entry)
        if dirty:
            outdated.append(at)
            is_out = snapshot.telemetry.is_out
            changed.append((inputs, sorted(_changed(entry, pool, inputs, dirty, is_out))))
    before = [current[at].evaluation for at in outdated]
    after = _update(before, snapshot, pool, changed)
    for at, evaluation in zip(outdated, after, strict=True):
        current[at] = CacheEntry.of(evaluation, snapshot, pool, all_inputs[at])
    return current


def evaluate_in_steps(
    snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs
) -> Steps[CacheEntry]:
    """Evaluate a whole pool in steps; the parts that requests share come first."""
    batch = count_freed(pool.batch)
    yield from assess_in_steps(batch, inputs.devices.columns, estimates(inputs.policy))
    as_written = yield from evaluate_for_in_steps(inputs, pool.batch, snapshot.models, pool.seen)
    yield
    assumed = {pool.row_of[node] for node in inputs.overlay if node in pool.row_of}
    changed = sorted(assumed.union(pool.unwritten))
    (evaluation,) = _update([as_written], snapshot, pool, [(inputs, changed)])
    return CacheEntry.of(evaluation, snapshot, pool, inputs)


def _nearest(
    snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs, entries: Iterable[CacheEntry]
) -> tuple[CacheEntry, set[int]] | None:
    """Return the usable entry with the fewest dirty rows, and its dirty rows."""
    usable = [
        (entry, _dirty(entry, pool, inputs.overlay))
        for entry in entries
        if entry.is_usable(snapshot, pool, inputs.policy)
    ]
    return min(usable, key=lambda found: len(found[1]), default=None)


def _dirty(entry: CacheEntry, pool: Pool, overlay: Overlay) -> set[int]:
    """Return the rows that may differ from a cached entry: changed rows, or changed tenants."""
    before = entry.overlay
    nodes = {node for node, tenants in overlay.items() if before.get(node) is not tenants}
    nodes.update(node for node in before if node not in overlay)
    rows = {pool.row_of[node] for node in nodes if node in pool.row_of}
    return rows.union(pool.dirty[entry.dirty_count :])


def _changed(
    entry: CacheEntry, pool: Pool, inputs: EvaluationInputs, dirty: set[int], is_out: Flags
) -> set[int]:
    """Return the dirty rows whose values differ from those of a cached entry.

    A row is unchanged if a pod was bound to the node on which it was assumed. `is_out` can only
    differ for rows in `estimated`.
    """
    estimated = dirty.intersection(pool.estimated[entry.estimated_count :])
    return estimated.union(
        at
        for at in dirty
        if row_with_tenants(pool.rows[at], pool.nodes[at], inputs.overlay, is_out)
        != row_with_tenants(entry.rows[at], pool.nodes[at], entry.overlay, is_out)
    )


def _update(
    evaluations: Sequence[Evaluation],
    snapshot: Snapshot,
    pool: Pool,
    changed: Sequence[tuple[EvaluationInputs, Sequence[int]]],
) -> list[Evaluation]:
    """Return evaluations of a pool with some rows evaluated again, all in one batch.

    Args:
        changed: per evaluation, the request and the rows.
    """
    if not any(rows for _, rows in changed):
        return list(evaluations)
    batch = batch_of(
        snapshot, pool, [(at, inputs.overlay) for inputs, rows in changed for at in rows]
    )
    ends = np.cumsum([len(rows) for _, rows in changed])
    all_inputs = [inputs for inputs, _ in changed]
    model_ids = np.split(batch.model_id, ends[:-1])
    wants = Wants.joined(all_inputs, snapshot.models, model_ids)
    others = Others(seen=pool.seen, models=snapshot.models)
    fresh = finish(evaluate_batch_in_steps(batch, wants, all_inputs[0].policy, others))
    starts = [0, *ends.tolist()]
    return [
        evaluation.with_rows(rows, fresh.part(slice(start, start + len(rows))))
        if rows
        else evaluation
        for evaluation, (_, rows), start in zip(evaluations, changed, starts, strict=False)
    ]
