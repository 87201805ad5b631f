"""Decide which candidate nodes pass the filter for a request, and order them by score."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.decision.dirty_rows import evaluate_cached
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationInputs,
    Overlay,
    avoid,
    device_requests,
    nominate,
)
from extender.core.decision.filtering import Code, Codes
from extender.core.decision.group_fit import GroupFit, GroupNeed, fit_group, too_few
from extender.core.decision.landing import Band
from extender.core.decision.scoring import GPU, PLACES, UNITS, is_roomy, unknown_score
from extender.core.nodes.node_names import NamesAt
from extender.core.nodes.snapshot import NO_PRICE, Batch, Flags, Pool, Ratios, Rows, Snapshot
from extender.core.policy import Policy, PriceMode
from extender.core.request.annotations import Target, TargetPolicy
from extender.core.request.request import GpuRequest

_RELAXED_MARGIN = 0.10
"""If no node has enough idle devices, the load filter passes nodes whose load is at most this ratio
above the lowest load."""


_ABOUT: Final = (GPU - 1) / UNITS
"""Scores that differ by at most this much count as equal: less than one GPU of fit."""

_NO_ZONES: Final[Rows] = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Verdict on each candidate, in the order of the request, or by node name after `slim`.

    Attributes:
        candidates: node names.
        codes: the first rejection of each candidate, `Code.PASSES` without one.
        scores: ratio from 0 to 1 at full precision, meaningful for every candidate.
        zones: zone number of each candidate, -1 if unknown; () after `slim`.
        order: indexes of passing candidates, best first, ties by node name. Limited to the best
            ones if `decide` was called with `ranked`.
        group: nearness of the candidates to the pod's group, None if it is in none.
    """

    candidates: Sequence[str]
    codes: Codes
    scores: npt.NDArray[np.floating]
    order: Rows
    zones: Rows = field(default_factory=lambda: _NO_ZONES, repr=False)
    group: GroupFit | None = None

    def slim(self, kept: int, like: Sequence[str] | None = None) -> "Decision":
        """Return a compact copy for the decision log, sorted by node name.

        Scores are reduced to float32: seven digits, more than users see.

        Args:
            kept: number of best candidates to keep in `order`.
            like: candidates of an earlier slim decision, shared if they are equal.
        """
        order, scores = self.order[:kept], self.scores.astype(np.float32)
        if not isinstance(self.candidates, NamesAt):
            return replace(self, scores=scores, order=order.copy(), zones=_NO_ZONES)
        rows = self.candidates.rows
        listed = np.full(len(self.candidates.names), -1, dtype=np.intp)
        listed[rows] = np.arange(len(rows))
        by_name = listed[listed >= 0]  # numbers follow the name order
        place = np.empty_like(by_name)
        place[by_name] = np.arange(len(by_name))
        codes = self.codes[by_name]
        return replace(
            self,
            candidates=self.candidates.sorted_as(by_name, like),
            codes=codes if codes.any() else np.broadcast_to(codes[:1], codes.shape),
            scores=scores[by_name],
            order=place[order],
            zones=_NO_ZONES,
            group=self.group and self.group.take(by_name),
        )

    def shortlist(self, count: int, reach: float) -> Rows:
        """Return the indexes of the `count` best passing candidates, ascending.

        Candidates that are about as good as the last of the best are drawn evenly from all zones,
        because kube-scheduler chooses among them and may have to spread pods.

        Args:
            count: number of candidates; fewer than pass, and at most the length of `order`.
            reach: candidates whose score is within this distance of the best are always included.
        """
        best = self.order[:count]
        top = self.scores[best]
        edge, lifted = top[-1], top[0] - reach if reach else np.inf
        at = np.flatnonzero(self.scores >= min(edge - _ABOUT, lifted))
        if self.codes.any():
            at = at[self.codes[at] == Code.PASSES]
        if len(at) == count:
            return at
        scores = self.scores[at]
        sure = best[: max(int(np.count_nonzero(top > edge + _ABOUT)), 1)]
        alike = at[(scores >= edge - _ABOUT) & (scores <= edge + _ABOUT) & (at != best[0])]
        if len(sure) + len(alike) > count:
            alike = alike[_from_each(self.zones[alike], self._numbers(alike), count - len(sure))]
        named = np.concatenate([sure, alike])
        return np.union1d(named, at[scores >= lifted]) if reach else np.sort(named)

    def _numbers(self, rows: Rows) -> Rows:
        """Return a number per candidate in name order, independent of the request."""
        if isinstance(self.candidates, NamesAt):
            return self.candidates.rows[rows].astype(np.intp)
        names = np.array([self.candidates[at] for at in rows.tolist()])
        return np.unique(names, return_inverse=True)[1]

    @property
    def feasible(self) -> int:
        """Number of candidates that pass."""
        return len(self.codes) - int(np.count_nonzero(self.codes))

    def refused(self, count: int) -> list[int]:
        """Return the indexes of up to `count` refused candidates, alternating by rejection."""
        rows = np.flatnonzero(self.codes) if count > 0 else np.zeros(0, dtype=np.intp)
        codes = self.codes[rows]
        rounds = np.zeros(len(rows), dtype=np.intp)
        for code in np.unique(codes):
            rounds[codes == code] = np.arange(np.count_nonzero(codes == code))
        chosen: list[int] = rows[np.argsort(rounds, kind="stable")[:count]].tolist()
        return chosen

    def place_of(self, node: str) -> int | None:
        """Return a node's index among the candidates, or None if it is not a candidate."""
        try:
            return self.candidates.index(node)
        except ValueError:
            return None

    @property
    def best(self) -> str | None:
        """Name of the best candidate, None if no candidate passes."""
        return self.candidates[self.order[0]] if len(self.order) else None


Evaluate = Callable[[Snapshot, Pool, EvaluationInputs], Evaluation]
"""Function that evaluates a pool, `_evaluate_pool` or a cache in front of it."""


def _from_each(zones: Rows, numbers: Rows, count: int) -> Rows:
    """Return the indexes of `count` nodes, drawn evenly from each zone and evenly by name.

    Nodes of one kind often have similar names, so evenly spaced names mix the kinds.

    Args:
        zones: zone number of each node.
        numbers: number of each node in name order.
        count: number of nodes to draw, fewer than there are.
    """
    found: list[Rows] = []
    sizes = np.bincount(zones + 1)
    kinds = np.flatnonzero(sizes)
    for done, kind in enumerate(kinds[np.argsort(sizes[kinds], kind="stable")].tolist()):
        share = count // (len(kinds) - done)
        members = np.flatnonzero(zones == kind - 1)
        if share < len(members):
            by_name = members[np.argsort(numbers[members], kind="stable")]
            members = by_name[np.arange(share) * len(members) // max(share, 1)]
        found.append(members)
        count -= len(members)
    return np.concatenate(found)


def _evaluate_pool(snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs) -> Evaluation:
    """Evaluate every node of a pool for one request, without a cache."""
    return evaluate_cached(snapshot, pool, inputs).evaluation


def decide(
    snapshot: Snapshot,
    request: GpuRequest,
    candidates: Sequence[str],
    policy: Policy,
    *,
    overlays: Mapping[str, Overlay],
    evaluate: Evaluate = _evaluate_pool,
    ranked: int | None = None,
    group: GroupNeed | GroupFit | None = None,
) -> Decision:
    """Decide which candidates pass for `request`, and order them by score.

    A candidate that is missing in the snapshot passes with an unknown score, unless the pod
    requires devices known to be idle.

    Args:
        candidates: node names, in kube-scheduler's order.
        overlays: tentative tenants by resource and node, without the pod itself.
        evaluate: function that evaluates a whole pool: `_evaluate_pool`, or a cache in front of it.
        ranked: number of best candidates to order, None for all that pass.
        group: needs of the pod's group, None if the pod is in none; or the nearness of the
            candidates to the group from a logged decision.
    """
    targets, target_policy = request.targets, request.target_policy
    if targets:
        request = replace(request, targets=())  # evaluations do not depend on them
    # Numbers instead of names: no strings are created or compared.
    candidates = snapshot.node_index.number(candidates)
    grouping: _Grouping | None = None
    tally = _Tally(request, candidates, weighs_load=policy.load_filter.is_enabled)
    for resource, devices in device_requests(request):
        pool = snapshot.pools.get(resource)
        if pool is None:
            tally.add_unknown()
            continue
        inputs = EvaluationInputs(
            request=request, devices=devices, policy=policy, overlay=overlays.get(resource, {})
        )
        evaluation = evaluate(snapshot, pool, inputs)
        evaluation = avoid(evaluation, snapshot, pool, inputs)
        evaluation = nominate(evaluation, snapshot, pool, inputs)
        rows = _rows_in(snapshot, pool, candidates)
        tally.add(evaluation, rows, pool.batch)
        if isinstance(group, GroupNeed) and resource == request.resource:
            grouping = _Grouping(group, pool, rows, inputs, evaluation.codes)
    codes = tally.codes
    if policy.load_filter.is_enabled:
        codes = _refuse_busy(codes, tally)
    if targets:
        codes = _refuse_others(candidates, codes, targets, target_policy)
    elif policy.prices.mode is PriceMode.STRICT and not request.names_models:
        roomy = is_roomy(tally.scores) if request.expected_bytes else None
        codes = _refuse_dearer(codes, tally.prices, roomy)
    fit = group if isinstance(group, GroupFit) else None
    fit = fit if grouping is None else grouping.judge(codes)
    codes, scores = _weigh_group(fit, codes, tally.scores)
    return Decision(
        candidates=candidates,
        codes=codes,
        scores=scores,
        order=_order(candidates, codes, scores, ranked),
        zones=tally.zones,
        group=fit,
    )


def _rows_in(snapshot: Snapshot, pool: Pool, candidates: Sequence[str]) -> Rows:
    """Return the row of each candidate in a pool, -1 if it is not in the pool."""
    rows = snapshot.node_index.rows(pool.resource, candidates)
    if rows is None:
        found = map(pool.row_of.get, candidates, repeat(-1))
        rows = np.fromiter(found, np.intp, len(candidates))
    return rows


class _Tally:
    """Combine the verdicts on each candidate over all resources of a pod: the worst one counts.

    Args:
        weighs_load: whether to collect `load` and `is_busy` for the load filter.
    """

    def __init__(
        self, request: GpuRequest, candidates: Sequence[str], *, weighs_load: bool
    ) -> None:
        count = len(candidates)
        self._request = request
        self._candidates = candidates
        self._weighs_load = weighs_load
        self._unknown_score = unknown_score(0 if request.preferred_models else PLACES)
        self.codes: Codes = np.zeros(count, dtype=np.uint8)
        self.scores = np.ones(count)
        self.zones: Rows = np.full(count, -1, dtype=np.intp)
        self.prices: Rows = np.full(count, NO_PRICE, dtype=np.intp)
        if weighs_load:
            self.load = np.zeros(count)
            self.is_busy: Flags = np.zeros(count, dtype=np.bool_)

    @cached_property
    def _unknown_codes(self) -> Codes:
        """Verdict on candidates that are not known to offer a resource."""
        code = Code.NOT_IDLE if self._request.requires_idle else Code.PASSES
        code = Code.WRONG_MODEL if self._request.required_models else code
        return np.full(len(self._candidates), code, dtype=np.uint8)

    def add(self, evaluation: Evaluation, rows: Rows, batch: Batch) -> None:
        """Add the evaluation of one resource; row -1 marks a candidate without the resource."""
        if (rows >= 0).all():
            codes, scores = evaluation.codes[rows], evaluation.scores[rows]
            self.zones, self.prices = batch.zone_id[rows], batch.price[rows]
        else:
            self.zones = np.where(rows < 0, self.zones, np.append(batch.zone_id, -1)[rows])
            self.prices = np.where(rows < 0, self.prices, np.append(batch.price, NO_PRICE)[rows])
            codes = np.append(evaluation.codes, np.uint8(Code.PASSES))[rows]
            codes = np.where(rows < 0, self._unknown_codes, codes)
            scores = np.append(evaluation.scores, self._unknown_score)[rows]
        self._worsen(codes, scores)
        if self._weighs_load:
            is_busy = evaluation.bands == Band.UNLIKELY
            self.load = np.maximum(self.load, np.append(evaluation.utilization, 0.0)[rows])
            self.is_busy |= np.append(is_busy, False)[rows]

    def add_unknown(self) -> None:
        """Add a resource that no known node offers."""
        self._worsen(self._unknown_codes, np.full(len(self._candidates), self._unknown_score))

    def _worsen(self, codes: Codes, scores: Ratios) -> None:
        self.codes = np.where(self.codes == Code.PASSES, codes, self.codes)
        self.scores = np.minimum(self.scores, scores)


@dataclass(frozen=True, slots=True)
class _Grouping:
    """A pod's group, and the pool of the pod's first resource.

    Attributes:
        rows: row of each candidate in the pool, -1 if it is not there.
        codes: verdict on each row of the pool.
    """

    need: GroupNeed
    pool: Pool
    rows: Rows
    inputs: EvaluationInputs
    codes: Codes

    def judge(self, codes: Codes) -> GroupFit:
        """Rank the candidates by their nearness to the group, using the verdicts on them.

        A group that the cluster can never hold is refused before its first pod is placed. Nodes
        that are not known yet may hold it.
        """
        need, inputs = self.need, self.inputs
        holds = None
        if (self.rows >= 0).all():
            holds = too_few(need, self.pool, self.codes, inputs.devices.count)
        fit = fit_group(need, self.pool, self.rows, codes, inputs)
        return replace(fit, too_few=holds)


def _weigh_group(fit: GroupFit | None, codes: Codes, scores: Ratios) -> tuple[Codes, Ratios]:
    """Return the candidates' codes and scores, adjusted for their pod's group."""
    if fit is None:
        return codes, scores
    if fit.too_few is not None:
        codes = np.where(codes == Code.PASSES, np.uint8(Code.GROUP_TOO_LARGE), codes)
    return codes, scores + fit.units_of_all() / UNITS


def _refuse_busy(codes: Codes, tally: _Tally) -> Codes:
    """Refuse nodes known to be busy, but never all: the least loaded nodes always pass."""
    passing = codes == Code.PASSES
    if not passing.any():
        return codes
    if (passing & ~tally.is_busy).any():
        refused = passing & tally.is_busy
    else:
        refused = passing & (tally.load > tally.load[passing].min() + _RELAXED_MARGIN)
    return np.where(refused, np.uint8(Code.BUSY), codes)


def _refuse_dearer(codes: Codes, prices: Rows, roomy: Flags | None) -> Codes:
    """Refuse nodes that cost more than another that passes; nodes without a price pass.

    Args:
        roomy: whether a node has the memory that the pod will likely use; None if unknown.
    """
    known = (codes == Code.PASSES) & (prices != NO_PRICE)
    if not known.any():
        return codes
    suitable = known if roomy is None or not (known & roomy).any() else known & roomy
    is_dearer = known & (prices > prices[suitable].min())
    return np.where(is_dearer, np.uint8(Code.DEARER), codes)


def _refuse_others(
    candidates: Sequence[str], codes: Codes, targets: Sequence[Target], policy: TargetPolicy
) -> Codes:
    """Refuse all nodes but the first target that passes; else the target policy applies."""
    place = {node: at for at, node in enumerate(candidates)}
    found = (place.get(target.node) for target in targets if target.is_usable)
    at = next((at for at in found if at is not None and codes[at] == Code.PASSES), None)
    if at is None and policy is TargetPolicy.PREFER:
        return codes
    after = np.where(codes == Code.PASSES, np.uint8(Code.NOT_TARGET), codes)
    if at is not None:
        after[at] = Code.PASSES
    return after


def _order(candidates: Sequence[str], codes: Codes, scores: Ratios, ranked: int | None) -> Rows:
    """Return the indexes of passing candidates, best first; ties by name."""
    passing = np.flatnonzero(codes == Code.PASSES)
    least = -(scores if len(passing) == len(scores) else scores[passing])
    if ranked is not None and ranked < len(passing):
        # Include all candidates that tie with the last one: the name decides among these.
        edge = np.partition(least, ranked)[ranked]
        best = np.flatnonzero(least <= edge)
        if isinstance(candidates, NamesAt) and len(best) > ranked:
            # Of many ties only the first by name are sorted: sorting all takes longer.
            numbers = np.where(least[best] < edge, -1, candidates.rows[passing[best]])
            best = best[numbers <= np.partition(numbers, ranked)[ranked]]
        passing, least = passing[best], least[best]
    if isinstance(candidates, NamesAt):
        names = candidates.rows[passing]  # numbers follow the name order
    else:
        names = np.array([candidates[at] for at in passing.tolist()])
    order: Rows = passing[np.lexsort((names, least))[:ranked]]
    return order
