"""Repeat logged decisions with the same code as a running extender."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from extender.core.decision.certainty import Band
from extender.core.decision.decision import Decision, decide
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationRequest,
    batch_of,
    device_requests,
    evaluate_for,
)
from extender.core.decision.evaluation_cache import CacheEntry, evaluate_cached
from extender.core.nodes.snapshot import Pool, Snapshot
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.insight.decision_log.lines import BEST, digest
from extender.insight.decision_log.reader import LoggedDecision
from extender.insight.replay.changes import Changes

_CACHED: Final = 64
"""Size of the evaluation cache: a cached evaluation is only updated for changed rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedLanding:
    """Value of a node for a pod, under the logged settings.

    Attributes:
        node: name of the node, "" for none.
        activity: mean activity of the GPUs that the pod could land on, as a ratio; None if there is
            no node, or no known GPU on it.
        is_idle: whether the pod was likely to land on idle GPUs.
    """

    node: str
    activity: float | None
    is_idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A logged decision and its repetition.

    Attributes:
        logged: the decision as logged.
        before: first choice under the logged settings.
        after: first choice under the changed settings.
        feasible: number of nodes that pass under the changed settings.
        is_exact: whether the logged settings reproduce the logged decision exactly.
    """

    logged: LoggedDecision
    before: ReplayedLanding
    after: ReplayedLanding
    feasible: int
    is_exact: bool


class Replay:
    """Repeats the decisions of a log one by one.

    Each decision uses the logged state of the fleet: consequences of a different earlier choice are
    not simulated.

    Args:
        changes: changed settings.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._policies: tuple[Policy, Policy] | None = None
        self._cache: OrderedDict[tuple[int, str, GpuRequest], CacheEntry] = OrderedDict()

    def again(self, logged: LoggedDecision) -> Replayed:
        """Repeat one decision; call in the order of the log.

        Raises:
            ValueError: the changed settings are invalid together with the logged ones.
        """
        policy, changed = self._policies_for(logged.policy)
        decision = self._decide(logged, logged.request, policy)
        before = self.landing(logged, decision.best or "")
        if not self._changes.values:
            after, feasible = before, decision.feasible
        else:
            other = self._decide(logged, self._changes.request(logged.request), changed)
            is_same = other.best == decision.best
            after = before if is_same else self.landing(logged, other.best or "")
            feasible = other.feasible
        return Replayed(
            logged=logged,
            before=before,
            after=after,
            feasible=feasible,
            is_exact=_is_as_logged(logged, decision),
        )

    @staticmethod
    def landing(logged: LoggedDecision, node: str) -> ReplayedLanding:
        """Return the value of a node for a decision's pod, under the logged settings."""
        resource, ask = device_requests(logged.request)[0]
        snapshot, pool = logged.snapshot, logged.snapshot.pools.get(resource)
        if not node or pool is None or node not in pool.row_of:
            return ReplayedLanding(node=node, activity=None, is_idle=False)
        question = EvaluationRequest(
            request=logged.request, ask=ask, policy=logged.policy, overlay={}
        )
        rows = [(pool.row_of[node], logged.overlays.get(resource, {}))]
        evaluation = evaluate_for(question, batch_of(snapshot, pool, rows), snapshot.models)
        return ReplayedLanding(
            node=node,
            activity=float(evaluation.utilization[0]),
            is_idle=bool(evaluation.bands[0] == Band.LIKELY),
        )

    def _policies_for(self, logged: Policy) -> tuple[Policy, Policy]:
        """Return the logged and the changed settings; equal logged settings share objects."""
        if self._policies is None or self._policies[0] is not logged:
            self._policies = (logged, self._changes.policy(logged))
            self._cache.clear()
        return self._policies

    def _decide(self, logged: LoggedDecision, request: GpuRequest, policy: Policy) -> Decision:
        return decide(
            logged.snapshot,
            request,
            logged.candidates,
            policy,
            overlays=logged.overlays,
            evaluate=self._evaluate,
            group=logged.group,
        )

    def _evaluate(self, snapshot: Snapshot, pool: Pool, question: EvaluationRequest) -> Evaluation:
        """Evaluate a pool for a request, updating a cached evaluation if there is one."""
        key = (id(question.policy), pool.resource, replace(question.request, nominated_node=""))
        cached = self._cache.pop(key, None)
        entry = evaluate_cached(snapshot, pool, question, () if cached is None else (cached,))
        self._cache[key] = entry
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return entry.evaluation


def _is_as_logged(logged: LoggedDecision, decision: Decision) -> bool:
    """Check whether a decision equals the logged one: all verdicts, all scores to the last bit."""
    order = decision.order[:BEST].tolist()
    best = tuple((decision.candidates[at], float(decision.scores[at])) for at in order)
    return (
        best == logged.best
        and decision.feasible == logged.feasible
        and digest(decision.candidates, decision) == logged.digest
    )
