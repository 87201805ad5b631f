"""Nodes of an explanation: why each ranks behind the first choice, and lists of the others."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from extender.core.decision.decision import Decision
from extender.core.decision.filtering import Code
from extender.core.decision.scoring import (
    BAND,
    CERTAINTY,
    EARLY_FAILURES,
    ILL_HEALTH,
    MODEL,
    NEAR_GROUP,
    Factor,
    ScorePart,
)
from extender.core.decision.verdicts import NodeScore
from extender.core.steps import finish
from extender.insight import explain_views
from extender.insight.explain_views import (
    _NOTHING,
    Wish,
    closed_nodes,
    kept_view,
    lost_by,
    rejected_nodes,
    requested_node,
    short_nodes,
)

SURE = "certain to get an idle GPU"
LEAVES = "leaves 4 of 8 usable"
MAYBE = "may get an idle GPU (50 %)"


def scored(
    node: str,
    parts: Mapping[str, float],
    *clauses: str,
    factors: Mapping[str, float] | None = None,
    rejection: str = "",
) -> NodeScore:
    """Return a node whose score is the sum of its parts, with its reason."""
    return NodeScore(
        node=node,
        rejection=rejection,
        score=sum(parts.values()),
        parts=tuple(
            ScorePart(name=name, share=1.0, value=adds, adds=adds) for name, adds in parts.items()
        ),
        factors=tuple(
            Factor(name=name, value=0.0, keeps=keeps) for name, keeps in (factors or {}).items()
        ),
        reason="; ".join(clauses),
    )


def behind(name: str, first: Sequence[str], other: Sequence[str]) -> str | None:
    """Return why a node is behind whose only deficit is in one part, by the nodes' reasons."""
    return lost_by(
        scored("a", {"equal": 0.1, name: 0.4, "later": 0.0}, *first),
        scored("b", {"equal": 0.1, name: 0.2, "later": 0.1}, *other),
    )


def test_the_first_choice_and_refused_nodes_lose_by_no_part() -> None:
    first = scored("a", {"fit": 0.5})

    assert lost_by(first, first) is None
    assert lost_by(None, first) is None
    refused = scored("b", {"fit": 0.1}, rejection="node(s) were bad")
    assert lost_by(first, refused) == "refused: node(s) were bad"


@pytest.mark.parametrize(
    ("name", "first", "other", "words"),
    [
        (BAND, [SURE, LEAVES], [MAYBE, LEAVES], MAYBE),
        (MODEL, [SURE, f"{MODEL} 1"], [SURE, f"{MODEL} 2", LEAVES], f"{MODEL} 2"),
        (MODEL, [SURE, f"{MODEL} 1"], [SURE, LEAVES], SURE),
        (NEAR_GROUP, [SURE, "same rack as its group"], [SURE, "far from its group", LEAVES],
         "far from its group"),
        (NEAR_GROUP, [SURE, "same rack as its group"], [SURE, "same rack as its group", LEAVES],
         "less room for the rest of its group"),
        (NEAR_GROUP, ["same rack as its group"], [SURE, LEAVES], SURE),
        ("fit", [SURE, LEAVES], [SURE, "leaves 2 of 8 usable"], "leaves 2 of 8 usable"),
        ("fit", [SURE, LEAVES], ["likely", LEAVES], "a little more load"),
    ],
)  # fmt: skip
def test_a_node_loses_by_the_clause_of_the_first_part_in_which_it_is_behind(
    name: str, first: list[str], other: list[str], words: str
) -> None:
    assert behind(name, first, other) == words


@pytest.mark.parametrize(
    ("keeps", "words"),
    [
        ((0.9, 0.9, 0.4), f"{EARLY_FAILURES} cost 60 %"),
        ((0.9, 0.4, 0.9), f"{ILL_HEALTH} costs 60 %"),
        ((0.1, 0.8, 0.9), MAYBE),
    ],
)
def test_less_certainty_is_explained_by_its_largest_cause(
    keeps: tuple[float, ...], words: str
) -> None:
    names = "GPUs that may not be idle", ILL_HEALTH, EARLY_FAILURES
    clauses = [MAYBE, f"{ILL_HEALTH} costs 60 %", f"{EARLY_FAILURES} cost 60 %", LEAVES]
    first = scored(
        "a", {CERTAINTY: 0.5}, SURE, factors=dict(zip(names, (1.0, 0.9, 0.9), strict=True))
    )
    other = scored("b", {CERTAINTY: 0.2}, *clauses, factors=dict(zip(names, keeps, strict=True)))

    assert lost_by(first, other) == words


def test_a_node_that_is_ahead_in_an_earlier_part_loses_by_the_sum() -> None:
    first = scored("a", {"fit": 0.1, "calm": 0.4}, SURE)
    other = scored("b", {"fit": 0.2, "calm": 0.1}, SURE)

    assert lost_by(first, other) == "a little more load"


def test_equal_nodes_are_ordered_by_name() -> None:
    first, other = (scored(name, {"fit": 0.1, "calm": 0.4}, SURE) for name in "ab")

    assert lost_by(first, other) == "as good as a: ties go by name"


@pytest.mark.parametrize(
    ("ahead", "words"),
    [(_NOTHING / 2, "as good as a: ties go by name"), (_NOTHING, "a little more load")],
)
def test_a_tiny_difference_of_scores_is_none(ahead: float, words: str) -> None:
    first, other = scored("a", {"fit": ahead}, SURE), scored("b", {"fit": 0.0}, SURE)

    assert lost_by(first, other) == words


def test_other_parts_make_other_scores() -> None:
    first = scored("a", {"fit": 0.1}, SURE, LEAVES)
    other = scored("b", {"calm": 0.3}, SURE, "idle GPUs: 3")

    assert lost_by(first, other) == "idle GPUs: 3"


DECISION = Decision(
    candidates=("a", "b", "c", "d", "e", "f", "g"),
    codes=np.array([0, 0, Code.UNHEALTHY, 0, Code.NOT_IDLE, 0, Code.NOT_IDLE], dtype=np.uint8),
    scores=np.array([0.2, 0.9, 0.5, 0.12345678, 0.4, 0.2, 0.1]),
    order=np.array([1, 0, 5, 3], dtype=np.intp),
)


@pytest.mark.parametrize(
    ("limit", "shown", "left"),
    [(9, ["b", "f", "d"], 0), (3, ["b", "f", "d"], 0), (1, ["b"], 2), (0, [], 3)],
)
def test_other_nodes_that_pass_are_listed_best_first(
    monkeypatch: pytest.MonkeyPatch, limit: int, shown: list[str], left: int
) -> None:
    monkeypatch.setattr(explain_views, "PIECE_SHORT", 2)

    others, rest = finish(short_nodes(DECISION, ["a"], limit))

    assert ([other.node for other in others], rest) == (shown, left)
    assert [other.score for other in others] == [0.9, 0.2, 0.1234568][: len(shown)]
    assert sum(1 for _ in short_nodes(DECISION, ["a"], limit)) == 2


def test_rejected_nodes_are_grouped_most_frequent_reason_first() -> None:
    found = [(one.count, one.reason, one.nodes) for one in rejected_nodes(DECISION, 1)]

    assert found == [(2, Code.NOT_IDLE.text, ["e"]), (1, Code.UNHEALTHY.text, ["c"])]
    closed = closed_nodes({"few": ["a"], "many": ["b", "c"]}, 1)
    assert [(one.count, one.reason, one.nodes) for one in closed] == [
        (2, "many", ["b"]),
        (1, "few", ["a"]),
    ]


@pytest.mark.parametrize(
    ("node", "kept", "rank", "score", "rejection"),
    [
        ("b", "in-short", 1, 0.9, None),
        ("a", "in-full", 2, 0.2, None),
        ("f", "in-short", 2, 0.2, None),
        ("d", "in-short", 4, 0.1234568, None),
        ("c", "in-short", None, 0.5, Code.UNHEALTHY.text),
    ],
)
def test_a_node_is_reported_with_its_rank_and_score(
    node: str, kept: str, rank: int | None, score: float, rejection: str | None
) -> None:
    asked: list[str] = []

    def evaluate(name: str) -> list[object]:
        asked.append(name)
        return []

    wish = Wish(limit=1, node=node)
    found = requested_node(wish, DECISION, ["a"], {*"abcd"}, now=evaluate)  # type: ignore[arg-type] # a stand-in

    assert found is not None
    assert (found.kept, found.rank, found.score) == (kept, rank, score)
    assert found.rejection == rejection
    assert asked == ([] if node in "af" else [node])  # only a node that is there
    if found.rank is not None and kept == "in-short":
        assert (found.why or "").startswith(
            f"it passed, in place {rank} of 4 with score {score:.6f}; "
        )
    if rejection:
        assert (found.why or "").startswith(f"it was refused: {rejection}; ")


def test_why_a_node_was_no_candidate_is_reported() -> None:
    def why(node: str, closed_by: str = "") -> str:
        found = requested_node(Wish(limit=1, node=node), DECISION, [], {"x"}, closed_by)
        assert found is not None
        assert (found.rank, found.score, found.rejection) == (None, None, None)
        return f"{found.kept}: {found.why}"

    assert why("x").startswith("no-candidate: it was not a candidate for this pod")
    assert why("gone") == "unknown: it was not a candidate, and no node has this name now"
    assert why("x", "cordoned") == "no-candidate: kube-scheduler itself would reject it: cordoned"
    assert requested_node(Wish(limit=1, node=""), DECISION, [], {"x"}) is None


def test_names_of_rejected_nodes_are_few_unless_many_are_requested() -> None:
    assert [Wish(limit=limit, node="").names for limit in (0, 100, 101)] == [20, 20, 101]


def test_the_request_is_forwarded_as_it_came() -> None:
    assert Wish(limit=7, node="a").query == {"limit": "7", "node": "a"}
    assert Wish(limit=7, node="").query == {"limit": "7"}


def test_extent_of_the_record_is_in_numbers_and_words() -> None:
    full, part = kept_view(3, 3), kept_view(5, 3)

    assert (full.in_full, full.in_short, full.note.partition(":")[0]) == (
        3,
        0,
        "every candidate is recorded in full",
    )
    assert (part.in_full, part.in_short) == (3, 2)
    assert part.note.startswith("3 of 5 candidates are recorded in full, ")
    assert "; the other 2 only with score and reason" in part.note
    assert kept_view(3, 4).in_short == 0  # the node bound to need not be a candidate
