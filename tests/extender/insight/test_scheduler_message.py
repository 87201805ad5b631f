"""Parser of kube-scheduler's messages."""

import re

import pytest

from extender.core.decision.filtering import Rejection
from extender.insight.scheduler_message import (
    _HELP_OURS,
    _HELP_SCHEDULER,
    CountedReason,
    hints,
    read_message,
)
from testkit.world import MESSAGE


def pairs(counted: tuple[CountedReason, ...]) -> list[tuple[int, str]]:
    return [(one.count, one.reason) for one in counted]


def test_message_separates_our_reasons_most_frequent_first() -> None:
    reported = read_message(MESSAGE)

    assert reported.nodes == 9
    assert pairs(reported.by_scheduler) == [
        (4, "Insufficient nvidia.com/gpu"),
        (2, "node(s) had untolerated taint {team: red, blue}"),
    ]
    assert pairs(reported.by_us) == [(3, Rejection.NOT_IDLE.value)]
    assert reported.preemption.startswith("0/9 nodes are available: 9 No preemption victims")


@pytest.mark.parametrize("rejection", Rejection)
def test_every_rejection_is_recognized_and_has_a_remedy(rejection: Rejection) -> None:
    reported = read_message(f"0/2 nodes are available: 2 {rejection.value}.")

    assert pairs(reported.by_us) == [(2, rejection.value)]
    (hint,) = hints(reported.by_us)
    assert hint.startswith(f"2 {rejection.value}: ")
    assert "describe pod" not in hint


def test_older_schedulers_say_nothing_of_claims() -> None:
    reported = read_message(
        "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available: 1 x."
    )

    assert pairs(reported.by_scheduler) == [(1, "Insufficient cpu")]
    assert reported.preemption == "0/1 nodes are available: 1 x."


@pytest.mark.parametrize(
    "message", ["", "scheduling is blocked", "0/x nodes are available: 1 a.", "9 Insufficient cpu"]
)
def test_text_that_is_not_a_count_yields_no_reason(message: str) -> None:
    reported = read_message(message)

    assert (reported.nodes, reported.by_scheduler, reported.by_us) == (None, (), ())


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Insufficient nvidia.com/gpu", "holders"),
        ("Insufficient cpu", "CPU request"),
        ("Insufficient memory", "memory request"),
        ("node(s) had untolerated taint {a: b}", "toleration"),
        ("node(s) had untolerated taint {node.kubernetes.io/not-ready: }", "not ready"),
        ("node(s) didn't match Pod's node affinity/selector", "nodeSelector"),
        ("node(s) didn't match pod anti-affinity rules", "anti-affinity"),
        ("node(s) didn't match pod topology spread constraints", "topologySpread"),
        ("node(s) were unschedulable", "uncordon"),
        ("node(s) had untolerated taint {node.kubernetes.io/disk-pressure: }", "describe node"),
        ("node(s) had untolerated taint(s)", "names the taints: add a toleration"),
        ("pod affinity terms conflict", "contradict"),
        ("node(s) didn't match scheduler-enforced node affinity", "addedAffinity"),
        ("node(s) didn't match pod affinity rules", "affinity for other pods"),
        ("node(s) didn't satisfy existing pods anti-affinity rules", "anti-affinity"),
        ("node(s) had volume node affinity conflict", "describe pvc"),
        ("node(s) didn't match PersistentVolume's node affinity", "describe pvc"),
        ("node(s) didn't find available persistent volumes to bind", "describe pvc"),
        (
            "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)",
            "describe pvc",
        ),
        ("node(s) did not have enough free storage", "describe pvc"),
        ("node(s) exceed max volume count", "as they can"),
        ("node(s) had no available volume zone", "describe pvc"),
        ("node(s) had no available disk", "describe pvc"),
        ('persistentvolumeclaim "data" not found', "describe pvc"),
        ("Insufficient ephemeral-storage", "used up"),
        ("Too many pods", "kubelet"),
        ("node(s) didn't have free ports for the requested pod ports", "hostPort"),
        ("node(s) didn't match the requested node name", "another node"),
        ("something of tomorrow", "describe pod"),
    ],
)
def test_each_reason_has_a_hint(reason: str, words: str) -> None:
    (hint,) = hints([CountedReason(count=3, reason=reason)])

    assert hint.startswith(f"3 {reason}: ")
    assert words in hint.removeprefix(f"3 {reason}: ")


def test_a_hint_names_a_node() -> None:
    one = CountedReason(count=1, reason="node(s) had too few working GPUs")
    many = CountedReason(count=2, reason="node(s) had GPUs in use by processes outside Kubernetes")

    found = hints([one, many], {one.reason: "gpu-1", many.reason: "gpu-2"})

    assert found[0].startswith(f"2 {many.reason} (such as gpu-2): ")
    assert "`idlegpu gpus gpu-2`" in found[0]
    assert found[1].startswith(f"1 {one.reason} (gpu-1): `idlegpu gpus gpu-1 -o wide`")


def test_a_reason_that_rules_out_every_node_has_no_count_but_a_hint() -> None:
    reported = read_message(
        "0/9 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: "
        "0/9 nodes are available: 9 Preemption is not helpful for scheduling."
    )

    assert pairs(reported.by_scheduler) == [(9, "pod has unbound immediate PersistentVolumeClaims")]
    assert "describe pvc" in hints(reported.by_scheduler)[0]


def test_every_command_in_a_hint_can_be_typed_as_it_stands() -> None:
    texts = [*_HELP_OURS.values(), *(text for _, text in _HELP_SCHEDULER)]
    commands = [command for text in texts for command in re.findall(r"`([^`]+)`", text)]

    assert {command.split()[0] for command in commands} == {"idlegpu", "kubectl", "nvidia-smi"}
