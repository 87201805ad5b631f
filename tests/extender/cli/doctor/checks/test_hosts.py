"""Checks for GPU nodes that pods without GPUs fill."""

from typing import Any

import pytest

from extender.cli.doctor.facts import Facts
from tests.extender.cli.doctor.things import (
    GPU,
    NOW,
    evidence,
    found,
    node,
    pod,
    severities,
)

OFFERED = {GPU: "8", "cpu": "64", "memory": "512Gi"}
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def at(*pods: Any, **changes: Any) -> Facts:
    return Facts(at=NOW, nodes=(node(capacity=OFFERED, **changes),), pods=pods)


def needing(name: str, cpu: str, memory: str = "1Gi", gpus: int = 0, owner: str = "") -> Any:
    item = pod(name, gpus)
    item["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu, "memory": memory}
    item["metadata"]["ownerReferences"] = [{"kind": owner, "name": "it"}]
    return item


def test_pods_without_gpus_that_strand_gpus_are_reported_with_a_taint() -> None:
    facts = at(needing("web", "40"), needing("batch", "20"), needing("train", "2", gpus=2))

    assert severities("IG207", facts) == ["warning"]
    assert evidence("IG207", facts) == (
        "node-1: 6 of 6 free GPUs cannot be used: team/web, team/batch "
        "request 60 of 64 CPUs and 2 of 512 GiB"
    )
    (reported,) = found("IG207", facts)
    assert reported.remedy.startswith("kubectl taint node node-1 nvidia.com/gpu=present:NoSchedule")


def test_so_are_those_that_leave_no_memory() -> None:
    facts = at(needing("cache", "1", "400Gi"))

    assert "5 of 8 free GPUs cannot be used" in evidence("IG207", facts)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(at(needing("web", "30")), id="half-of-each-share-is-left"),
        pytest.param(at(needing("agent", "60", owner="DaemonSet")), id="on-every-node"),
        pytest.param(at(needing("train", "60", gpus=2)), id="a-gpu-pod-has-it"),
        pytest.param(at(needing("web", "60"), needing("train", "1", gpus=8)), id="no-gpu-is-free"),
        pytest.param(at(needing("web", "60"), taints=[TAINT]), id="tainted-already"),
    ],
)
def test_stranded_gpus_are_reported_only_if_pods_took_their_cpu(facts: Facts) -> None:
    assert found("IG207", facts) == []


def test_a_pod_that_has_ended_takes_nothing() -> None:
    ended = needing("done", "60")
    ended["status"]["phase"] = "Succeeded"

    assert found("IG207", at(ended)) == []
