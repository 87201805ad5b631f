"""Moves of pods that free GPUs on one node."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest

from extender.core.devices.readings import Signal
from extender.core.nodes.host_resources import HostResources, PlacedPod
from extender.core.steps import finish
from extender.insight import stranded
from extender.insight.stranded import find_plans
from extender.server.redaction import write_json_in_full
from testkit.builders import GPU
from testkit.cards import IDLE, Gpu
from testkit.world import SHARED, World

DEAD = Gpu(signs={Signal.ROW_REMAP_FAILURE: 1.0})
NO_PODS: Mapping[str, PlacedPod] = {}


@pytest.fixture
def world() -> World:
    world = World()
    world.add({"a": [IDLE] * 4, "b": [IDLE] * 4, "c": [IDLE] * 4})
    return world


def hold(world: World, node: str, *sizes: int, **rest: Any) -> None:
    for number, size in enumerate(sizes):
        world.hold(f"{node}-{number}", node, size, **rest)


def found(
    world: World,
    gpus: int = 4,
    *,
    resource: str = GPU,
    pods: Mapping[str, PlacedPod] = NO_PODS,
    closed: Collection[str] = (),
) -> Any:
    """Return the ready nodes and the plans, as an answer has them."""
    plans = finish(
        find_plans(
            world.fleet,
            resource,
            gpus,
            is_open=lambda node: node not in closed,
            host_pods=lambda: pods,
        )
    )
    views = [plan.view() for plan in plans.plans]
    return orjson.loads(write_json_in_full({"ready": plans.ready, "plans": views}))


def moves(plan: Any) -> dict[str, str | None]:
    """Return the new node of each pod that moves."""
    return {move["pod"].partition("/")[2]: move["to"] for move in plan["moves"]}


def test_plans_that_fit_come_first_then_those_with_the_fewest_moves(world: World) -> None:
    hold(world, "a", 2, 1)
    hold(world, "b", 1)
    hold(world, "c", 4)

    def moved(pod: str, gpus: int, to: str | None) -> dict[str, object]:
        owner = "StatefulSet notebook"
        return {"pod": f"team/{pod}", "owner": owner, "gpus": gpus, "to": to}

    assert found(world) == {
        "ready": [],
        "plans": [
            {"node": "b", "free": 3, "fits": True, "moves": [moved("b-0", 1, "a")]},
            {
                "node": "a",
                "free": 1,
                "fits": True,
                "moves": [moved("a-0", 2, "b"), moved("a-1", 1, "b")],
            },
            {"node": "c", "free": 0, "fits": False, "moves": [moved("c-0", 4, None)]},
        ],
    }


def test_of_as_many_moves_those_of_fewer_gpus_come_first(world: World) -> None:
    hold(world, "a", 2)
    hold(world, "b", 1)
    hold(world, "c", 1)

    assert [plan["node"] for plan in found(world)["plans"]] == ["b", "c", "a"]


def test_nodes_with_room_are_ready(world: World) -> None:
    hold(world, "b", 2)

    assert found(world)["ready"] == ["a", "c"]
    assert found(world, closed={"a"})["ready"] == ["c"]
    assert found(world, resource=SHARED) == {"ready": [], "plans": []}


def test_pods_on_the_way_to_a_node_take_its_room(world: World) -> None:
    node = world.place("p")

    answer = found(world)

    assert answer["ready"] == sorted({"a", "b", "c"} - {node})
    assert answer["plans"] == []  # the pod is not there yet
    assert found(world, 3)["ready"] == ["a", "b", "c"]


def test_two_pods_do_not_get_the_same_room(world: World) -> None:
    hold(world, "a", 2, 2)
    hold(world, "b", 2)
    hold(world, "c", 4)

    plan = next(plan for plan in found(world)["plans"] if plan["node"] == "a")

    assert (plan["fits"], moves(plan)) == (False, {"a-0": "b", "a-1": None})


@pytest.mark.parametrize("scarce", range(3), ids=HostResources._fields)
def test_two_pods_do_not_get_the_same_cpu_memory_or_storage(world: World, scarce: int) -> None:
    hold(world, "a", 1, 1, 2)
    hold(world, "c", 4)
    amounts = [1000, 1000, 1000]
    amounts[scarce] = 3
    world.fleet.apply_node(replace(world.fleet.nodes["b"], host=HostResources(*amounts)))
    pods = {f"team/a-{number}": PlacedPod("a", HostResources(3, 3, 3)) for number in range(2)}

    (plan,) = [plan for plan in found(world, 2, pods=pods)["plans"] if plan["node"] == "a"]
    assert moves(plan) == {"a-2": "b"}
    (plan,) = [plan for plan in found(world, pods=pods)["plans"] if plan["node"] == "a"]
    assert moves(plan) == {"a-2": "b", "a-0": "b", "a-1": None}


def test_only_pods_that_are_needed_move(world: World) -> None:
    hold(world, "a", 2, 1, 1)
    hold(world, "b", 3, 1)

    (plan,) = [plan for plan in found(world, 2)["plans"] if plan["node"] == "a"]
    assert moves(plan) == {"a-0": "b"} or moves(plan) == {"a-0": "c"}
    (plan,) = [plan for plan in found(world, 1)["plans"] if plan["node"] == "b"]
    assert moves(plan) == {"b-1": "c"}  # the smaller one is enough


def test_of_pods_of_a_size_the_one_of_the_lowest_priority_moves(world: World) -> None:
    for name, priority in (("first", 5), ("second", 1)):
        world.hold(name, "a", 2, priority=priority)

    (plan,) = found(world, 2)["plans"]

    assert moves(plan) == {"second": "b"}


def test_pods_of_daemon_sets_stay(world: World) -> None:
    hold(world, "a", 1, owner="DaemonSet exporter")
    hold(world, "b", 1)
    hold(world, "c", 1)

    assert {plan["node"] for plan in found(world)["plans"]} == {"b", "c"}


def test_pods_that_are_being_deleted_need_no_move(world: World) -> None:
    hold(world, "a", 2, is_deleting=True)
    world.hold("other", "a", 1, resources={SHARED: 3}, is_deleting=True)
    hold(world, "b", 4)
    world.hold("b-gone", "b", 1, resources={SHARED: 4}, is_deleting=True)
    hold(world, "c", 3)

    first, *others = found(world)["plans"]

    assert first == {"node": "a", "free": 2, "fits": True, "moves": []}
    assert {plan["node"]: moves(plan) for plan in others} == {
        "b": {"b-0": None},
        "c": {"c-0": None},
    }


def test_gpus_that_cannot_work_are_no_room(world: World) -> None:
    world.live({"a": [IDLE] * 4, "b": [IDLE] * 4, "c": [DEAD, IDLE, IDLE, IDLE]}, 60)

    assert found(world)["ready"] == ["a", "b"]
    assert found(world)["plans"] == []  # no move would help
    assert found(world, 3)["ready"] == ["a", "b", "c"]

    hold(world, "c", 1)
    cards = [DEAD, Gpu(tenants=("team/c-0",)), IDLE, IDLE]
    world.live({"a": [IDLE] * 4, "b": [IDLE] * 4, "c": cards}, 60)

    answer = found(world, 3)
    assert (answer["ready"], [plan["node"] for plan in answer["plans"]]) == (["a", "b"], ["c"])
    assert answer["plans"][0]["free"] == 2


def test_a_broken_gpu_is_no_room_once_its_pod_has_moved(world: World) -> None:
    hold(world, "c", 4)
    cards = [replace(gpu, tenants=("team/c-0",)) for gpu in (DEAD, IDLE, IDLE, IDLE)]
    world.live({"a": [IDLE] * 4, "b": [IDLE] * 4, "c": cards}, 60)

    assert found(world)["plans"] == []
    assert [plan["node"] for plan in found(world, 3)["plans"]] == ["c"]


def test_a_gpu_that_the_kubelet_withdrew_is_lacking_once(world: World) -> None:
    world.register_node("c", allocatable={GPU: 3}, capacity={GPU: 4})
    cards = [DEAD, IDLE, IDLE, IDLE]
    world.live({"a": [IDLE] * 4, "b": [IDLE] * 4, "c": cards}, 60)
    assert found(world, 3)["ready"] == ["a", "b", "c"]

    hold(world, "c", 1)

    (plan,) = found(world, 3)["plans"]
    assert (plan["node"], plan["free"]) == ("c", 2)


@pytest.mark.parametrize(
    ("cpus", "has_room"),
    [
        pytest.param({"hog": 28}, False, id="another pod holds it"),
        pytest.param({"hog": 20, "a-0": 4}, False, id="the moved pod holds too little of it"),
        pytest.param({"hog": 16, "a-0": 4}, True, id="the moved pod holds just enough of it"),
        pytest.param({"hog": 14, "a-0": 4}, True, id="the moved pod holds more than enough of it"),
    ],
)
def test_a_node_that_would_lack_cpu_after_the_moves_has_no_plan(
    world: World, cpus: dict[str, int], has_room: bool
) -> None:
    for node in "abc":
        host = HostResources(32_000, 64 << 30)
        world.fleet.apply_node(replace(world.fleet.nodes[node], host=host))
    hold(world, "a", 1)
    hold(world, "b", 2)
    hold(world, "c", 2)
    pods = {f"team/{name}": PlacedPod("a", HostResources(it * 1000)) for name, it in cpus.items()}
    world.fleet.apply_host_use("a", HostResources(sum(cpus.values()) * 1000))
    world.live({"a": [IDLE] * 4}, 60)

    plans = found(world, pods=pods)["plans"]

    assert ("a" in {plan["node"] for plan in plans}) is has_room


@pytest.mark.parametrize(("hog", "has_room"), [(8, True), (9, False)])
def test_pods_that_are_being_deleted_leave_their_cpu(
    world: World, hog: int, *, has_room: bool
) -> None:
    world.fleet.apply_node(replace(world.fleet.nodes["a"], host=HostResources(16_000, 64 << 30)))
    hold(world, "a", 2, is_deleting=True)
    cpus = {"a-0": 4, "hog": hog}
    pods = {f"team/{name}": PlacedPod("a", HostResources(it * 1000)) for name, it in cpus.items()}
    world.fleet.apply_host_use("a", HostResources(sum(cpus.values()) * 1000))
    world.live({"a": [IDLE] * 4}, 60)

    plans = found(world, pods=pods)["plans"]

    assert [plan["node"] for plan in plans] == (["a"] if has_room else [])


def test_only_the_nodes_with_the_fewest_moves_are_examined(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stranded, "_MAX_EXAMINED", 2)
    hold(world, "a", 1, 1)
    hold(world, "b", 1)
    hold(world, "c", 1)

    assert [plan["node"] for plan in found(world)["plans"]] == ["b", "c"]


def test_nodes_are_examined_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranded, "_PIECE_CANDIDATES", 2)
    hold(world, "a", 1)
    steps = find_plans(world.fleet, GPU, 4, is_open=lambda _: True, host_pods=dict)

    # two nodes, then the third, then the one plan
    assert sum(1 for _ in steps) == 3
