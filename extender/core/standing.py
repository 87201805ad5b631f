"""What the nodes of a pool are worth to a request: kept, and evaluated anew where that changed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from extender.core.assessment import assess_in_steps
from extender.core.evaluation import (
    Evaluation,
    Overlay,
    Question,
    Wants,
    estimates,
    evaluate_batch,
    evaluate_for,
)
from extender.core.filtering import Code
from extender.core.landing import assume, closed_slots, count_freed
from extender.core.leaving import batch_after
from extender.core.policy import Policy
from extender.core.snapshot import Batch, Flags, Pool, PoolRow, Snapshot, batch_rows, patched
from extender.core.steps import Steps, finish

MOST_PATCHED = 256
"""To evaluate more rows one by one takes longer than to evaluate a whole pool of thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a pool was worth to a request, and what that rested on.

    Attributes:
        evaluation: by node, tentative tenants included.
        base: the pool's, as it was then.
        rows: the pool's, likewise.
        patched: how many of them had been patched by then.
        believed: how many of them had been believed anew by then.
        models: the snapshot's: a new one may change what every node is worth.
        policy: the settings that it was evaluated by.
        overlay: the tentative tenants that were counted.
    """

    evaluation: Evaluation
    base: int
    rows: tuple[PoolRow, ...]
    patched: int
    believed: int
    models: tuple[str, ...]
    policy: Policy
    overlay: Overlay

    @classmethod
    def of(
        cls, evaluation: Evaluation, snapshot: Snapshot, pool: Pool, question: Question
    ) -> "Standing":
        """Return the standing that an evaluation of everything as it is now gives."""
        return cls(
            evaluation=evaluation,
            base=pool.base,
            rows=pool.rows,
            patched=len(pool.patched),
            believed=len(pool.believed),
            models=snapshot.models,
            policy=question.policy,
            overlay=question.overlay,
        )

    def holds(self, snapshot: Snapshot, pool: Pool, policy: Policy) -> bool:
        """Tell whether it still says what most nodes are worth, those that have not changed."""
        is_same = (self.base, self.models) == (pool.base, snapshot.models)
        is_near = len(pool.patched) - self.patched <= MOST_PATCHED
        return is_same and is_near and self.policy is policy


def stand(
    snapshot: Snapshot, pool: Pool, question: Question, kept: Iterable[Standing] = ()
) -> Standing:
    """Return what a pool is worth now; of what is kept from before only the changes are evaluated.

    Where the pod is nominated to makes no difference here: see `nominate`.
    """
    (standing,) = stand_together(snapshot, pool, [question], [kept])
    return standing


def stand_together(
    snapshot: Snapshot,
    pool: Pool,
    questions: Sequence[Question],
    kept: Sequence[Iterable[Standing]],
) -> list[Standing]:
    """Return what a pool is worth to several requests, their changes evaluated side by side.

    That takes little longer than those of one of them.

    Args:
        snapshot: the snapshot.
        pool: one of its pools.
        questions: what is asked of it, all under the same settings.
        kept: for each of them, what is kept from before.
    """
    standings: list[Standing] = []
    late: list[int] = []
    changed: list[tuple[Question, list[int]]] = []
    for at, (question, known) in enumerate(zip(questions, kept, strict=True)):
        nearest = _nearest(snapshot, pool, question, known)
        if nearest is None:
            steps = stand_in_steps(snapshot, pool, question)
            standings.append(finish(steps))
            continue
        standing, touched = nearest
        standings.append(standing)
        if touched:
            late.append(at)
            is_out = snapshot.telemetry.is_out
            rows = sorted(_changed(standing, pool, question.overlay, touched, is_out))
            changed.append((question, rows))
    before = [standings[at].evaluation for at in late]
    after = _evaluate_anew(before, snapshot, pool, changed)
    for at, evaluation in zip(late, after, strict=True):
        standings[at] = Standing.of(evaluation, snapshot, pool, questions[at])
    return standings


def _nearest(
    snapshot: Snapshot, pool: Pool, question: Question, kept: Iterable[Standing]
) -> tuple[Standing, set[int]] | None:
    """Return of what is kept that from which least has happened since, and to which rows."""
    nearest: tuple[Standing, set[int]] | None = None
    for standing in kept:
        if standing.holds(snapshot, pool, question.policy):
            touched = _touched_since(standing, pool, question.overlay)
            if nearest is None or len(touched) < len(nearest[1]):
                nearest = (standing, touched)
    return nearest


def stand_in_steps(snapshot: Snapshot, pool: Pool, question: Question) -> Steps[Standing]:
    """Return what a pool is worth, from scratch; what other requests share is a step of its own."""
    batch = count_freed(pool.batch)
    yield from assess_in_steps(batch, question.ask.columns, estimates(question.policy))
    everywhere = evaluate_for(question, pool.batch, snapshot.models)
    yield
    assumed = {pool.row_of[node] for node in question.overlay if node in pool.row_of}
    changed = sorted(assumed.union(pool.late))
    (evaluation,) = _evaluate_anew([everywhere], snapshot, pool, [(question, changed)])
    return Standing.of(evaluation, snapshot, pool, question)


def avoid(evaluation: Evaluation, snapshot: Snapshot, pool: Pool, question: Question) -> Evaluation:
    """Return an evaluation with what the pod's own request avoids counted."""
    avoided = question.request.avoided
    rows = [pool.row_of[node] for node in avoided if node in pool.row_of]
    if not rows:
        return evaluation
    batch = batch_under(snapshot, pool, [(at, question.overlay) for at in rows])
    batch = avoided_in(batch, [pool.nodes[at] for at in rows], avoided)
    fresh = evaluate_for(question, batch, snapshot.models)
    return _patched(evaluation, rows, fresh, slice(0, len(rows)))


def avoided_in(batch: Batch, nodes: Sequence[str], avoided: Mapping[str, float]) -> Batch:
    """Return a batch in which nodes lose besides what a request avoids of them.

    Args:
        batch: some nodes.
        nodes: their names.
        avoided: share of its certainty that a node loses, by name.
    """
    lost = np.array([avoided.get(node, 0.0) for node in nodes])
    return replace(batch, suspicion=1.0 - (1.0 - batch.suspicion) * (1.0 - lost))


def nominate(
    evaluation: Evaluation, snapshot: Snapshot, pool: Pool, question: Question
) -> Evaluation:
    """Return an evaluation with the pod's own nomination counted.

    It is a promise of what pods release that are being deleted there. Where there are none it was
    made in expectation of something else, and promises nothing. A device that was in foreign use
    before they came is none that they release.
    """
    at = pool.row_of.get(question.request.nominated_node)
    if at is None:
        return evaluation
    after = evaluate_after(snapshot, pool, at, question)
    if after is None or after.codes[0] not in {Code.PASSES, Code.FOREIGN_USE}:
        return evaluation
    return _patched(evaluation, [at], replace(after, scores=evaluation.scores[[at]]), slice(0, 1))


def evaluate_after(
    snapshot: Snapshot, pool: Pool, at: int, question: Question
) -> Evaluation | None:
    """Return what one node is worth once the pods that are being deleted there are gone.

    None where there are none. Those that the pod is nominated for made it free for this pod: what
    they used counts as idle. While as many whole devices are free besides as the pod asks for, it
    would get these and not theirs: then only those count that have ended.
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
    """Return one node's row with the tentative tenants on it; `is_out` as `Telemetry` has it."""
    tenants = overlay.get(node)
    return assume(row, tenants, closed_slots(row, is_out)) if tenants else row


def batch_under(snapshot: Snapshot, pool: Pool, rows: Sequence[tuple[int, Overlay]]) -> Batch:
    """Return some nodes' rows side by side, each with its tentative tenants on it."""
    is_out = snapshot.telemetry.is_out
    return batch_rows(
        tuple(row_under(pool.rows[at], pool.nodes[at], overlay, is_out) for at, overlay in rows),
        snapshot.telemetry,
        pool.batch.suspicion[np.array([at for at, _ in rows], dtype=np.intp)],
        width=pool.batch.slots.shape[1],
    )


def _touched_since(standing: Standing, pool: Pool, overlay: Overlay) -> set[int]:
    """Return the rows that something has happened to since a standing was taken."""
    before = standing.overlay
    nodes = {node for node, tenants in overlay.items() if before.get(node) is not tenants}
    nodes.update(node for node in before if node not in overlay)
    moved = {pool.row_of[node] for node in nodes if node in pool.row_of}
    return moved.union(pool.patched[standing.patched :])


def _changed(
    standing: Standing, pool: Pool, overlay: Overlay, touched: set[int], is_out: Flags
) -> set[int]:
    """Return the touched rows that are others now.

    Where a pod is bound to the node that it was assumed on, nothing has changed. Devices that were
    not believed anew are out as they were before.
    """
    believed = touched.intersection(pool.believed[standing.believed :])
    return believed.union(
        at
        for at in touched
        if row_under(pool.rows[at], pool.nodes[at], overlay, is_out)
        != row_under(standing.rows[at], pool.nodes[at], standing.overlay, is_out)
    )


def _evaluate_anew(
    evaluations: Sequence[Evaluation],
    snapshot: Snapshot,
    pool: Pool,
    changed: Sequence[tuple[Question, Sequence[int]]],
) -> list[Evaluation]:
    """Return evaluations of a pool with some rows evaluated as they are now.

    Args:
        evaluations: to one request each.
        snapshot: the snapshot.
        pool: one of its pools.
        changed: for each of them, what was asked, and the rows.
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
    asked: Sequence[tuple[Question, Sequence[int]]],
) -> Evaluation:
    """Evaluate some rows for each of several requests, side by side."""
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
    """Return an evaluation with some rows as `fresh` has them, in its rows `own`."""
    index = np.array(rows, dtype=np.intp)
    return Evaluation(
        **{
            column.name: patched(
                getattr(evaluation, column.name), index, getattr(fresh, column.name)[own]
            )
            for column in fields(evaluation)
        }
    )
