"""Nodes and pods of the fleet as Kubernetes objects."""

from simulation.fleet import SimulatedFleet
from simulation.models import A100_40GB, L40S
from simulation.nodes import NodeSpec, Sharing
from simulation.objects import (
    JsonObject,
    bound_pod_object,
    child,
    node_object,
    pod_object,
    tenant_pods,
)
from tests.simulation.builders import NOW, fleet, pod, spec

LAYOUT = (("3g.20gb", "1g.5gb", "1g.5gb"),)


def described(built: SimulatedFleet) -> tuple[JsonObject, JsonObject]:
    """Return labels and status of the node."""
    item = node_object(built.node("node-a"), now=NOW)
    return child(child(item, "metadata"), "labels"), child(item, "status")


def test_a_node_of_whole_gpus_is_labelled_as_gfd_does() -> None:
    labels, status = described(fleet(spec(cards=8)))

    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert labels["nvidia.com/gpu.count"] == "8"
    assert labels["nvidia.com/gpu.replicas"] == "1"
    assert labels["nvidia.com/gpu.sharing-strategy"] == "none"
    assert labels["nvidia.com/gpu.memory"] == "81559"
    assert child(status, "allocatable")["nvidia.com/gpu"] == "8"
    assert status["addresses"] == [
        {"type": "InternalIP", "address": "10.0.0.97"},
        {"type": "Hostname", "address": "node-a"},
    ]


def test_a_time_sliced_node_offers_replicas() -> None:
    labels, status = described(fleet(spec(cards=2, replicas=4)))

    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3-SHARED"
    assert labels["nvidia.com/gpu.replicas"] == "4"
    assert labels["nvidia.com/gpu.sharing-strategy"] == "time-slicing"
    assert child(status, "capacity")["nvidia.com/gpu"] == "8"


def test_an_mps_node_may_rename_its_resource() -> None:
    node = NodeSpec(
        name="node-a", model=L40S, cards=2, sharing=Sharing.MPS, replicas=4, is_renamed=True
    )

    labels, status = described(fleet(node))

    assert labels["nvidia.com/gpu.product"] == "NVIDIA-L40S"
    assert labels["nvidia.com/gpu.sharing-strategy"] == "mps"
    assert labels["nvidia.com/mps.capable"] == "true"
    assert child(status, "allocatable")["nvidia.com/gpu.shared"] == "8"
    assert "nvidia.com/gpu" not in child(status, "allocatable")


def test_a_mig_node_offers_its_profiles() -> None:
    labels, status = described(fleet(spec(model=A100_40GB, cards=2, mig=LAYOUT)))

    assert labels["nvidia.com/mig.strategy"] == "mixed"
    assert labels["nvidia.com/mig-1g.5gb.count"] == "2"
    assert labels["nvidia.com/mig-1g.5gb.memory"] == "4864"
    assert labels["nvidia.com/mig-3g.20gb.product"] == "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb"
    assert {name: count for name, count in child(status, "allocatable").items() if "/" in name} == {
        "nvidia.com/gpu": "1",
        "nvidia.com/mig-1g.5gb": "2",
        "nvidia.com/mig-3g.20gb": "1",
    }


def test_a_loss_that_the_kubelet_noticed_is_in_capacity_alone() -> None:
    built = fleet(spec(cards=8))
    built.kill_device("node-a", 3, is_noticed=True)

    _, status = described(built)

    assert child(status, "capacity")["nvidia.com/gpu"] == "8"
    assert child(status, "allocatable")["nvidia.com/gpu"] == "7"


def test_a_stock_pod_says_nothing_but_its_limits() -> None:
    assert pod_object("train")["spec"] == {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "main",
                "image": "registry.k8s.io/pause:3.10",
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
            }
        ],
    }


def test_a_pod_may_name_scheduler_annotations_and_another_resource() -> None:
    item = pod_object(
        "train",
        {"nvidia.com/mig-1g.5gb": 2},
        scheduler_name="idle",
        annotations={"idlegpu.io/gpu-memory": "4Gi"},
        priority_class="high",
    )

    assert child(item, "metadata")["annotations"] == {"idlegpu.io/gpu-memory": "4Gi"}
    assert child(item, "spec")["schedulerName"] == "idle"
    assert child(item, "spec")["priorityClassName"] == "high"
    assert "'nvidia.com/mig-1g.5gb': '2'" in str(item)


def test_a_running_pod_leaves_the_pod_it_was_made_of_alone() -> None:
    stock = pod_object("train")

    running = bound_pod_object(stock, uid="u", node="node-a", bound_at=NOW)

    assert "status" not in stock
    assert child(running, "spec")["nodeName"] == "node-a"
    assert child(running, "status")["phase"] == "Running"


def test_the_pods_that_a_fleet_came_with_are_bound_where_they_are() -> None:
    built = fleet(spec(cards=4))
    built.place(pod("a"), "node-a", "nvidia.com/gpu", 3)

    (item,) = tenant_pods(built, started_at=NOW)

    assert child(item, "metadata")["uid"] == "uid-a"
    assert child(item, "spec")["nodeName"] == "node-a"
    assert "'limits': {'nvidia.com/gpu': '3'}" in str(item)
