"""The simulated kubelets: bound pods become load, ended ones leave."""

import pytest

from simulation.devices import Load
from simulation.kubelet import MEMORY_ANNOTATION, UTILIZATION_ANNOTATION, load_of, observe_pod
from simulation.models import GIB
from simulation.objects import JsonObject, bound_pod_object, child, pod_object
from tests.simulation.builders import NOW, fleet, spec


def bound(stock: JsonObject, node: str = "node-a") -> JsonObject:
    return bound_pod_object(stock, uid="uid-a", node=node, bound_at=NOW)


def test_a_bound_pod_takes_its_devices_once() -> None:
    built = fleet(spec(cards=4))

    for _ in range(2):
        assert observe_pod(built, bound(pod_object("a", 2))) == ""

    assert [len(device.tenants) for device in built.node("node-a").devices] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("phase", "is_deleted"),
    [("Succeeded", False), ("Failed", False), ("Running", True)],
    ids=["succeeded", "failed", "deleted"],
)
def test_a_pod_that_is_over_leaves(phase: str, is_deleted: bool) -> None:
    built = fleet()
    item = bound(pod_object("a"))
    observe_pod(built, item)

    child(item, "status")["phase"] = phase
    observe_pod(built, item, is_deleted=is_deleted)

    assert built.placements == {}


@pytest.mark.parametrize(
    "item",
    [pod_object("a"), bound(pod_object("a"), "elsewhere"), bound(pod_object("a", {}))],
    ids=["not-bound", "bound-elsewhere", "no-gpu"],
)
def test_other_pods_take_nothing(item: JsonObject) -> None:
    built = fleet()

    assert observe_pod(built, item) == ""
    assert built.placements == {}


def test_a_pod_that_does_not_fit_is_refused_with_the_reason() -> None:
    built = fleet(spec(cards=2))

    assert observe_pod(built, bound(pod_object("a", 3))) == (
        "cannot place default/a on node-a: 2 of 3 nvidia.com/gpu are free"
    )


def test_annotations_say_what_a_pod_will_do() -> None:
    told = {UTILIZATION_ANNOTATION: "0.9", MEMORY_ANNOTATION: "20Gi"}
    asked = {"idlegpu.io/gpu-memory": "10Gi"}
    built = fleet()

    assert load_of(built, pod_object("a", annotations=told)) == Load(
        utilization=0.9, memory_bytes=20 * GIB
    )
    assert load_of(built, pod_object("a", annotations=asked)).memory_bytes == 9 * GIB
    assert load_of(built, pod_object("a")) == built.default_load
