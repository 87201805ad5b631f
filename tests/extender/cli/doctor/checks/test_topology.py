"""Checks of labels with the policy of the kubelets' Topology Manager."""

from typing import Any

import pytest

from extender.cli.doctor.facts import Facts
from tests.extender.cli.doctor.things import NOW, evidence, found, node, pod, severities

POLICY, SCOPE = "idlegpu.io/topology-policy", "idlegpu.io/topology-scope"


def refused() -> Any:
    item = pod("train", 4, phase="Failed")
    item["status"]["reason"] = "TopologyAffinityError"
    return item


def at(*pods: Any, **labels: str) -> Facts:
    return Facts(at=NOW, nodes=(node(labels=labels),), pods=pods)


def test_a_refusal_of_a_kubelet_whose_policy_no_label_names_is_reported() -> None:
    assert severities("IG208", at(refused())) == ["warning"]
    assert evidence("IG208", at(refused())) == "team/train: TopologyAffinityError on node-1"
    assert severities("IG208", at(refused(), **{POLICY: "none"})) == ["warning"]


def test_a_word_that_no_kubelet_knows_is_reported() -> None:
    assert evidence("IG208", at(**{POLICY: "single"})) == (
        f"node-1: {POLICY}=single, must be one of none, best-effort, restricted, single-numa-node"
    )
    labels = {POLICY: "restricted", SCOPE: "node"}
    assert f"{SCOPE}=node" in evidence("IG208", at(**labels))


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(
            at(refused(), **{POLICY: "single-numa-node"}), id="the label names the policy"
        ),
        pytest.param(
            at(pod("train", 4), **{POLICY: "none", SCOPE: "pod"}), id="nothing is refused"
        ),
        pytest.param(at(pod("train", 4)), id="no labels"),
    ],
)
def test_nothing_is_reported_where_labels_and_kubelets_agree(facts: Facts) -> None:
    assert found("IG208", facts) == []
