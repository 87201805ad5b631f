"""Checks of other programs that place pods or add nodes."""

from typing import Any

from extender.cli.doctor.checks.neighbours import REFUSALS
from extender.cli.doctor.facts import Facts
from extender.core.decision.filtering import Rejection
from tests.extender.cli.doctor.things import (
    NOW,
    entry,
    evidence,
    found,
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


def test_check_knows_every_rejection() -> None:
    assert set(REFUSALS) == {rejection.value for rejection in Rejection}
