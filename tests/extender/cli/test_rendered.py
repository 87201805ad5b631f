"""Each value of an answer, as people read it."""

import re
from typing import Any

import pytest
from rich.console import Console

from extender.answers.advice import (
    Advice,
    CardAdvice,
    HostAmounts,
    PodAdvice,
    StrandedGpus,
    StrandedHolder,
)
from extender.answers.decisions import (
    Best,
    BestNode,
    DecisionAnswer,
    Decisions,
    ModelCount,
    Request,
)
from extender.answers.fleet import (
    Defrag,
    ForeignProcessAnswer,
    Gpu,
    MovePlan,
    Node,
    Nodes,
    PodMove,
    ResourceCounts,
    StateCounts,
)
from extender.answers.pods import PendingAnswer, ReasonCount
from extender.cli.commands import advise, best, decisions, defrag, gpus, nodes, pending, top
from tests.extender.cli.answers import device, filled, rendered, row_of, waiting

GIB = 1 << 30
AT = "2027-01-15T08:00:00+00:00"


# --- GPUs ---------------------------------------------------------------------------------------


def gpu(**changes: Any) -> Gpu:
    return filled(Gpu, **{"node": "n", "state": "idle", "replicas": 1, **changes})


def test_a_gpu_shows_each_of_its_values() -> None:
    process = ForeignProcessAnswer(7, "python", 2 * GIB, None, "", "x.scope")
    full = gpu(
        index=2,
        gpu_instance_id="7",
        mig_profile="1g.10gb",
        model="H100",
        utilization_ratio=0.5,
        memory_used_ratio=0.25,
        memory_total_bytes=80 * GIB,
        temperature_celsius=71.6,
        tenants=["team/a"],
        power_watts=350.4,
        replicas=4,
        replicas_used=2,
        assumed=1,
        source="agent",
        age_seconds=5.0,
        why="low",
        uuid="GPU-2",
        foreign_processes=[process],
    )
    bare = gpu(replicas_used=1, memory_used_ratio=0.5)
    lines = rendered(gpus.table([full, bare, gpu()], is_wide=True))

    assert row_of(lines, 1) == [
        "n::2/7", "H100 1g.10gb", "50%", "20/80", "72", "held idle", "team/a",
        "2.0 GiB by python, PID 7, outside Kubernetes (x.scope)",
        "350", "2/4", "1", "agent", "5s", "low", "GPU-2",
    ]  # fmt: skip
    assert row_of(lines, 2)[:8] == ["n::?", "?", "?", "?/?", "?", "held idle", "?", "-"]
    assert row_of(lines, 2)[8:11] == ["?", "1/1", "0"]
    assert row_of(lines, 3)[6] == "-"
    assert "PROCESSES" not in rendered(gpus.table([gpu()], is_wide=False))[0]


@pytest.mark.parametrize(
    ("process", "text"),
    [
        (ForeignProcessAnswer(7, "", None, None, "team/p", ""),
         "? GiB by a process, PID 7, in pod team/p"),
        (ForeignProcessAnswer(7, "x", GIB, None, "", ""),
         "1.0 GiB by x, PID 7, outside Kubernetes"),
    ],
)  # fmt: skip
def test_a_process_is_described_as_far_as_it_is_known(
    process: ForeignProcessAnswer, text: str
) -> None:
    assert gpus.process(process) == text
    started = ForeignProcessAnswer(7, "x", GIB, AT, "", "")
    assert re.search(r", since 2027-01-15 \d\d:\d\d$", gpus.process(started))


def test_the_busiest_gpus_come_first_and_unknown_ones_last() -> None:
    values = [(None, 0.9), (0.1, 0.5), (0.1, 0.7), (0.9, 0.1), (0.1, 0.7)]
    some = [
        gpu(index=at, utilization_latest_ratio=busy, memory_used_ratio=memory)
        for at, (busy, memory) in enumerate(values)
    ]

    assert [one.index for one in top._busiest_first(some[::-1])] == [3, 2, 4, 1, 0]


def test_top_counts_gpus_and_says_how_many_are_hidden() -> None:
    some = [
        gpu(state="busy", utilization_latest_ratio=0.5),
        gpu(utilization_latest_ratio=0.25),
        gpu(mig_profile="1g.10gb"),
    ]

    lines = rendered(top._screen(some, screen_of(2), is_wide=False))
    assert re.fullmatch(
        r"[\d:]{8}  2 GPUs, 1 MIG instance, 38% busy on average:  2 idle  1 busy", lines[0]
    )
    assert (len(lines), lines[-1]) == (6, "and 1 less busy")
    assert "less busy" not in rendered(top._screen(some, screen_of(3), is_wide=False))[-1]
    assert rendered(top._screen(some[2:], screen_of(3), is_wide=False))[0].endswith(
        "0 GPUs, 1 MIG instance, ? busy on average:  1 idle"
    )
    assert "  1 GPU, 50% busy" in rendered(top._screen(some[:1], screen_of(3), is_wide=False))[0]


@pytest.mark.parametrize(
    ("console", "hidden"),
    [
        (Console(height=24, width=200, force_terminal=True), 10),
        (Console(height=5, width=200, force_terminal=True), 29),
        (Console(height=3, width=200, force_terminal=True), 29),
        (Console(height=5, width=200, force_terminal=False), 10),
    ],
    ids=["large", "small", "tiny", "no-terminal"],
)
def test_top_fills_the_screen_and_shows_at_least_one_gpu(console: Console, hidden: int) -> None:
    lines = rendered(top._screen([gpu()] * 30, console, is_wide=False))

    assert lines[-1] == f"and {hidden} less busy"


def screen_of(gpus: int) -> Console:
    """Return a terminal with room for this many GPUs."""
    return Console(height=top._AROUND + gpus, width=200, force_terminal=True)


# --- nodes --------------------------------------------------------------------------------------


def node(name: str = "n", **changes: Any) -> Node:
    return filled(Node, **{"name": name, "is_ready": True, **changes})


def test_a_node_shows_its_gpus_and_instances_in_rows_of_their_own() -> None:
    states = StateCounts(1, 2, 3, 4, 5, 6, 7)
    full = node(
        model="H100",
        driver_version="580.1",
        gpu_states=states,
        mig_states=StateCounts(idle=7),
        utilization_mean_ratio=0.5,
        memory_used_mean_ratio=0.25,
        early_failures=2,
        pods=["team/a", "team/b"],
        resources={
            "nvidia.com/gpu": ResourceCounts(capacity=28, allocatable=28, held=5, assumed=1),
            "nvidia.com/mig": ResourceCounts(capacity=7, allocatable=7, held=2, assumed=1),
        },
    )
    lines = rendered(nodes._sheet(Nodes([full, node("m")]), is_wide=True))
    more = ["Ready", "7/35", "2", "2", "580.1", "28 gpu, 7 mig", "team/a, team/b"]

    assert row_of(lines, 1) == [
        "n", "H100", "28", "1", "2", "3", "4", "5", "6", "7", "50%", "25%", *more
    ]  # fmt: skip
    assert row_of(lines, 2) == [
        "n", "H100 MIG", "7", "7", *["0"] * 6, "50%", "25%", *more
    ]  # fmt: skip
    assert row_of(lines, 3)[:3] == ["m", "?", "0"]
    assert row_of(lines, 3)[-5:] == ["0/0", "0", "0", "?", "-"]


def test_a_node_of_instances_alone_has_one_row_and_columns_without_values_are_left_out() -> None:
    alone = node(mig_states=StateCounts(idle=7))
    lines = rendered(nodes._sheet(Nodes([alone]), is_wide=False))

    assert len(lines) == 2
    assert row_of(lines, 1)[:3] == ["n", "? MIG", "7"]
    assert row_of(lines, 0) == [
        "NODE", "MODEL", "GPUS", "IDLE", "HELD IDLE", "BUSY", "FOREIGN", "UNHEALTHY", "UNKNOWN",
        "ACTIVITY", "MEMORY",
    ]  # fmt: skip
    excluded = node(mig_states=StateCounts(excluded=1))
    assert "EXCLUDED" in rendered(nodes._sheet(Nodes([excluded]), is_wide=False))[0]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"is_ready": False}, "NotReady"),
        ({"is_unschedulable": True}, "Ready,SchedulingDisabled"),
        ({"is_ready": False, "is_unschedulable": True}, "NotReady,SchedulingDisabled"),
    ],
)
def test_a_status_is_shown_if_a_node_is_not_only_ready(
    changes: dict[str, Any], status: str
) -> None:
    lines = rendered(nodes._sheet(Nodes([node(), node("m", **changes)]), is_wide=False))

    assert [row_of(lines, number)[-1] for number in range(3)] == ["STATUS", "Ready", status]


@pytest.mark.parametrize("kind", ["gpu_states", "mig_states"])
@pytest.mark.parametrize(
    ("state", "has_trouble"),
    [
        ("foreign", True),
        ("unhealthy", True),
        ("unknown", True),
        ("excluded", False),
        ("busy", False),
    ],
)
def test_a_node_has_trouble_if_any_of_its_gpus_has(
    kind: str, state: str, has_trouble: bool
) -> None:
    one = node()
    setattr(one, kind, StateCounts(**{state: 1}))

    assert nodes._has_trouble(one) is has_trouble
    assert nodes._has_trouble(node(is_ready=False))


# --- best, defrag, pending, decisions -------------------------------------------------------------


def test_best_ranks_nodes_and_says_what_is_left_out() -> None:
    landing = [
        device(can_land=True, index=0, utilization_ratio=0.5, free_bytes=40 * GIB, assumed=1),
        device(can_land=True, utilization_ratio=None, free_bytes=None),
        device(index=2, utilization_ratio=0.9, free_bytes=0, assumed=1),
    ]
    first = filled(
        BestNode, node="a", model="H100", idle=1, landing=2, chance=0.5, reason="certain",
        devices=landing, is_agreed=True, score=0.5, stranded=3,
    )  # fmt: skip
    answer = filled(
        Best,
        best=[first, filled(BestNode, node="b")],
        feasible=5,
        rejected={"x": "busy", "y": "full", "z": "full"},
        models={"T4": ModelCount(0, 0), "L4": ModelCount(4, 0), "A10": ModelCount(4, 1)},
    )
    lines = rendered(best._render(answer, is_wide=True))

    assert row_of(lines, 1) == [
        "1", "a", "H100", "1/2", "50%", "50%", "40", "3", "certain", "0, ?", "2", "yes", "0.500000"
    ]  # fmt: skip
    assert row_of(lines, 2) == [
        "2", "b", "?", "0/0", "0%", "?", "?", "0", "-", "0", "no", "0.000000"
    ]  # fmt: skip
    assert lines[3:] == [
        "and 3 more that suit (--limit)",
        "no node has a GPU of the model T4: idlegpu nodes lists all",
        "no L4 is free: all 4 are held",
        "2 full",
        "1 busy",
    ]
    plain = rendered(best._render(filled(Best, best=[filled(BestNode)], feasible=1), is_wide=False))
    assert row_of(plain, 0)[-2:] == ["FREE GiB", "WHY"]
    assert len(plain) == 2


def test_best_says_why_no_node_suits() -> None:
    assert rendered(best._render(filled(Best), is_wide=False)) == [
        "no node suits",
        "no node offers this resource: idlegpu nodes lists all",
    ]
    stranded = {
        "A": ModelCount(gpus=4, free=0, held=1, stranded=3),
        "B": ModelCount(gpus=3, free=0, stranded=3),
    }
    answer = filled(Best, rejected={"x": "full"}, models=stranded)
    words = "3 stranded without CPU, memory or storage (idlegpu advise)"
    assert rendered(best._render(answer, is_wide=False)) == [
        "no node suits",
        f"no A is free: 1 held, {words}",
        f"no B is free: {words}",
        "1 full",
    ]


def test_defrag_lists_each_move_under_its_node() -> None:
    moves = [PodMove("team/a", "Job a", 2, "m"), PodMove("team/b", None, 1, None)]
    plans = [MovePlan("n", 1, True, moves), MovePlan("o", 3, True, [])]
    answer = filled(Defrag, resource="gpu", gpus=4, ready=["x"], plans=plans, total=5)
    lines = rendered(defrag._render(answer))

    assert lines[0] == "room for 4 gpu already: x"
    assert row_of(lines, 2) == ["n", "1", "2", "team/a", "2", "Job a", "m"]
    assert row_of(lines, 3) == ["team/b", "1", "-", "no room"]
    assert row_of(lines, 4) == ["o", "3", "0", "pods being deleted hold the rest"]
    assert lines[5] == "and 3 more nodes (--limit)"
    assert rendered(defrag._render(filled(Defrag, resource="gpu", gpus=4))) == [
        "no node can be freed for 4 gpu"
    ]
    assert rendered(defrag._render(filled(Defrag, resource="gpu", gpus=4, ready=["x"]))) == [
        "room for 4 gpu already: x"
    ]


def test_pending_shows_two_reasons_or_in_wide_tables_all() -> None:
    reasons = [ReasonCount(3, "node(s) had busy GPUs"), ReasonCount(2, "node(s) were cordoned"),
               ReasonCount(1, "other")]  # fmt: skip
    one = waiting(
        resources={"nvidia.com/gpu": 2},
        state="refused",
        by_us=reasons,
        owner="Job a",
        hints=["x", "y"],
    )
    answer = filled(PendingAnswer, pods=[one, waiting()], total=3, unreachable=["10.0.0.1"])
    narrow, wide = (rendered(pending._render(answer, is_wide=is_wide)) for is_wide in (False, True))

    assert row_of(narrow, 1) == [
        "team/p", "1m30s", "2 gpu", "refused", "-", "3 busy GPUs, 2 were cordoned and 1 more"
    ]  # fmt: skip
    assert row_of(wide, 1)[5:] == [
        "3 busy GPUs, 2 were cordoned, 1 other", "s", "Job a", "x; y"
    ]  # fmt: skip
    assert row_of(wide, 2)[2:] == ["-", "-", "-", "s", "-", "-"]
    assert narrow[3:] == ["and 1 more (--limit)", "replicas that do not answer: 10.0.0.1"]
    assert rendered(pending._render(filled(PendingAnswer), is_wide=False)) == ["no GPU pod waits"]


def call(number: int, verb: str, pod: str = "team/p", **changes: Any) -> DecisionAnswer:
    return filled(DecisionAnswer, number=number, verb=verb, pod=pod, at=AT, **changes)


def test_both_calls_of_an_attempt_are_one_row() -> None:
    listed = [
        call(6, "prioritize", feasible=2, candidates=2),
        call(5, "filter", "team/other"),
        call(4, "filter", feasible=2, candidates=9),
        call(3, "filter", feasible=1, candidates=8),
        call(2, "prioritize"),
        call(1, "prioritize"),
    ]

    assert [(one.number, other.number) for one, other in decisions._joined(listed)] == [
        (6, 4), (5, 5), (3, 3), (2, 2), (1, 1),
    ]  # fmt: skip


def test_a_decision_shows_each_of_its_values() -> None:
    full = call(
        7, "prioritize", feasible=3, candidates=9, node="a", bound_node="b", is_followed=False,
        runner_up="c", request=Request(resources={"nvidia.com/gpu": 2}), duration_seconds=0.0021,
        replica="pod-1", id="x-7",
    )  # fmt: skip
    shadow = call(6, "filter", "team/q", is_shadow=True)
    answer = Decisions([full, shadow], ["10.0.0.1"])
    lines = rendered(decisions._render(answer, None, 9, is_wide=True))

    cells = row_of(lines, 1)
    assert (cells[0], cells[2:]) == (
        "7",
        ["team/p", "3/9", "a", "b", "no", "c", "2 gpu", "2.1", "pod-1", "x-7"],
    )
    assert row_of(lines, 2)[2:] == ["team/q", "0/0", "none", "-", "shadow", "-", "?", "-", "-"]
    assert lines[3].startswith("shadow: in shadow mode")
    assert lines[4] == "replicas that do not answer: 10.0.0.1"
    assert len(rendered(decisions._render(Decisions([full]), None, 9, is_wide=False))) == 2
    assert rendered(decisions._render(Decisions([]), None, 9, is_wide=False)) == [
        "no decisions yet"
    ]
    assert rendered(decisions._render(Decisions([]), "team/p", 9, is_wide=False)) == []


# --- advice -------------------------------------------------------------------------------------


def advised(*, is_wide: bool = False, **changes: Any) -> list[str]:
    return rendered(advise._render(filled(Advice, **changes), is_wide=is_wide))


def test_advice_shows_each_value_of_a_card_and_of_a_pod() -> None:
    card = filled(
        CardAdvice, node="n", index=1, model="H100", replicas=4, replicas_used=2,
        activity_ratio=0.5, memory_bytes=20.0 * GIB, memory_total_bytes=80.0 * GIB, verdict="more",
        recommended_replicas=7, way="mig", mig_layout="7 x 1g", looked_seconds=60.0, samples=9,
        resource="gpu", why="idle",
    )  # fmt: skip
    pod = filled(
        PodAdvice, pod="team/a", node="n", gpus=2, activity_ratio=0.5, memory_most_bytes=10.0 * GIB,
        memory_total_bytes=80.0 * GIB, kind="small", requested_memory_bytes=40 * GIB,
        suggested_memory_bytes=12 * GIB, looked_seconds=60.0, samples=9, owner="Job a", why="small",
    )  # fmt: skip
    cards = [
        card,
        filled(CardAdvice, node="n", way="mps"),
        filled(CardAdvice, node="n", way="more"),
    ]
    lines = advised(
        is_wide=True, cards=cards, cards_total=5, pods=[pod, filled(PodAdvice)], pods_total=3,
        pods_unjudged=4, samples=9, devices=3, looked_seconds=60.0, sources=["agent", "memory"],
        note="too short",
    )  # fmt: skip

    assert row_of(lines, 1) == [
        "n::1", "H100", "4", "2", "50%", "20/80", "more", "7", "MIG 7 x 1g", "1m", "9", "gpu",
        "idle",
    ]  # fmt: skip
    assert row_of(lines, 2) == ["n::?", "?", "0", "0", "?", "?/?", "0", "MPS", "0s", "0"]
    assert row_of(lines, 3)[7] == "more"
    assert lines[4:6] == ["and 2 more (--limit)", ""]
    assert row_of(lines, 7) == [
        "team/a", "n", "2", "50%", "10/80", "small", "40", "12", "1m", "9", "Job a", "small"
    ]  # fmt: skip
    assert row_of(lines, 8) == ["0", "?", "?/0", "-", "-", "0s", "0", "-"]
    assert lines[9:] == [
        "and 1 more (--limit)",
        "pods not judged, because too few samples exist: 4",
        "based on up to 9 samples of each of 3 GPUs, over 1m (agent and memory); at least 0 are "
        "needed",
        "too short",
    ]


def test_advice_says_that_there_is_none() -> None:
    assert advised() == [
        "no GPU should be shared differently",
        "",
        "no pod is known to request far more, or less, than it uses",
        "no samples yet of GPUs that pods hold",
    ]


def stranded(resource: str = "nvidia.com/gpu", **changes: Any) -> StrandedGpus:
    amounts = HostAmounts(cpus=1.5, memory_bytes=2 * GIB, storage_bytes=30 * GIB)
    values = {"node": "n", "stranded_gpus": 2, "free_gpus": 3, "left": amounts, "need": amounts}
    return filled(StrandedGpus, resource=resource, **{**values, **changes})


def test_advice_shows_what_stranded_gpus_lack_and_who_holds_it() -> None:
    holders = [StrandedHolder(f"team/{name}", 0, 0.25, None) for name in "abcd"]
    one = stranded(
        lacks=["cpu", "memory", "ephemeral-storage", "pods"], holders=holders, holders_total=9,
        is_need_assumed=True, remedy="move a pod",
    )  # fmt: skip
    lines = advised(stranded=[one, stranded(lacks=["cpu"])], stranded_gpus=4, stranded_total=3)
    amounts = "1.5 CPUs, 2.0 GiB, 30 GiB of storage"

    assert lines[4:6] == ["", "4 free GPUs are stranded:"]
    assert row_of(lines, 7) == [
        "n", "2", "3", "cpu, memory, ephemeral-storage, pods", amounts, f"{amounts} (assumed)",
        "team/a (25%), team/b (25%), team/c (25%) and 6 more",
    ]  # fmt: skip
    assert row_of(lines, 8)[3:] == ["cpu", "1.5 CPUs", "1.5 CPUs", "-"]
    assert lines[9:] == ["and 1 more (--limit)", "n: move a pod", "n:"]


@pytest.mark.parametrize(
    ("found", "count", "text"),
    [
        ([stranded()], 1, "1 free GPU is stranded:"),
        ([stranded()], 2, "2 free GPUs are stranded:"),
        ([stranded("nvidia.com/mig-1g.5gb")], 2, "2 free MIG instances are stranded:"),
        ([stranded("nvidia.com/mig-1g.5gb"), stranded()], 2, "2 free devices are stranded:"),
    ],
)
def test_advice_names_the_kind_of_stranded_devices(
    found: list[StrandedGpus], count: int, text: str
) -> None:
    assert text in advised(stranded=found, stranded_gpus=count, stranded_total=len(found))
