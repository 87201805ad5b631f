"""Sizes of groups by the objects that describe the groups."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extender.core.nodes.pod_groups import MAX_SIZE
from extender.core.request.gpu_resources import ResourceNames
from extender.runtime.cooperative import yield_to_loop
from extender.sources.kubernetes.group_sizes import (
    GroupSizes,
    _gang_size,
    _job_set_size,
    _least_members,
    _workload_sizes,
)
from extender.sources.kubernetes.objects import Feed, Pacer
from testkit.fake_kube import eventually, running_kube
from tests.extender.sources.watched_cluster import FAST, watched_cluster

NAMES = ResourceNames()
GPU_POD = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]}}
CPU_POD: dict[str, Any] = {"spec": {"containers": [{}]}}
COUNTS = (("a", 2), ("b", 4))
COSCHEDULING = "/apis/scheduling.x-k8s.io/v1alpha1/podgroups"


def jobs(template: object, **spec: Any) -> dict[str, Any]:
    """Return a replicated Job of a JobSet."""
    replicas = spec.pop("replicas", None)
    job = {"name": "a", "template": {"spec": {"template": template, **spec}}}
    return job if replicas is None else job | {"replicas": replicas}


def after(status: str, job: dict[str, Any], name: str = "a") -> dict[str, Any]:
    """Return a replicated Job that waits for another one."""
    return job | {"dependsOn": [{"name": name, "status": status}]}


@pytest.mark.parametrize(
    ("replicated", "size"),
    [
        ([jobs(GPU_POD)], 1),
        ([jobs(GPU_POD, replicas=4)], 4),
        ([jobs(GPU_POD, replicas=2, parallelism=4, completions=4)], 8),
        ([jobs(GPU_POD, parallelism=4, completions=3)], 3),
        ([jobs(GPU_POD, parallelism=4, completions=16)], 4),
        ([jobs(CPU_POD), jobs(GPU_POD, parallelism=2), jobs(GPU_POD, replicas=3)], 5),
        ([jobs(CPU_POD, replicas=3)], 0),
        ([jobs(GPU_POD, replicas=0)], 0),
        ([jobs(GPU_POD, parallelism="four")], 0),
        ("none", 0),
        ([jobs(GPU_POD, replicas=3), after("Complete", jobs(GPU_POD, replicas=2))], 3),
        ([jobs(GPU_POD, replicas=2), after("Complete", jobs(GPU_POD, replicas=3))], 3),
        ([jobs(GPU_POD, replicas=2), after("Ready", jobs(GPU_POD, replicas=3))], 5),
        (
            [
                jobs(GPU_POD),
                after("Complete", jobs(GPU_POD, replicas=2) | {"name": "b"}),
                after("Ready", jobs(GPU_POD, replicas=4), name="b"),
            ],
            6,
        ),
        (
            [
                jobs(GPU_POD),
                after("Complete", jobs(GPU_POD, replicas=2) | {"name": "b"}),
                jobs(GPU_POD, replicas=4)
                | {
                    "dependsOn": [
                        {"name": "a", "status": "Ready"},
                        {"name": "b", "status": "Ready"},
                    ]
                },
            ],
            6,
        ),
    ],
)
def test_the_size_of_a_job_set_is_its_pods_with_gpus_at_one_time(
    replicated: object, size: int
) -> None:
    described = {"metadata": {"name": "a"}, "spec": {"replicatedJobs": replicated}}

    assert _job_set_size(described, NAMES) == {"a": size}


@pytest.mark.parametrize(
    ("spec", "gang", "least"),
    [
        ({"schedulingPolicy": {"gang": {"minCount": 4}}}, 4, 0),
        ({"schedulingPolicy": {"basic": {}}}, 0, 0),
        ({"minMember": 3}, 0, 3),
        ({"minMember": "3"}, 0, 0),
        (None, 0, 0),
    ],
)
def test_size_of_a_pod_group_is_its_minimum_to_start(spec: object, gang: int, least: int) -> None:
    described = {"metadata": {"name": "a"}, "spec": spec}

    assert _gang_size(described, NAMES) == {"a": gang}
    assert _least_members(described, NAMES) == {"a": least}


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ([{"name": "g", "policy": {"gang": {"minCount": 4}}}], {"w/g": 4}),
        (
            [
                {"name": "driver", "policy": {"basic": {}}},
                {"name": "workers", "policy": {"gang": {"minCount": 8}}},
            ],
            {"w/driver": 0, "w/workers": 8},
        ),
        ([{"name": "g", "policy": "gang"}, "g"], {"w/g": 0}),
        (None, {}),
    ],
)
def test_a_workload_states_the_size_of_each_of_its_pod_groups(
    groups: object, sizes: dict[str, int]
) -> None:
    described = {"metadata": {"name": "w"}, "spec": {"podGroups": groups}}

    assert _workload_sizes(described, NAMES) == sizes


def feed_of(sizes: GroupSizes, path: str = COSCHEDULING) -> Feed:
    """Return the receiver of a kind of objects, by default the coscheduling plugin's PodGroups."""
    return next(feed for kind, feed in sizes.feeds if kind.path == path)


def pod_group(name: str, size: int) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"},
        "spec": {"minMember": size},
    }


async def test_sizes_are_reported_while_the_setting_wants_them() -> None:
    reported: dict[str, int | None] = {}
    sizes = GroupSizes(reported.__setitem__, lambda: NAMES, is_used=False)
    feed = feed_of(sizes)
    feed.begin_list()
    feed.add_listed(pod_group("a", 4))
    feed.add_listed(pod_group("none", 0))
    await feed.end_list(Pacer(yield_to_loop))
    assert reported == {}

    sizes.use(is_used=True)
    feed.put(pod_group("b", 2))
    assert reported == {"team/coscheduling group a": 4, "team/coscheduling group b": 2}

    feed.put(pod_group("a", 8))
    feed.drop(pod_group("b", 2))
    assert reported == {"team/coscheduling group a": 8, "team/coscheduling group b": None}

    sizes.use(is_used=False)
    assert reported["team/coscheduling group a"] is None


@pytest.mark.parametrize(
    ("size", "is_reported"),
    [(0, False), (1, True), (MAX_SIZE, True), (MAX_SIZE + 1, False)],
    ids=["none", "one", "most", "too many"],
)
def test_a_group_has_at_least_one_pod_and_a_limited_number(size: int, is_reported: bool) -> None:
    reported: dict[str, int | None] = {}
    sizes = GroupSizes(reported.__setitem__, lambda: NAMES, is_used=True)

    feed_of(sizes).put(pod_group("a", size))

    assert reported == ({"team/coscheduling group a": size} if is_reported else {})


def test_a_group_that_is_made_again_keeps_its_new_size() -> None:
    reported: dict[str, int | None] = {}
    sizes = GroupSizes(reported.__setitem__, lambda: NAMES, is_used=True)
    feed = feed_of(sizes)
    feed.put(pod_group("a", 4))
    again = pod_group("a", 6)
    again["metadata"]["uid"] = "another"

    feed.put(again)
    feed.drop(pod_group("a", 4))

    assert reported == {"team/coscheduling group a": 6}


def test_two_objects_with_one_name_may_end_in_any_order() -> None:
    reported: dict[str, int | None] = {}
    sizes = GroupSizes(reported.__setitem__, lambda: NAMES, is_used=True)
    feed = feed_of(sizes)
    feed.put(pod_group("a", 4))
    another = pod_group("a", 6)
    another["metadata"]["uid"] = "another"

    feed.put(another)
    feed.drop(another)
    feed.drop(pod_group("a", 4))

    assert reported == {"team/coscheduling group a": None}


def test_a_workload_gives_each_of_its_groups_a_size_and_takes_it_back() -> None:
    reported: dict[str, int | None] = {}
    sizes = GroupSizes(reported.__setitem__, lambda: NAMES, is_used=True)
    feed = feed_of(sizes, "/apis/scheduling.k8s.io/v1alpha1/workloads")
    groups = [{"name": name, "policy": {"gang": {"minCount": size}}} for name, size in COUNTS]
    workload = {
        "metadata": {"name": "w", "namespace": "team", "uid": "1"},
        "spec": {"podGroups": groups},
    }

    feed.put(workload)
    assert reported == {"team/Workload w/a": 2, "team/Workload w/b": 4}

    feed.put(workload | {"spec": {"podGroups": groups[:1]}})
    assert reported == {"team/Workload w/a": 2, "team/Workload w/b": None}

    feed.drop(workload)
    assert reported == {"team/Workload w/a": None, "team/Workload w/b": None}


@pytest.mark.parametrize("version", ["v1alpha2", "v1beta1"])
def test_kubernetes_own_groups_state_their_size_from_1_36_on(version: str) -> None:
    reported: dict[str, int | None] = {}
    sizes = GroupSizes(reported.__setitem__, lambda: NAMES, is_used=True)
    feed = feed_of(sizes, f"/apis/scheduling.k8s.io/{version}/podgroups")
    own = {"spec": {"schedulingPolicy": {"gang": {"minCount": 4}}}}

    feed.put(pod_group("train", 0) | own)

    assert reported == {"team/PodGroup train": 4}


async def test_a_cluster_without_such_objects_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="extender")
    settings = replace(FAST, reads_groups=True)
    async with (
        running_kube() as kube,
        watched_cluster(kube, tmp_path, settings=settings) as (source, _),
    ):
        await eventually(lambda: not any("scheduling" in name for name in source.status))

        assert not any("jobsets" in name for name in source.status)

    resources = {record.__dict__.get("resource", "") for record in caplog.records}
    assert not [name for name in resources if name.endswith(("scheduling.k8s.io", "x-k8s.io"))]


async def test_no_group_object_is_watched_without_the_setting(tmp_path: Path) -> None:
    async with running_kube() as kube, watched_cluster(kube, tmp_path) as (source, _):
        assert not any("podgroups" in resource for resource in source.status)
