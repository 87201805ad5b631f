"""Stored selectors of pods and labels of nodes."""

from typing import Any

import pytest

from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.nodes.node_selection import Selection
from extender.core.request.gpu_resources import ResourceNames
from extender.sources.kubernetes.records import _MAX_SELECTION, reduce_node, reduce_pod
from testkit.kube_objects import Object, node, pod

SSD = {"disk": "ssd"}


def selecting(selector: dict[str, str] | None = None, name: str = "p", **status: Any) -> Object:
    raw = pod(name, **status)
    raw["spec"]["nodeSelector"] = SSD if selector is None else selector
    return raw


def kept(raw: Object) -> PodRecord:
    record = reduce_pod(raw, ResourceNames(), early_seconds=60)
    assert record is not None
    return record


def labelled(name: str = "n", **labels: Any) -> NodeRecord:
    record = reduce_node(node(name, **labels), ResourceNames())
    assert record is not None
    return record


def test_a_pods_selection_is_stored_while_it_waits() -> None:
    bound = selecting()
    bound["spec"]["nodeName"] = "n"

    assert kept(selecting()).selection == Selection(labels=(("disk", "ssd"),))
    assert kept(bound).selection is None
    assert kept(selecting(phase="Failed")).selection is None


def test_equal_pods_share_their_selection() -> None:
    assert kept(selecting(name="a")).selection is kept(selecting(name="b")).selection


def test_a_pod_with_claims_only_has_no_selection() -> None:
    raw = selecting()
    raw["spec"] = {**raw["spec"], "containers": [{}], "resourceClaims": [{"name": "gpu"}]}

    assert kept(raw).selection is None


@pytest.mark.parametrize(
    "selector", [{"a": "x" * _MAX_SELECTION}, {f"l{at}": "x" for at in range(_MAX_SELECTION // 16)}]
)
def test_a_selection_that_is_too_large_is_not_stored(selector: dict[str, str]) -> None:
    assert kept(selecting(selector)).selection is None


def test_a_selection_with_too_many_terms_is_not_read() -> None:
    """Empty terms select no node and have no size: only their number shows that they cost time."""
    raw = selecting()
    terms: list[dict[str, str]] = [{}] * 1001
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    raw["spec"]["affinity"] = {"nodeAffinity": required}

    assert kept(raw).selection is None


def test_labels_that_pods_may_select_by_are_stored() -> None:
    record = labelled(
        **{
            "disk": "ssd",
            "kubernetes.io/hostname": "host",
            "nvidia.com/gpu.product": "NVIDIA-L4",
            "nvidia.com/gfd.timestamp": "1",
            "feature.node.kubernetes.io/cpu-model.id": "1",
        }
    )

    assert record.other_labels == SSD
    assert record.hostname == "host"
    assert record.labels == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    assert record.label("disk") == "ssd"
    assert record.label("kubernetes.io/hostname") == "host"
    assert record.label("nvidia.com/gpu.product") == "NVIDIA-L4"
    assert labelled().label("kubernetes.io/hostname") is None


def test_nodes_of_one_pool_share_their_labels() -> None:
    first = labelled("a", disk="ssd", arch="x", **{"kubernetes.io/hostname": "a"})
    second = labelled("b", arch="x", disk="ssd", **{"kubernetes.io/hostname": "b"})

    assert first.other_labels is second.other_labels


def test_a_changed_irrelevant_label_does_not_change_the_record() -> None:
    changing = "feature.node.kubernetes.io/network-latency"

    assert labelled(disk="ssd", **{changing: "1"}) == labelled(disk="ssd", **{changing: "2"})
