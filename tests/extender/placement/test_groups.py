"""Pods of a group that kube-scheduler places in one pass, and may revert."""

from dataclasses import replace

import pytest

from extender.core.nodes.pod_groups import PodGroup
from extender.core.request.request import GpuRequest
from extender.placement.request_log import FILTER, PRIORITIZE
from testkit.builders import GPU, pod_ref, request
from testkit.world import World

CORE = PodGroup("PodGroup", "ns", "train")
JOB_SET = PodGroup("JobSet", "ns", "train")
NAMES = ("p-0", "p-1", "p-2")


def world(group: PodGroup = CORE) -> World:
    made = World()
    for node in "ab":
        made.add_node(node, 2)
    made.read()
    for name in NAMES:
        made.add_waiting(name, "ns", resources={GPU: 1}, group=group)
    return made


def requested(group: PodGroup = CORE) -> GpuRequest:
    return request(group=group)


def answer(made: World, name: str, group: PodGroup = CORE, *nodes: str) -> None:
    """Answer both verbs for a pod, with some of the nodes."""
    for verb in (FILTER, PRIORITIZE):
        made.placer.place(verb, pod_ref(name), requested(group), nodes or ("a", "b"))


def assumed(made: World) -> set[str]:
    made.fleet.snapshot()
    return {name for name in NAMES if made.fleet.ledger.get(f"uid-{name}") is not None}


def test_each_pod_of_a_pass_counts_for_the_next() -> None:
    made = world()
    for name in NAMES:
        answer(made, name)
        made.now += 0.9

    assert assumed(made) == set(NAMES)


def test_withdrawn_group_pass_leaves_no_assumed_pods() -> None:
    made = world()
    for name in NAMES:
        answer(made, name)

    made.now += 1.1

    assert assumed(made) == set()


def test_another_pass_begins_without_the_pods_of_the_one_before() -> None:
    made = world()
    for name in NAMES:
        answer(made, name, CORE, "a")

    answer(made, "p-0", CORE, "b")

    assert assumed(made) == {"p-0"}
    answer(made, "p-1", CORE, "b")
    assert assumed(made) == {"p-0", "p-1"}


def test_the_other_pods_count_on_once_one_of_the_group_is_bound() -> None:
    made = world()
    for name in NAMES:
        answer(made, name)

    made.bind("p-0", "a", group=CORE)
    made.now += 20.0

    assert assumed(made) == {"p-1", "p-2"}


def test_groups_that_kube_scheduler_places_one_by_one_count_for_the_usual_time() -> None:
    made = world(JOB_SET)
    for name in NAMES:
        answer(made, name, JOB_SET)
    answer(made, "p-0", JOB_SET)

    made.now += 20.0

    assert assumed(made) == set(NAMES)


@pytest.mark.parametrize("group", [CORE, JOB_SET])
def test_a_pod_that_is_nominated_counts_until_it_is_bound(group: PodGroup) -> None:
    made = world(group)
    answer(made, "p-1", group)
    made.fleet.apply_pod(replace(made.fleet.pods["uid-p-1"], nominated_node="a"))
    answer(made, "p-0", group)

    made.now += 100.0

    assert assumed(made) == {"p-1"}
