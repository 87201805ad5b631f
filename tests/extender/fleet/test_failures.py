"""Test whether early failures count against the node or against the pods' owner."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision.decision import Decision
from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_groups import owner_key
from extender.core.policy import EarlyFailures
from extender.fleet.failures import _MOST_AVOIDED, FailureLog
from testkit.builders import GPU, NOW, request
from testkit.world import World

RULE = EarlyFailures(half_life_seconds=600, weight=0.5)
MALADY, OWN_FAULT = 94.0, 31.0  # XIDs: a contained memory error; the program's page fault


def failed(node: str, owner: str, name: str = "p", **changes: Any) -> PodRecord:
    return PodRecord(uid=name, namespace="ns", name=name, node=node, owner=owner, **changes)


def log_of(*pods: PodRecord) -> FailureLog:
    log = FailureLog(RULE)
    for pod in pods:
        log.note(pod, NOW)
    return log


def test_failures_of_one_owner_do_not_count_against_the_node() -> None:
    log = log_of(*(failed("a", "Job train", f"p{number}") for number in range(6)))

    assert log.suspicion(NOW) == {}
    assert log.count("a") == 0


def test_a_second_owner_on_the_node_counts_and_a_third_counts_more() -> None:
    owners = ("Job train", "ReplicaSet serve", "")
    pods = [failed("a", owner) for owner in owners]

    assert log_of(*pods[:2]).suspicion(NOW) == {"a": pytest.approx(0.5)}
    assert log_of(*pods).suspicion(NOW) == {"a": pytest.approx(0.75)}
    assert log_of(*pods).count("a") == 3


def test_of_many_owners_that_fail_on_a_node_the_last_ones_are_remembered() -> None:
    log = log_of(failed("a", "Job device", is_device_fault=True))
    for number in range(1000):
        log.note(failed("a", "", f"p-of-{number}-x"), NOW + number)

    assert log.count("a") == 64
    assert log.of_owner(owner_key("ns", "Job device", ""), NOW) == {"a": pytest.approx(0.5)}
    assert log.of_owner(owner_key("ns", "", "p-of-936-x"), NOW + 1000) == {}
    assert log.of_owner(owner_key("ns", "", "p-of-937-x"), NOW + 1000) != {}


def test_pods_of_one_series_count_as_one_owner() -> None:
    sweep = [failed("a", "", f"sweep-{suffix}") for suffix in ("x7k2p", "9vbnm", "bcdfg", 1, 12)]

    assert log_of(*sweep).suspicion(NOW) == {}
    assert log_of(*sweep, failed("a", "", "other")).suspicion(NOW) == {"a": pytest.approx(0.5)}
    assert log_of(*(failed("a", "", f"sweep-{letter}") for letter in "xy")).count("a") == 2


def test_owners_of_one_name_in_two_namespaces_are_two() -> None:
    other = PodRecord(uid="o", namespace="other", name="o", node="a", owner="Job train")

    assert log_of(failed("a", "Job train"), other).suspicion(NOW) == {"a": pytest.approx(0.5)}


def test_an_owner_whose_pods_fail_on_several_nodes_is_at_fault_itself() -> None:
    pods = [failed(node, "Job train") for node in ("a", "b")]
    log = log_of(*pods, failed("a", "Job other"))

    assert log.suspicion(NOW) == {}
    assert log.count("a") == log.count("b") == 0


def test_a_device_fault_counts_at_once_and_once_an_owner() -> None:
    faults = [failed("a", "Job train", f"p{number}", is_device_fault=True) for number in range(6)]

    assert log_of(*faults).suspicion(NOW) == {"a": pytest.approx(0.5)}
    assert log_of(*faults).count("a") == 1


def test_a_node_that_fails_a_whole_job_is_at_fault_alone() -> None:
    others = [failed(node, "Job train", node) for node in ("b", "c", "d")]
    log = log_of(*others, failed("a", "Job train", is_device_fault=True))

    assert set(log.suspicion(NOW)) == {"a"}


def test_an_owner_whose_devices_fail_on_every_node_is_at_fault_itself() -> None:
    log = log_of(*(failed(node, "Job wide", node, is_device_fault=True) for node in ("a", "b")))

    assert log.suspicion(NOW) == {}


def test_failures_fade_and_those_of_a_device_from_the_last_one() -> None:
    log = log_of(failed("a", "Job train", is_device_fault=True))
    log.note(failed("a", "Job train", "next", is_device_fault=True), NOW + 600)

    assert log.suspicion(NOW + 600) == {"a": pytest.approx(0.5)}
    assert log.suspicion(NOW + 1200) == {"a": pytest.approx(1 - 0.5**0.5)}
    assert log.suspicion(NOW + 1e5) == {}


def test_other_failures_of_an_owner_fade_from_the_first_one() -> None:
    log = log_of(failed("a", "Job one"), failed("a", "Job two"))
    log.note(failed("a", "Job one", "next"), NOW + 1e5)

    assert log.suspicion(NOW + 1e5) == {}


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("vwxyz"), st.booleans(), st.integers()),
        max_size=30,
    )
)
def test_the_number_of_an_owners_failures_on_a_node_does_not_count(
    ends: Iterable[tuple[str, str, bool, int]],
) -> None:
    once = {(node, owner, is_fault) for node, owner, is_fault, _ in ends}
    every = log_of(
        *(failed(node, owner, str(n), is_device_fault=fault) for node, owner, fault, n in ends)
    )
    single = log_of(*(failed(node, owner, is_device_fault=fault) for node, owner, fault in once))

    suspicion = every.suspicion(NOW)

    assert suspicion == pytest.approx(dict(single.suspicion(NOW)))
    assert all(0 < share < 1 for share in suspicion.values())
    for node in suspicion:  # no node is suspected for owners that failed elsewhere too
        here = {owner for at, owner, _ in once if at == node}
        assert any(
            {at for at, who, fault in once if who == owner and fault} == {node}
            or {at for at, who, _ in once if who == owner} == {node}
            for owner in here
        )


def test_a_device_failure_fades_from_its_last_sign_reported_or_measured() -> None:
    log = FailureLog(RULE, lambda _node, at: at == NOW + 600)
    log.note(failed("a", "Job train", is_device_fault=True), NOW)
    log.note(failed("a", "Job train", "next"), NOW + 600)
    assert log.suspicion(NOW + 1200) == {"a": pytest.approx(1 - 0.5**0.5)}

    log.note(failed("a", "Job train", "third", is_device_fault=True), NOW + 1200)

    assert log.suspicion(NOW + 1200) == {"a": pytest.approx(0.5)}


def test_late_news_of_a_failure_makes_no_later_one_older() -> None:
    log = FailureLog(RULE)
    log.note(failed("a", "Job train", is_device_fault=True), NOW + 600)
    log.note(failed("a", "Job train", "late", is_device_fault=True), NOW)

    assert log.suspicion(NOW + 600) == {"a": pytest.approx(0.5)}
    assert log.of_owner("ns/Job train", NOW + 600) == {"a": 0.5}


def test_a_failure_in_the_future_counts_in_full_and_no_more() -> None:
    log = log_of(failed("a", "Job train", is_device_fault=True))

    assert log.suspicion(NOW - 1e4) == {"a": pytest.approx(0.5)}


def test_an_owners_nodes_are_avoided_in_rounded_shares_until_that_fades() -> None:
    log = log_of(failed("a", "Job train"))
    log.note(failed("b", "Job train"), NOW + 600)

    assert log.of_owner("ns/Job train", NOW + 600) == {"a": 0.29, "b": 0.5}
    assert log.of_owner("ns/Job train", NOW + 600 * 8) == {"b": 0.01}
    assert log.of_owner("ns/Job other", NOW) == {}


def test_an_owner_that_fails_on_many_nodes_avoids_the_latest_ones() -> None:
    log = FailureLog(RULE)
    for number in range(_MOST_AVOIDED + 3):
        log.note(failed(f"node-{number}", "Job train"), NOW + number)

    avoided = log.of_owner("ns/Job train", NOW)

    assert set(avoided) == {f"node-{number}" for number in range(3, _MOST_AVOIDED + 3)}


def test_failures_of_a_removed_node_and_faded_ones_leave_nothing() -> None:
    log = log_of(failed("a", "Job train"), failed("b", "Job train"), failed("b", "Job other"))

    log.forget("a")
    assert log.of_owner("ns/Job train", NOW) == {"b": 0.5}
    assert log.suspicion(NOW) == {"b": pytest.approx(0.5)}
    log.forget("unknown")
    log.suspicion(NOW + 1e5)

    assert (log._by_node, log._by_owner) == ({}, {})


def test_a_clock_that_was_set_back_shifts_every_time_of_a_failure() -> None:
    faults = {NOW, NOW - 400}
    log = FailureLog(RULE, lambda _node, at: at in faults)
    log.note(failed("a", "Job train", is_device_fault=True), NOW)
    log.note(failed("b", "Job other"), NOW)
    before = log.suspicion(NOW), log.of_owner("ns/Job train", NOW)

    log.shift_back(400)

    after = log.suspicion(NOW - 400), log.of_owner("ns/Job train", NOW - 400)
    assert before == after
    assert log.suspicion(NOW + 200) == {
        "a": pytest.approx(1 - 0.5**0.5),
        "b": pytest.approx(1 - 0.5**0.5),
    }


# --- in the fleet ---------------------------------------------------------------------------------


def two_nodes() -> World:
    """Return a world of two shared cards: one is unused, a tenant keeps the other at 28 %."""
    world = World()
    for name in ("calm", "lively"):
        world.add_node(name, replicas=4)
    world.bind("tenant", "lively", on=[world.card("lively")])
    busy = dict.fromkeys((Signal.GPU_UTILIZATION, Signal.GRAPHICS_ACTIVE), 0.28)
    world.card("lively").values.update(busy)
    world.read_after(200, times=2)
    assert world.rank().best == "calm"
    assert world.rank().feasible == 2
    return world


def test_two_failed_pods_of_one_job_push_no_other_pod_to_a_busier_card() -> None:
    world = two_nodes()
    for name in ("train-1", "train-2"):
        world.bind(name, "calm", owner="Job train", is_failed_early=True)
        world.fleet.remove_pod(f"uid-{name}", NOW)
    world.read_after(30, times=2)

    assert world.rank().best == "calm"


def scores_of(decision: Decision) -> dict[str, float]:
    return dict(zip(decision.candidates, decision.scores.tolist(), strict=True))


def own_rank(world: World, owner: str) -> Decision:
    """Return the scores for the next pod of an owner."""
    requested = world.fleet.informed(request(), (owner_key("ns", owner, ""),))
    return world.rank(requested)


def test_a_failing_jobs_own_next_pods_try_another_node_until_that_fades() -> None:
    world = two_nodes()
    world.bind("train-1", "calm", owner="Job train", is_failed_early=True)
    world.fleet.remove_pod("uid-train-1", NOW)
    world.read_after(30, times=2)

    assert own_rank(world, "Job train").best == "lively"
    assert own_rank(world, "Job other").best == "calm"
    assert own_rank(world, "Job train").feasible == 2

    world.read_after(600, times=8)
    assert own_rank(world, "Job train").best == "calm"


def test_its_pods_return_to_the_node_with_the_oldest_failure_first() -> None:
    world = two_nodes()
    for name, node in (("train-1", "calm"), ("train-2", "lively")):
        world.bind(name, node, owner="Job train", is_failed_early=True)
        world.fleet.remove_pod(f"uid-{name}", world.clock.now)
        world.read_after(300, times=2)

    assert own_rank(world, "Job train").best == "calm"
    assert own_rank(world, "Job other").best == "calm"


def test_an_avoided_node_is_explained_and_nothing_else_changes() -> None:
    world = two_nodes()
    before = {node: score for node, score in scores_of(world.rank()).items() if node != "calm"}
    world.bind("train-1", "calm", owner="Job train", is_failed_early=True)
    world.fleet.remove_pod("uid-train-1", NOW)
    world.read_after(30, times=2)
    requested = world.fleet.informed(request(), ("ns/Job train",))

    after = scores_of(world.rank(requested))
    shown = {one.node: one for one in world.placer.explain_nodes(requested, ["calm", "lively"])}

    assert {node: after[node] for node in before} == pytest.approx(before, abs=1e-3)
    assert shown["calm"].score == after["calm"]
    assert "early failures of pods cost" in shown["calm"].reason
    assert shown["lively"].suspicion == 0


def test_a_job_that_fails_everywhere_changes_no_order() -> None:
    world = two_nodes()
    for name, node in (("train-1", "calm"), ("train-2", "lively")):
        world.bind(name, node, owner="Job train", is_failed_early=True)
        world.fleet.remove_pod(f"uid-{name}", NOW)
    world.read_after(30, times=2)

    assert world.rank().best == "calm"


def test_a_failure_by_a_device_sends_the_next_pod_elsewhere() -> None:
    world = two_nodes()
    world.bind("train-1", "calm", is_failed_early=True, is_device_fault=True)
    world.fleet.remove_pod("uid-train-1", NOW)
    world.read_after(30, times=2)

    assert world.rank().best == "lively"


@pytest.mark.parametrize(
    ("xid", "later_seconds", "counts"),
    [(MALADY, 30, 1), (MALADY, 600, 0), (OWN_FAULT, 30, 0)],
    ids=["at that time", "long after", "the program's own"],
)
def test_an_xid_at_the_time_makes_it_a_device_failure(
    xid: float, later_seconds: float, counts: int
) -> None:
    world = two_nodes()
    world.bind("train-1", "calm", owner="Job train", is_failed_early=True)
    world.clock.now += later_seconds
    world.card("calm").values[Signal.XID] = xid
    world.read()

    suspicion = world.fleet.snapshot().pools[GPU].batch.suspicion

    assert world.fleet.early_failures("calm") == counts
    assert sorted(suspicion > 0) == [False, bool(counts)]


def fails_early(world: World, node: str, owner: str, name: str) -> None:
    """Report a pod of an owner that failed just now."""
    world.bind(name, node, owner=owner, is_failed_early=True)
    world.fleet.remove_pod(f"uid-{name}", world.clock.now)


def test_an_xid_at_a_later_failure_counts_like_one_at_the_first() -> None:
    world = two_nodes()
    fails_early(world, "calm", "Job train", "train-1")
    world.read_after(300, times=2)
    assert world.fleet.early_failures("calm") == 0

    fails_early(world, "calm", "Job train", "train-2")
    world.card("calm").values[Signal.XID] = MALADY
    world.read_after(30)
    world.fleet.snapshot()

    assert world.fleet.early_failures("calm") == 1


def test_repeated_device_failure_shown_only_by_its_xid_counts_in_full() -> None:
    faults = {NOW, NOW + 3600}
    log = FailureLog(RULE, lambda _node, at: at in faults)
    log.note(failed("a", "Job train"), NOW)
    assert log.suspicion(NOW) == {"a": pytest.approx(0.5)}

    log.note(failed("a", "Job train", "next"), NOW + 3600)

    assert log.suspicion(NOW + 3600) == {"a": pytest.approx(0.5)}


def test_device_fault_counts_after_the_owners_first_failure_faded() -> None:
    log = FailureLog(RULE, lambda _node, at: at > NOW)
    log.note(failed("a", "Job train"), NOW)
    log.note(failed("a", "Job train", "next"), NOW + 1e5)

    assert log.suspicion(NOW + 1e5) == {"a": pytest.approx(0.5)}


def test_xids_of_two_nodes_count_against_both_for_one_owner() -> None:
    world = two_nodes()
    for node in ("calm", "lively"):
        fails_early(world, node, "Job train", f"train-{node}")
        world.card(node).values[Signal.XID] = MALADY
    world.read_after(30)
    world.fleet.snapshot()

    assert [world.fleet.early_failures(node) for node in ("calm", "lively")] == [1, 1]


def test_xids_caused_by_a_program_on_two_nodes_count_against_neither() -> None:
    world = two_nodes()
    for node in ("calm", "lively"):
        fails_early(world, node, "Job train", f"train-{node}")
        world.card(node).values[Signal.XID] = OWN_FAULT
    world.read_after(30)
    world.fleet.snapshot()

    assert [world.fleet.early_failures(node) for node in ("calm", "lively")] == [0, 0]


def test_a_measured_fault_of_a_node_says_nothing_about_the_owner() -> None:
    # On both nodes the status names a device; a fault was measured on one only.
    log = FailureLog(RULE, lambda node, _at: node == "a")
    for node in ("a", "b"):
        log.note(failed(node, "Job train", node, is_device_fault=True), NOW)
    assert set(log.suspicion(NOW)) == {"a", "b"}

    log.note(failed("c", "Job train", "c", is_device_fault=True), NOW)
    assert set(log.suspicion(NOW)) == {"a"}
