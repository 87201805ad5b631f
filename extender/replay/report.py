"""What would differ under other settings, in figures."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from extender.placement.asked import FILTER, PRIORITIZE
from extender.records.reading import Logged, LoggedBinding, LoggedDecision
from extender.replay.again import Landing, Replay, Replayed
from extender.replay.changes import Changes

MOVES: Final = 100
"""So many pods that would go elsewhere are named."""


UNBOUND: Final = 2000
"""Pods that may still be bound, of which the fleet of their decision is kept."""

ATTEMPT_SECONDS: Final = 10.0
"""kube-scheduler asks about scores at the latest so long after it asked filter: other extenders
come between. What comes later belongs to another attempt, whose filter another replica answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What placements were, or would be.

    Attributes:
        placed: pods that got a node.
        waits: pods that got none at their last decision.
        activity: mean activity of the GPUs where they landed, as a ratio; None where unknown.
        idle_share: share of the placed pods that got enough GPUs known to be idle.
    """

    placed: int
    waits: int
    activity: float | None
    idle_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A pod that would go elsewhere, "" for nowhere.

    Attributes:
        pod: `namespace/name`.
        before: our first choice by the settings of the log.
        after: our first choice by the changed ones.
        bound: where kube-scheduler put it, "" where the log does not say.
    """

    pod: str
    before: str
    after: str
    bound: str
    activity_before: float | None
    activity_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A log decided again.

    Attributes:
        changes: what was set, by name.
        decisions: decisions of the log.
        exact: those that came out as they were logged, to the last bit, by the log's settings.
        inexact: numbers of the first that did not.
        pods: pods of the log; of each the last attempt to place it counts below, by what filter was
            asked then.
        narrowed: of those, how many of which the log has no such question: prioritize was asked
            about no more than the nodes that had passed.
        moved: of those, how many would have another first choice.
        bound: of those, how many are known to be bound.
        followed: of those, how many on our first choice by the settings of the log.
        would_be_followed: of those, how many on our first choice by the changed ones.
        before: our first choices by the settings of the log.
        after: our first choices by the changed ones.
        actual: where kube-scheduler put the pods.
        moves: the first of those that would go elsewhere.
        activities: for a plot: activity per pod of before, after and actual.
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
    """The decision about one pod that counts."""

    key: str
    is_narrowed: bool
    before: Landing
    after: Landing
    bound: Landing | None = None


def replay(log: Iterable[Logged], changes: Changes, told: dict[str, str]) -> Report:
    """Decide a log again.

    Args:
        log: what it tells, in its order.
        changes: the settings that are changed.
        told: the same for people, by name.

    Raises:
        ValueError: the changes cannot be, or the log cannot be read.
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
        if not made.is_exact and len(inexact) < MOVES:
            inexact.append(line.number)
        filtered = last.get(line.pod.uid)
        if filtered is not None and _is_scored_after(filtered.logged, line):
            continue
        is_narrowed = line.verb == PRIORITIZE
        pods[line.pod.uid] = _Pod(line.pod.key, is_narrowed, made.before, made.after)
        last[line.pod.uid] = made
        if len(last) > UNBOUND:
            last.popitem(last=False)
    return _report(list(pods.values()), told, decisions, exact, inexact)


def _is_scored_after(filtered: LoggedDecision, line: LoggedDecision) -> bool:
    """Whether a line is the prioritize of the same attempt as a filter.

    Prioritize is asked about no more than the nodes that had passed, or the shortlist of them: by
    other settings others might have.
    """
    return (
        (filtered.verb, line.verb) == (FILTER, PRIORITIZE)
        and 0 <= line.at - filtered.at <= ATTEMPT_SECONDS
        and (filtered.feasible > 0 or filtered.mode == "shadow")
    )


def _bind(pod: _Pod | None, made: Replayed | None, node: str) -> None:
    """Note what the node was worth that a pod was bound to, by what it was decided from."""
    if pod is not None and made is not None:
        pod.bound = Replay.landing(made.logged, node)


def _report(
    pods: Sequence[_Pod], told: dict[str, str], decisions: int, exact: int, inexact: list[int]
) -> Report:
    moved = [pod for pod in pods if pod.before.node != pod.after.node]
    bound = [pod for pod in pods if pod.bound is not None]
    actual = [pod.bound for pod in bound if pod.bound is not None]
    before, after = [pod.before for pod in pods], [pod.after for pod in pods]
    return Report(
        changes=told,
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
            for pod in moved[:MOVES]
        ],
        activities={
            "settings of the log": _known(before),
            "changed settings": _known(after),
            "kube-scheduler": _known(actual),
        },
    )


def _side(landings: Sequence[Landing]) -> Side:
    placed = [landing for landing in landings if landing.node]
    known = _known(placed)
    return Side(
        placed=len(placed),
        waits=len(landings) - len(placed),
        activity=sum(known) / len(known) if known else None,
        idle_share=sum(landing.is_idle for landing in placed) / len(placed) if placed else None,
    )


def _known(landings: Sequence[Landing]) -> list[float]:
    return [landing.activity for landing in landings if landing.activity is not None]
