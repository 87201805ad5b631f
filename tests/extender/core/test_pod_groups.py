"""Group of a pod, from the pod's own labels and annotations."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.pod_groups import PodGroup, read_group, read_size

LWS = "leaderworkerset.sigs.k8s.io"
OLD = "pod-group.scheduling.sigs.k8s.io"


def pod(**parts: Any) -> dict[str, Any]:
    spec = parts.pop("spec", {})
    return {"metadata": {"namespace": "ns", **parts}, "spec": spec}


@pytest.mark.parametrize(
    ("described", "kind", "name", "size"),
    [
        (pod(spec={"schedulingGroup": {"podGroupName": "train"}}), "PodGroup", "train", None),
        (
            pod(spec={"workloadRef": {"name": "w", "podGroup": "g", "podGroupReplicaKey": "1"}}),
            "Workload",
            "w/g/1",
            None,
        ),
        (
            pod(
                labels={f"{LWS}/name": "serve", f"{LWS}/group-index": "2"},
                annotations={f"{LWS}/size": "4"},
            ),
            "LeaderWorkerSet",
            "serve-2",
            4,
        ),
        (
            pod(
                labels={
                    f"{LWS}/name": "serve",
                    f"{LWS}/group-index": "2",
                    f"{LWS}/worker-index": "1",
                },
                annotations={f"{LWS}/size": "4"},
            ),
            "LeaderWorkerSet",
            "serve-2",
            3,  # the leader may have no GPU
        ),
        (
            pod(
                labels={
                    f"{LWS}/name": "serve",
                    f"{LWS}/group-index": "2",
                    f"{LWS}/worker-index": "0",
                },
                annotations={f"{LWS}/size": "4"},
            ),
            "LeaderWorkerSet",
            "serve-2",
            4,
        ),
        (
            pod(
                labels={"kueue.x-k8s.io/pod-group-name": "train"},
                annotations={"kueue.x-k8s.io/pod-group-total-count": "8"},
            ),
            "Kueue group",
            "train",
            8,
        ),
        (
            pod(annotations={"kueue.x-k8s.io/workload": "job-train-1"}),
            "Kueue workload",
            "job-train-1",
            None,
        ),
        (
            pod(labels={"scheduling.x-k8s.io/pod-group": "train"}),
            "coscheduling group",
            "train",
            None,
        ),
        (
            pod(labels={f"{OLD}/name": "train", f"{OLD}/min-available": "3"}),
            "coscheduling group",
            "train",
            3,
        ),
        (
            pod(
                annotations={
                    "scheduling.k8s.io/group-name": "train",
                    "scheduling.volcano.sh/group-min-member": "2",
                }
            ),
            "Volcano group",
            "train",
            2,
        ),
        (pod(labels={"jobset.sigs.k8s.io/jobset-name": "train"}), "JobSet", "train", None),
    ],
)
def test_a_pod_says_its_group_and_often_the_groups_size(
    described: dict[str, Any], kind: str, name: str, size: int | None
) -> None:
    assert read_group(described) == PodGroup(kind, "ns", name, size)


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        *[
            ({"kind": kind, "name": "train", "controller": True}, f"{kind} train")
            for kind in ("JAXJob", "MPIJob", "PyTorchJob", "XGBoostJob", "RayCluster")
        ],
        ({"kind": "PyTorchJob", "name": "train"}, None),
        ({"kind": "Job", "name": "train", "controller": True}, None),
        ({"kind": "ReplicaSet", "name": "serve", "controller": True}, None),
    ],
)
def test_some_controllers_are_groups_by_themselves(
    owner: dict[str, Any], expected: str | None
) -> None:
    group = read_group(pod(ownerReferences=[owner]))

    assert (group and group.title) == expected


def test_only_kubernetes_own_groups_are_reverted_and_leader_worker_sets_have_a_leader() -> None:
    kinds = ("PodGroup", "Workload", "LeaderWorkerSet", "JobSet")
    groups = [PodGroup(kind, "ns", "train") for kind in kinds]

    assert [group.is_reverted for group in groups] == [True, False, False, False]
    assert [group.has_leader for group in groups] == [False, False, True, False]


def test_a_job_set_has_at_least_a_pod_for_each_job_of_the_kind() -> None:
    name, replicas = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-replicas"

    group = read_group(pod(labels={name: "train", replicas: "8"}))

    assert group == PodGroup("JobSet", "ns", "train", least=8)


def test_scheduling_group_counts_before_labels_and_replica_before_queue() -> None:
    labels = {
        f"{LWS}/name": "serve",
        f"{LWS}/group-index": "0",
        "kueue.x-k8s.io/pod-group-name": "queued",
        "jobset.sigs.k8s.io/jobset-name": "set",
    }
    own = read_group(pod(labels=labels, spec={"schedulingGroup": {"podGroupName": "core"}}))
    assert own is not None
    assert own.title == "PodGroup core"
    replica = read_group(pod(labels=labels))
    assert replica is not None
    assert replica.title == "LeaderWorkerSet serve-0"


@pytest.mark.parametrize(
    "described",
    [
        {},
        pod(),
        pod(labels={"app": "web"}, annotations={"note": "x"}),
        pod(labels={f"{LWS}/name": "serve"}),
        pod(annotations={"kueue.x-k8s.io/pod-group-total-count": "8"}),
        pod(spec={"schedulingGroup": None, "workloadRef": {"podGroup": "g"}}),
    ],
)
def test_other_pods_are_in_no_group(described: dict[str, Any]) -> None:
    assert read_group(described) is None


def test_groups_of_one_name_in_two_namespaces_are_two_groups() -> None:
    keys = set()
    for namespace in ("a", "b"):
        described = pod(labels={"jobset.sigs.k8s.io/jobset-name": "x"}, namespace=namespace)
        group = read_group(described)
        assert group is not None
        keys.add(group.key)
    assert keys == {"a/JobSet x", "b/JobSet x"}


@given(st.recursive(st.none() | st.text() | st.integers(), st.lists))
def test_any_size_is_a_number_of_pods_or_unknown(value: object) -> None:
    size = read_size(value)
    assert size is None or 1 <= size <= 100_000


def test_the_largest_size_of_a_group_is_a_size() -> None:
    assert [read_size(text) for text in ("100000", "100001")] == [100_000, None]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_object_breaks_the_reading(value: object) -> None:
    read_group({"metadata": value, "spec": value})
    read_group({"metadata": {"labels": value, "annotations": value}, "spec": {}})
