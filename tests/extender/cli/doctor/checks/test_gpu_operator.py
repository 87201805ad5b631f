"""Checks that the agent stops when the GPU operator needs the GPUs."""

from typing import Any

import pytest
import yaml

from extender.cli.doctor.facts import Facts
from testkit.controlplane.shipped import MANIFESTS
from tests.extender.cli.doctor.things import (
    NOW,
    evidence,
    found,
    node,
    pod,
    severities,
)

DEPLOY = "nvidia.com/gpu.deploy."
PAUSED = {f"{DEPLOY}device-plugin": "paused-for-mig-change"}
SERVED = {f"{DEPLOY}device-plugin": "true"}
SHIPPED = yaml.safe_load((MANIFESTS / "agent" / "daemon-set.yaml").read_text())


def facts(
    labels: dict[str, str], *pods: dict[str, Any], daemon_set: dict[str, Any] = SHIPPED
) -> Facts:
    return Facts(at=NOW, nodes=(node(labels=labels),), pods=pods, daemon_sets=(daemon_set,))


def with_terms(*terms: list[dict[str, Any]]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": [{"matchExpressions": term} for term in terms]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return of_spec({"affinity": affinity})


def of_spec(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "idlegpu-agent", "namespace": "idlegpu-agent"}
    return {"kind": "DaemonSet", "metadata": metadata, "spec": {"template": {"spec": spec}}}


def test_an_agent_on_a_paused_node_is_reported() -> None:
    one = facts(PAUSED, pod("idlegpu-agent-x"))

    assert severities("IG406", one) == ["error"]
    assert "device-plugin=paused-for-mig-change, and team/idlegpu-agent-x runs" in evidence(
        "IG406", one
    )


def test_one_that_is_leaving_or_elsewhere_is_well() -> None:
    leaving = pod("idlegpu-agent-x")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-23T22:00:00Z"

    assert found("IG406", facts(PAUSED, leaving)) == []
    assert found("IG406", facts(PAUSED, pod("idlegpu-agent-x", node="node-2"))) == []
    assert found("IG406", facts(PAUSED, pod("train", 1))) == []
    assert found("IG406", facts(SERVED, pod("idlegpu-agent-x"))) == []


NOT_IN = [
    {
        "key": f"{DEPLOY}{part}",
        "operator": "NotIn",
        "values": ["paused-for-driver-upgrade", "paused-for-mig-change"],
    }
    for part in ("client", "device-plugin", "gpu-feature-discovery")
]
ANYWHERE = {"key": "nvidia.com/gpu.present", "operator": "Exists"}


@pytest.mark.parametrize(
    ("daemon_set", "is_deaf"),
    [
        pytest.param(SHIPPED, False, id="as shipped"),
        pytest.param(with_terms([ANYWHERE, *NOT_IN]), False, id="one term"),
        pytest.param(with_terms([ANYWHERE, *NOT_IN], [ANYWHERE]), True, id="not every term"),
        pytest.param(with_terms([ANYWHERE, *NOT_IN[1:]]), True, id="not every label"),
        pytest.param(of_spec({}), True, id="no affinity at all"),
        pytest.param(
            of_spec({"nodeSelector": {one["key"]: "true" for one in NOT_IN}}), False, id="selector"
        ),
        pytest.param(
            with_terms([{**one, "operator": "In", "values": ["true"]} for one in NOT_IN]),
            False,
            id="only where true",
        ),
    ],
)
def test_a_daemon_set_that_would_stay_is_reported(
    daemon_set: dict[str, Any], is_deaf: bool
) -> None:
    assert severities("IG406", facts(SERVED, daemon_set=daemon_set)) == ["warning"] * is_deaf


def test_without_the_operator_there_is_nothing_to_follow() -> None:
    assert found("IG406", facts({}, pod("idlegpu-agent-x"), daemon_set=of_spec({}))) == []
