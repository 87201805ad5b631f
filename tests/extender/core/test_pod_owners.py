"""Owner of a pod: the lasting object, not that of a revision or run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.pod_groups import kin_of, owner_of
from testkit.kube_objects import pod
from testkit.pod_records import reduced

CREATED = "2026-11-24T06:30:07Z"
MINUTES = 29925030  # 2026-11-24 06:30, since the epoch
DAY = 24 * 60


def metadata(
    kind: str, name: str, created: object = CREATED, **labels: object
) -> dict[str, object]:
    owner = {"controller": True, "kind": kind, "name": name}
    return {"ownerReferences": [owner], "creationTimestamp": created, "labels": labels}


def test_replica_sets_of_one_deployment_are_one_owner() -> None:
    owners = {
        owner_of(metadata("ReplicaSet", f"serve-{each}", **{"pod-template-hash": each}))
        for each in ("5d8f9c7b6d", "7c9d8f6b5")
    }

    assert owners == {"Deployment serve"}


@pytest.mark.parametrize(
    "labels",
    [{}, {"pod-template-hash": "other"}, {"pod-template-hash": ""}, {"pod-template-hash": 7}],
)
def test_replica_set_without_a_deployment_is_the_owner(labels: dict[str, object]) -> None:
    assert owner_of(metadata("ReplicaSet", "serve-7", **labels)) == "ReplicaSet serve-7"


@pytest.mark.parametrize("before", [0, 1, DAY, 31 * DAY])
def test_jobs_of_one_cron_job_are_one_owner(before: int) -> None:
    assert owner_of(metadata("Job", f"nightly-{MINUTES - before}")) == "CronJob nightly"


@pytest.mark.parametrize(
    ("name", "created"),
    [
        ("train-20261124", CREATED),
        ("train-31122026", CREATED),
        ("train-7", CREATED),
        ("train", CREATED),
        (f"-{MINUTES}", CREATED),
        (f"{MINUTES}", CREATED),
        (f"train-{MINUTES + 1}", CREATED),
        (f"train-{MINUTES - 31 * DAY - 1}", CREATED),
        (f"train-{MINUTES}", ""),
        (f"train-{MINUTES}", "2026-13-41T06:30:07Z"),
        (f"train-{MINUTES}", 7),
        (f"train-{MINUTES}-0", CREATED),
    ],
)
def test_a_job_whose_name_ends_in_another_number_is_the_owner(name: str, created: object) -> None:
    assert owner_of(metadata("Job", name, created)) == f"Job {name}"


@pytest.mark.parametrize(
    ("kind", "name", "labels", "owner"),
    [
        ("Job", "llm-workers-0", {"jobset.sigs.k8s.io/jobset-name": "llm"}, "JobSet llm"),
        ("Job", "llm", {"jobset.sigs.k8s.io/jobset-name": "ll"}, "Job llm"),
        ("StatefulSet", "big", {"leaderworkerset.sigs.k8s.io/name": "big"}, "LeaderWorkerSet big"),
        (
            "StatefulSet",
            "big-1",
            {"leaderworkerset.sigs.k8s.io/name": "big"},
            "LeaderWorkerSet big",
        ),
        ("PyTorchJob", "llm-x", {"jobset.sigs.k8s.io/jobset-name": "llm"}, "PyTorchJob llm-x"),
    ],
)
def test_pods_of_a_job_set_belong_to_the_set(
    kind: str, name: str, labels: dict[str, str], owner: str
) -> None:
    assert owner_of(metadata(kind, name, **labels)) == owner


def test_records_and_requests_of_two_runs_share_one_owner() -> None:
    pods = []
    for number in (0, 1):
        raw = pod(f"nightly-{number}")
        raw["metadata"] |= metadata("Job", f"nightly-{MINUTES + number}", "2026-11-24T06:31:00Z")
        pods.append(raw)

    assert {kin_of(raw)[0] for raw in pods} == {"ns/CronJob nightly"}
    assert {reduced(raw).kin for raw in pods} == {kin_of(pods[0])}


anything: st.SearchStrategy[object] = st.one_of(
    st.none(), st.integers(), st.text(max_size=9), st.just({}), st.just([])
)


@given(
    st.sampled_from(["Job", "ReplicaSet", "StatefulSet", ""]),
    st.one_of(anything, st.from_regex(r"[a-z-]*[0-9]{8}", fullmatch=True)),
    st.one_of(
        anything, st.from_regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:", fullmatch=True)
    ),
    anything,
)
def test_an_owner_of_any_shape_is_read(kind: Any, name: Any, created: Any, label: Any) -> None:
    assert isinstance(owner_of(metadata(kind, name, created, **{"pod-template-hash": label})), str)
