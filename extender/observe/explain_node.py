"""What a decision keeps of one node that somebody asks for, and why that is not more."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from extender.core.decision import Decision
from extender.core.filtering import Code
from extender.observe.parameters import read_number
from extender.observe.views import Json

DEFAULT_OTHERS, MAX_OTHERS = 100, 10_000
FEW_NAMES: Final = 20
"""Of nodes that were refused for the same reason, where nobody asks for more."""

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
    def names(self) -> int:
        """So many names of the nodes that were refused are told, for each reason."""
        return self.limit if self.limit > DEFAULT_OTHERS else FEW_NAMES

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
    now: Callable[[str], list[Json]] = lambda _: [],
) -> Json | None:
    """Return what a decision says of the node that is asked about, None where none is.

    Args:
        wish: names the node.
        decision: the verdict on every candidate.
        in_full: nodes that are kept in full.
        nodes: those that there are now.
        closed_by: why kube-scheduler would not ask about it, "" where that is not known.
        now: returns what a node is worth to the pod by now, for one that is not kept in full.
    """
    name, is_known = wish.node, wish.node in nodes
    if not name:
        return None
    at = decision.place_of(name)
    if at is None:
        kept = Kept.NOT_ASKED if is_known else Kept.UNKNOWN
        why = NOT_ASKED if is_known else NO_SUCH_NODE
        if closed_by:
            why = f"kube-scheduler would not ask about it: {closed_by}"
        return _view(NodeTold(node=name, kept=kept, why=why))
    score, rejection = float(decision.scores[at]), Code(int(decision.codes[at])).text
    told = NodeTold(
        node=name,
        kept=Kept.IN_FULL,
        rank=None if rejection else _rank(decision, score),
        score=score,
        rejection=rejection or None,
    )
    known = set(in_full)
    if name not in known and is_known:
        told = msgspec.structs.replace(told, now=now(name))
    return in_short_or_full(told, known, decision.feasible)


class NodeTold(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of the node that is asked about, as it is written; `now` is recomputed."""

    node: str
    kept: Kept
    rank: int | None = None
    score: float | None = None
    rejection: str | None = None
    why: str | None = None
    now: list[Json] = []


def in_short_or_full(told: NodeTold, in_full: Container[str], feasible: int) -> Json:
    """Return what is said of a node, by which nodes are told in full.

    Args:
        told: what a decision says of it.
        in_full: nodes that are told in full.
        feasible: how many nodes passed.
    """
    if told.kept not in {Kept.IN_FULL, Kept.IN_SHORT}:
        return _view(told)
    if told.node in in_full:
        return _view(msgspec.structs.replace(told, kept=Kept.IN_FULL, why=None, now=[]))
    short = f"it was refused: {told.rejection}"
    if told.rank is not None:
        short = f"it passed, in place {told.rank} of {feasible} with score {told.score or 0.0:.6f}"
    return _view(msgspec.structs.replace(told, kept=Kept.IN_SHORT, why=f"{short}; {NOT_IN_FULL}"))


def _rank(decision: Decision, score: float) -> int:
    passing = decision.scores[decision.codes == Code.PASSES]
    return int(np.count_nonzero(passing > score + SAME)) + 1


def _view(told: NodeTold) -> Json:
    return {
        "node": told.node,
        "kept": told.kept.value,
        "rank": told.rank,
        "score": None if told.score is None else round(told.score, 7),
        "rejection": told.rejection,
        "why": told.why,
        "now": told.now,
    }
