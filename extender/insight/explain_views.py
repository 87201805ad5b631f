"""Build the nodes of an explanation: full records with devices for some, short ones for others.

For a node that the caller names, also report the extent of its record, and why details are missing.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Final

import msgspec
import numpy as np

from extender.answers import routes
from extender.answers.decisions import RankedVerdict, VerdictAnswer
from extender.answers.pods import NodeReport, Other, ReasonNodes, StoredAnswer
from extender.core.decision.decision import Decision
from extender.core.decision.filtering import RELATIVE_CODES, Code
from extender.core.decision.ranking_reasons import BETWEEN
from extender.core.decision.scoring import (
    BAND,
    CERTAINTY,
    EARLY_FAILURES,
    ILL_HEALTH,
    MODEL,
    NEAR_GROUP,
    ScorePart,
)
from extender.core.decision.verdicts import NodeScore, NodeVerdict
from extender.core.steps import Steps, let_go
from extender.insight.views import PIECE_SHORT, PIECE_VERDICTS, verdict_view
from extender.placement.history import DecisionRecord
from extender.server.json_api import read_number

_NOTHING: Final = 1e-12
"""Scores closer than this count as equal."""

_MORE_LOAD: Final = "a little more load"
_LESS_ROOM: Final = "less room for the rest of its group"

_FEW_NAMES: Final = 20
"""Rejected nodes to name for each reason, unless the caller asks for more."""

_SAME: Final = 1e-6
"""Scores closer than this count as equal: recorded scores have seven digits."""

_NOT_IN_FULL: Final = (
    "its GPUs and readings at that time are not recorded: a decision records only its best nodes, "
    "the node bound to, and some rejected ones if few pass (decisions.detailed_nodes sets how many)"
)
_NO_CANDIDATE: Final = (
    "it was not a candidate for this pod: kube-scheduler's own filters had rejected it, "
    "kube-scheduler had found enough nodes before this one, or the node was added later"
)
_NO_SUCH_NODE: Final = "it was not a candidate, and no node has this name now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """A decision with the nodes that are recorded in full.

    Attributes:
        details: nodes recorded in full.
        bound_node: node that the pod was bound to, "" if none or unknown.
    """

    decision: Decision
    details: Sequence[NodeVerdict]
    bound_node: str = ""


def details_in_steps(
    decided: DecisionRecord, filtered: DecisionRecord | None
) -> Steps[list[NodeVerdict]]:
    """Build the verdicts of the recorded nodes in steps, including those that filter rejected.

    Args:
        filtered: filter decision of the same attempt, which covers the nodes that prioritize did
            not see; None if `decided` is that one, or if it is not remembered.
    """
    found = yield from decided.details_in_steps()
    if filtered is not None:
        refused = _refused_by(filtered.decision) - {verdict.node for verdict in found}
        for part in filtered.evidence:
            if not refused.isdisjoint(part.nodes):
                verdicts = yield from part.explain_in_steps()
                found += (verdict for verdict in verdicts if verdict.node in refused)
                yield from let_go(verdicts)
    # These rejections compare nodes, so they are not in a node's own verdict: add them here.
    decision = (filtered or decided).decision
    relative = {node: code.text for code in RELATIVE_CODES for node in _refused_by(decision, code)}
    return [
        replace(verdict, rejection=relative[verdict.node])
        if verdict.node in relative
        else _as_decided(verdict, decision)
        for verdict in found
    ]


def _as_decided(verdict: NodeVerdict, decision: Decision) -> NodeVerdict:
    """Replace the rejection of a verdict from the time of binding with the decision's own."""
    at = decision.place_of(verdict.node) if verdict.is_late else None
    return verdict if at is None else replace(verdict, rejection=Code(int(decision.codes[at])).text)


def _refused_by(decision: Decision, code: Code | None = None) -> set[str]:
    """Return the rejected nodes, for one reason if given."""
    is_meant = decision.codes != Code.PASSES if code is None else decision.codes == code
    return {decision.candidates[at] for at in np.flatnonzero(is_meant).tolist()}


def full_nodes(ranking: Ranking) -> Steps[list[RankedVerdict]]:
    """Build the full records of nodes in steps: the best node first, rejected nodes last."""
    decision = ranking.decision
    scores = decision.scores
    passing = np.sort(scores[decision.codes == Code.PASSES])[::-1]
    place = {decision.candidates[at]: rank for rank, at in enumerate(decision.order.tolist(), 1)}
    first = _first(ranking)
    found: list[tuple[bool, int, str, RankedVerdict]] = []
    for verdict in ranking.details:
        if len(found) % PIECE_VERDICTS == 0:
            yield
        rank = None if verdict.rejection else place.get(verdict.node)
        if rank is None and not verdict.rejection:
            # Not among the ranked best: count the nodes with a higher score.
            rank = int((passing > _decided_score(verdict, decision) + _SAME).sum()) + 1
        view = RankedVerdict(
            **msgspec.structs.asdict(verdict_view(verdict)),
            rank=rank,
            is_bound=verdict.node == ranking.bound_node,
            assumed=sum(device.assumed for device in verdict.devices),
            lost_by=_lost_late(ranking, verdict) or lost_by(first, verdict),
        )
        found.append((rank is None, rank or 0, verdict.node, view))
    return [view for *_, view in sorted(found, key=lambda one: one[:3])]


def _decided_score(verdict: NodeVerdict, decision: Decision) -> float:
    """Return a node's score in the decision, which differs from a verdict at binding time."""
    at = decision.place_of(verdict.node) if verdict.is_late else None
    return verdict.score if at is None else float(decision.scores[at])


def _lost_late(ranking: Ranking, verdict: NodeVerdict) -> str:
    """Compare scores with the first choice if a node was recorded only at the binding, else "".

    Parts of a score from another time than the first choice's cannot be compared one by one.
    """
    decision = ranking.decision
    if not verdict.is_late or verdict.rejection or not len(decision.order):
        return ""
    mine, first = _decided_score(verdict, decision), float(decision.scores[decision.order[0]])
    return f"scored {mine:.6f} in the decision, {decision.best} {first:.6f}"


def _first(ranking: Ranking) -> NodeVerdict | None:
    """Return the verdict on the first choice, None if no node passed or it is not recorded."""
    best = ranking.decision.best
    mine = [verdict for verdict in ranking.details if verdict.node == best]
    return min(mine, key=lambda verdict: verdict.score) if mine else None


def lost_by(first: NodeScore | None, other: NodeScore) -> str | None:
    """Explain in one sentence why a node ranks behind the first choice; None for that choice."""
    if other.rejection:
        return f"refused: {other.rejection}"
    if first is None or other.node == first.node:
        return None
    for mine, theirs in zip(first.parts, other.parts, strict=False):
        if mine.name != theirs.name or mine.adds - theirs.adds > _NOTHING:
            return _behind(first, other, mine)
        if theirs.adds - mine.adds > _NOTHING:
            break  # the node is ahead in this part: only the sum of the other parts decides
    if first.score - other.score < _NOTHING:
        return f"as good as {first.node}: ties go by name"
    return _MORE_LOAD


def _behind(first: NodeScore, other: NodeScore, mine: ScorePart) -> str:
    """Return the clause of a node's reason that states its deficit."""
    clauses = other.reason.split(BETWEEN)
    if mine.name == MODEL:
        return next((one for one in clauses if MODEL in one), clauses[0])
    if mine.name == BAND:
        return clauses[0]
    if mine.name == NEAR_GROUP:
        near = next((one for one in clauses if "group" in one), clauses[0])
        return _LESS_ROOM if near in first.reason.split(BETWEEN) else near
    if mine.name == CERTAINTY:
        pairs = zip(first.factors, other.factors, strict=True)
        worst = max(pairs, key=lambda pair: pair[0].keeps - pair[1].keeps)[1].name
        starts = worst if worst in {ILL_HEALTH, EARLY_FAILURES} else ""
        return next(one for one in clauses if one.startswith(starts))
    same = clauses[-1] == first.reason.split(BETWEEN)[-1]
    return _MORE_LOAD if same else clauses[-1]


def short_nodes(
    decision: Decision, known: Iterable[str], limit: int
) -> Steps[tuple[list[Other], int]]:
    """Return the passing nodes without full detail, best first, and the number beyond the limit.

    Runs in steps.

    Args:
        known: nodes with full detail.
        limit: largest number of nodes to return.
    """
    skipped, candidates = set(known), decision.candidates
    passing = np.flatnonzero(decision.codes == Code.PASSES)
    ordered = passing[np.argsort(-decision.scores[passing], kind="stable")]
    rows = zip(ordered.tolist(), decision.scores[ordered].tolist(), strict=True)
    shown: list[Other] = []
    count = 0
    while some := list(islice(rows, PIECE_SHORT)):
        yield
        others = [(candidates[at], score) for at, score in some if candidates[at] not in skipped]
        shown += (
            Other(node=node, score=round(score, 7))
            for node, score in others[: max(limit - len(shown), 0)]
        )
        count += len(others)
    return shown, count - len(shown)


def rejected_nodes(decision: Decision, most: int) -> list[ReasonNodes]:
    """Group rejected nodes by reason, most frequent first, with up to `most` names each."""
    groups: list[ReasonNodes] = []
    counts = np.bincount(decision.codes, minlength=len(Code)).tolist()
    for code in Code:
        if not code.text or not counts[code]:
            continue
        rows = np.flatnonzero(decision.codes == code)[:most].tolist()
        names = [decision.candidates[at] for at in rows]
        groups.append(ReasonNodes(count=counts[code], reason=code.text, nodes=names))
    return sorted(groups, key=lambda group: -group.count)


def closed_nodes(closed: "dict[str, list[str]]", most: int) -> list[ReasonNodes]:
    """Group nodes that kube-scheduler itself would reject by reason, most frequent reason first."""
    groups = [
        ReasonNodes(count=len(names), reason=reason, nodes=names[:most])
        for reason, names in closed.items()
    ]
    return sorted(groups, key=lambda group: -group.count)


def kept_view(candidates: int, in_full: int) -> StoredAnswer:
    """Summarize how many candidates a decision recorded in full, and how many in short."""
    in_short = max(candidates - in_full, 0)
    note = "every candidate is recorded in full: devices and readings at the time of the decision"
    if in_short:
        note = (
            f"{in_full} of {candidates} candidates are recorded in full, with devices and "
            "readings at the time of the decision: the best ones, the node bound to, and if few "
            f"pass some rejected ones; the other {in_short} only with score and reason "
            "(decisions.detailed_nodes sets how many)"
        )
    return StoredAnswer(in_full=in_full, in_short=in_short, note=note)


@dataclass(frozen=True, slots=True)
class Wish:
    """The caller's request for detail of the nodes.

    Attributes:
        limit: largest number of nodes without full detail.
        node: name of a node to return in full detail, "" for none.
    """

    limit: int
    node: str

    @classmethod
    def read(cls, query: Mapping[str, str]) -> "Wish":
        """Parse the request's parameters.

        Raises:
            QueryError: a parameter has an invalid value.
        """
        limit = read_number(query, routes.EXPLAIN, "limit")
        return cls(limit, query.get("node", ""))

    @property
    def names(self) -> int:
        """Largest number of rejected nodes to name for each reason."""
        usual = routes.EXPLAIN.number("limit").default
        return self.limit if self.limit > usual else _FEW_NAMES

    @property
    def query(self) -> dict[str, str]:
        """The request as query parameters; an older replica accepts them if no node is named."""
        return {"limit": str(self.limit)} | ({"node": self.node} if self.node else {})


class _NodeDetail(StrEnum):
    """Detail that a decision has of a node."""

    IN_FULL = "in-full"
    IN_SHORT = "in-short"
    """Score and rank, or the reason of the rejection."""
    NO_CANDIDATE = "no-candidate"
    """The node was not a candidate."""
    UNKNOWN = "unknown"
    """No node has this name."""


def requested_node(
    wish: Wish,
    decision: Decision,
    in_full: Iterable[str],
    nodes: Container[str],
    closed_by: str = "",
    now: Callable[[str], list[VerdictAnswer]] = lambda _: [],
) -> NodeReport | None:
    """Return a decision's record of the requested node, None if no node is requested.

    Args:
        wish: names the node.
        in_full: nodes with full detail.
        nodes: present nodes of the cluster.
        closed_by: reason why kube-scheduler itself would filter out the node, "" if unknown.
        now: evaluates the node for the pod with current readings; used if there is no full detail.
    """
    name, is_known = wish.node, wish.node in nodes
    if not name:
        return None
    at = decision.place_of(name)
    if at is None:
        kept = _NodeDetail.NO_CANDIDATE if is_known else _NodeDetail.UNKNOWN
        why = _NO_CANDIDATE if is_known else _NO_SUCH_NODE
        if closed_by:
            why = f"kube-scheduler itself would reject it: {closed_by}"
        return NodeReport(node=name, kept=kept, why=why)
    score, rejection = float(decision.scores[at]), Code(int(decision.codes[at])).text
    report = NodeReport(
        node=name,
        kept=_NodeDetail.IN_FULL,
        rank=None if rejection else _rank(decision, score),
        score=round(score, 7),
        rejection=rejection or None,
    )
    known = set(in_full)
    if name not in known and is_known:
        report.now = now(name)
    return in_short_or_full(report, known, decision.feasible)


def in_short_or_full(report: NodeReport, in_full: Container[str], feasible: int) -> NodeReport:
    """Set whether the record of the requested node is in full or in short, and why.

    Args:
        report: record of the node.
        in_full: nodes with full detail.
        feasible: number of nodes that passed.
    """
    if report.kept not in {_NodeDetail.IN_FULL, _NodeDetail.IN_SHORT}:
        return report
    if report.node in in_full:
        return msgspec.structs.replace(report, kept=_NodeDetail.IN_FULL, why=None, now=[])
    short = f"it was refused: {report.rejection}"
    if report.rank is not None:
        short = (
            f"it passed, in place {report.rank} of {feasible} with score {report.score or 0.0:.6f}"
        )
    why = f"{short}; {_NOT_IN_FULL}"
    return msgspec.structs.replace(report, kept=_NodeDetail.IN_SHORT, why=why)


def _rank(decision: Decision, score: float) -> int:
    passing = decision.scores[decision.codes == Code.PASSES]
    return int(np.count_nonzero(passing > score + _SAME)) + 1
