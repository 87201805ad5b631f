"""What the benchmark of waking makes of what it measured."""

from collections.abc import Sequence
from dataclasses import replace

from bench.wakeup import WAYS, Bindings, Measured, bounds, plan, row, waiting_pod
from extender.core.request.scheduled_condition import GATE


def measured(
    way: str = "gated", *, freed: Sequence[float] = (1.0, 2.9), retries: float = 2.0
) -> Measured:
    return Measured(
        way=way, waiting=1000, freed=freed, retries=retries, early=[9.0, 0.2], others=[0.1, 0.3]
    )


def test_pods_that_are_woken_by_themselves_have_bounds_and_the_slow_ones_count() -> None:
    *_, of_time, of_questions = bounds([measured("object"), measured("pod"), measured()])

    assert (of_time.is_met, of_questions.is_met) == (True, True)
    assert not bounds([measured("pod", freed=[4.0])])[1].is_met
    assert not bounds([measured(freed=[4.0])])[1].is_met
    assert not bounds([measured(retries=3.1)])[2].is_met
    assert of_time.measured == row(measured())["p95 s"]


def test_how_often_pods_without_a_gate_are_tried_is_ours_where_bindings_wake_none() -> None:
    pods = [measured("object", retries=500.0), measured("pod", retries=500.0)]

    assert all(bound.is_met for bound in bounds(pods))
    assert not bounds(pods, bindings_wake=False)[-1].is_met
    assert bounds(pods[:1], bindings_wake=False)[0].is_met


def test_other_pods_are_bound_soon_beside_pods_that_wait_in_any_way() -> None:
    assert all(bound.is_met for way in WAYS for bound in bounds([measured(way)])[:1])
    assert not bounds([replace(measured("object"), others=[0.1, 3.5])])[0].is_met
    assert row(measured())["others at first: max s"] == 9.0


def test_a_binding_counts_once_for_its_node_and_only_of_a_pod_that_waited() -> None:
    bindings = Bindings()

    for name, node, now in (
        ("other-1", "b", 1.0),
        ("waiting-1", "", 2.0),
        ("waiting-1", "a", 3.0),
        ("waiting-1", "a", 4.0),
    ):
        bindings.take({"metadata": {"name": name}, "spec": {"nodeName": node}}, now)

    assert bindings.of_node == {"a": 3.0}
    assert bindings.of_pod == {"other-1": 1.0, "waiting-1": 3.0}


def test_pods_that_wait_have_the_gate_in_one_way_alone() -> None:
    assert waiting_pod(1, is_gated=True)["spec"]["schedulingGates"] == [{"name": GATE}]
    assert waiting_pod(1, is_gated=False)["spec"]["schedulingGates"] == []


def test_thousands_wait_by_default_where_they_have_a_gate_and_elsewhere_on_demand() -> None:
    assert plan(WAYS, None)[-2:] == [(1000, "gated"), (5000, "gated")]
    assert plan(["pod"], [5000, 30]) == [(30, "pod"), (5000, "pod")]
