"""Checks that every GPU has telemetry."""

from dataclasses import replace
from typing import Any

import pytest

from extender.cli.doctor.facts import Facts
from tests.extender.cli.doctor.things import (
    NOW,
    device,
    evidence,
    found,
    node,
    pod,
    sample,
    severities,
)

EXPORTER = pod("dcgm-exporter-x", namespace="gpu-operator")
SET = {
    "metadata": {"name": "dcgm-exporter", "namespace": "gpu-operator"},
    "spec": {"template": {"spec": {"nodeSelector": {"gpu": "yes"}}}},
    "status": {"desiredNumberScheduled": 1, "numberReady": 0},
}


def test_a_gpu_node_without_exporter_or_agent_is_reported() -> None:
    facts = Facts(at=NOW, nodes=(node(taints=[{"key": "gpu", "effect": "NoSchedule"}]),), pods=())

    assert severities("IG105", facts) == ["error"]
    assert "node-1: no pod of dcgm-exporter or idlegpu-agent" in evidence("IG105", facts)
    assert "taints of these nodes: gpu:NoSchedule" in evidence("IG105", facts)
    assert "helm install dcgm-exporter" in found("IG105", facts)[0].remedy


def test_an_exporter_that_does_not_run_is_reported_with_its_daemon_set() -> None:
    dead = pod("dcgm-exporter-x", namespace="gpu-operator", phase="Pending")
    facts = Facts(at=NOW, nodes=(node(),), pods=(dead,), daemon_sets=(SET,))

    assert "gpu-operator/dcgm-exporter-x is not ready (Pending)" in evidence("IG105", facts)
    assert "0 of 1 ready, nodeSelector {'gpu': 'yes'}" in evidence("IG105", facts)
    assert "tolerations" in found("IG105", facts)[0].remedy


def test_a_node_that_anything_measures_is_well() -> None:
    agent = pod("idlegpu-agent-x", namespace="idlegpu-agent")
    no_gpu = node("cpu", capacity={}, labels={"nvidia.com/gpu.present": None})

    assert found("IG105", Facts(at=NOW, nodes=(node(),), pods=(EXPORTER,))) == []
    assert found("IG105", Facts(at=NOW, nodes=(node(),), pods=(agent,))) == []
    assert found("IG105", Facts(at=NOW, nodes=(no_gpu,), pods=())) == []
    # A removed node has no telemetry, which is no fault of the exporter.
    gone = node()
    gone["status"]["conditions"][0]["status"] = "Unknown"
    assert found("IG105", Facts(at=NOW, nodes=(gone,), pods=())) == []
    # An exporter outside the cluster's pods, as on some clouds.
    assert found("IG105", Facts(at=NOW, nodes=(node(),), pods=(), devices=(device(),))) == []


def test_a_device_that_nothing_shows_measures_nothing() -> None:
    dark = device(uuid="", freshness="missing")

    assert severities("IG105", Facts(at=NOW, nodes=(node(),), pods=(), devices=(dark,)))


def unread(**changes: Any) -> Facts:
    """Return a node with a running exporter, of whose GPUs no values arrive."""
    dark = tuple(device(index, uuid="", freshness="missing") for index in range(8))
    return replace(Facts(at=NOW, nodes=(node(),), pods=(EXPORTER,), devices=dark), **changes)


def test_exporter_without_readings_is_reported() -> None:
    facts = unread()

    assert severities("IG105", facts) == ["error"]
    assert evidence("IG105", facts) == (
        "node-1: gpu-operator/dcgm-exporter-x runs, the extender has no reading of any GPU"
    )
    assert "have Prometheus scrape dcgm-exporter-x" in found("IG105", facts)[0].remedy


def test_agent_without_readings_is_reported() -> None:
    facts = unread(pods=(pod("idlegpu-agent-x", namespace="idlegpu-agent"),))

    assert "logs of idlegpu-agent-x" in found("IG105", facts)[0].remedy


def test_nodes_with_readings_or_a_young_exporter_are_not_reported() -> None:
    one = (device(0, uuid="", freshness="missing"), device(1))
    young = pod("dcgm-exporter-x")
    young["status"]["startTime"] = "2027-01-15T07:58:00Z"

    assert found("IG105", unread(devices=one)) == []
    assert found("IG105", unread(devices=(device(freshness="stale"),))) == []
    assert found("IG105", unread(devices=())) == []
    assert found("IG105", unread(pods=(young,))) == []


def test_degraded_parts_of_the_extender_are_reported() -> None:
    facts = Facts(at=NOW, degraded={"prometheus": "cannot reach http://p:9090"})

    assert severities("IG106", facts) == ["error"]
    assert "prometheus: cannot reach http://p:9090" in evidence("IG106", facts)
    assert found("IG106", Facts(at=NOW, degraded={})) == []


def test_the_objects_that_the_extender_cannot_read_are_named() -> None:
    facts = Facts(
        at=NOW,
        degraded={"apiserver/pods objects": "some objects cannot be read"},
        unreadable={"pods": ("team/a",), "nodes": ("n",)},
    )

    reported = evidence("IG106", facts)

    assert "cannot read pods team/a" in reported
    assert "cannot read nodes" not in reported


def test_a_gpu_that_telemetry_does_not_show_is_reported() -> None:
    seven = tuple(device(index) for index in range(7))
    facts = Facts(at=NOW, nodes=(node(),), devices=(*seven, device(7, uuid="")))

    assert severities("IG107", facts) == ["warning"]
    assert evidence("IG107", facts) == "node-1: has 8 GPUs, telemetry shows 7"


def test_a_gpu_that_the_node_does_not_know_is_reported() -> None:
    nine = tuple(
        sample("DCGM_FI_DEV_GPU_UTIL", 0.0, UUID=str(n), Hostname="node-1") for n in range(9)
    )

    assert severities("IG107", Facts(at=NOW, nodes=(node(),), exporter=nine)) == ["warning"]


def test_as_many_as_there_are_or_none_at_all_is_another_matter() -> None:
    eight = tuple(device(index) for index in range(8))
    shares = node(capacity={"nvidia.com/gpu.shared": "32"}, labels={"nvidia.com/gpu.replicas": "4"})
    instances = tuple(device(0, uuid=f"GPU-{n // 7}", gpu_instance_id=str(n)) for n in range(56))

    assert found("IG107", Facts(at=NOW, nodes=(node(),), devices=eight)) == []
    assert found("IG107", Facts(at=NOW, nodes=(node(),), devices=())) == []
    assert found("IG107", Facts(at=NOW, nodes=(shares,), devices=eight)) == []
    assert found("IG107", Facts(at=NOW, nodes=(node(),), devices=instances)) == []


NO_LABELS: dict[str, str | None] = dict.fromkeys(
    (
        "nvidia.com/gpu.present",
        "nvidia.com/gpu.count",
        "nvidia.com/gpu.replicas",
        "nvidia.com/gpu.sharing-strategy",
        "nvidia.com/gpu.product",
    )
)


def unlabelled(labels: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a node without the labels of gpu-feature-discovery."""
    return node(labels={**NO_LABELS, **(labels or {})}, **changes)


def shown(count: int, **changes: object) -> tuple[dict[str, object], ...]:
    return tuple(device(index, **changes) for index in range(count))


def test_without_labels_the_capacity_counts_the_gpus() -> None:
    fewer = Facts(at=NOW, nodes=(unlabelled(),), devices=shown(7))
    more = Facts(at=NOW, nodes=(unlabelled(),), devices=shown(9))

    assert severities("IG107", fewer) == ["warning"]
    assert evidence("IG107", fewer) == "node-1: capacity nvidia.com/gpu is 8, telemetry shows 7"
    assert severities("IG107", more) == ["warning"]
    assert found("IG107", Facts(at=NOW, nodes=(unlabelled(),), devices=shown(8))) == []


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(unlabelled(capacity={"nvidia.com/gpu": "28"}), id="replicas-of-each"),
        pytest.param(unlabelled(capacity={"nvidia.com/gpu.shared": "16"}), id="renamed-shares"),
        pytest.param(
            unlabelled(capacity={"nvidia.com/gpu": "4", "nvidia.com/mig-1g.5gb": "21"}), id="mig"
        ),
        pytest.param(unlabelled({"nvidia.com/gpu.replicas": "2"}), id="replicas"),
        pytest.param(unlabelled({"nvidia.com/gpu.sharing-strategy": "mps"}), id="mps"),
        pytest.param(unlabelled({"nvidia.com/gpu.product": "A100-MIG-1g.5gb"}), id="mig-single"),
        pytest.param(
            unlabelled({"cloud.google.com/gke-max-shared-clients-per-gpu": "2"}), id="gke"
        ),
    ],
)
def test_a_capacity_of_shares_or_instances_does_not_count_whole_gpus(
    parts: dict[str, Any],
) -> None:
    assert found("IG107", Facts(at=NOW, nodes=(parts,), devices=shown(7))) == []


def test_capacity_explained_by_shares_or_instances_is_not_reported() -> None:
    instances = shown(7, gpu_instance_id="1")
    exported = tuple(
        sample("DCGM_FI_DEV_GPU_TEMP", 40.0, UUID=str(n), Hostname="node-1", GPU_I_ID="1")
        for n in range(7)
    )
    slices = {"sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu"}]}}}
    nodes = (unlabelled(),)

    assert found("IG107", Facts(at=NOW, nodes=nodes, devices=instances)) == []
    assert found("IG107", Facts(at=NOW, nodes=nodes, exporter=exported)) == []
    sharing = Facts(at=NOW, nodes=nodes, devices=shown(7), plugin_configs={"default": slices})
    assert found("IG107", sharing) == []
