"""Replay a log and summarize the effect of changed settings in figures."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from extender.insight.decision_log.reader import Logged, LoggedBinding, LoggedDecision
from extender.insight.replay.changes import Changes
from extender.insight.replay.replay import Replay, Replayed, ReplayedLanding
from extender.placement.request_log import FILTER, PRIORITIZE

_MOVES: Final = 100
"""Largest number of moved pods, and of inexact decisions, to list."""


_UNBOUND: Final = 2000
"""Number of latest decisions whose snapshot is kept for a binding that may follow in the log."""

_ATTEMPT_SECONDS: Final = 10.0
"""Longest time between filter and prioritize of one attempt, in which other extenders may be
called. A later prioritize belongs to another attempt, whose filter another replica answered."""


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
class Move:
    """A pod whose first choice changes; a node of "" means none.

    Attributes:
        pod: `namespace/name`.
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
    moves: list[Move]
    activities: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Pod:
    """The last attempt to place one pod."""

    key: str
    is_narrowed: bool
    before: ReplayedLanding
    after: ReplayedLanding
    bound: ReplayedLanding | None = None


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
            Move(
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


def _side(landings: Sequence[ReplayedLanding]) -> Side:
    placed = [landing for landing in landings if landing.node]
    known = _known(placed)
    return Side(
        placed=len(placed),
        waits=len(landings) - len(placed),
        activity=sum(known) / len(known) if known else None,
        idle_share=sum(landing.is_idle for landing in placed) / len(placed) if placed else None,
    )


def _known(landings: Sequence[ReplayedLanding]) -> list[float]:
    return [landing.activity for landing in landings if landing.activity is not None]
