"""Decides again, by the same code as a running extender."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from extender.core.certainty import Band
from extender.core.decision import Decision, decide
from extender.core.evaluation import Evaluation, Question, asks, evaluate_for
from extender.core.policy import Policy
from extender.core.request import GpuRequest
from extender.core.snapshot import Pool, Snapshot
from extender.core.standing import Standing, batch_under, stand
from extender.records.lines import BEST, digest
from extender.records.reading import LoggedDecision
from extender.replay.changes import Changes

KEPT: Final = 64
"""Distinct requests whose evaluation of a pool is kept: of the next one only changes are new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """What a node was worth to a pod by the settings of the log.

    Attributes:
        node: the node, "" for none.
        activity: mean activity of the GPUs that the pod could have landed on there, as a ratio;
            None where there is no node, or none is known of it.
        is_idle: whether the pod was likely to land on idle GPUs there.
    """

    node: str
    activity: float | None
    is_idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One decision, made again.

    Attributes:
        logged: as the log has it.
        before: our first choice by the settings of the log.
        after: our first choice by the changed ones.
        feasible: nodes that pass by the changed ones.
        is_exact: by the settings of the log everything came out as the log has it.
    """

    logged: LoggedDecision
    before: Landing
    after: Landing
    feasible: int
    is_exact: bool


class Replay:
    """Makes the decisions of a log again, one after the other.

    Each rests on the fleet as it was: what an other choice would have led to later is not known.

    Args:
        changes: the settings that are changed.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._policies: tuple[Policy, Policy] | None = None
        self._kept: OrderedDict[tuple[int, str, GpuRequest], Standing] = OrderedDict()

    def again(self, logged: LoggedDecision) -> Replayed:
        """Make one decision again; they must come in the order of the log.

        Raises:
            ValueError: the changed settings cannot be, beside those of the log.
        """
        policy, changed = self._policies_for(logged.policy)
        decision = self._decide(logged, logged.request, policy)
        before = self.landing(logged, decision.best or "")
        if not self._changes.values:
            after, feasible = before, decision.feasible
        else:
            anew = self._decide(logged, self._changes.request(logged.request), changed)
            is_same = anew.best == decision.best
            after = before if is_same else self.landing(logged, anew.best or "")
            feasible = anew.feasible
        return Replayed(
            logged=logged,
            before=before,
            after=after,
            feasible=feasible,
            is_exact=_is_as_logged(logged, decision),
        )

    @staticmethod
    def landing(logged: LoggedDecision, node: str) -> Landing:
        """Return what a node was worth to the pod of a decision, by the settings of the log."""
        resource, ask = asks(logged.request)[0]
        snapshot, pool = logged.snapshot, logged.snapshot.pools.get(resource)
        if not node or pool is None or node not in pool.row_of:
            return Landing(node=node, activity=None, is_idle=False)
        question = Question(request=logged.request, ask=ask, policy=logged.policy, overlay={})
        rows = [(pool.row_of[node], logged.overlays.get(resource, {}))]
        evaluation = evaluate_for(question, batch_under(snapshot, pool, rows), snapshot.models)
        return Landing(
            node=node,
            activity=float(evaluation.utilization[0]),
            is_idle=bool(evaluation.bands[0] == Band.LIKELY),
        )

    def _policies_for(self, logged: Policy) -> tuple[Policy, Policy]:
        """Return the settings of the log, and those with the changes; always the same objects."""
        if self._policies is None or self._policies[0] is not logged:
            self._policies = (logged, self._changes.policy(logged))
            self._kept.clear()
        return self._policies

    def _decide(self, logged: LoggedDecision, request: GpuRequest, policy: Policy) -> Decision:
        return decide(
            logged.snapshot,
            request,
            logged.candidates,
            policy,
            overlays=logged.overlays,
            evaluate=self._evaluate,
        )

    def _evaluate(self, snapshot: Snapshot, pool: Pool, question: Question) -> Evaluation:
        """Evaluate a pool; of what was evaluated before only what has changed."""
        key = (id(question.policy), pool.resource, replace(question.request, nominated_node=""))
        known = self._kept.pop(key, None)
        standing = stand(snapshot, pool, question, () if known is None else (known,))
        self._kept[key] = standing
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return standing.evaluation


def _is_as_logged(logged: LoggedDecision, decision: Decision) -> bool:
    """Whether a decision is the logged one: every verdict, every score to the last bit."""
    order = decision.order[:BEST].tolist()
    best = tuple((decision.candidates[at], float(decision.scores[at])) for at in order)
    return (
        best == logged.best
        and decision.feasible == logged.feasible
        and digest(decision.candidates, decision) == logged.digest
    )
