"""Checks of other programs that place pods or add nodes."""

from typing import Any

import pytest
import yaml

from extender.cli.doctor.checks.neighbours import _REFUSALS
from extender.cli.doctor.facts import Facts
from extender.core.decision.filtering import Rejection
from testkit.controlplane.shipped import MANIFESTS
from tests.extender.cli.doctor.things import (
    NOW,
    entry,
    evidence,
    found,
    node,
    pod,
    scheduler,
    severities,
)

OURS = "default-scheduler"
SECOND = "idlegpu-scheduler"


def test_two_schedulers_on_one_node_are_reported() -> None:
    pods = (pod("a", 1), pod("b", 1, scheduler=SECOND))
    both = (scheduler(), scheduler(entry(), profiles=[SECOND], source="second.yaml"))

    assert severities("IG007", Facts(at=NOW, pods=pods, schedulers=both)) == ["error"]
    assert "node-1: pods of default-scheduler, idlegpu-scheduler" in evidence(
        "IG007", Facts(at=NOW, pods=pods, schedulers=both)
    )
    # The processes' names are unknown.
    assert severities("IG007", Facts(at=NOW, pods=pods)) == ["warning"]


def test_second_scheduler_beside_a_known_one_is_found() -> None:
    pods = (pod("a", 1), pod("b", 1, scheduler=SECOND))

    assert severities("IG007", Facts(at=NOW, pods=pods, schedulers=(scheduler(),))) == ["error"]


def test_a_configuration_without_profiles_is_the_default_schedulers() -> None:
    pods = (pod("a", 1), pod("b", 1, scheduler=SECOND))
    bare = (scheduler(entry(), profiles=[]), scheduler(profiles=[SECOND], source="second.yaml"))

    assert severities("IG007", Facts(at=NOW, pods=pods, schedulers=bare)) == ["error"]


def test_two_profiles_of_one_process_are_one_scheduler() -> None:
    pods = (pod("a", 1), pod("b", 1, scheduler=SECOND))
    one = (scheduler(entry(), profiles=[OURS, SECOND]),)

    assert found("IG007", Facts(at=NOW, pods=pods, schedulers=one)) == []


def test_nodes_of_their_own_are_well() -> None:
    pods = (
        pod("a", 1),
        pod("b", 1, scheduler=SECOND, node="node-2"),
        pod("c", 0, scheduler=SECOND),
        pod("d", 1, scheduler=SECOND, phase="Succeeded"),
        pod("e", 1, scheduler=SECOND, node=""),
    )

    assert found("IG007", Facts(at=NOW, pods=pods)) == []


def test_pods_that_the_kubelet_refused_are_evidence() -> None:
    lost = pod("lost", 1, phase="Failed", reason="UnexpectedAdmissionError")
    pods = (pod("a", 1), pod("b", 1, scheduler=SECOND), lost)

    assert "UnexpectedAdmissionError: team/lost" in evidence("IG007", Facts(at=NOW, pods=pods))


def waiting(message: str, **changes: Any) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    return pod("waits", 1, node="", phase="Pending", conditions=[condition], **changes)


AUTOSCALER = pod("cluster-autoscaler-7c9", namespace="kube-system")
REFUSED = waiting(f"0/3 nodes are available: 3 {Rejection.NOT_IDLE}.")


def test_autoscaler_adds_no_node_for_our_refusals() -> None:
    facts = Facts(at=NOW, pods=(AUTOSCALER, REFUSED))

    assert severities("IG008", facts) == ["warning"]
    assert "autoscaler: pod kube-system/cluster-autoscaler-7c9" in evidence("IG008", facts)
    assert f"team/waits waits: {Rejection.NOT_IDLE}" in evidence("IG008", facts)


def test_hosted_autoscaler_is_found_by_its_config_map() -> None:
    status = {"metadata": {"name": "cluster-autoscaler-status", "namespace": "kube-system"}}

    assert severities("IG008", Facts(at=NOW, pods=(REFUSED,), config_maps=(status,)))


def test_without_autoscaler_or_refusal_nothing_is_reported() -> None:
    full = waiting("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")

    other = {"metadata": {"name": "coredns", "namespace": "kube-system"}}
    assert found("IG008", Facts(at=NOW, pods=(REFUSED,), config_maps=(other,))) == []
    assert found("IG008", Facts(at=NOW, pods=(AUTOSCALER, full))) == []
    assert found("IG008", Facts(at=NOW, pods=(AUTOSCALER, pod("runs", 1)))) == []


def test_refusing_for_load_is_reported_beforehand() -> None:
    load = {"load_filter": {"enabled": True}}

    assert severities("IG008", Facts(at=NOW, pods=(AUTOSCALER,), settings=load)) == ["warning"]
    assert evidence("IG008", Facts(at=NOW, pods=(AUTOSCALER,), settings=load)) == (
        "autoscaler: pod kube-system/cluster-autoscaler-7c9\nsettings: load_filter.enabled: true"
    )


def test_the_remedy_is_to_accept_busy_gpus_only_for_pods_that_require_idle_ones() -> None:
    picky = waiting(
        f"3 {Rejection.NOT_IDLE}.", annotations={"idlegpu.io/require-idle": "true"}, namespace="ml"
    )
    (one,) = found("IG008", Facts(at=NOW, pods=(AUTOSCALER, REFUSED)))
    (other,) = found("IG008", Facts(at=NOW, pods=(AUTOSCALER, picky)))

    assert "annotate" not in one.remedy
    assert "kubectl annotate pod -n ml waits idlegpu.io/require-idle-" in other.remedy


def test_an_autoscaler_that_has_ended_and_a_pod_with_a_node_do_not_count() -> None:
    ended = pod("cluster-autoscaler-7c9", phase="Succeeded")
    placed = {**REFUSED, "spec": {**REFUSED["spec"], "nodeName": "node-1"}}

    assert found("IG008", Facts(at=NOW, pods=(ended, REFUSED))) == []
    assert found("IG008", Facts(at=NOW, pods=(AUTOSCALER, placed))) == []
    karpenter = pod("karpenter-x", namespace="kube-system")
    assert severities("IG008", Facts(at=NOW, pods=(karpenter, REFUSED))) == ["warning"]


def test_check_knows_every_rejection() -> None:
    assert set(_REFUSALS) == {rejection.value for rejection in Rejection}


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
