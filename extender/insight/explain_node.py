"""Report what a decision recorded about one requested node, and why details are missing."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from extender.answers import routes
from extender.answers.decisions import VerdictAnswer
from extender.answers.pods import NodeReport
from extender.core.decision.decision import Decision
from extender.core.decision.filtering import Code
from extender.server.json_api import read_number

_FEW_NAMES: Final = 20
"""Rejected nodes to name for each reason, unless the caller asks for more."""

SAME: Final = 1e-6
"""Scores closer than this count as equal: recorded scores have seven digits."""

_NOT_IN_FULL: Final = (
    "its GPUs and readings at that time are not recorded: a decision records only its best nodes, "
    "the node bound to, and some rejected ones if few pass (decisions.detailed_nodes sets how many)"
)
_NO_CANDIDATE: Final = (
    "it was no candidate for this pod: kube-scheduler's own filters had rejected it, "
    "kube-scheduler had found enough nodes before this one, or the node was added later"
)
_NO_SUCH_NODE: Final = "it was no candidate, and no node has this name now"


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
    """The node was no candidate."""
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
        decision: verdicts on all candidates.
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
    """Return the record of the requested node, depending on its detail.

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
    return int(np.count_nonzero(passing > score + SAME)) + 1
