"""Pods of a group in the fleet, and their effect on the choice of a node."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.decision.filtering import Code
from extender.core.decision.group_fit import GroupNeed
from extender.core.nodes.inventory import Taint
from extender.core.nodes.node_selection import Selection
from extender.core.nodes.pod_groups import LEADER_WORKER_SET, POD_GROUP, PodGroup
from extender.core.policy import GroupPolicy, Policy
from extender.core.request.annotations import _parse_targets
from extender.core.request.request import GpuRequest
from extender.fleet import groups
from extender.placement.placer import Victims
from testkit.builders import GPU, pod_ref, ranking, rejected, request
from testkit.world import World

RACK = "topology.kubernetes.io/rack"
GROUP = PodGroup("JobSet", "ns", "train")


def world(racks: dict[str, str], cards: int = 2, **node: Any) -> World:
    """Return a world of idle nodes with rack labels."""
    made = World()
    for name, rack in racks.items():
        made.add_node(name, cards, other_labels={RACK: rack} if rack else {}, **node)
    made.read()
    return made


def requested(size: int | None = None, **changes: Any) -> GpuRequest:
    return request(group=replace(GROUP, size=size), **changes)


def waiting(made: World, *names: str, **changes: Any) -> None:
    """Report pods of the group that are not bound yet, as the watch would."""
    for name in names:
        made.add_waiting(name, "ns", **{"resources": {GPU: 1}, "group": GROUP, **changes})


def need(made: World, name: str, wanted: GpuRequest) -> GroupNeed | None:
    return made.fleet.group_need(f"uid-{name}", wanted, made.fleet.snapshot())


def test_a_group_counts_its_pods_bound_assumed_and_waiting() -> None:
    made = world({"a": "1", "b": "1"})
    waiting(made, "p-0", "p-1", "p-2")
    made.bind("p-3", "a", group=GROUP)
    made.place("p-2", requested())

    found = need(made, "p-0", requested())

    assert found is not None
    assert found.size == 4
    assert sum(found.placed.values()) == 2
    assert found.rest == 2
    assert found.total is None  # no pod states the size


def test_a_group_whose_pods_go_to_different_nodes_is_never_too_large() -> None:
    made = world({"a": "1", "b": "1"}, cards=1)
    elsewhere = (("idlegpu.io/target", "b"),)
    waiting(made, "p-0", wishes=(("idlegpu.io/target", "a"),))
    waiting(made, "p-1", wishes=elsewhere)
    wanted = requested(2, targets=_parse_targets("a"))

    found = need(made, "p-0", wanted)

    assert found is not None
    assert found.total is None
    waiting(made, "p-0", wishes=elsewhere)
    found = need(made, "p-0", wanted)
    assert found is not None
    assert found.total == 2


def test_a_size_from_an_object_counts_unless_the_pod_says_one() -> None:
    made = world({"a": "1", "b": "1"})
    waiting(made, "p-0")
    made.fleet.apply_group_size(GROUP.key, 5)

    by_object, by_pod = need(made, "p-0", requested()), need(made, "p-0", requested(3))
    assert by_object is not None
    assert by_pod is not None
    assert (by_object.size, by_object.total) == (5, 5)
    assert (by_pod.size, by_pod.total) == (3, 3)

    made.fleet.apply_group_size(GROUP.key, None)
    assert need(made, "p-0", requested()) is None
    least = need(made, "p-0", request(group=replace(GROUP, least=4)))
    assert least is not None
    assert (least.size, least.total) == (4, 4)


def test_pods_with_other_gpus_are_no_missing_pods_of_the_group() -> None:
    made = world({"a": "1", "b": "1"}, cards=1)
    waiting(made, "p-0", "p-1")
    waiting(made, "driver", resources={"nvidia.com/mig-1g.10gb": 1})

    found = need(made, "p-0", requested(3))

    assert found is not None
    assert (found.size, found.rest, found.total) == (3, 2, 2)
    decision = made.placer.weigh(pod_ref("p-0"), requested(3), ("a", "b")).decision
    assert len(ranking(decision)) == 2


def test_replicas_of_a_workloads_group_share_the_size_that_it_states() -> None:
    made = world({"a": "1", "b": "1"})
    waiting(made, "p-0")
    made.fleet.apply_group_size("ns/Workload train/workers", 3)

    for replica in ("train/workers", "train/workers/0", "train/workers/1"):
        found = need(made, "p-0", request(group=PodGroup("Workload", "ns", replica)))
        assert found is not None
        assert (found.size, found.total) == (3, 3)
    assert need(made, "p-0", request(group=PodGroup("Workload", "ns", "train/other/0"))) is None


def test_a_size_that_the_pod_says_counts_pods_that_do_not_exist_yet() -> None:
    made = world({"a": "1", "b": "1"})
    waiting(made, "p-0")

    found = need(made, "p-0", requested(4))

    assert found is not None
    assert (found.size, found.rest, found.total) == (4, 4, 4)


def test_pods_that_do_not_exist_yet_count_with_the_fewest_gpus_of_any_known_pod() -> None:
    made = world({"a": "1", "b": "1"})
    waiting(made, "p-0", "p-1")

    found = need(made, "p-0", requested(4, count=2))

    assert found is not None
    assert (found.size, found.rest, found.total) == (4, 2 + 1 + 2 * 2, 2 + 1 + 2 * 1)


def test_a_leader_is_not_refused_because_of_workers_that_do_not_exist() -> None:
    made = world({"a": "1", "b": "1"})
    replica = PodGroup(LEADER_WORKER_SET, "ns", "serve-0", size=3)
    leader, worker = request(count=2, group=replica), request(count=1, group=replica)
    made.add_waiting("leader", "ns", resources={GPU: 2}, group=replica)

    alone = need(made, "leader", leader)
    for name in ("worker-1", "worker-2"):
        made.add_waiting(name, "ns", resources={GPU: 1}, group=replica)
    complete, of_worker = need(made, "leader", leader), need(made, "worker-1", worker)

    assert alone is not None
    assert complete is not None
    assert of_worker is not None
    assert (alone.rest, alone.total) == (6, None)
    assert (complete.rest, complete.total) == (4, 4)
    assert of_worker.total == 4


def test_a_group_larger_than_it_has_to_be_needs_its_smallest_pods_only() -> None:
    made = world({"a": "1"})
    waiting(made, "p-0", "p-1", "p-2", resources={GPU: 2})

    found = need(made, "p-0", requested(2))

    assert found is not None
    assert found.size == 3
    assert found.total == 3  # this pod's node and the smallest other one
    assert not found.is_uniform


@pytest.mark.parametrize("state", ["deleted", "ended", "deleting", "other namespace"])
def test_pods_that_are_gone_or_of_another_namespace_do_not_count(state: str) -> None:
    made = world({"a": "1"})
    waiting(made, "p-0")
    other = made.bind("p-1", "a", group=GROUP)
    match state:
        case "deleted":
            made.fleet.remove_pod(other.uid, made.now)
        case "ended":
            made.end(other)
        case "deleting":
            made.fleet.apply_pod(replace(other, is_deleting=True))
        case _:
            made.fleet.apply_pod(replace(other, group=replace(GROUP, namespace="other")))

    assert need(made, "p-0", requested()) is None


def test_the_other_pods_of_a_group_stay_when_one_is_gone_and_nothing_stays_of_them_all() -> None:
    made = world({"a": "1"})
    waiting(made, "p-0", "p-1", "p-2")

    made.fleet.remove_pod("uid-p-1", made.now)
    found = need(made, "p-0", requested())
    assert found is not None
    assert found.size == 2
    assert set(made.fleet.groups.members(GROUP.key)) == {"uid-p-0", "uid-p-2"}
    for name in ("p-0", "p-2"):
        made.fleet.remove_pod(f"uid-{name}", made.now)

    assert made.fleet.groups._uids == {}


def test_a_resource_that_no_node_offers_has_no_group() -> None:
    made = world({"a": "1"})
    waiting(made, "p-0", "p-1")

    assert need(made, "p-0", GpuRequest(resource="amd.com/gpu", count=1, group=GROUP)) is None


def test_node_selections_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_MOST_SELECTIONS", 2)
    made = world({"a": "1", "b": "1"})
    sizes = []
    for number in range(5):
        name = f"p-{number}"
        group = replace(GROUP, name=name)
        selection = Selection(labels=(("pool", str(number)),))
        waiting(made, name, group=group, selection=selection)
        for _ in range(2):
            need(made, name, request(group=replace(group, size=9)))
        sizes.append(len(made.fleet.groups._may_go))

    assert sizes == [1, 2, 1, 2, 1]


def test_a_pod_that_states_its_nodes_may_go_to_these_only() -> None:
    made = world({"a": "1", "b": "1", "c": "1"})
    waiting(made, "p-0", selection=Selection())

    found = need(made, "p-0", requested(9, targets=_parse_targets("a; c")))

    assert found is not None
    assert found.may_go is not None
    assert found.may_go.tolist() == [True, False, True]


def test_only_a_group_that_is_tried_as_a_whole_counts_for_longer() -> None:
    made = world({"a": "1"})
    waiting(made, "whole", group=replace(GROUP, kind=POD_GROUP))
    waiting(made, "one-by-one")
    made.add_waiting("alone", "ns")
    assumed = made.policy.assumed

    seconds = {
        name: made.fleet.groups.tentative_seconds(f"uid-{name}", assumed)
        for name in ("whole", "one-by-one", "alone", "unknown")
    }

    assert seconds == {
        "whole": assumed.simulated_seconds,
        "one-by-one": assumed.tentative_seconds,
        "alone": assumed.tentative_seconds,
        "unknown": assumed.tentative_seconds,
    }


def test_a_pod_alone_in_its_group_or_in_none_needs_nothing() -> None:
    made = world({"a": "1"})
    waiting(made, "p-0")

    assert need(made, "p-0", requested()) is None
    assert need(made, "p-0", request()) is None


def test_later_pods_follow_the_first_into_its_rack() -> None:
    made = world({"a": "1", "b": "2", "c": "1", "d": "2"})
    waiting(made, "p-0", "p-1")
    made.bind("p-0", "d", 2, group=GROUP)
    made.read()

    decision = made.placer.weigh(pod_ref("p-1"), requested(), tuple(made.fleet.nodes)).decision

    assert ranking(decision)[0] == "b"
    assert decision.group is not None
    assert decision.group.of(decision.place_of("b")).words == "same rack as its group"


def test_a_changed_label_counts_at_once() -> None:
    made = world({"a": "1", "b": "2", "c": "1"})
    made.bind("p-0", "a", 2, group=GROUP)
    made.read()
    assert made.rank(requested()).best == "c"

    made.fleet.apply_node(replace(made.fleet.nodes["b"], other_labels={RACK: "1"}))
    made.fleet.apply_node(replace(made.fleet.nodes["c"], other_labels={RACK: "2"}))

    assert made.rank(requested()).best == "b"


def test_the_topology_is_kept_while_no_label_changes() -> None:
    made = world({"a": "1", "b": "2"})
    waiting(made, "p-0", "p-1")
    before = need(made, "p-0", requested())

    made.fleet.apply_node(replace(made.fleet.nodes["b"], is_ready=False))
    after = need(made, "p-0", requested())

    assert before is not None
    assert after is not None
    assert after.topology is before.topology


def test_the_topology_is_a_setting() -> None:
    made = World(Policy(group_topology=("x/row",)))
    for name, row in {"a": "1", "b": "2", "c": "1"}.items():
        made.add_node(name, 1, other_labels={"x/row": row, RACK: "1"})
    made.read()
    made.bind("p-0", "c", group=GROUP)
    made.read()

    assert ranking(made.rank(requested(), ["a", "b"])) == ["a", "b"]


def test_without_topology_groups_do_not_count() -> None:
    made = World(Policy(group_topology=()))
    made.add_node("a", 1)
    made.read()

    assert made.rank(requested(9)).group is None
    assert made.rank(requested(9)).best == "a"


def refused(made: World, wanted: GpuRequest, name: str = "p-0") -> dict[str, int]:
    return rejected(made.placer.weigh(pod_ref(name), wanted, tuple(made.fleet.nodes)).decision)


def test_first_pod_of_a_too_large_group_is_refused_until_a_node_is_added() -> None:
    made = world({"a": "1", "b": "1"})
    waiting(made, "p-0")
    assert refused(made, requested(5)) == dict.fromkeys("ab", Code.GROUP_TOO_LARGE)

    made.add_node("c", 1)
    made.read()

    assert refused(made, requested(5)) == {}


def test_held_devices_count_as_room_that_could_become_free() -> None:
    made = world({"a": "1", "b": "1"})
    made.bind("other", "a", 1)
    made.read()

    assert refused(made, requested(4)) == {}


def test_nearness_without_requirement_refuses_no_pod() -> None:
    made = world({"a": "1"})

    assert refused(made, requested(5, group_policy=GroupPolicy.PREFER)) == {}


@pytest.mark.parametrize(
    ("node", "selection", "expected"),
    [
        ({}, Selection(labels=(("pool", "x"),)), Code.GROUP_TOO_LARGE),
        ({"taints": (Taint(key="team"),)}, Selection(), Code.GROUP_TOO_LARGE),
        ({"taints": (Taint(key="node.kubernetes.io/not-ready"),)}, Selection(), Code.PASSES),
        ({"is_unschedulable": True}, Selection(), Code.PASSES),
    ],
    ids=["another label", "a taint", "not ready for now", "cordoned"],
)
def test_only_nodes_that_could_ever_take_the_pod_count(
    node: dict[str, Any], selection: Selection, expected: Code
) -> None:
    made = World()
    made.add_node("a", 2, other_labels={"pool": "x"})
    made.add_node("b", 2, **node)
    made.read()
    waiting(made, "p-0", selection=selection)

    assert refused(made, requested(4)).get("a", Code.PASSES) == expected


def test_nothing_is_evicted_for_a_group_that_cannot_fit() -> None:
    made = world({"a": "1"})
    low = made.bind("low", "a", 2)
    made.read()
    victims = [Victims(node="a", uids=frozenset({low.uid}))]

    assert made.placer.accepts_without(pod_ref("p-0"), requested(2), victims) == {"a"}
    assert made.placer.accepts_without(pod_ref("p-0"), requested(3), victims) == frozenset()
