"""Verdict on each candidate, and the candidates' order."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.decision.decision import Decision, decide
from extender.core.decision.evaluation import model_places
from extender.core.decision.filtering import Code
from extender.core.nodes.node_index import EMPTY_NODE_INDEX
from extender.core.nodes.node_names import NamesAt
from extender.core.nodes.snapshot import Snapshot, Telemetry, Tenant, build_pool
from extender.core.policy import LoadFilter, Policy
from extender.core.request.annotations import Target, TargetPolicy
from testkit.builders import (
    GPU,
    NOW,
    Node,
    busy,
    decide_on,
    gpu,
    node,
    ranking,
    rejected,
    request,
    shared,
    snapshot_of,
    unknown,
)

LOAD_FILTER = Policy(load_filter=LoadFilter(is_enabled=True))
MIG = "nvidia.com/mig-1g.10gb"


def test_equal_nodes_rank_by_name_in_any_order_of_the_request() -> None:
    nodes = {name: node() for name in "dabc"}

    assert ranking(decide_on(nodes, candidates=("c", "b", "d", "a"))) == ["a", "b", "c", "d"]


def test_nodes_that_differ_in_the_order_of_their_devices_alone_are_equal() -> None:
    loads = [0.1, 0.2, 0.07, 0.23, 0.11]
    nodes = {
        "b": node(*(gpu(utilization=load) for load in loads)),
        "a": node(*(gpu(utilization=load) for load in reversed(loads))),
    }

    assert ranking(decide_on(nodes)) == ["a", "b"]


def test_the_first_choice_is_the_best_of_those_that_pass() -> None:
    nodes = {"dead": node(gpu(is_excluded=True)), "busy": node(busy())}

    assert decide_on(nodes).best == "busy"
    assert decide_on(nodes, candidates=("dead",)).best is None


def test_nodes_are_decided_on_alike_by_number_and_by_name() -> None:
    fleet = {f"node-{at:03}": node(gpu(utilization=at % 7 / 10)) for at in range(0, 600, 2)}
    snapshot = snapshot_of(fleet)
    candidates = (*fleet, "node-001", "zone-b", "a")

    def decided(snapshot: Snapshot) -> Decision:
        return decide(snapshot, request(), candidates, Policy(), overlays={})

    by_number, by_name = decided(snapshot), decided(replace(snapshot, node_index=EMPTY_NODE_INDEX))

    assert isinstance(by_number.candidates, NamesAt)
    assert not isinstance(by_name.candidates, NamesAt)
    assert list(by_number.candidates) == list(by_name.candidates)
    assert by_number.scores.tolist() == by_name.scores.tolist()
    assert by_number.codes.tolist() == by_name.codes.tolist()
    assert ranking(by_number) == ranking(by_name)


def test_a_refused_node_stays_refused_beside_an_unknown_one() -> None:
    nodes = {"dead": node(gpu(is_excluded=True)), "idle": node()}

    decision = decide_on(nodes, candidates=("dead", "idle", "unknown"))

    assert ranking(decision) == ["idle", "unknown"]


def test_no_name_is_requested() -> None:
    decision = decide_on({"a": node()}, candidates=(), policy=LOAD_FILTER)

    assert (decision.best, list(decision.candidates), len(decision.codes)) == (None, [], 0)


def test_a_resource_that_no_known_node_offers_refuses_no_node() -> None:
    requested = replace(request(), resource=MIG, resources=((MIG, 1),))

    assert ranking(decide_on({"b": node(), "a": node()}, requested)) == ["a", "b"]


@pytest.mark.parametrize(
    ("preferred", "places"),
    [
        (("H100",), [0, 16, 0, 0]),
        (("a100", "H100"), [0, 15, 16, 0]),
        (("H100-80GB", "NVIDIA"), [0, 16, 15, 0]),
        (("H10",), [0, 0, 0, 0]),
        (("H100", "H100"), [0, 16, 0, 0]),
        (("A100-40GB", "hbm3 h100"), [0, 15, 16, 0]),
        (("nvidia-tesla-t4", "NVIDIA-H100-80GB-HBM3-SHARED"), [0, 15, 0, 16]),
        (("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",), [0, 0, 16, 0]),
        ((), [16, 16, 16, 16]),
    ],
)
def test_a_preference_matches_whole_words_of_a_model(
    preferred: tuple[str, ...], places: list[int]
) -> None:
    models = ["", "nvidia h100 80gb hbm3", "nvidia a100 sxm4 40gb", "tesla t4"]

    assert model_places(models, preferred).tolist() == places


@pytest.mark.parametrize(
    ("preferred", "place"),
    [(("A2", "T4"), 15), (("T4",), 1), (("L4",), 0), (("L4",) * 15 + ("A2", "T4"), 2)],
)
def test_of_several_models_the_last_one_in_the_list_counts(
    preferred: tuple[str, ...], place: int
) -> None:
    assert model_places(["nvidia a2 | tesla t4"], preferred).tolist() == [place]


def test_tentative_pods_count_on_their_node_at_once() -> None:
    nodes = {"a": shared(), "b": shared()}

    decision = decide_on(nodes, overlay={"a": (Tenant(uid="other", count=1),)})

    assert ranking(decision) == ["b", "a"]


def test_tentative_pods_on_a_deleted_node_change_no_verdict() -> None:
    overlay = {"gone": (Tenant(uid="other", count=1),)}

    assert ranking(decide_on({"a": node()}, overlay=overlay)) == ["a"]


# --- the load filter ----------------------------------------------------------------------------


def filtered(nodes: dict[str, Node], **requested: Any) -> dict[str, int]:
    return rejected(decide_on(nodes, request(**requested), policy=LOAD_FILTER))


def test_the_load_filter_is_off_by_default() -> None:
    assert rejected(decide_on({"idle": node(), "busy": node(busy())})) == {}


def test_the_load_filter_refuses_busy_nodes_while_others_may_do() -> None:
    nodes = {"idle": node(), "busy": node(busy()), "unknown": node(unknown())}

    assert filtered(nodes) == {"busy": Code.BUSY}


def test_the_load_filter_relaxes_to_the_least_loaded_nodes() -> None:
    nodes = {
        name: node(gpu(utilization=load)) for name, load in [("a", 0.5), ("b", 0.58), ("c", 0.9)]
    }

    assert filtered(nodes) == {"c": Code.BUSY}


def test_the_load_filter_passes_a_node_that_we_do_not_know() -> None:
    nodes = {"busy": node(busy()), "idle": node()}
    decision = decide_on(nodes, policy=LOAD_FILTER, candidates=("busy", "idle", "new"))

    assert ranking(decision) == ["idle", "new"]


def test_the_load_filter_leaves_other_refusals_alone() -> None:
    assert filtered({"dead": node(gpu(is_excluded=True))}) == {"dead": Code.UNHEALTHY}


def test_load_filter_passes_the_nominated_node_with_its_victims_readings() -> None:
    nodes = {"idle": node(), "made-room": node(busy(used=1), leaving=(0,)), "busy": node(busy())}

    assert filtered(nodes, nominated_node="made-room") == {"busy": Code.BUSY}
    assert filtered(nodes, nominated_node="busy") == dict.fromkeys(["made-room", "busy"], Code.BUSY)


def test_the_load_filter_passes_nodes_whose_held_devices_may_be_the_busy_ones() -> None:
    """Without a mapping the held devices are unknown; four of eight are idle, and four are held."""
    half = node(*[gpu()] * 4, *[busy()] * 4, held=4, is_agreed=False)

    assert filtered({"half": half, "idle": node(), "busy": node(busy())}) == {"busy": Code.BUSY}


# --- several resources at once ------------------------------------------------------------------


def two_pools(whole: dict[str, Node], instances: dict[str, Node]) -> Snapshot:
    """Return a snapshot with whole GPUs and MIG instances; all devices are idle."""
    snapshot = snapshot_of(whole)
    first = len(snapshot.telemetry.utilization)
    everything = [*whole.values(), *instances.values()]
    telemetry: Telemetry = snapshot_of(
        {str(index): each for index, each in enumerate(everything)}
    ).telemetry
    rows = {}
    for name, described in instances.items():
        rows[name] = described.row(first)
        first += len(described.gpus)
    pools = {
        GPU: build_pool(
            GPU, dict(zip(whole, snapshot.pools[GPU].rows, strict=True)), telemetry, {}
        ),
        MIG: build_pool(MIG, rows, telemetry, {}),
    }
    return Snapshot(
        version=1, at=NOW, nodes=frozenset([*whole, *instances]), pools=pools, telemetry=telemetry
    )


def test_pod_with_two_resources_gets_the_worse_score() -> None:
    snapshot = two_pools(
        {"a": node(), "b": node(gpu(is_excluded=True)), "c": node()},
        {"a": node(busy()), "b": node(), "c": node()},
    )
    requested = request(resources=((GPU, 1), (MIG, 1)))

    decision = decide(snapshot, requested, ("a", "b", "c", "d"), Policy(), overlays={})

    assert ranking(decision) == ["c", "d", "a"]
    assert rejected(decision) == {"b": Code.UNHEALTHY}


def test_a_decision_is_remembered_small_and_by_name() -> None:
    nodes = {
        "c": node(),
        "a": node(busy()),
        "b": node(gpu(is_excluded=True)),
        "d": node(gpu(), gpu()),
    }
    decided = decide_on(nodes, candidates=("d", "c", "b", "a"))

    slim = decided.slim(2)

    assert list(slim.candidates) == ["a", "b", "c", "d"]
    assert ranking(slim) == ranking(decided)[:2]
    assert slim.best == decided.best
    assert not len(slim.zones)
    assert slim.feasible == decided.feasible == 3
    assert rejected(slim) == rejected(decided)
    worth = dict(zip(decided.candidates, decided.scores, strict=True))
    for name, score in zip(slim.candidates, slim.scores, strict=True):
        assert score == pytest.approx(worth[name])


def test_decisions_share_the_list_of_the_same_candidates() -> None:
    nodes = {name: node() for name in "abc"}
    snapshot = snapshot_of(nodes)

    first, second, other = (
        decide(snapshot, request(), candidates, Policy(), overlays={})
        for candidates in (("a", "b", "c"), ("c", "a", "b"), ("a", "b"))
    )

    slim = first.slim(1)
    assert second.slim(1, slim.candidates).candidates is slim.candidates
    assert list(other.slim(1, slim.candidates).candidates) == ["a", "b"]


def test_unknown_names_are_stored_as_strings() -> None:
    decided = decide_on({"a": node()}, candidates=("new", "a"))

    assert list(decided.slim(5).candidates) == ["new", "a"]
    assert ranking(decided.slim(5)) == ranking(decided)


def targeting(*targets: Target, **changes: Any) -> Decision:
    nodes = {name: node() for name in "abc"} | {"dead": node(gpu(is_excluded=True))}
    return decide_on(nodes, request(targets=targets, **changes))


def test_only_the_first_target_that_passes_is_left() -> None:
    unusable, missing, dead = Target("a", (9,), is_usable=False), Target("gone"), Target("dead")

    found = targeting(unusable, missing, dead, Target("c"), Target("b"))

    assert ranking(found) == ["c"]
    assert rejected(found) == {"a": Code.NOT_TARGET, "b": Code.NOT_TARGET, "dead": Code.UNHEALTHY}


def test_policy_decides_if_no_target_passes() -> None:
    assert ranking(targeting(Target("gone"))) == []
    assert ranking(targeting(Target("gone"), target_policy=TargetPolicy.PREFER)) == ["a", "b", "c"]


def test_nodes_on_which_the_owners_pods_failed_come_last() -> None:
    nodes = {name: node() for name in "abc"}

    assert ranking(decide_on(nodes, request(avoided={"a": 0.5}))) == ["b", "c", "a"]
