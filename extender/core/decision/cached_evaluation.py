"""Cache evaluations of a pool per request, and re-evaluate only the rows that changed.

Invariant: a cached evaluation, updated for its dirty rows, equals an evaluation from scratch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from extender.core.decision.assessment import assess_in_steps
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationRequest,
    Overlay,
    Wants,
    estimates,
    evaluate_batch,
    evaluate_for,
)
from extender.core.decision.filtering import Code
from extender.core.decision.landing import assume, closed_slots, count_freed
from extender.core.decision.victims import batch_after
from extender.core.nodes.snapshot import (
    Batch,
    Flags,
    Pool,
    PoolRow,
    Snapshot,
    batch_rows,
    patched,
)
from extender.core.policy import Policy
from extender.core.steps import Steps, finish

MOST_PATCHED = 256
"""Limit of dirty rows per cache entry: above it, evaluating the whole pool is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedEvaluation:
    """Cache entry: a pool's evaluation for one request, and the versions it was computed from.

    Attributes:
        evaluation: evaluation by node, tentative tenants included.
        base: the pool's `base` at that time.
        rows: the pool's rows at that time.
        patched: length of the pool's `patched` list at that time.
        estimated: length of the pool's `estimated` list at that time.
        models: the snapshot's models; a new model may change every score.
        policy: the settings.
        overlay: the tentative tenants included.
    """

    evaluation: Evaluation
    base: int
    rows: tuple[PoolRow, ...]
    patched: int
    estimated: int
    models: tuple[str, ...]
    policy: Policy
    overlay: Overlay

    @classmethod
    def of(
        cls, evaluation: Evaluation, snapshot: Snapshot, pool: Pool, question: EvaluationRequest
    ) -> "CachedEvaluation":
        """Create an entry from an evaluation of the current pool."""
        return cls(
            evaluation=evaluation,
            base=pool.base,
            rows=pool.rows,
            patched=len(pool.patched),
            estimated=len(pool.estimated),
            models=snapshot.models,
            policy=question.policy,
            overlay=question.overlay,
        )

    def holds(self, snapshot: Snapshot, pool: Pool, policy: Policy) -> bool:
        """Return whether the entry is usable: same pool base, models and policy, few dirty rows."""
        is_same = (self.base, self.models) == (pool.base, snapshot.models)
        is_near = len(pool.patched) - self.patched <= MOST_PATCHED
        return is_same and is_near and self.policy is policy


def evaluate_cached(
    snapshot: Snapshot,
    pool: Pool,
    question: EvaluationRequest,
    kept: Iterable[CachedEvaluation] = (),
) -> CachedEvaluation:
    """Return the current evaluation of a pool as a cache entry, updating the closest old entry.

    The pod's nomination is not included; `nominate` adds it.

    Args:
        snapshot: the snapshot.
        pool: one of its pools.
        question: the request.
        kept: old cache entries for the same request.
    """
    (entry,) = evaluate_together(snapshot, pool, [question], [kept])
    return entry


def evaluate_together(
    snapshot: Snapshot,
    pool: Pool,
    questions: Sequence[EvaluationRequest],
    kept: Sequence[Iterable[CachedEvaluation]],
) -> list[CachedEvaluation]:
    """Return current cache entries for several requests, re-evaluating all dirty rows in one batch.

    That takes little longer than the rows of a single request.

    Args:
        snapshot: the snapshot.
        pool: one of its pools.
        questions: the requests, all under the same policy.
        kept: old cache entries per request.
    """
    entries: list[CachedEvaluation] = []
    outdated: list[int] = []
    changed: list[tuple[EvaluationRequest, list[int]]] = []
    for at, (question, old) in enumerate(zip(questions, kept, strict=True)):
        nearest = _nearest(snapshot, pool, question, old)
        if nearest is None:
            steps = evaluate_in_steps(snapshot, pool, question)
            entries.append(finish(steps))
            continue
        entry, touched = nearest
        entries.append(entry)
        if touched:
            outdated.append(at)
            is_out = snapshot.telemetry.is_out
            rows = sorted(_changed(entry, pool, question.overlay, touched, is_out))
            changed.append((question, rows))
    before = [entries[at].evaluation for at in outdated]
    after = _refresh(before, snapshot, pool, changed)
    for at, evaluation in zip(outdated, after, strict=True):
        entries[at] = CachedEvaluation.of(evaluation, snapshot, pool, questions[at])
    return entries


def _nearest(
    snapshot: Snapshot, pool: Pool, question: EvaluationRequest, kept: Iterable[CachedEvaluation]
) -> tuple[CachedEvaluation, set[int]] | None:
    """Return the usable cache entry with the fewest touched rows, and these rows."""
    nearest: tuple[CachedEvaluation, set[int]] | None = None
    for entry in kept:
        if entry.holds(snapshot, pool, question.policy):
            touched = _touched_since(entry, pool, question.overlay)
            if nearest is None or len(touched) < len(nearest[1]):
                nearest = (entry, touched)
    return nearest


def evaluate_in_steps(
    snapshot: Snapshot, pool: Pool, question: EvaluationRequest
) -> Steps[CachedEvaluation]:
    """Evaluate a pool from scratch in steps; the parts that requests share come first."""
    batch = count_freed(pool.batch)
    yield from assess_in_steps(batch, question.ask.columns, estimates(question.policy))
    everywhere = evaluate_for(question, pool.batch, snapshot.models)
    yield
    assumed = {pool.row_of[node] for node in question.overlay if node in pool.row_of}
    changed = sorted(assumed.union(pool.late))
    (evaluation,) = _refresh([everywhere], snapshot, pool, [(question, changed)])
    return CachedEvaluation.of(evaluation, snapshot, pool, question)


def avoid(
    evaluation: Evaluation, snapshot: Snapshot, pool: Pool, question: EvaluationRequest
) -> Evaluation:
    """Return an evaluation in which the nodes that the request avoids lose certainty."""
    avoided = question.request.avoided
    rows = [pool.row_of[node] for node in avoided if node in pool.row_of]
    if not rows:
        return evaluation
    batch = batch_under(snapshot, pool, [(at, question.overlay) for at in rows])
    batch = avoided_in(batch, [pool.nodes[at] for at in rows], avoided)
    fresh = evaluate_for(question, batch, snapshot.models)
    return _patched(evaluation, rows, fresh, slice(0, len(rows)))


def avoided_in(batch: Batch, nodes: Sequence[str], avoided: Mapping[str, float]) -> Batch:
    """Return a batch whose suspicion includes the nodes' early failures of the pod's owner.

    Args:
        batch: some nodes.
        nodes: their names.
        avoided: share of its certainty that a node loses, by name.
    """
    lost = np.array([avoided.get(node, 0.0) for node in nodes])
    return replace(batch, suspicion=1.0 - (1.0 - batch.suspicion) * (1.0 - lost))


def nominate(
    evaluation: Evaluation, snapshot: Snapshot, pool: Pool, question: EvaluationRequest
) -> Evaluation:
    """Return an evaluation in which the pod's nominated node counts as if deleted pods had left it.

    Without pods being deleted there the nomination changes nothing. Devices in foreign use before
    these pods came stay in foreign use.
    """
    at = pool.row_of.get(question.request.nominated_node)
    if at is None:
        return evaluation
    after = evaluate_after(snapshot, pool, at, question)
    if after is None or after.codes[0] not in {Code.PASSES, Code.FOREIGN_USE}:
        return evaluation
    return _patched(evaluation, [at], replace(after, scores=evaluation.scores[[at]]), slice(0, 1))


def evaluate_after(
    snapshot: Snapshot, pool: Pool, at: int, question: EvaluationRequest
) -> Evaluation | None:
    """Evaluate one node as if the pods being deleted there had left; None without such pods.

    Devices that they release count as idle, because they are freed for this pod. If enough other
    whole devices are free, the pod would get those instead; then only pods that have ended are
    removed.
    """
    row, tenants = pool.rows[at], question.overlay.get(pool.nodes[at], ())
    leaving = row.leaving
    if leaving is None or max(leaving.row.slots, default=0) >= len(snapshot.telemetry.latest):
        return None
    free = row.allocatable - row.held - sum(tenant.count for tenant in tenants)
    if not row.is_shared and free >= question.ask.count:
        leaving = leaving.of_ended(row)
    batch = batch_after(
        leaving,
        tenants,
        snapshot.telemetry,
        pool.batch.suspicion[[at]],
        is_presumed_idle=True,
    )
    return evaluate_for(question, batch, snapshot.models)


def row_under(row: PoolRow, node: str, overlay: Overlay, is_out: Flags) -> PoolRow:
    """Return a node's row with its tentative tenants added; `is_out` as in `Telemetry`."""
    tenants = overlay.get(node)
    return assume(row, tenants, closed_slots(row, is_out)) if tenants else row


def batch_under(snapshot: Snapshot, pool: Pool, rows: Sequence[tuple[int, Overlay]]) -> Batch:
    """Build a batch of some nodes with their tentative tenants added."""
    is_out = snapshot.telemetry.is_out
    return batch_rows(
        tuple(row_under(pool.rows[at], pool.nodes[at], overlay, is_out) for at, overlay in rows),
        snapshot.telemetry,
        pool.batch.suspicion[np.array([at for at, _ in rows], dtype=np.intp)],
        width=pool.batch.slots.shape[1],
    )


def _touched_since(entry: CachedEvaluation, pool: Pool, overlay: Overlay) -> set[int]:
    """Return the rows patched, or with changed tentative tenants, since an entry was made."""
    before = entry.overlay
    nodes = {node for node, tenants in overlay.items() if before.get(node) is not tenants}
    nodes.update(node for node in before if node not in overlay)
    moved = {pool.row_of[node] for node in nodes if node in pool.row_of}
    return moved.union(pool.patched[entry.patched :])


def _changed(
    entry: CachedEvaluation, pool: Pool, overlay: Overlay, touched: set[int], is_out: Flags
) -> set[int]:
    """Return the touched rows that need a new evaluation.

    A row is unchanged if a pod was bound to the node on which it was assumed. `is_out` can only
    differ for rows in `estimated`.
    """
    estimated = touched.intersection(pool.estimated[entry.estimated :])
    return estimated.union(
        at
        for at in touched
        if row_under(pool.rows[at], pool.nodes[at], overlay, is_out)
        != row_under(entry.rows[at], pool.nodes[at], entry.overlay, is_out)
    )


def _refresh(
    evaluations: Sequence[Evaluation],
    snapshot: Snapshot,
    pool: Pool,
    changed: Sequence[tuple[EvaluationRequest, Sequence[int]]],
) -> list[Evaluation]:
    """Return evaluations of a pool with some rows evaluated again.

    Args:
        evaluations: one evaluation per request.
        snapshot: the snapshot.
        pool: one of its pools.
        changed: per evaluation, the question and the rows.
    """
    if not any(rows for _, rows in changed):
        return list(evaluations)
    fresh = _evaluate_rows(snapshot, pool, changed)
    after = []
    start = 0
    for evaluation, (_, rows) in zip(evaluations, changed, strict=True):
        own = slice(start, start + len(rows))
        start = own.stop
        after.append(_patched(evaluation, rows, fresh, own) if rows else evaluation)
    return after


def _evaluate_rows(
    snapshot: Snapshot,
    pool: Pool,
    asked: Sequence[tuple[EvaluationRequest, Sequence[int]]],
) -> Evaluation:
    """Evaluate some rows for each of several requests in one batch."""
    asked_of = [(at, question.overlay) for question, rows in asked for at in rows]
    batch = batch_under(snapshot, pool, asked_of)
    ends = np.cumsum([len(of_one) for _, of_one in asked])
    questions = [question for question, _ in asked]
    model_ids = np.split(batch.model_id, ends[:-1])
    wants = Wants.joined(questions, snapshot.models, model_ids)
    return evaluate_batch(batch, wants, questions[0].policy)


def _patched(
    evaluation: Evaluation, rows: Sequence[int], fresh: Evaluation, own: slice
) -> Evaluation:
    """Return an evaluation with `rows` replaced by the slice `own` of `fresh`."""
    index = np.array(rows, dtype=np.intp)
    return Evaluation(
        **{
            column.name: patched(
                getattr(evaluation, column.name), index, getattr(fresh, column.name)[own]
            )
            for column in fields(evaluation)
        }
    )
