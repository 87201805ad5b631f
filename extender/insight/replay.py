"""Replay a decision log with other settings, using the server's code, and report differences.

Only settings that affect the decision itself can change: the log has the estimates, not the
readings that they were computed from.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final

from extender.core.decision.decision import Decision, decide
from extender.core.decision.dirty_rows import CacheEntry, evaluate_cached
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationInputs,
    batch_of,
    device_requests,
    evaluate_for,
)
from extender.core.decision.landing import Band
from extender.core.nodes.snapshot import Pool, Snapshot
from extender.core.policy import Policy
from extender.core.request.request import GpuRequest
from extender.insight.decision_log.lines import BEST, digest
from extender.insight.decision_log.reader import Logged, LoggedBinding, LoggedDecision
from extender.placement.request_log import FILTER, PRIORITIZE
from extender.settings.config import load_settings
from extender.settings.loading import ConfigError

_REPLAYABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "strategy": ("strategy",),
    "thresholds.utilization": ("thresholds", "utilization"),
    "thresholds.memory": ("thresholds", "memory"),
    "weights.utilization": ("weights", "utilization"),
    "weights.memory": ("weights", "memory"),
    "weights.sharing": ("weights", "sharing"),
    "weights.bursts": ("weights", "bursts"),
    "weights.stress": ("weights", "stress"),
    "load_filter.enabled": ("load_filter", "is_enabled"),
    "assumed.utilization": ("assumed", "utilization"),
    "mps_share": ("mps_share_bytes",),
}
"""Attribute path in `Policy` by setting. All other settings affect the estimates that are computed
from readings before a decision; the log has these estimates, not the readings."""

_CACHED: Final = 64
"""Size of the evaluation cache: a cached evaluation is only updated for changed rows."""

_MOVES: Final = 100
"""Largest number of moved pods, and of inexact decisions, to list."""

_UNBOUND: Final = 2000
"""Number of latest decisions whose snapshot is kept for a binding that may follow in the log."""

_ATTEMPT_SECONDS: Final = 10.0
"""Longest time between filter and prioritize of one attempt, in which other extenders may be
called. A later prioritize belongs to another attempt, whose filter another replica answered."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Settings to change in a replay.

    Attributes:
        values: new values by setting, in the core's types.
    """

    values: Mapping[str, object] = field(default_factory=dict)

    def policy(self, before: Policy) -> Policy:
        """Return the policy with these settings replaced.

        Raises:
            ValueError: the combination is invalid.
        """
        policy = before
        for name, value in self.values.items():
            policy = _put(policy, _REPLAYABLE[name], value)
        weights = policy.weights
        if not any(getattr(weights, name) for name in type(weights).__slots__):
            raise ValueError("weights.*: one of them must be more than 0")
        return policy

    def request(self, request: GpuRequest) -> GpuRequest:
        """Return a pod's request under the changed settings; its own annotations still win."""
        values = {name: value for name, value in self.values.items() if name not in request.own}
        changed: dict[str, Any] = {}
        if "strategy" in values:
            changed["strategy"] = values["strategy"]
        limits: dict[str, Any] = {
            part: values[f"thresholds.{part}"]
            for part in ("utilization", "memory")
            if f"thresholds.{part}" in values
        }
        if limits:
            changed["thresholds"] = replace(request.thresholds, **limits)
        return replace(request, **changed) if changed else request


def parse_changes(texts: Iterable[str]) -> Changes:
    """Parse `NAME=VALUE` texts into changed settings.

    Raises:
        ValueError: a text is invalid; the message says what is allowed.
    """
    values: dict[str, object] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in _REPLAYABLE:
            raise ValueError(
                f"{text!r}: must be NAME=VALUE, NAME one of {', '.join(_REPLAYABLE)}; other "
                "settings affect estimates that are computed before a decision, from readings that "
                "the log does not have"
            )
        variable = f"IDLEGPU_{name.replace('.', '__').upper()}"
        try:
            policy = load_settings(None, {variable: value}).policy()
        except ConfigError as error:
            raise ValueError("; ".join(error.problems).replace(variable, name)) from error
        values[name] = reduce(getattr, _REPLAYABLE[name], policy)
    return Changes(values)


def _put(part: Any, path: tuple[str, ...], value: object) -> Any:  # noqa: ANN401 - parts of a policy
    """Return a copy of a policy part with the value at an attribute path replaced."""
    name, *rest = path
    inner = _put(getattr(part, name), tuple(rest), value) if rest else value
    return replace(part, **{name: inner})


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayedLanding:
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
        is_exact: whether the logged settings reproduce the logged decision exactly.
    """

    logged: LoggedDecision
    before: _ReplayedLanding
    after: _ReplayedLanding
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
            after = before
        else:
            other = self._decide(logged, self._changes.request(logged.request), changed)
            is_same = other.best == decision.best
            after = before if is_same else self.landing(logged, other.best or "")
        return Replayed(
            logged=logged, before=before, after=after, is_exact=_is_as_logged(logged, decision)
        )

    @staticmethod
    def landing(logged: LoggedDecision, node: str) -> _ReplayedLanding:
        """Return the value of a node for a decision's pod, under the logged settings."""
        resource, devices = device_requests(logged.request)[0]
        snapshot, pool = logged.snapshot, logged.snapshot.pools.get(resource)
        if not node or pool is None or node not in pool.row_of:
            return _ReplayedLanding(node=node, activity=None, is_idle=False)
        inputs = EvaluationInputs(
            request=logged.request, devices=devices, policy=logged.policy, overlay={}
        )
        rows = [(pool.row_of[node], logged.overlays.get(resource, {}))]
        evaluation = evaluate_for(inputs, batch_of(snapshot, pool, rows), snapshot.models)
        return _ReplayedLanding(
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

    def _evaluate(self, snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs) -> Evaluation:
        """Evaluate a pool for a request, updating a cached evaluation if there is one."""
        key = (id(inputs.policy), pool.resource, replace(inputs.request, nominated_node=""))
        cached = self._cache.pop(key, None)
        entry = evaluate_cached(snapshot, pool, inputs, () if cached is None else (cached,))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Summary of placements, actual or simulated.

    Attributes:
        placed: pods that got a node.
        waits: pods without a node at their last decision.
        activity: mean activity of the GPUs where they landed, as a ratio; None if unknown.
        idle_share: share of the placed pods that got enough GPUs known to be idle.
    """

    placed: int
    waits: int
    activity: float | None
    idle_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A pod whose first choice changes; a node of "" means none.

    Attributes:
        before: first choice under the logged settings.
        after: first choice under the changed settings.
        bound: node that kube-scheduler bound the pod to, "" if unknown.
        activity_before: activity on `before` as a ratio, None if unknown.
        activity_after: activity on `after` as a ratio, None if unknown.
    """

    pod: str
    before: str
    after: str
    bound: str
    activity_before: float | None
    activity_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Result of a replay.

    For each pod only the last attempt counts.

    Attributes:
        changes: changed settings by name, as text.
        decisions: decisions in the log.
        exact: decisions that the logged settings reproduce to the last bit.
        inexact: numbers of the first decisions that they do not reproduce.
        pods: pods in the log.
        narrowed: pods without a filter call in the log; prioritize saw only the nodes that had
            passed.
        moved: pods whose first choice changes.
        bound: pods with a known binding.
        followed: bound pods on the first choice under the logged settings.
        would_be_followed: bound pods on the first choice under the changed settings.
        before: first choices under the logged settings.
        after: first choices under the changed settings.
        actual: nodes that kube-scheduler bound the pods to.
        moves: the first of the moved pods.
        activities: mean activity of each pod's GPUs, as a ratio, for before, after and actual.
    """

    changes: dict[str, str]
    decisions: int
    exact: int
    inexact: list[int]
    pods: int
    narrowed: int
    moved: int
    bound: int
    followed: int
    would_be_followed: int
    before: Side
    after: Side
    actual: Side
    moves: list[_Move]
    activities: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Pod:
    """The last attempt to place one pod."""

    key: str
    is_narrowed: bool
    before: _ReplayedLanding
    after: _ReplayedLanding
    bound: _ReplayedLanding | None = None


def replay(log: Iterable[Logged], changes: Changes, change_texts: dict[str, str]) -> ReplayReport:
    """Replay a log and build the report.

    Args:
        log: decisions and bindings in log order.
        changes: changed settings.
        change_texts: the changed settings as text, by name, for the report.

    Raises:
        ValueError: the changes are invalid, or the log cannot be decoded.
    """
    again = Replay(changes)
    pods: dict[str, _Pod] = {}
    last: OrderedDict[str, Replayed] = OrderedDict()
    decisions, exact = 0, 0
    inexact: list[int] = []
    for line in log:
        if isinstance(line, LoggedBinding):
            _bind(pods.get(line.uid), last.pop(line.uid, None), line.node)
            continue
        made = again.again(line)
        decisions, exact = decisions + 1, exact + made.is_exact
        if not made.is_exact and len(inexact) < _MOVES:
            inexact.append(line.number)
        filtered = last.get(line.pod.uid)
        if filtered is not None and _is_scored_after(filtered.logged, line):
            continue
        is_narrowed = line.verb == PRIORITIZE
        pods[line.pod.uid] = _Pod(line.pod.key, is_narrowed, made.before, made.after)
        last[line.pod.uid] = made
        if len(last) > _UNBOUND:
            last.popitem(last=False)
    return _report(list(pods.values()), change_texts, decisions, exact, inexact)


def _is_scored_after(filtered: LoggedDecision, line: LoggedDecision) -> bool:
    """Check whether a prioritize line belongs to the same attempt as a filter line.

    The prioritize line is then ignored: it covers only nodes that passed under the logged settings.
    """
    return (
        (filtered.verb, line.verb) == (FILTER, PRIORITIZE)
        and 0 <= line.at - filtered.at <= _ATTEMPT_SECONDS
        and (filtered.feasible > 0 or filtered.mode == "shadow")
    )


def _bind(pod: _Pod | None, made: Replayed | None, node: str) -> None:
    """Record the value of the node that a pod was bound to, as of its last decision."""
    if pod is not None and made is not None:
        pod.bound = Replay.landing(made.logged, node)


def _report(
    pods: Sequence[_Pod],
    change_texts: dict[str, str],
    decisions: int,
    exact: int,
    inexact: list[int],
) -> ReplayReport:
    moved = [pod for pod in pods if pod.before.node != pod.after.node]
    bound = [pod for pod in pods if pod.bound is not None]
    actual = [pod.bound for pod in bound if pod.bound is not None]
    before, after = [pod.before for pod in pods], [pod.after for pod in pods]
    return ReplayReport(
        changes=change_texts,
        decisions=decisions,
        exact=exact,
        inexact=inexact,
        pods=len(pods),
        narrowed=sum(pod.is_narrowed for pod in pods),
        moved=len(moved),
        bound=len(bound),
        followed=sum(pod.bound is not None and pod.bound.node == pod.before.node for pod in bound),
        would_be_followed=sum(
            pod.bound is not None and pod.bound.node == pod.after.node for pod in bound
        ),
        before=_side(before),
        after=_side(after),
        actual=_side(actual),
        moves=[
            _Move(
                pod=pod.key,
                before=pod.before.node,
                after=pod.after.node,
                bound=pod.bound.node if pod.bound else "",
                activity_before=pod.before.activity,
                activity_after=pod.after.activity,
            )
            for pod in moved[:_MOVES]
        ],
        activities={
            "settings of the log": _known(before),
            "changed settings": _known(after),
            "kube-scheduler": _known(actual),
        },
    )


def _side(landings: Sequence[_ReplayedLanding]) -> Side:
    placed = [landing for landing in landings if landing.node]
    known = _known(placed)
    return Side(
        placed=len(placed),
        waits=len(landings) - len(placed),
        activity=sum(known) / len(known) if known else None,
        idle_share=sum(landing.is_idle for landing in placed) / len(placed) if placed else None,
    )


def _known(landings: Sequence[_ReplayedLanding]) -> list[float]:
    return [landing.activity for landing in landings if landing.activity is not None]
