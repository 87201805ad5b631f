"""What the nodes of a pool are worth to a request; kept, and evaluated anew where that changed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from extender.core.assessment import Ask, Assessment, Estimates, assess
from extender.core.batches import take_batch
from extender.core.filtering import Codes, reject
from extender.core.landing import assume
from extender.core.policy import Policy
from extender.core.request import GpuRequest
from extender.core.scoring import mean, score
from extender.core.snapshot import (
    Batch,
    Flags,
    Pool,
    PoolRow,
    Ratios,
    Rows,
    Snapshot,
    Tenant,
    batch_rows,
    patched,
)
from extender.core.steps import Steps, finish

Overlay = Mapping[str, tuple[Tenant, ...]]
"""Tentative tenants by node name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What every node of a pool is worth to one request; one row per node.

    Attributes:
        codes: the first reason against the node, `Code.PASSES` where there is none.
        scores: ratio from 0 to 1.
        idle: landing devices known to suit.
        needed: distinct devices that the pod will get.
        possible: landing devices that suit or may suit for all that is known.
        utilization: mean ratio of the landing devices.
    """

    codes: Codes
    scores: Ratios
    idle: Rows
    needed: Rows
    possible: Rows
    utilization: Ratios


def model_places(models: Sequence[str], preferred: Sequence[str]) -> Rows:
    """Return by model id how early the pod's list names the model; 0 where it does not.

    A preference matches a model that contains it as a word, so `H100` is `NVIDIA H100 80GB HBM3`.

    Example:
        >>> model_places(["", "nvidia a100 sxm4 40gb", "nvidia h100 80gb hbm3"], ["H100", "A100"])
        array([0, 1, 2])
    """
    places = [0] * len(models)
    for place, preference in enumerate(preferred):
        words = f" {normalize_model(preference)} "
        for model_id, model in enumerate(models):
            if not places[model_id] and words in f" {model} ":
                places[model_id] = len(preferred) - place
    return np.array(places, dtype=np.intp)


def normalize_model(model: str) -> str:
    """Return a model in lower-case words, however its source joins them.

    Example:
        >>> normalize_model("NVIDIA-A100-SXM4-40GB")
        'nvidia a100 sxm4 40gb'
    """
    return " ".join(model.lower().replace("-", " ").replace("_", " ").split())


def evaluate_batch(
    batch: Batch, request: GpuRequest, ask: Ask, policy: Policy, places: Rows, nominated: Flags
) -> Evaluation:
    """Evaluate each node of a batch."""
    assessment = assess(batch, ask, estimates(policy))
    codes = reject(batch, ask, assessment, requires_idle=request.requires_idle, nominated=nominated)
    return Evaluation(
        codes=codes,
        scores=score(batch, assessment, request.strategy, places),
        idle=assessment.idle,
        needed=assessment.landing.needed,
        possible=_possible(assessment),
        utilization=mean(
            assessment.utilization, assessment.landing.devices, assessment.landing.size
        ),
    )


def _possible(assessment: Assessment) -> Rows:
    """Return how many landing devices suit, or may suit for all that is known.

    The held ones may be the busy ones; where all are held by our count, that is late.
    """
    landing = assessment.landing
    may_suit = (assessment.fits & (assessment.idle_chance > 0)).sum(axis=1)
    possible: Rows = np.minimum(may_suit, np.maximum(landing.size - landing.taken, landing.needed))
    return possible


def estimates(policy: Policy) -> Estimates:
    """Return what the policy believes of tenants that the readings do not show."""
    return Estimates(
        utilization=policy.assumed.utilization,
        mps_share_bytes=policy.mps_share_bytes,
    )


def asks(request: GpuRequest) -> tuple[tuple[str, Ask], ...]:
    """Return what the request asks of each resource."""
    return tuple(
        (
            resource,
            Ask(
                count=count,
                memory_bytes=float(request.memory_bytes or 0),
                thresholds=request.thresholds,
            ),
        )
        for resource, count in request.resources
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a pod asks of one pool.

    Attributes:
        request: the pod's whole request.
        ask: what it asks of the pool's resource.
        policy: the settings of the decision.
        overlay: tentative tenants; never the pod itself.
    """

    request: GpuRequest
    ask: Ask
    policy: Policy
    overlay: Overlay


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a pool was worth to a request, and what that rested on.

    Attributes:
        evaluation: by node, tentative tenants included.
        base: the pool's, as it was then.
        models: the snapshot's: a new one may change what every node is worth.
        policy: the settings that it was evaluated by.
        patched: how many of its rows had been patched by then.
        overlay: the tentative tenants that were counted.
    """

    evaluation: Evaluation
    base: int
    models: tuple[str, ...]
    policy: Policy
    patched: int
    overlay: Overlay

    def holds(self, snapshot: Snapshot, pool: Pool, policy: Policy) -> bool:
        """Tell whether it still says what the nodes are worth that have not changed since."""
        is_same = (self.base, self.models) == (pool.base, snapshot.models)
        return is_same and self.policy is policy


def stand(
    snapshot: Snapshot, pool: Pool, question: Question, kept: Iterable[Standing] = ()
) -> Standing:
    """Return what a pool is worth now; of what is kept from before only the changes are evaluated.

    Where the pod is nominated to makes no difference here: see `nominate`.
    """
    nearest: tuple[Standing, set[int]] | None = None
    for standing in kept:
        if standing.holds(snapshot, pool, question.policy):
            changed = _changed_since(standing, pool, question.overlay)
            if nearest is None or len(changed) < len(nearest[1]):
                nearest = (standing, changed)
    if nearest is None:
        nearest = finish(stand_in_steps(snapshot, pool, question, piece=len(pool.nodes))), set()
    standing, changed = nearest
    if not changed:
        return standing
    return Standing(
        evaluation=_evaluate_anew(
            standing.evaluation, snapshot, pool, sorted(changed), question, ""
        ),
        base=pool.base,
        models=snapshot.models,
        policy=question.policy,
        patched=len(pool.patched),
        overlay=question.overlay,
    )


def stand_in_steps(
    snapshot: Snapshot, pool: Pool, question: Question, piece: int = 1000
) -> Steps[Standing]:
    """Return what a pool is worth, from scratch, so many nodes in each step."""
    places = model_places(snapshot.models, question.request.preferred_models)
    parts = []
    for start in range(0, max(len(pool.nodes), 1), max(piece, 1)):
        batch = take_batch(pool.batch, slice(start, start + piece))
        nominated = np.zeros(len(batch), dtype=np.bool_)
        parts.append(
            evaluate_batch(
                batch, question.request, question.ask, question.policy, places, nominated
            )
        )
        yield
    everywhere = parts[0] if len(parts) == 1 else _joined(parts)
    changed = sorted(pool.row_of[node] for node in question.overlay if node in pool.row_of)
    return Standing(
        evaluation=_evaluate_anew(everywhere, snapshot, pool, changed, question, ""),
        base=pool.base,
        models=snapshot.models,
        policy=question.policy,
        patched=len(pool.patched),
        overlay=question.overlay,
    )


def nominate(
    evaluation: Evaluation, snapshot: Snapshot, pool: Pool, question: Question
) -> Evaluation:
    """Return an evaluation with the pod's own nomination counted: there it is promised room."""
    node = question.request.nominated_node
    if node not in pool.row_of:
        return evaluation
    return _evaluate_anew(evaluation, snapshot, pool, [pool.row_of[node]], question, node)


def row_under(pool: Pool, row: int, overlay: Overlay) -> PoolRow:
    """Return one node's row with the tentative tenants on it."""
    tenants = overlay.get(pool.nodes[row])
    return assume(pool.rows[row], tenants) if tenants else pool.rows[row]


def _changed_since(standing: Standing, pool: Pool, overlay: Overlay) -> set[int]:
    """Return the rows that are others than when a standing was taken."""
    before = standing.overlay
    nodes = {node for node, tenants in overlay.items() if before.get(node) is not tenants}
    nodes.update(node for node in before if node not in overlay)
    moved = {pool.row_of[node] for node in nodes if node in pool.row_of}
    return moved.union(pool.patched[standing.patched :])


def _joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Return evaluations of one pool's parts as one."""
    return Evaluation(
        **{
            column.name: np.concatenate([getattr(part, column.name) for part in parts])
            for column in fields(Evaluation)
        }
    )


def _evaluate_anew(
    evaluation: Evaluation,
    snapshot: Snapshot,
    pool: Pool,
    rows: Sequence[int],
    question: Question,
    nominated_node: str,
) -> Evaluation:
    """Return an evaluation with some rows evaluated as they are now."""
    if not rows:
        return evaluation
    index = np.array(rows, dtype=np.intp)
    batch = batch_rows(
        tuple(row_under(pool, row, question.overlay) for row in rows),
        snapshot.telemetry,
        pool.batch.suspicion[index],
        width=pool.batch.slots.shape[1],
    )
    fresh = evaluate_batch(
        batch,
        question.request,
        question.ask,
        question.policy,
        model_places(snapshot.models, question.request.preferred_models),
        np.array([pool.nodes[row] == nominated_node for row in rows]),
    )
    return Evaluation(
        **{
            column.name: patched(
                getattr(evaluation, column.name), index, getattr(fresh, column.name)
            )
            for column in fields(evaluation)
        }
    )
