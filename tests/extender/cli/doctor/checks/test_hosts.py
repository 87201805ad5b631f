"""Checks for GPU nodes that pods without GPUs fill."""

from dataclasses import replace
from typing import Any

import pytest

from extender.cli.doctor.facts import Facts
from tests.extender.cli.doctor.described import at
from tests.extender.cli.doctor.things import GPU, NOW, evidence, found, node, pod, severities

OFFERED = {GPU: "8", "cpu": "64", "memory": "512Gi"}
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def filled(*pods: Any, **changes: Any) -> Facts:
    return Facts(at=NOW, nodes=(node(capacity=OFFERED, **changes),), pods=pods)


def needing(name: str, cpu: str, memory: str = "1Gi", gpus: int = 0, owner: str = "") -> Any:
    item = pod(name, gpus)
    item["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu, "memory": memory}
    item["metadata"]["ownerReferences"] = [{"kind": owner, "name": "it"}]
    return item


def test_pods_without_gpus_that_strand_gpus_are_reported_with_a_taint() -> None:
    facts = filled(needing("web", "40"), needing("batch", "20"), needing("train", "2", gpus=2))

    assert severities("IG207", facts) == ["warning"]
    assert evidence("IG207", facts) == (
        "node-1: 6 of 6 free GPUs cannot be used: team/web, team/batch "
        "request 60 of 64 CPUs and 2 of 512 GiB"
    )
    (reported,) = found("IG207", facts)
    assert reported.remedy.startswith("kubectl taint node node-1 nvidia.com/gpu=present:NoSchedule")


def test_so_are_those_that_leave_no_memory() -> None:
    facts = filled(needing("cache", "1", "400Gi"))

    assert "5 of 8 free GPUs cannot be used" in evidence("IG207", facts)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(filled(needing("web", "30")), id="half-of-each-share-is-left"),
        pytest.param(filled(needing("agent", "60", owner="DaemonSet")), id="on-every-node"),
        pytest.param(filled(needing("train", "60", gpus=2)), id="a-gpu-pod-has-it"),
        pytest.param(
            filled(needing("web", "60"), needing("train", "1", gpus=8)), id="no-gpu-is-free"
        ),
        pytest.param(filled(needing("web", "60"), taints=[TAINT]), id="tainted-already"),
    ],
)
def test_stranded_gpus_are_reported_only_if_pods_took_their_cpu(facts: Facts) -> None:
    assert found("IG207", facts) == []


def test_a_pod_that_has_ended_takes_nothing() -> None:
    ended = needing("done", "60")
    ended["status"]["phase"] = "Succeeded"

    assert found("IG207", filled(ended)) == []


RACK = "topology.kubernetes.io/rack"
JOBSET = "jobset.sigs.k8s.io/jobset-name"


def cluster(*labels: dict[str, str], settings: dict[str, Any] | None = None) -> Facts:
    """Return a cluster with a group, and a node for each set of labels."""
    nodes = tuple(node(f"node-{number}", labels=each) for number, each in enumerate(labels))
    facts = at(nodes[0], pod("p", 1, labels={JOBSET: "train"}), settings=settings or {})
    return replace(facts, nodes=nodes)


def test_a_label_that_no_node_has_is_named() -> None:
    facts = cluster({RACK: "a"}, {}, settings={"group_topology": [RACK, "x/row"]})

    assert severities("IG305", facts) == ["warning"]
    assert "x/row" in evidence("IG305", facts)
    assert RACK not in evidence("IG305", facts)


def test_groups_on_nodes_without_any_topology_are_named() -> None:
    facts = cluster({}, {})

    assert severities("IG305", facts) == ["info"]
    assert "team/JobSet train" in evidence("IG305", facts)


@pytest.mark.parametrize(
    "facts",
    [
        cluster({RACK: "a"}, {}),
        cluster({}, {}, settings={"group_topology": []}),
        cluster({}),
        replace(cluster({}, {}), pods=(pod("alone", 1),)),
        cluster({"x/row": "1"}, {}, settings={"group_topology": ["x/row"]}),
    ],
    ids=["a node has one", "switched off", "one node", "no group", "its own label"],
)
def test_all_is_well(facts: Facts) -> None:
    assert found("IG305", facts) == []


def test_the_last_free_gpu_counts_and_an_overcommitted_node_counts_no_more_than_it_has() -> None:
    last = filled(needing("web", "62"), needing("train", "1", gpus=7))
    beyond = filled(needing("web", "80"), needing("train", "1", gpus=8))
    short = filled(needing("web", "80"))

    assert "1 of 1 free GPUs cannot be used" in evidence("IG207", last)
    assert found("IG207", beyond) == []
    assert "8 of 8 free GPUs cannot be used" in evidence("IG207", short)


@pytest.mark.parametrize("offered", [{GPU: "8"}, {GPU: "8", "cpu": "64"}])
def test_a_node_whose_cpu_or_memory_is_unknown_is_not_judged(offered: dict[str, str]) -> None:
    web = needing("web", "60")

    assert found("IG207", Facts(at=NOW, nodes=(node(capacity=offered),), pods=(web,))) == []


@pytest.mark.parametrize(
    ("taints", "is_found"),
    [
        ([{**TAINT, "effect": "NoExecute"}], False),
        ([{"key": "team", "effect": "NoSchedule"}, TAINT], False),
        ([{**TAINT, "effect": "PreferNoSchedule"}], True),
        ([{"key": "team", "effect": "NoSchedule"}], True),
    ],
)
def test_only_a_taint_for_gpus_keeps_other_pods_out(
    taints: list[dict[str, str]], is_found: bool
) -> None:
    assert bool(found("IG207", filled(needing("web", "60"), taints=taints))) is is_found
