"""Refusals are read from the pods themselves, so that every replica knows them."""

from dataclasses import replace

import pytest

from extender.core.decision.filtering import Rejection
from extender.core.nodes.inventory import PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import _MAX_MESSAGE
from extender.sources.kubernetes.records import _MAX_WISHES, reduce_pod
from testkit.kube_objects import Object, pod

PREEMPTION = (
    " no new claims to deallocate, preemption: 0/4 nodes are available: 4 Preemption is not "
    "helpful for scheduling."
)


def waiting(message: str, *, reason: str = "Unschedulable", status: str = "False") -> Object:
    condition = {"type": "PodScheduled", "status": status, "reason": reason, "message": message}
    raw = pod("p", conditions=[condition])
    raw["metadata"]["annotations"] = {
        "team": "a",
        "idlegpu.io/require-idle": "true",
        "idlegpu.io/gpu-memory": "2Gi",
    }
    return raw


def reduced(raw: Object) -> PodRecord:
    record = reduce_pod(raw, ResourceNames(), early_seconds=60)
    assert record is not None
    return record


@pytest.mark.parametrize("rejection", Rejection)
def test_a_pod_whose_message_names_a_rejection_is_refused(rejection: Rejection) -> None:
    record = reduced(
        waiting(f"0/4 nodes are available: 1 Insufficient cpu, 3 {rejection.value}.{PREEMPTION}")
    )

    assert record.is_refused
    assert record.wishes == (("idlegpu.io/gpu-memory", "2Gi"), ("idlegpu.io/require-idle", "true"))


@pytest.mark.parametrize(
    "raw",
    [
        waiting(f"0/4 nodes are available: 4 Insufficient nvidia.com/gpu.{PREEMPTION}"),
        waiting(f"1 {Rejection.NOT_IDLE.value}.", reason="SchedulerError"),
        waiting(f"1 {Rejection.NOT_IDLE.value}.", status="True"),
        pod("p"),
    ],
    ids=["others refused it", "an error", "bound", "unknown"],
)
def test_any_other_pod_is_not_refused(raw: Object) -> None:
    assert not reduced(raw).is_refused


def test_a_bound_pod_does_not_wait() -> None:
    raw = waiting(f"1 {Rejection.NOT_IDLE.value}.")
    raw["spec"]["nodeName"] = "n"

    record = reduced(raw)

    assert (record.is_refused, record.wishes, record.version) == (False, (), "")


def test_records_with_different_versions_are_equal() -> None:
    raw = waiting("refused")
    before = reduced(raw)
    raw["metadata"]["resourceVersion"] = "8"

    assert reduced(raw).version == "8"
    assert reduced(raw) == before


def test_long_annotations_are_stored_only_of_refused_pods() -> None:
    ours, others = waiting(f"1 {Rejection.NOT_IDLE.value}."), waiting("1 Insufficient cpu.")
    for raw in (ours, others):
        raw["metadata"]["annotations"] = {"idlegpu.io/unknown": "x" * _MAX_WISHES}
        raw["metadata"]["resourceVersion"] = "7"

    assert len(reduced(ours).wishes) == 1
    assert reduced(others).wishes == ()
    assert (reduced(ours).version, reduced(others).version) == ("", "")


def test_changed_counts_in_the_message_do_not_change_the_refusal() -> None:
    few, many = (reduced(waiting(f"0/9: {count} {Rejection.NOT_IDLE.value}.")) for count in (1, 9))

    assert few != many  # shown to users
    assert replace(few, message="") == replace(many, message="")


def test_kube_schedulers_message_is_stored_while_the_pod_waits() -> None:
    raw = waiting("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
    bound = waiting("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
    bound["spec"]["nodeName"] = "n"

    assert reduced(raw).message == "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    assert reduced(bound).message == ""


def test_a_long_message_is_cut() -> None:
    assert len(reduced(waiting("x" * 100_000)).message) == _MAX_MESSAGE


def test_a_scheduling_gate_is_recognized() -> None:
    assert reduced(waiting("gated", reason="SchedulingGated")).is_gated
    assert not reduced(waiting("refused")).is_gated


@pytest.mark.parametrize(
    ("owners", "owner"),
    [
        ([{"kind": "Job", "name": "train", "controller": True}], "Job train"),
        ([{"kind": "Job", "name": "train"}], ""),
        (None, ""),
        ([7, {"controller": True}], ""),
    ],
)
def test_the_controller_of_a_pod_is_its_owner(owners: object, owner: str) -> None:
    raw = waiting("refused")
    raw["metadata"]["ownerReferences"] = owners

    assert reduced(raw).owner == owner


@pytest.mark.parametrize("annotations", [None, [], {"idlegpu.io/strategy": 7}])
def test_annotations_of_any_shape_are_accepted(annotations: object) -> None:
    raw = waiting(f"1 {Rejection.NOT_IDLE.value}.")
    raw["metadata"]["annotations"] = annotations

    assert reduced(raw).is_refused
