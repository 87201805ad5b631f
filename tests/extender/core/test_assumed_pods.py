"""Assumed pods: answered, and not bound yet according to the API server."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.nodes import assumed_pods
from extender.core.nodes.assumed_pods import Assumption, Ledger
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Tenant
from testkit.builders import GPU


def assumption(name: str = "a", node: str = "node", **changes: Any) -> Assumption:
    described = Assumption(
        uid=name,
        key=f"ns/{name}",
        node=node,
        resources=((GPU, 1),),
        memory_bytes=None,
        expires_at=100.0,
    )
    return replace(described, **changes)


def ledger(*assumptions: Assumption) -> Ledger:
    made = Ledger()
    for each in assumptions:
        made.assume(each)
    return made


def counted(made: Ledger, *, without: str = "") -> dict[str, list[str]]:
    overlay = made.overlays(without=without).get(GPU, {})
    return {node: [tenant.uid for tenant in tenants] for node, tenants in overlay.items()}


def test_pods_count_on_their_nodes() -> None:
    made = ledger(assumption("a"), assumption("b"), assumption("c", "other"))

    assert counted(made) == {"node": ["a", "b"], "other": ["c"]}


def test_only_nominated_pods_of_at_least_the_pods_priority_count() -> None:
    made = ledger(
        assumption("tentative", rank=(-1, 0.0, "")),
        assumption("low", expires_at=None, rank=(-1, 0.0, "")),
        assumption("high", expires_at=None, rank=(-5, 0.0, "")),
        assumption("gone", expires_at=None, rank=(-1, 0.0, "")),
    )
    made.drop("gone")

    def counting(priority: int | None) -> list[str]:
        overlay = made.overlays(without="new", priority=priority)[GPU]
        return [tenant.uid for tenant in overlay["node"]]

    assert counting(None) == counting(1) == ["tentative", "low", "high"]
    assert counting(2) == counting(5) == ["tentative", "high"]
    assert counting(6) == ["tentative"]


@pytest.mark.parametrize("own", [{"expires_at": None, "rank": (-9, 0.0, "")}, {}])
def test_tentative_pods_count_for_each_other_and_for_nominated_pods(own: dict[str, Any]) -> None:
    made = ledger(assumption("own", **own), assumption("tentative"))

    assert counted(made, without="own") == {"node": ["tentative"]}


def test_a_later_answer_replaces_the_earlier_one() -> None:
    assert counted(ledger(assumption("a", "old"), assumption("a", "new"))) == {"new": ["a"]}


@pytest.mark.parametrize(
    ("last_refusal", "before", "after", "is_ended"),
    [
        pytest.param(None, None, "full", True, id="first"),
        pytest.param(None, "", "full", True, id="first-after-waiting"),
        pytest.param(None, "full", "full", False, id="unknown-whether-new"),
        pytest.param("full", "full", "full", False, id="the-old-one"),
        pytest.param("full", "full", "busy", True, id="another"),
        pytest.param("full", "full", "", False, id="none"),
    ],
)
def test_only_a_new_refusal_ends_an_assumption(
    last_refusal: str | None, before: str | None, after: str, *, is_ended: bool
) -> None:
    def record(message: str) -> PodRecord:
        return PodRecord(
            uid="a", namespace="ns", name="a", message=message, is_unscheduled=bool(message)
        )

    former = None if before is None else record(before)
    assumed = assumption(last_refusal=last_refusal)

    assert assumed.is_ended_by(former, record(after)) is is_ended


def test_no_answer_brings_a_pod_back_that_is_gone() -> None:
    made = ledger(assumption("a"))

    made.end("a", until=50.0)
    made.assume(assumption("a"))
    made.assume(assumption("b"))
    assert counted(made) == {"node": ["b"]}

    made.expire(49.0)
    made.assume(assumption("a"))
    assert counted(made) == {"node": ["b"]}

    made.expire(50.0)
    assert not made._gone


def test_a_nominated_pod_counts_on_its_node_after_any_message() -> None:
    made = ledger()

    made.end("a", until=50.0)
    made.assume(assumption("a", expires_at=None))

    assert counted(made) == {"node": ["a"]}


def test_a_pod_never_counts_against_itself() -> None:
    assert counted(ledger(assumption("a"), assumption("b")), without="a") == {"node": ["b"]}


def test_assumed_pod_counts_in_each_requested_resource() -> None:
    made = ledger(assumption(resources=((GPU, 2), ("mig", 1)), memory_bytes=5))

    assert made.overlays(without="") == {
        GPU: {"node": (Tenant(uid="a", count=2, memory_bytes=5),)},
        "mig": {"node": (Tenant(uid="a", count=1, memory_bytes=5),)},
    }


def test_tentative_pods_expire_and_firm_ones_do_not() -> None:
    made = ledger(assumption("tentative"), assumption("firm", expires_at=None))

    made.expire(99.9)
    assert len(made) == 2
    made.expire(100.0)

    assert counted(made) == {"node": ["firm"]}


def test_times_follow_a_clock_that_is_set_back() -> None:
    made = ledger(assumption("tentative"), assumption("firm", expires_at=None), assumption("gone"))
    made.end("gone", until=100.0)

    made.shift_back(60.0)

    made.expire(39.0)
    made.assume(assumption("gone"))
    assert counted(made) == {"node": ["tentative", "firm"]}
    made.expire(40.0)
    made.assume(assumption("gone"))
    assert counted(made) == {"node": ["firm", "gone"]}


def test_a_dropped_pod_no_longer_counts() -> None:
    made = ledger(assumption("a"))

    made.drop("a")
    made.drop("a")

    assert (len(made), made.get("a")) == (0, None)


def test_overlays_that_were_given_out_never_change() -> None:
    made = ledger(assumption("a"), assumption("b"))
    before = made.overlays(without="")

    made.drop("a")
    made.assume(assumption("c", "other"))

    assert list(before[GPU]) == ["node"]
    assert [tenant.uid for tenant in before[GPU]["node"]] == ["a", "b"]


def test_a_ledger_that_is_empty_again_has_no_overlays() -> None:
    made = ledger(assumption("a"))

    made.drop("a")

    assert made.overlays(without="") == {}
    assert ledger(assumption("a")).overlays(without="a") == {}


def test_more_pods_than_a_scheduler_can_place_are_not_counted() -> None:
    made = Ledger()
    for number in range(assumed_pods._MOST_PODS + 1_000):
        made.assume(assumption(f"p{number}", f"n{number % 50}"))

    assert len(made) == assumed_pods._MOST_PODS
    made.expire(100.0)
    assert (len(made), counted(made)) == (0, {})


def test_no_node_gets_more_pods_than_a_kubelet_runs_unless_nominated() -> None:
    made = Ledger()
    for number in range(assumed_pods._MOST_ON_NODE + 10):
        made.assume(assumption(f"p{number}"))
    made.assume(assumption("nominated", expires_at=None))

    assert len(counted(made)["node"]) == assumed_pods._MOST_ON_NODE + 1
    made.assume(assumption("p0"))  # a pod that counts already may be answered again
    assert len(counted(made)["node"]) == assumed_pods._MOST_ON_NODE + 1


def test_a_pod_that_moves_to_a_node_that_is_full_counts_nowhere() -> None:
    made = ledger(assumption("moves", "other"))
    for number in range(assumed_pods._MOST_ON_NODE):
        made.assume(assumption(f"p{number}"))

    made.assume(assumption("moves"))

    assert made.get("moves") is None
    assert list(counted(made)) == ["node"]
    assert len(counted(made)["node"]) == assumed_pods._MOST_ON_NODE


def test_pods_of_more_resources_than_a_cluster_has_are_not_counted() -> None:
    made = Ledger()
    for number in range(assumed_pods._MOST_RESOURCES + 10):
        made.assume(assumption(f"p{number}", resources=((f"mig-{number}", 1),)))

    assert len(made.overlays(without="")) == assumed_pods._MOST_RESOURCES
    made.expire(100.0)
    assert made.overlays(without="") == {}
