"""Each value of an explanation, as people read it."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from extender.answers.decisions import (
    DecisionAnswer,
    DeviceAnswer,
    Domain,
    FactorAnswer,
    Group,
    PartAnswer,
    RankedVerdict,
    Request,
)
from extender.answers.fleet import SourceAnswer
from extender.answers.pods import (
    Explanation,
    NodeReport,
    Other,
    ProblemAnswer,
    ReasonCount,
    ReasonNodes,
    StoredAnswer,
)
from extender.cli.client import Client
from extender.cli.commands import explain
from extender.cli.transports import ClientError, Failure
from tests.extender.cli.answers import device, filled, rendered, row_of, waiting

GIB = 1 << 30
AT = "2027-01-15T08:00:00+00:00"


class Silent:
    """Extender that answers no request."""

    def request(self, *_: object, **__: object) -> bytes:
        raise ClientError("gone", Failure.UNREACHABLE)


def explained(
    node: str | None = None,
    limit: int = 10,
    *,
    is_wide: bool = False,
    has_scores: bool = False,
    **changes: Any,
) -> list[str]:
    """Return the lines of an explanation of team/p."""
    answer = filled(Explanation, pod="team/p", **changes)
    client = Client(Silent())
    shown = explain._render(
        answer, client, node=node, limit=limit, is_wide=is_wide, has_scores=has_scores
    )
    return rendered(shown)


def decision(**changes: Any) -> DecisionAnswer:
    return filled(DecisionAnswer, candidates=9, feasible=7, node="a", **changes)


def verdict(node: str, **changes: Any) -> RankedVerdict:
    values = {"node": node, "resource": "nvidia.com/gpu", "is_agreed": True, **changes}
    return filled(RankedVerdict, **values)


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({"is_hypothetical": True, "decision": decision()}, "would go to a"),
        ({"is_hypothetical": True}, "no node is suitable"),
        ({"bound_node": "a", "is_followed": True, "decision": decision()},
         "is on a, idlegpu's first choice"),
        ({"bound_node": "b", "is_followed": False, "decision": decision(), "gpus": [0, 3]},
         "is on b (GPU 0, 3), not idlegpu's first choice, a"),
        ({"bound_node": "b"},
         "is on b, and no decision about it is recorded: none was made, or it is too old"),
        ({"state": "gone", "decision": decision()}, "is gone; idlegpu's choice was a"),
        ({"state": "gone"}, "is gone; idlegpu's choice was no node"),
        ({"state": "refused", "decision": decision()}, "waits: refused"),
    ],
)  # fmt: skip
def test_an_explanation_begins_with_where_the_pod_is(changes: dict[str, Any], head: str) -> None:
    assert explained(**changes)[0] == f"team/p: {head}"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "1 gpu"),
        ({"gpu_memory_bytes": 20 * GIB}, "1 gpu, 20 GiB on each"),
        ({"gpu_memory_share": 0.25}, "1 gpu, 25% of the memory of each"),
        ({"gpu_memory_bytes": GIB, "gpu_memory_from": "its words"},
         "1 gpu, 1.0 GiB on each, by its words"),
        ({"prefer_models": ["H100", "A100"]}, "1 gpu, preferably H100, A100"),
        ({"require_models": ["H100"]}, "1 gpu, only H100"),
        ({"targets": ["a", "b"]}, "1 gpu, on a, else b and nowhere else"),
        ({"targets": ["a"], "target_policy": "prefer"}, "1 gpu, on a"),
        ({"require_idle": True}, "1 gpu, known to be idle"),
        ({"max_utilization_ratio": 0.2, "max_memory_ratio": 0.4},
         "1 gpu, idle is below 20% activity and 40% memory"),
        ({"max_utilization_ratio": 0.2}, "1 gpu"),
        ({"max_memory_ratio": 0.2}, "1 gpu"),
        ({"strategy": "pack"}, "1 gpu, strategy pack"),
    ],
)  # fmt: skip
def test_an_explanation_says_what_the_pod_requests(changes: dict[str, Any], text: str) -> None:
    request = Request(resources={"nvidia.com/gpu": 1}, **changes)

    assert explained(decision=decision(request=request))[1] == f"requests {text}"


def test_an_explanation_says_how_many_nodes_suit_and_which_decision_that_was() -> None:
    number = {"number": 812, "verb": "prioritize", "at": AT}
    filtered = filled(DecisionAnswer, candidates=20, feasible=9)

    assert explained(decision=decision())[1] == "7 of 9 candidates suitable now"
    timed = explained(decision=decision(**number, duration_seconds=0.0021))[1]
    assert re.fullmatch(
        r"7 of 9 candidates suitable \(decision 812, prioritize, [-\d: ]{14}, 2\.1 ms\)", timed
    )
    untimed = explained(decision=decision(**number, is_shadow=True), filter=filtered)
    assert re.fullmatch(
        r"9 of 20 candidates suitable \(decision 812, prioritize, [-\d: ]{14}\)", untimed[1]
    )
    assert untimed[2].startswith("in shadow mode")
    problem = filled(ProblemAnswer, message="strategy: must be pack")
    assert explained(problems=[problem])[1] == "strategy: must be pack"


def group(placed: Mapping[str, int], **changes: Any) -> str:
    """Return the line about a pod's group of four."""
    values: dict[str, Any] = {"rest": 2, "fitting": [], **changes}
    one = Group(name="JobSet train", size=4, placed=dict(placed), **values)
    return explained(decision=decision(group=one))[1]


def test_an_explanation_says_where_the_pods_group_is() -> None:
    domains = [Domain(label="rack", name="r1", pods=8), Domain(label="rack", name="r2", pods=2)]
    many = {f"n{number}": 1 for number in range(6)}
    start = "group JobSet train: "

    assert group({}) == f"{start}0 of 4 pods placed; no domain has room for 2 with this pod"
    assert group({"a": 2, "b": 1}, rest=1) == (
        f"{start}3 of 4 pods placed: a (2), b; no domain has room for this pod"
    )
    assert group(many) == (
        f"{start}6 of 4 pods placed: n0, n1, n2, n3 and 2 more; no domain has room for 2 with "
        "this pod"
    )
    assert group({}, fitting=domains) == (
        f"{start}0 of 4 pods placed; room for 2 with this pod by rack: r1 (8), r2 (2)"
    )
    assert group({}, too_few=0) == (
        f"{start}0 of 4 pods placed; the cluster has GPUs for 0 of them, held or not"
    )


def test_an_explanation_says_why_the_pod_waits() -> None:
    ours, theirs = ReasonCount(3, "busy"), ReasonCount(2, "tainted")

    assert explained(pending=waiting(by_us=[ours], by_scheduler=[theirs], hints=["a node"]))[
        1:
    ] == [
        "waits for 1m30s, scheduler s",
        "  kube-scheduler: 2 tainted",
        "  idlegpu: 3 busy",
        "  what would help: a node",
    ]
    assert explained(pending=waiting(message="odd"))[2:] == ["  kube-scheduler: odd"]
    assert explained(pending=waiting(message="odd", by_us=[ours]))[2:] == ["  idlegpu: 3 busy"]
    assert explained(pending=waiting(message="odd", by_scheduler=[theirs]))[2:] == [
        "  kube-scheduler: 2 tainted"
    ]


def test_an_explanation_lists_the_nodes_with_why_each_was_not_first() -> None:
    listed = [
        verdict("a", rank=1, reason="certain"),
        verdict("b", rank=2, lost_by="busier", is_bound=True),
        verdict("c"),
        verdict("d", rank=3),
    ]
    others = [Other(node=f"o{number}", score=0.25) for number in range(4)]
    refused = [ReasonNodes(3, "full", ["a", "x", "y"])]
    shown: dict[str, Any] = {
        "nodes": listed,
        "others": others,
        "others_left": 5,
        "rejected": refused,
    }
    narrow, wide = explained(limit=6, **shown), explained(limit=6, is_wide=True, **shown)

    assert [row_of(narrow, number)[-1] for number in range(3, 9)] == [
        "first choice: certain", "bound here, busier", "-", "first choice",
        "kept in short: 0.250000", "kept in short: 0.250000",
    ]  # fmt: skip
    assert row_of(narrow, 7)[:2] == ["-", "o0"]
    assert narrow[9:11] == ["and 7 more (--limit)", "refused by idlegpu: 3 full: a, x, y"]
    assert [row_of(wide, number)[1::6] for number in (9, 10)] == [
        ["x", "refused: full"], ["y", "refused: full"],
    ]  # fmt: skip
    assert "and" not in "".join(explained(nodes=listed[:1], limit=1))
    assert not any("kept in short" in text for text in explained(limit=3, **shown))


@pytest.mark.parametrize(
    ("count", "names", "text"),
    [
        (2, ["a", "b"], "a, b"),
        (9, ["a", "b"], "a, b and 7 more"),
        (5, ["a", "b", "c", "d"], "a, b, c, d and 1 more"),
        (6, ["a", "b", "c", "d", "e"], "a, b, c, d and 2 more"),
        (5, ["a", "b", "c", "d", "e"], "a, b, c, d and 1 more"),
    ],
)
def test_an_explanation_counts_the_nodes_of_a_reason(
    count: int, names: list[str], text: str
) -> None:
    closed = [ReasonNodes(count, "cordoned", names)]

    assert explained(closed=closed)[1:] == [f"not candidates: {count} cordoned: {text}"]


def test_an_explanation_shows_the_pods_node_or_the_first_choice_in_detail() -> None:
    listed = [verdict("a", rank=1), verdict("b", rank=2), verdict("c", rank=3)]

    def shown(*, bound: str = "", node: str | None = None, is_wide: bool = False) -> list[str]:
        some = [verdict(one.node, rank=one.rank, is_bound=one.node == bound) for one in listed]
        lines = explained(decision=decision(), nodes=some, node=node, is_wide=is_wide)
        return [text.partition(",")[0] for text in lines if "that the pod could land on" in text]

    assert shown() == ["a"]
    assert shown(bound="c") == ["c"]
    assert shown(node="b") == ["b"]
    assert shown(is_wide=True) == ["a", "b", "c"]


def test_an_explanation_says_why_a_node_is_not_shown_in_detail() -> None:
    nothing = explained(node="x", nodes=[verdict("a")])
    report = filled(NodeReport, node="x", why="it was refused", now=[verdict("x")])
    short = explained(node="x", requested_node=report)
    kept = StoredAnswer(in_full=2, in_short=7, note="7 nodes are kept in short")

    assert nothing[-1] == "x: no decision about this pod is remembered"
    assert short[2:4] == ["x: it was refused", ""]
    assert short[4].startswith("recomputed from current readings")
    assert short[5].startswith("x, nvidia.com/gpu: 0 idle of 0 GPUs")
    assert explained(not_checked=["volumes", "quotas"])[-1] == "not checked: volumes, quotas"
    assert explained(kept=kept)[-1] == kept.note
    assert explained(kept=StoredAnswer(in_full=2, in_short=0, note="x"))[-1] != "x"


def detail_of(one: DeviceAnswer, **changes: Any) -> list[str]:
    """Return the lines about a node with one device."""
    return explained(node="n", nodes=[verdict("n", devices=[one], **changes)])[5:]


def test_an_explanation_shows_each_value_of_a_device() -> None:
    full = device(
        index=3,
        gpu_instance_id="7",
        can_land=True,
        utilization_ratio=0.5,
        memory_used_ratio=0.25,
        free_bytes=60 * GIB,
        assumed=2,
        temperature_celsius=71.6,
        health="hot",
        throttling="power cap",
        signals={
            "utilization": SourceAnswer("agent", 5.0, "sm_active_ratio"),
            "memory": SourceAnswer("prometheus", 30.0),
        },
    )
    lines = detail_of(full, idle=1, landing=2, needed=1, taken=3, reason="certain", is_late=True)

    assert lines[0] == (
        "n, nvidia.com/gpu: 1 idle of 2 GPUs that the pod could land on, 1 needed, 2 assumed on "
        "them, 3 taken by pods on unknown GPUs"
    )
    assert lines[1] == "certain"
    assert lines[2].startswith("as of the pod's binding")
    assert row_of(lines, 4) == [
        "3/7", "idle", "50%", "SM", "25%", "60", "72", "yes", "2",
        "utilization: agent 5s, memory: prometheus 30s", "hot; throttled: power cap",
    ]  # fmt: skip


def test_an_explanation_marks_unknown_values_of_a_device() -> None:
    same = {name: SourceAnswer("agent", 5.0) for name in ("utilization", "memory")}
    lines = detail_of(device(free_bytes=GIB, source="none"))

    assert row_of(lines, 2) == ["?", "idle", "?", "-", "?", "-", "?", "no", "0", "none", "-"]
    assert row_of(detail_of(device(signals=same)), 2)[3::6] == ["-", "agent 5s"]
    assert "disagree" not in "".join(lines)
    unagreed = detail_of(device(), is_agreed=False)
    assert unagreed[1].startswith("readings and API server disagree")
    assert "assumed on them" not in lines[0]
    assert "taken by" not in lines[0]


def test_an_explanation_adds_up_the_room_for_declared_memory() -> None:
    declared = device(
        index=1,
        free_bytes=30 * GIB,
        memory_total_bytes=80 * GIB,
        declared_bytes=40 * GIB,
        others_bytes=10 * GIB,
        memory_free_bytes=35 * GIB,
    )

    assert detail_of(declared)[-1] == (
        "GPU 1: 30 GiB of room: 80 in all, 40 declared by its pods, 10 in use by others, 35 "
        "measured free"
    )
    assert detail_of(device(declared_bytes=GIB))[-1].startswith("GPU ?: ? GiB of room")


def test_an_explanation_shows_the_parts_of_a_score() -> None:
    one = verdict(
        "n",
        score=0.75,
        parts=[PartAnswer(name="idle", share=0.5, value=0.9, adds=0.45)],
        factors=[
            FactorAnswer(name="early failures", value=0.1, keeps=0.9),
            FactorAnswer(name="nothing", value=0.0, keeps=1.0),
        ],
    )
    *_, head, part, score, factor = explained(node="n", nodes=[one], has_scores=True)

    assert head.split("  ")[0] == "PART OF THE SCORE"
    assert row_of([part], 0) == ["idle", "90%", "0.500000", "0.450000"]
    assert row_of([score], 0) == ["score", "0.750000"]
    assert row_of([factor], 0) == ["of the certainty, early failures leave", "10%", "x 0.9000"]
