"""A decision as a record of every node: those kept in full with devices, the others in short."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import numpy as np

from extender.core.decision import Decision
from extender.core.explain import NodeScore, NodeVerdict
from extender.core.filtering import Code
from extender.core.parts import BAND, CERTAINTY, EARLY_FAILURES, ILL_HEALTH, MODEL, Part
from extender.core.reasons import BETWEEN, PREFERRED
from extender.core.reasons import EARLY_FAILURES as COSTS_FAILURES
from extender.core.reasons import ILL_HEALTH as COSTS_HEALTH
from extender.core.steps import Steps, let_go
from extender.observe.explain_node import SAME
from extender.observe.views import PIECE_SHORT, PIECE_VERDICTS, Json, verdict_view
from extender.placement.history import DecisionRecord

_NOTHING: Final = 1e-12
"""Scores that differ by less are equal."""

MORE_LOAD: Final = "a little more load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """What every node is to be read from.

    Attributes:
        decision: the verdict on every candidate.
        details: the nodes that are known in full.
        bound_node: where the pod went, "" where nowhere or unknown.
    """

    decision: Decision
    details: Sequence[NodeVerdict]
    bound_node: str = ""


def details_in_steps(
    decided: DecisionRecord, filtered: DecisionRecord | None
) -> Steps[list[NodeVerdict]]:
    """Return the nodes that are kept in full, in steps: also those that filter had refused.

    Args:
        decided: the decision.
        filtered: what filter said in the same attempt: prioritize was not asked about the nodes
            that it refused. None where that is `decided` itself, or not remembered.
    """
    found = yield from decided.details_in_steps()
    if filtered is not None:
        refused = _refused_by(filtered.decision) - {verdict.node for verdict in found}
        for part in filtered.evidence:
            if not refused.isdisjoint(part.nodes):
                verdicts = yield from part.explain_in_steps()
                found += (verdict for verdict in verdicts if verdict.node in refused)
                yield from let_go(verdicts)
    # That others are less busy is no verdict on a node by itself.
    asked = (filtered or decided).decision
    busy = _refused_by(asked, Code.BUSY)
    return [
        replace(verdict, rejection=Code.BUSY.text)
        if verdict.node in busy
        else _as_decided(verdict, asked)
        for verdict in found
    ]


def _as_decided(verdict: NodeVerdict, decision: Decision) -> NodeVerdict:
    """Return a verdict that is from the binding with the decision's own word for or against it."""
    at = decision.place_of(verdict.node) if verdict.is_late else None
    return verdict if at is None else replace(verdict, rejection=Code(int(decision.codes[at])).text)


def _refused_by(decision: Decision, code: Code | None = None) -> set[str]:
    """Return the nodes that were refused, for one reason where one is named."""
    is_meant = decision.codes != Code.PASSES if code is None else decision.codes == code
    return {decision.candidates[at] for at in np.flatnonzero(is_meant).tolist()}


def full_nodes(ranking: Ranking) -> Steps[list[Json]]:
    """Return the nodes that are known in full, best first, those refused last; in steps."""
    decision = ranking.decision
    scores = decision.scores
    passing = np.sort(scores[decision.codes == Code.PASSES])[::-1]
    place = {decision.candidates[at]: rank for rank, at in enumerate(decision.order.tolist(), 1)}
    first = _first(ranking)
    found: list[tuple[bool, int, str, Json]] = []
    for verdict in ranking.details:
        if len(found) % PIECE_VERDICTS == 0:
            yield
        rank = None if verdict.rejection else place.get(verdict.node)
        if rank is None and not verdict.rejection:
            # One that was not among the best: those with higher scores come before it.
            rank = int((passing > _decided_score(verdict, decision) + SAME).sum()) + 1
        view = verdict_view(verdict) | {
            "rank": rank,
            "is_bound": verdict.node == ranking.bound_node,
            "assumed": sum(device.assumed for device in verdict.devices),
            "lost_by": _lost_late(ranking, verdict) or lost_by(first, verdict),
        }
        found.append((rank is None, rank or 0, verdict.node, view))
    return [view for *_, view in sorted(found, key=lambda one: one[:3])]


def _decided_score(verdict: NodeVerdict, decision: Decision) -> float:
    """Return a node's score in the decision: that of a verdict from the binding is another."""
    at = decision.place_of(verdict.node) if verdict.is_late else None
    return verdict.score if at is None else float(decision.scores[at])


def _lost_late(ranking: Ranking, verdict: NodeVerdict) -> str:
    """Return what a node was behind by that is known from the binding alone, "" for others.

    Its parts are of another time than those of our first choice.
    """
    decision = ranking.decision
    if not verdict.is_late or verdict.rejection or not len(decision.order):
        return ""
    mine, first = _decided_score(verdict, decision), float(decision.scores[decision.order[0]])
    return f"scored {mine:.6f} in the decision, {decision.best} {first:.6f}"


def _first(ranking: Ranking) -> NodeVerdict | None:
    """Return our first choice in full, None where nothing passes or it is not kept."""
    best = ranking.decision.best
    mine = [verdict for verdict in ranking.details if verdict.node == best]
    return min(mine, key=lambda verdict: verdict.score) if mine else None


def lost_by(first: NodeScore | None, other: NodeScore) -> str | None:
    """Return in one sentence what a node is behind our first choice in, None for that itself."""
    if other.rejection:
        return f"refused: {other.rejection}"
    if first is None or other.node == first.node:
        return None
    for mine, theirs in zip(first.parts, other.parts, strict=False):
        if mine.name != theirs.name or mine.adds - theirs.adds > _NOTHING:
            return _behind(first, other, mine)
        if theirs.adds - mine.adds > _NOTHING:
            break  # of the smaller terms some are better; only their sum says which node is
    if first.score - other.score < _NOTHING:
        return f"as good as {first.node}: ties go by name"
    return MORE_LOAD


def _behind(first: NodeScore, other: NodeScore, mine: Part) -> str:
    """Return the clause of a node's reason that says in what it is behind."""
    clauses = other.reason.split(BETWEEN)
    if mine.name == MODEL:
        return next((one for one in clauses if PREFERRED in one), clauses[0])
    if mine.name == BAND:
        return clauses[0]
    if mine.name == CERTAINTY:
        pairs = zip(first.factors, other.factors, strict=True)
        worst = max(pairs, key=lambda pair: pair[0].keeps - pair[1].keeps)[1].name
        starts = {ILL_HEALTH: COSTS_HEALTH, EARLY_FAILURES: COSTS_FAILURES}.get(worst, "")
        return next(one for one in clauses if one.startswith(starts))
    same = clauses[-1] == first.reason.split(BETWEEN)[-1]
    return MORE_LOAD if same else clauses[-1]


def short_nodes(
    decision: Decision, known: Iterable[str], limit: int
) -> Steps[tuple[list[Json], int]]:
    """Return the nodes that passed and are not known in full, best first, and how many are left.

    That is done in steps.

    Args:
        decision: the verdict on every candidate.
        known: nodes that are known in full.
        limit: so many at most.
    """
    skipped, candidates = set(known), decision.candidates
    passing = np.flatnonzero(decision.codes == Code.PASSES)
    ordered = passing[np.argsort(-decision.scores[passing], kind="stable")]
    rows = zip(ordered.tolist(), decision.scores[ordered].tolist(), strict=True)
    shown: list[Json] = []
    count = 0
    while some := list(islice(rows, PIECE_SHORT)):
        yield
        others = [(candidates[at], score) for at, score in some if candidates[at] not in skipped]
        shown += (
            {"node": node, "score": round(score, 7), "rejection": None}
            for node, score in others[: max(limit - len(shown), 0)]
        )
        count += len(others)
    return shown, count - len(shown)


def rejected_nodes(decision: Decision, most: int) -> list[Json]:
    """Return the nodes that were refused, by reason, the commonest first; so many names of each."""
    groups: list[Json] = []
    counts = np.bincount(decision.codes, minlength=len(Code)).tolist()
    for code in Code:
        if not code.text or not counts[code]:
            continue
        rows = np.flatnonzero(decision.codes == code)[:most].tolist()
        names = [decision.candidates[at] for at in rows]
        groups.append({"count": counts[code], "reason": code.text, "nodes": names})
    return sorted(groups, key=_count)


def closed_nodes(closed: "dict[str, list[str]]", most: int) -> list[Json]:
    """Return the nodes that kube-scheduler would not ask about, likewise."""
    groups: list[Json] = [
        {"count": len(names), "reason": reason, "nodes": names[:most]}
        for reason, names in closed.items()
    ]
    return sorted(groups, key=_count)


def _count(group: Json) -> int:
    count = group["count"]
    return -count if isinstance(count, int) else 0


def kept(decision: Decision, names: Iterable[str]) -> Json:
    """Return what is kept of a decision in full and what in short, in numbers and words.

    Args:
        decision: the verdict on every candidate.
        names: nodes that are known in full.
    """
    return kept_view(len(decision.candidates), len(set(names)))


def kept_view(candidates: int, in_full: int) -> Json:
    """Return that by how many candidates there were, and how many are known in full."""
    in_short = max(candidates - in_full, 0)
    note = "every candidate is kept in full: devices and readings as they were at the decision"
    if in_short:
        note = (
            f"{in_full} of {candidates} candidates are kept in full, devices and "
            "readings as they were at the decision: the best ones, the node bound to, and where "
            f"fewer pass some that were refused; of the other {in_short} only score and reason "
            "(decisions.detailed_nodes sets how many)"
        )
    return {"in_full": in_full, "in_short": in_short, "note": note}
