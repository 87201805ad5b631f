"""The decision: which candidate nodes would do for a request, and in which order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import repeat

import numpy as np

from extender.core.assessment import Ask, Assessment, Estimates, assess
from extender.core.batches import take_batch
from extender.core.filtering import Code, Codes, reject
from extender.core.landing import assume
from extender.core.policy import Policy
from extender.core.request import GpuRequest
from extender.core.scoring import UNKNOWN_SCORE, mean, score
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

RELAXED_MARGIN = 0.10
"""Where no node has enough idle devices, the load filter lets those pass whose load is within
this ratio of the least."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict on each candidate, in the order of the question.

    Attributes:
        candidates: node names.
        codes: the first reason against each, `Code.PASSES` where there is none.
        scores: ratio from 0 to 1; full precision, meaningful for every candidate.
        order: indexes of the candidates that pass, best first; ties go by node name.
    """

    candidates: tuple[str, ...]
    codes: Codes
    scores: Ratios
    order: Rows

    @property
    def best(self) -> str | None:
        """Name of our first choice, None where no candidate passes."""
        return self.candidates[self.order[0]] if len(self.order) else None


Evaluate = Callable[[Snapshot, Pool, GpuRequest, Ask], Evaluation]
"""How a pool is evaluated; a cache may stand between."""


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


def evaluate_pool(
    snapshot: Snapshot, pool: Pool, request: GpuRequest, ask: Ask, policy: Policy
) -> Evaluation:
    """Evaluate every node of a pool as the snapshot has it, without tentative tenants."""
    places = model_places(snapshot.models, request.preferred_models)
    nominated = np.zeros(len(pool.nodes), dtype=np.bool_)
    return evaluate_batch(pool.batch, request, ask, policy, places, nominated)


def evaluate_again(
    evaluation: Evaluation,
    snapshot: Snapshot,
    pool: Pool,
    rows: Sequence[int],
    rest: tuple[GpuRequest, Ask, Policy],
) -> Evaluation:
    """Return an evaluation of the pool as it was with some rows evaluated as they are now."""
    if not rows:
        return evaluation
    request, ask, policy = rest
    index = np.unique(np.array(rows, dtype=np.intp))
    places = model_places(snapshot.models, request.preferred_models)
    nominated = np.zeros(len(index), dtype=np.bool_)
    batch = take_batch(pool.batch, index)
    fresh = evaluate_batch(batch, request, ask, policy, places, nominated)
    return _with_rows(evaluation, index, fresh)


def _with_rows(evaluation: Evaluation, index: Rows, fresh: Evaluation) -> Evaluation:
    """Return an evaluation with those of `fresh` at `index`."""
    return Evaluation(
        **{
            column.name: patched(
                getattr(evaluation, column.name), index, getattr(fresh, column.name)
            )
            for column in fields(evaluation)
        }
    )


def correct(
    evaluation: Evaluation,
    pool: Pool,
    snapshot: Snapshot,
    changed: Mapping[int, PoolRow],
    rest: tuple[GpuRequest, Ask, Policy],
) -> Evaluation:
    """Return `evaluation` with the rows of `changed` evaluated anew from their new records."""
    if not changed:
        return evaluation
    request, ask, policy = rest
    index = np.fromiter(changed, dtype=np.intp, count=len(changed))
    batch = batch_rows(
        tuple(changed.values()),
        snapshot.telemetry,
        pool.batch.suspicion[index],
        width=pool.batch.slots.shape[1],
    )
    nominated = np.array([pool.nodes[row] == request.nominated_node for row in changed])
    places = model_places(snapshot.models, request.preferred_models)
    fresh = evaluate_batch(batch, request, ask, policy, places, nominated)
    return _with_rows(evaluation, index, fresh)


def changed_rows(pool: Pool, overlay: Overlay, nominated_node: str) -> dict[int, PoolRow]:
    """Return the rows on which tentative tenants or the pod's own nomination make a difference."""
    changed = {
        pool.row_of[node]: assume(pool.rows[pool.row_of[node]], tenants)
        for node, tenants in overlay.items()
        if node in pool.row_of
    }
    if nominated_node in pool.row_of:
        row = pool.row_of[nominated_node]
        changed.setdefault(row, pool.rows[row])
    return changed


def decide(
    snapshot: Snapshot,
    request: GpuRequest,
    candidates: tuple[str, ...],
    policy: Policy,
    *,
    overlays: Mapping[str, Overlay],
    evaluate: Evaluate,
) -> Decision:
    """Decide which candidates would do for `request`, and in which order.

    A candidate that the snapshot does not know passes with `UNKNOWN_SCORE`, except for a pod that
    waits for devices known to be idle.

    Args:
        snapshot: the fleet.
        request: what the pod asks for.
        candidates: node names, in kube-scheduler's order.
        policy: the settings of the decision.
        overlays: tentative tenants by resource and node; never the pod itself.
        evaluate: how a whole pool is evaluated: `evaluate_pool`, or a cache before it.
    """
    is_nominated = np.zeros(len(candidates), dtype=np.bool_)
    if request.nominated_node:
        is_nominated[:] = [node == request.nominated_node for node in candidates]
    unknown_code = Code.NOT_IDLE if request.requires_idle else Code.PASSES
    tally = _Tally(np.where(is_nominated, Code.PASSES, unknown_code).astype(np.uint8))
    for resource, ask in asks(request):
        pool = snapshot.pools.get(resource)
        if pool is None:
            tally.add_unknown(np.ones(len(candidates), dtype=np.bool_))
            continue
        changed = changed_rows(pool, overlays.get(resource, {}), request.nominated_node)
        evaluation = correct(
            evaluate(snapshot, pool, request, ask), pool, snapshot, changed, (request, ask, policy)
        )
        found = map(pool.row_of.get, candidates, repeat(-1))
        rows = np.fromiter(found, np.intp, len(candidates))
        tally.add(evaluation, rows)
    codes = tally.codes
    if policy.load_filter.is_enabled:
        codes = _refuse_busy(codes, tally, is_nominated)
    return Decision(
        candidates=candidates,
        codes=codes,
        scores=tally.scores,
        order=_order(candidates, codes, tally.scores),
    )


class _Tally:
    """The verdict on each candidate over all resources that a pod asks for: the worst counts.

    Args:
        unknown_codes: per candidate, the verdict where we do not know that it offers a resource.
    """

    def __init__(self, unknown_codes: Codes) -> None:
        count = len(unknown_codes)
        self._unknown_codes = unknown_codes
        self.codes: Codes = np.zeros(count, dtype=np.uint8)
        self.scores = np.ones(count)
        self.load = np.zeros(count)
        self.is_enough: Flags = np.ones(count, dtype=np.bool_)
        self.is_busy: Flags = np.zeros(count, dtype=np.bool_)

    def add(self, evaluation: Evaluation, rows: Rows) -> None:
        """Add the evaluation of one resource; row -1 is a node that does not offer it."""
        known = rows >= 0
        at = rows[known]
        self._refuse(known, evaluation.codes[at])
        self.scores[known] = np.minimum(self.scores[known], evaluation.scores[at])
        self.load[known] = np.maximum(self.load[known], evaluation.utilization[at])
        self.is_enough[known] &= evaluation.idle[at] >= evaluation.needed[at]
        self.is_busy[known] |= evaluation.possible[at] < evaluation.needed[at]
        self.add_unknown(~known)

    def add_unknown(self, which: Flags) -> None:
        """Add a resource that the candidates in `which` do not offer as far as we know."""
        self._refuse(which, self._unknown_codes[which])
        self.scores[which] = np.minimum(self.scores[which], UNKNOWN_SCORE)
        self.is_enough[which] = False

    def _refuse(self, which: Flags, codes: Codes) -> None:
        before = self.codes[which]
        self.codes[which] = np.where(before == Code.PASSES, codes, before)


def _refuse_busy(codes: Codes, tally: _Tally, is_nominated: Flags) -> Codes:
    """Refuse nodes known to be busy, but never all: at least the least loaded ones pass.

    On the nominated node the readings may still show the victims.
    """
    passing = codes == Code.PASSES
    if not passing.any():
        return codes
    if (passing & (tally.is_enough | ~tally.is_busy)).any():
        refused = passing & tally.is_busy
    else:
        refused = passing & (tally.load > tally.load[passing].min() + RELAXED_MARGIN)
    return np.where(refused & ~is_nominated, np.uint8(Code.BUSY), codes)


def _order(candidates: tuple[str, ...], codes: Codes, scores: Ratios) -> Rows:
    """Return the candidates that pass, best first; ties by name, whatever order was asked in."""
    passing = np.flatnonzero(codes == Code.PASSES)
    ranked = passing[np.argsort(-scores[passing], kind="stable")]
    if not len(ranked):
        return ranked
    # Names are compared only within runs of equal scores: sorting 5,000 strings is dear.
    values = scores[ranked]
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    ends = np.r_[starts[1:], len(ranked)]
    for start, end in zip(starts, ends, strict=True):
        if end - start > 1:
            ranked[start:end] = sorted(ranked[start:end], key=candidates.__getitem__)
    return ranked
