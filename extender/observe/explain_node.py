"""What a decision keeps of one node that somebody asks for, and why that is not more."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from extender.core.decision import Decision
from extender.core.filtering import Code
from extender.observe.parameters import read_number
from extender.observe.views import Json

DEFAULT_OTHERS, MAX_OTHERS = 100, 10_000

SAME: Final = 1e-6
"""Scores that differ by less are remembered as equal: they keep seven digits."""

NOT_IN_FULL: Final = (
    "its GPUs and readings as they were then are not kept: of each decision only the best nodes "
    "are, the one bound to, and some that were refused where fewer pass (decisions.detailed_nodes "
    "sets how many)"
)
NOT_ASKED: Final = (
    "kube-scheduler did not ask about it for this pod: its own filters had refused it, it had "
    "found enough nodes before this one's turn, or the node came later"
)
NO_SUCH_NODE: Final = "it was no candidate, and no node is called so now"


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants to be told of the nodes.

    Attributes:
        limit: so many of those that are not known in full.
        node: of this one whatever is known, "" for none.
    """

    limit: int
    node: str

    @classmethod
    def read(cls, query: Mapping[str, str]) -> "Wish":
        """Read a question.

        Raises:
            QueryError: a parameter has a value that is not allowed.
        """
        limit = read_number(query, "limit", default=DEFAULT_OTHERS, low=0, high=MAX_OTHERS)
        return cls(limit, query.get("node", ""))

    @property
    def query(self) -> dict[str, str]:
        """As parameters; without a node none that an older replica would refuse."""
        return {"limit": str(self.limit)} | ({"node": self.node} if self.node else {})


class Kept(StrEnum):
    """How much is known of a node in a decision."""

    IN_FULL = "in-full"
    IN_SHORT = "in-short"
    """Score and place, or the reason against it."""
    NOT_ASKED = "not-asked"
    """It was no candidate."""
    UNKNOWN = "unknown"
    """There is no such node."""


def asked_node(
    wish: Wish,
    decision: Decision,
    in_full: Iterable[str],
    nodes: Container[str],
    closed_by: str = "",
) -> Json | None:
    """Return what a decision says of the node that is asked about, None where none is.

    Args:
        wish: names the node.
        decision: the verdict on every candidate.
        in_full: nodes that are kept in full.
        nodes: those that there are now.
        closed_by: why kube-scheduler would not ask about it, "" where that is not known.
    """
    name, is_known = wish.node, wish.node in nodes
    if not name:
        return None
    try:
        at = decision.candidates.index(name)
    except ValueError:
        kept = Kept.NOT_ASKED if is_known else Kept.UNKNOWN
        why = NOT_ASKED if is_known else NO_SUCH_NODE
        if closed_by:
            why = f"kube-scheduler would not ask about it: {closed_by}"
        return _view(name, kept, why=why)
    score, rejection = float(decision.scores[at]), Code(int(decision.codes[at])).text
    rank = None if rejection else _rank(decision, score)
    if name in set(in_full):
        return _view(name, Kept.IN_FULL, rank=rank, score=score, rejection=rejection)
    told = f"it was refused: {rejection}"
    if rank is not None:
        told = f"it passed, in place {rank} of {decision.feasible} with score {score:.3f}"
    return _view(
        name,
        Kept.IN_SHORT,
        rank=rank,
        score=score,
        rejection=rejection,
        why=f"{told}; {NOT_IN_FULL}",
    )


def _rank(decision: Decision, score: float) -> int:
    passing = decision.scores[decision.codes == Code.PASSES]
    return int(np.count_nonzero(passing > score + SAME)) + 1


def _view(
    name: str,
    kept: Kept,
    *,
    rank: int | None = None,
    score: float | None = None,
    rejection: str = "",
    why: str = "",
) -> Json:
    return {
        "node": name,
        "kept": kept.value,
        "rank": rank,
        "score": None if score is None else round(score, 7),
        "rejection": rejection or None,
        "why": why or None,
    }
