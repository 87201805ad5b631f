"""Test pods that name their node, its GPUs, or the models that they accept."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import NodeRecord
from extender.core.request.annotations import Target, TargetPolicy, _parse_targets
from extender.core.request.request import GpuRequest
from extender.fleet.impossible_requests import _target_problems
from testkit.builders import GPU, request
from testkit.world import BUSY, World


def aimed(world: World, target: str, **wishes: Any) -> GpuRequest:
    requested = request(targets=_parse_targets(target), **wishes)
    return world.fleet.informed(requested, ())


def three_nodes(cards: int = 4) -> World:
    world = World()
    for name in ("a", "b", "c"):
        world.add_node(name, cards)
    world.read()
    return world


def passing(world: World, requested: GpuRequest, *nodes: str) -> list[str]:
    decision = world.rank(requested, nodes or ("a", "b", "c"))
    return [decision.candidates[at] for at in decision.order]


@pytest.mark.parametrize("target", ["c", "c::3", "gone;c", "gone::0;c;a"])
def test_only_the_first_target_that_can_take_the_pod_passes(target: str) -> None:
    world = three_nodes()

    assert passing(world, aimed(world, target)) == ["c"]


def test_a_busy_target_still_wins_over_idle_nodes() -> None:
    world = three_nodes()
    for index in range(4):
        world.card("b", index).values.update(BUSY)
    world.bind("tenant", "b", 2)
    world.read()

    assert passing(world, aimed(world, "b;a")) == ["b"]


def test_next_target_is_tried_if_the_first_is_full() -> None:
    world = three_nodes()

    assert passing(world, aimed(world, "c;a"), "a", "b") == ["a"]


def test_without_a_usable_target_the_pod_waits_or_goes_anywhere() -> None:
    world = three_nodes()

    assert passing(world, aimed(world, "gone")) == []
    assert passing(world, aimed(world, "a::7")) == []
    prefer = {"target_policy": TargetPolicy.PREFER}
    assert passing(world, aimed(world, "gone", **prefer)) == ["a", "b", "c"]
    assert passing(world, aimed(world, "a::7", **prefer)) == ["a", "b", "c"]
    assert passing(world, aimed(world, "c", **prefer)) == ["c"]


def test_target_with_held_gpus_ranks_after_one_with_free_gpus() -> None:
    world = three_nodes()
    world.bind("tenant", "a", on=[world.card("a", 0)])
    world.read()

    assert passing(world, aimed(world, "a::0;b::0")) == ["b"]
    assert passing(world, aimed(world, "a::0,1;b::0")) == ["a"]
    assert passing(world, aimed(world, "a::0,1;b::0,1", count=2)) == ["b"]
    assert passing(world, aimed(world, "a::0")) == ["a"], "the node is binding, its GPUs are not"


@pytest.mark.parametrize("values", [{Signal.XID: 48.0}, BUSY])
def test_target_with_broken_or_foreign_gpus_ranks_after_a_good_one(
    values: dict[Signal, float],
) -> None:
    world = three_nodes()
    world.card("a", 0).values.update(values)
    world.read_after(30, 3)

    assert passing(world, aimed(world, "a::0;b::0")) == ["b"]
    assert passing(world, aimed(world, "a::1;b::0")) == ["a"]


def test_mig_instances_are_found_by_the_index_of_their_card() -> None:
    world = World()
    world.add_instances("a", 3, ["1g.10gb", "1g.10gb"])
    offered = {"nvidia.com/mig-1g.10gb": 2}
    world.fleet.apply_node(NodeRecord(name="a", allocatable=offered, capacity=offered))
    world.read()
    requested = {
        "resource": "nvidia.com/mig-1g.10gb",
        "resources": (("nvidia.com/mig-1g.10gb", 1),),
    }

    assert aimed(world, "a::3", **requested).targets[0].is_usable
    assert not aimed(world, "a::0", **requested).targets[0].is_usable


def test_no_gpu_is_called_missing_while_no_source_reports_any() -> None:
    world = World()
    world.add_node("a", 0, allocatable={GPU: 4}, capacity={GPU: 4})

    assert aimed(world, "a::2").targets == (Target("a", (2,)),)


def test_a_gpu_that_no_source_reports_may_have_any_index() -> None:
    world = World()
    world.add_node("a", 4)
    world.card("a", 3).is_shown = False
    world.read()

    assert aimed(world, "a::3").targets[0].is_usable
    world.card("a", 3).is_shown = True
    world.read()
    assert not aimed(world, "a::4").targets[0].is_usable


def test_a_target_without_gpus_is_named_too() -> None:
    world = three_nodes()
    world.fleet.apply_node(NodeRecord(name="cpu-1"))

    (problem,) = _target_problems(aimed(world, "cpu-1"), world.fleet.snapshot(), world.fleet.store)

    assert problem.allowed == "a node with nvidia.com/gpu: a, b, c"


def test_a_missing_target_is_named_with_existing_ones() -> None:
    world = three_nodes()
    requested = aimed(world, "gone::1;a::1,7;b")

    problems = _target_problems(requested, world.fleet.snapshot(), world.fleet.store)

    assert sorted(problem.message for problem in problems) == [
        'annotation idlegpu.io/target: "a::1,7" is not allowed: must be GPUs of a: 0, 1, 2, 3; '
        "used instead: nothing, the pod waits for it",
        'annotation idlegpu.io/target: "gone::1" is not allowed: must be a node of the cluster: '
        "a, b, c; used instead: nothing, the pod waits for it",
    ]


def test_few_names_are_listed_and_the_others_counted() -> None:
    world = World()
    for number in range(30):
        world.add_node(f"gpu-{number:02}")
    world.read()
    requested = aimed(world, "gpu-14x", target_policy=TargetPolicy.PREFER)

    (problem,) = _target_problems(requested, world.fleet.snapshot(), world.fleet.store)

    assert problem.allowed == (
        "a node of the cluster: gpu-11, gpu-12, gpu-13, gpu-14, gpu-15, gpu-16, gpu-17, gpu-18 "
        "and 22 more"
    )
    assert problem.default_used == "every node"


def test_only_required_models_pass_however_idle_the_others_are() -> None:
    world = World()
    models = {"a": "NVIDIA A100-SXM4-40GB", "h": "NVIDIA H100 80GB HBM3", "u": ""}
    for name, model in models.items():
        world.add_node(name)
        card = world.card(name)
        card.info = replace(card.info, model=model)
    world.card("h").values.update(BUSY)
    world.read()
    requested = request(required_models=("H100", "H200"))
    decision = world.rank(requested, ["a", "h", "u", "unseen"])

    assert [code.item() for code in decision.codes] == [8, 0, 8, 8]
    assert passing(world, request(required_models=("V100",)), "a", "h", "u") == []
