"""Sums, outcomes and proposals, as people read them."""

from typing import Any

import pytest

from extender.answers.decisions import OutcomeAnswer, Regret, RegretMeans
from extender.answers.holding import (
    CostGroup,
    Costs,
    HeldDeviceAnswer,
    HolderAnswer,
    HoldersAnswer,
    SumsAnswer,
    Usage,
    UsageFigures,
    UsageGroup,
)
from extender.cli.commands import costs, holders, regret, replay, size, smoke
from extender.cli.formatting import since
from extender.core.sizing import Certainty, Proposal
from extender.insight.replay import ReplayReport, Side, _Move
from tests.extender.cli.answers import filled, rendered, row_of

GIB = 1 << 30
AT = "2027-01-15T08:00:00+00:00"


def sums(**changes: Any) -> SumsAnswer:
    return filled(SumsAnswer, **changes)


def cost_of(**changes: Any) -> list[str]:
    values: dict[str, Any] = {"by": "owner", "sums": sums(gpu_hours=9.0), **changes}
    return rendered(costs._render(filled(Costs, **values)))


def test_costs_show_each_value_of_a_group() -> None:
    group = filled(
        CostGroup, namespace="team", owner="Job a", pods=2, gpus=4, gpus_idle=1, mig_instances=7,
        mig_instances_idle=3, gpu_hours=8.0, gpu_hours_idle=2.5, cost=1234.5, cost_used=1000.25,
        cost_idle=234.25,
    )  # fmt: skip
    bare = filled(CostGroup, namespace="other", gpus=0)
    total = sums(gpu_hours=9.0, gpu_hours_idle=3.0, cost=20.0, cost_idle=5.0, unpriced_pods=2)
    lines = cost_of(
        costs=[group, bare], is_priced=True, total=5, sums=total, hidden_pods=3, unknown=4
    )

    assert row_of(lines, 0) == [
        "OWNER", "PODS", "IDLE GPUS", "IDLE MIG", "GPU-HOURS", "IDLE HOURS", "COST", "COST USED",
        "COST IDLE",
    ]  # fmt: skip
    assert row_of(lines, 1) == [
        "team/Job a", "2", "1/4", "3/7", "8.0", "2.5", "1,234.50", "1,000.25", "234.25"
    ]  # fmt: skip
    assert row_of(lines, 2) == ["other/-", "0", "-", "-", "0.0", "0.0", "?", "?", "?"]
    assert lines[3:] == [
        "in all 9.0 GPU-hours, 3.0 of them idle: 20.00, 5.00 of it idle",
        "and 3 more (--limit)",
        "pods for whose GPUs no price is known: 2",
        "pods left out, because you may not read them: 3",
        "pods left out, because no source reports their GPUs: 4",
    ]


def test_costs_without_prices_are_hours() -> None:
    pod = filled(CostGroup, namespace="team", pod="team/a", gpus=2, gpus_idle=2)
    lines = cost_of(by="pod", costs=[pod], total=1, sums=sums(unpriced_pods=1))

    assert row_of(lines, 0) == ["POD", "PODS", "IDLE GPUS", "GPU-HOURS", "IDLE HOURS"]
    assert row_of(lines, 1) == ["team/a", "0", "2/2", "0.0", "0.0"]
    assert lines[2:] == [
        "in all 0.0 GPU-hours, 0.0 of them idle",
        "no cost: the extender has no price list (prices)",
    ]
    assert cost_of(is_priced=True) == ["no pod is known to hold GPUs"]
    by_namespace = cost_of(by="namespace", costs=[pod], total=1)
    assert (row_of(by_namespace, 0)[0], row_of(by_namespace, 1)[0]) == ("NAMESPACE", "team")


@pytest.mark.parametrize("is_priced", [True, False])
def test_usage_ends_with_the_sums(is_priced: bool) -> None:
    one = UsageGroup(8.0, 2.5, 20.0, 5.0, "team", "Job", "H100")
    answer = Usage(AT, AT, is_priced, [one], UsageFigures(9.0, 3.0, 21.0, 6.0))
    lines = rendered(costs._render_usage(answer))
    money = {True: (["COST", "COST IDLE"], ["20.00", "5.00"], ["21.00", "6.00"]), False: ([],) * 3}
    head, own, total = money[is_priced]

    assert row_of(lines, 0) == [
        "NAMESPACE",
        "OWNER KIND",
        "MODEL",
        "GPU-HOURS",
        "IDLE HOURS",
        *head,
    ]
    assert row_of(lines, 1) == ["team", "Job", "H100", "8.0", "2.5", *own]
    assert row_of(lines, 2) == [f"in all since {since(AT)}", "9.0", "3.0", *total]
    assert rendered(costs._render_usage(filled(Usage, since=AT))) == [
        f"no GPU-hours are recorded since {since(AT)}; they are added up once a minute"
    ]


def holding(*, is_wide: bool = False, **changes: Any) -> list[str]:
    values = {"idle_for_seconds": 3600.0, **changes}
    return rendered(holders._render(filled(HoldersAnswer, **values), is_wide=is_wide))


def test_holders_show_each_value_of_a_pod() -> None:
    on = [filled(HeldDeviceAnswer, index=3), filled(HeldDeviceAnswer)]
    pod = filled(
        HolderAnswer, pod="team/a", node="n", gpus=4, gpus_idle=2, mig_instances=7,
        mig_instances_idle=1, idle_seconds=90.0, is_at_least=True, gpu_hours=8.0,
        gpu_hours_idle=2.5, memory_used_bytes=20 * GIB, owner="Job a", cost_used=3.0,
        cost_idle=1.5, why="idle", held_seconds=120.0, devices=on,
    )  # fmt: skip
    lines = holding(
        is_wide=True, holders=[pod, filled(HolderAnswer)], is_priced=True, total=3, unknown=4,
        sums=sums(pods=2, gpu_hours=9.0), watched_since=AT,
    )  # fmt: skip

    assert row_of(lines, 1) == [
        "team/a", "n", "2/4", "1/7", "1m30s+", "8.0", "2.5", "20", "Job a", "3.00", "1.50", "idle",
        "2m", "3, ?",
    ]  # fmt: skip
    assert row_of(lines, 2)[:7] == ["-", "-", "0s", "0.0", "0.0", "?", "-"]
    assert lines[3:6] == [
        "and 1 more (--limit)",
        "in all 9.0 GPU-hours, 0.0 of them idle",
        "pods not judged, because no source reports their GPUs: 4",
    ]
    assert lines[6].startswith("watched since ")


def test_holders_show_no_sum_of_one_pod_and_no_columns_without_values() -> None:
    lines = holding(holders=[filled(HolderAnswer)], total=1, sums=sums(pods=1))

    assert row_of(lines, 0) == [
        "POD", "NODE", "IDLE GPUS", "IDLE FOR", "GPU-HOURS", "IDLE HOURS", "MEMORY GiB", "OWNER"
    ]  # fmt: skip
    assert len(lines) == 2
    assert holding() == ["no pod is known to hold GPUs unused for 1h"]
    assert holding(idle_for_seconds=0.0) == ["no pod is known to hold GPUs"]


def test_regret_shows_each_value_of_a_placement() -> None:
    full = filled(
        OutcomeAnswer, pod="team/a", node="n", choice="m", best="o", got_ratio=0.5, is_known=True,
        choice_ratio=0.25, best_ratio=0.1, regret_ratio=0.25, is_followed=True, got_then_ratio=0.6,
        choice_then_ratio=0.7, gpus=2, seconds=90.0, bound_at=AT,
    )  # fmt: skip
    means = RegretMeans(3, 0.5, 0.4, 0.3, 0.2, 0.1)
    answer = filled(
        Regret, after_seconds=3600.0, watched=2, left_out=1, all=means,
        placements=[full, filled(OutcomeAnswer, pod="team/b")], unreachable=["10.0.0.1"],
    )  # fmt: skip
    lines = rendered(regret._render(answer, is_wide=True))

    assert row_of(lines, 1) == ["all", "3", "50%", "40%", "30%", "20%", "10%"]
    assert row_of(lines, 2)[:2] == ["followed", "0"]
    assert row_of(lines, 3)[:2] == ["not followed", "0"]
    assert row_of(lines, 6)[:-1] == [
        "team/a", "n", "m", "o", "50%", "25%", "10%", "+25%", "yes", "60%", "70%", "2", "1m30s"
    ]  # fmt: skip
    assert row_of(lines, 7) == [
        "team/b", "none", "0%~", "?", "0%", "?", "no", "?", "?", "0", "0s", "?"
    ]  # fmt: skip
    assert lines[8:] == [
        "pods watched until 1h after their binding: 2",
        "pods left out: 1",
        "replicas that do not answer: 10.0.0.1",
    ]
    assert rendered(regret._render(filled(Regret), is_wide=False)) == [
        "no placement was compared yet",
        "pods watched until 0s after their binding: 0",
    ]


def replayed(**changes: Any) -> list[str]:
    sides: dict[str, Any] = {
        "before": Side(placed=3, waits=1, activity=0.125, idle_share=0.5),
        "after": Side(placed=2, waits=2, activity=None, idle_share=None),
        "actual": Side(placed=4, waits=0, activity=0.5, idle_share=0.25),
    }
    counts = dict.fromkeys(
        ("exact", "pods", "narrowed", "moved", "bound", "followed", "would_be_followed"), 0
    )
    values: dict[str, Any] = {"changes": {}, "inexact": [], "moves": [], "decisions": 4}
    values |= {**counts, **sides, **changes}
    return rendered(replay._render(ReplayReport(**values)))


def test_a_replay_shows_its_sides_moves_and_doubts() -> None:
    moves = [
        _Move(pod=f"team/{number}", before="", after="", bound="", activity_before=None,
              activity_after=0.5)
        for number in range(11)
    ]  # fmt: skip
    moves[0] = _Move(
        pod="team/a", before="n", after="m", bound="o", activity_before=0.1, activity_after=0.2
    )
    lines = replayed(
        changes={"weights.memory": "0.4"}, pods=4, moved=12, moves=moves, bound=3, followed=2,
        narrowed=1, exact=2, inexact=[7, 9],
    )  # fmt: skip

    assert row_of(lines, 1) == ["settings of the log", "3", "1", "12.5%", "50%"]
    assert row_of(lines, 2) == ["changed settings", "2", "2", "?", "?"]
    assert row_of(lines, 3) == ["kube-scheduler", "4", "0", "50.0%", "25%"]
    assert lines[6] == "12 of 4 pods (300%) would go elsewhere"
    assert row_of(lines, 8) == ["team/a", "n", "m", "o", "10%", "20%"]
    assert row_of(lines, 9) == ["team/1", "none", "none", "-", "?", "50%"]
    assert row_of(lines, 17)[0] == "team/9"
    assert lines[18:] == [
        "and 2 more (-o json names 11)",
        "",
        "2 of the 3 pods known to be bound are on idlegpu's first choice",
        "for 1 of 4 pods the log has no filter call: repeated only among the nodes that had "
        "passed, or their shortlist",
        "2 of 4 decisions come out exactly as they were logged; not 7, 9: were they made by "
        "another version of idlegpu?",
    ]


def test_a_replay_without_changes_compares_nothing() -> None:
    lines = replayed(pods=4, narrowed=1, exact=4)

    assert row_of(lines, 1)[0] == "settings of the log"
    assert lines[2].startswith("ACTIVITY: ")
    assert lines[3:] == ["", "4 of 4 decisions come out exactly as they were logged"]
    same = replayed(changes={"a": "b"}, pods=4, exact=4)
    assert same[5:] == [
        "0 of 4 pods (0%) would go elsewhere",
        "4 of 4 decisions come out exactly as they were logged",
    ]
    assert replayed(decisions=0) == ["the log contains no decision"]


def proposed(**changes: Any) -> list[str]:
    values = {
        "gpus": 1, "memory_bytes": None, "models": (), "is_share_enough": False,
        "certainty": Certainty.STATED, "because": (),
    }  # fmt: skip
    return rendered(size._render(Proposal(**(values | changes))))


def test_a_proposal_shows_what_to_request() -> None:
    full = proposed(
        gpus=16, memory_bytes=40 * GIB, models=("H100", "A100"), because=("2 x 70 GiB", "x")
    )

    assert full == [
        "16 GPUs, 40 GiB on each: stated by the command",
        "2 x 70 GiB",
        "x",
        "",
        "idlegpu.io/gpu-memory: 40Gi",
        "idlegpu.io/prefer-models: H100,A100",
        "idlegpu run --gpus 8 --memory 40Gi --model H100,A100 -- CMD",
    ]
    assert proposed() == ["1 GPU: stated by the command", "", "idlegpu run --gpus 1 -- CMD"]
    assert proposed(is_share_enough=True)[0] == "a share of a GPU: stated by the command"


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"containerStatuses": [{"state": {}}, {"state": {"waiting": {"reason": "Pulling"}}}]},
         "Pulling"),
        ({"containerStatuses": [{"state": {"terminated": {"reason": "Error", "message": "no"}}}]},
         "no"),
        ({"containerStatuses": [{"state": None}], "message": "evicted"}, "evicted"),
        ({"conditions": [{"status": "True", "message": "a"}, {"status": "False"},
                         {"status": "False", "message": "full"}]}, "full"),
        ({"phase": "Pending"}, "it is Pending"),
        ({}, "it is unknown"),
    ],
)  # fmt: skip
def test_the_reason_of_a_pod_that_does_not_run_is_found(status: dict[str, Any], why: str) -> None:
    assert smoke._why({"status": status}) == why
