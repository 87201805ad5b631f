"""The decision: which candidate nodes would do for a request, and in which order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.certainty import Band
from extender.core.evaluation import Evaluation, Overlay, Question, asks
from extender.core.filtering import Code, Codes
from extender.core.names import NamesAt
from extender.core.policy import Policy
from extender.core.request import GpuRequest
from extender.core.scoring import GPU, PLACES, UNITS, unknown_score
from extender.core.snapshot import Flags, Pool, Ratios, Rows, Snapshot
from extender.core.standing import avoid, nominate, stand

RELAXED_MARGIN = 0.10
"""Where no node has enough idle devices, the load filter lets those pass whose load is within
this ratio of the least."""


ABOUT: Final = (GPU - 1) / UNITS
"""Nodes whose scores differ by no more are about as good: by less than one GPU of fit."""

NO_ZONES: Final[Rows] = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict on each candidate, in the order of the question until it is made `slim`.

    Attributes:
        candidates: node names.
        codes: the first reason against each, `Code.PASSES` where there is none.
        scores: ratio from 0 to 1; full precision, meaningful for every candidate.
        zones: number of each candidate's zone, -1 where it is not known; () once it is `slim`.
        order: indexes of the candidates that pass, best first; ties go by node name. Only of the
            best ones where no more were asked for.
    """

    candidates: Sequence[str]
    codes: Codes
    scores: npt.NDArray[np.floating]
    order: Rows
    zones: Rows = field(default_factory=lambda: NO_ZONES, repr=False)

    def slim(self, kept: int, like: Sequence[str] | None = None) -> "Decision":
        """Return the decision as it is remembered: small, and by node name.

        Scores keep seven digits, which is more than people are shown.

        Args:
            kept: so many of the best are kept in order.
            like: candidates of a slim one, which are shared where they are the same.
        """
        order, scores = self.order[:kept], self.scores.astype(np.float32)
        if not isinstance(self.candidates, NamesAt):
            return replace(self, scores=scores, order=order.copy(), zones=NO_ZONES)
        rows = self.candidates.rows
        listed = np.full(len(self.candidates.names), -1, dtype=np.intp)
        listed[rows] = np.arange(len(rows))
        by_name = listed[listed >= 0]  # numbers go by name
        place = np.empty_like(by_name)
        place[by_name] = np.arange(len(by_name))
        codes = self.codes[by_name]
        return replace(
            self,
            candidates=self.candidates.sorted_as(by_name, like),
            codes=codes if codes.any() else np.broadcast_to(codes[:1], codes.shape),
            scores=scores[by_name],
            order=place[order],
            zones=NO_ZONES,
        )

    def shortlist(self, count: int, reach: float) -> Rows:
        """Return the indexes of so many of the best that pass, ascending, our first among them.

        Of those that are about as good as the last of them, as many are taken from each zone: which
        of them is best is kube-scheduler's to say, and pods may have to be spread.

        Args:
            count: so many, fewer than pass and no more than are in order.
            reach: score by which a node may be behind our first and is taken in any case.
        """
        best = self.order[:count]
        top = self.scores[best]
        edge, lifted = top[-1], top[0] - reach if reach else np.inf
        at = np.flatnonzero(self.scores >= min(edge - ABOUT, lifted))
        if self.codes.any():
            at = at[self.codes[at] == Code.PASSES]
        if len(at) == count:
            return at
        scores = self.scores[at]
        sure = best[: max(int(np.count_nonzero(top > edge + ABOUT)), 1)]
        alike = at[(scores >= edge - ABOUT) & (scores <= edge + ABOUT) & (at != best[0])]
        if len(sure) + len(alike) > count:
            alike = alike[_from_each(self.zones[alike], self._numbers(alike), count - len(sure))]
        named = np.concatenate([sure, alike])
        return np.union1d(named, at[scores >= lifted]) if reach else np.sort(named)

    def _numbers(self, rows: Rows) -> Rows:
        """Return numbers of candidates by name, whatever the order of the question."""
        if isinstance(self.candidates, NamesAt):
            return self.candidates.rows[rows].astype(np.intp)
        names = np.array([self.candidates[at] for at in rows.tolist()])
        return np.unique(names, return_inverse=True)[1]

    @property
    def feasible(self) -> int:
        """How many candidates pass."""
        return len(self.codes) - int(np.count_nonzero(self.codes))

    def refused(self, count: int) -> list[int]:
        """Return the indexes of so many candidates that do not pass, each reason in its turn."""
        rows = np.flatnonzero(self.codes) if count > 0 else np.zeros(0, dtype=np.intp)
        codes = self.codes[rows]
        turns = np.zeros(len(rows), dtype=np.intp)
        for code in np.unique(codes):
            turns[codes == code] = np.arange(np.count_nonzero(codes == code))
        chosen: list[int] = rows[np.argsort(turns, kind="stable")[:count]].tolist()
        return chosen

    def place_of(self, node: str) -> int | None:
        """Return the index of a candidate, None where it was none."""
        try:
            return self.candidates.index(node)
        except ValueError:
            return None

    @property
    def best(self) -> str | None:
        """Name of our first choice, None where no candidate passes."""
        return self.candidates[self.order[0]] if len(self.order) else None


Evaluate = Callable[[Snapshot, Pool, Question], Evaluation]
"""How a pool is evaluated; a cache may stand between."""


def _from_each(zones: Rows, numbers: Rows, count: int) -> Rows:
    """Return the places of so many nodes: as many of each zone, from all over their names.

    Nodes of one kind are often named alike.

    Args:
        zones: of each node.
        numbers: of each, by name.
        count: so many, fewer than there are.
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


def evaluate_pool(snapshot: Snapshot, pool: Pool, question: Question) -> Evaluation:
    """Evaluate every node of a pool."""
    return stand(snapshot, pool, question).evaluation


def decide(
    snapshot: Snapshot,
    request: GpuRequest,
    candidates: Sequence[str],
    policy: Policy,
    *,
    overlays: Mapping[str, Overlay],
    evaluate: Evaluate = evaluate_pool,
    ranked: int | None = None,
) -> Decision:
    """Decide which candidates would do for `request`, and in which order.

    A candidate that the snapshot does not know passes as unknown, except for a pod that waits for
    devices known to be idle.

    Args:
        snapshot: the fleet.
        request: what the pod asks for.
        candidates: node names, in kube-scheduler's order.
        policy: the settings of the decision.
        overlays: tentative tenants by resource and node; never the pod itself.
        evaluate: how a whole pool is evaluated: `evaluate_pool`, or a cache before it.
        ranked: so many of the best are put in order, None for all that pass.
    """
    # By number they are neither made into strings nor compared as such.
    candidates = snapshot.roll.number(candidates)
    tally = _Tally(request, candidates, weighs_load=policy.load_filter.is_enabled)
    for resource, ask in asks(request):
        pool = snapshot.pools.get(resource)
        if pool is None:
            tally.add_unknown()
            continue
        question = Question(
            request=request, ask=ask, policy=policy, overlay=overlays.get(resource, {})
        )
        evaluation = evaluate(snapshot, pool, question)
        evaluation = avoid(evaluation, snapshot, pool, question)
        evaluation = nominate(evaluation, snapshot, pool, question)
        tally.add(evaluation, _rows_in(snapshot, pool, candidates), pool.batch.zone_id)
    codes = tally.codes
    if policy.load_filter.is_enabled:
        codes = _refuse_busy(codes, tally)
    return Decision(
        candidates=candidates,
        codes=codes,
        scores=tally.scores,
        order=_order(candidates, codes, tally.scores, ranked),
        zones=tally.zones,
    )


def _rows_in(snapshot: Snapshot, pool: Pool, candidates: Sequence[str]) -> Rows:
    """Return the row of each candidate in a pool, -1 where it is not in it."""
    rows = snapshot.roll.rows(pool.resource, candidates)
    if rows is None:
        found = map(pool.row_of.get, candidates, repeat(-1))
        rows = np.fromiter(found, np.intp, len(candidates))
    return rows


class _Tally:
    """The verdict on each candidate over all resources that a pod asks for: the worst counts.

    Args:
        request: what the pod asks for.
        candidates: node names.
        weighs_load: whether `load` and `is_busy` are wanted.
    """

    def __init__(
        self, request: GpuRequest, candidates: Sequence[str], *, weighs_load: bool
    ) -> None:
        count = len(candidates)
        self._request = request
        self._candidates = candidates
        self._weighs_load = weighs_load
        self._is_empty = True
        self._unknown_score = unknown_score(0 if request.preferred_models else PLACES)
        self.codes: Codes = np.zeros(count, dtype=np.uint8)
        self.scores = np.ones(count)
        self.zones: Rows = np.full(count, -1, dtype=np.intp)
        if weighs_load:
            self.load = np.zeros(count)
            self.is_busy: Flags = np.zeros(count, dtype=np.bool_)

    @cached_property
    def _unknown_codes(self) -> Codes:
        """Per candidate, the verdict where we do not know that it offers a resource."""
        code = Code.NOT_IDLE if self._request.requires_idle else Code.PASSES
        return np.full(len(self._candidates), code, dtype=np.uint8)

    def add(self, evaluation: Evaluation, rows: Rows, zones: Rows) -> None:
        """Add the evaluation of one resource; row -1, a node without it, takes what is appended."""
        if rows.min(initial=0) >= 0:
            codes, scores = evaluation.codes[rows], evaluation.scores[rows]
            self.zones = zones[rows]
        else:
            self.zones = np.where(rows < 0, self.zones, np.append(zones, -1)[rows])
            codes = np.append(evaluation.codes, np.uint8(Code.PASSES))[rows]
            codes = np.where(rows < 0, self._unknown_codes, codes)
            scores = np.append(evaluation.scores, self._unknown_score)[rows]
        self._worsen(codes, scores)
        if self._weighs_load:
            is_busy = evaluation.bands == Band.UNLIKELY
            self.load = np.maximum(self.load, np.append(evaluation.utilization, 0.0)[rows])
            self.is_busy |= np.append(is_busy, False)[rows]

    def add_unknown(self) -> None:
        """Add a resource that no candidate offers as far as we know."""
        self._worsen(self._unknown_codes, np.full(len(self._candidates), self._unknown_score))

    def _worsen(self, codes: Codes, scores: Ratios) -> None:
        """Take the worse of the verdict so far and that of another resource."""
        if self._is_empty:  # as nearly every time: nothing to compare with
            self.codes, self.scores, self._is_empty = codes, scores, False
            return
        self.codes = np.where(self.codes == Code.PASSES, codes, self.codes)
        self.scores = np.minimum(self.scores, scores)


def _refuse_busy(codes: Codes, tally: _Tally) -> Codes:
    """Refuse nodes known to be busy, but never all: at least the least loaded ones pass."""
    passing = codes == Code.PASSES
    if not passing.any():
        return codes
    if (passing & ~tally.is_busy).any():
        refused = passing & tally.is_busy
    else:
        refused = passing & (tally.load > tally.load[passing].min() + RELAXED_MARGIN)
    return np.where(refused, np.uint8(Code.BUSY), codes)


def _order(candidates: Sequence[str], codes: Codes, scores: Ratios, ranked: int | None) -> Rows:
    """Return the best candidates that pass, best first; ties by name, however they were asked."""
    passing = np.flatnonzero(codes == Code.PASSES)
    least = -(scores if len(passing) == len(scores) else scores[passing])
    if ranked is not None and ranked < len(passing):
        # All that are as good as the last one wanted: which of them it is goes by name.
        edge = np.partition(least, ranked)[ranked]
        best = np.flatnonzero(least <= edge)
        if isinstance(candidates, NamesAt) and len(best) > ranked:
            # Of many equal ones the first by name alone are looked at: to order all takes longer.
            numbers = np.where(least[best] < edge, -1, candidates.rows[passing[best]])
            best = best[numbers <= np.partition(numbers, ranked)[ranked]]
        passing, least = passing[best], least[best]
    if isinstance(candidates, NamesAt):
        names = candidates.rows[passing]  # numbers go by name: no name has to be looked at
    else:
        names = np.array([candidates[at] for at in passing.tolist()])
    order: Rows = passing[np.lexsort((names, least))[:ranked]]
    return order
