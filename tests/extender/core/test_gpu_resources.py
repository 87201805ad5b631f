"""Intersection of two lists of names of GPU resources."""

from collections.abc import Mapping

import pytest

from extender.core.request.gpu_resources import (
    _NO_NAMES,
    MOST_CONTAINERS,
    ResourceNames,
    excess_of,
    list_containers,
    read_counts,
)

GPU, SMALL = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
ANY, MIG = "nvidia.com/*", "nvidia.com/mig-*"


@pytest.mark.parametrize(
    ("names", "others", "covers", "shared"),
    [
        pytest.param((GPU, MIG), (GPU,), True, (GPU,), id="fewer"),
        pytest.param((GPU,), (MIG, GPU), False, (GPU,), id="more"),
        pytest.param((ANY,), (SMALL, GPU), True, (SMALL, GPU), id="narrower"),
        pytest.param((GPU,), (ANY,), False, (GPU,), id="wider"),
        pytest.param((GPU,), ("amd.com/gpu",), False, _NO_NAMES, id="others"),
    ],
)
def test_resources_by_both_lists_are_shared(
    names: tuple[str, ...], others: tuple[str, ...], covers: bool, shared: tuple[str, ...]
) -> None:
    assert ResourceNames(names).covers(ResourceNames(others)) is covers
    assert ResourceNames(names).shared_with(ResourceNames(others)).names == shared


def test_a_pod_may_have_as_many_containers_as_the_limit() -> None:
    assert excess_of({"spec": {"containers": [{}] * MOST_CONTAINERS}}) == ""


@pytest.mark.parametrize(
    "pod",
    [
        {"metadata": {"uid": "u" * 321}},
        {"metadata": {"namespace": "n" * 321}},
        {"metadata": {"name": "n" * 321}},
        {"status": {"nominatedNodeName": "n" * 321}},
    ],
    ids=["uid", "namespace", "name", "nominated-node"],
)
def test_a_pod_with_a_name_longer_than_any_in_kubernetes_is_excessive(
    pod: Mapping[str, object],
) -> None:
    assert excess_of(pod) == "a name of 321 characters: must be at most 320"


def test_limits_and_requests_of_all_containers_and_the_overhead_are_counted() -> None:
    many = {f"a/{number}": "1" for number in range(1250)}
    container = {"resources": {"limits": many, "requests": many}}
    spec: dict[str, object] = {"containers": [container], "initContainers": [container]}

    assert excess_of({"spec": spec}) == ""
    assert excess_of({"spec": spec | {"overhead": {"cpu": "1"}}}) == (
        "5001 limits and requests: must be at most 5000"
    )
    assert excess_of({"spec": spec | {"resources": {"limits": {"cpu": "1"}}}}) != ""


def test_containers_are_listed_if_a_resource_is_requested_by_several() -> None:
    whole, both = {"limits": {GPU: "1"}}, {"limits": {GPU: "1", SMALL: "2"}}

    def listed(*resources: object) -> dict[str, list[int]]:
        spec = {"containers": [{"resources": each} for each in resources]}
        containers = list_containers({"spec": spec}, ResourceNames())
        return {name: [one.devices for one in some] for name, some in containers}

    assert listed(both) == listed({}) == {}
    assert listed(whole, both) == {GPU: [1, 1], SMALL: [2]}
    assert listed(*[whole] * 20) == {GPU: [1] * 16}


def test_a_name_as_long_as_the_longest_in_kubernetes_is_not_excessive() -> None:
    assert excess_of({"metadata": {"uid": "u" * 320}}) == ""


def test_a_resource_with_a_name_longer_than_any_in_kubernetes_is_skipped() -> None:
    limits = {f"nvidia.com/mig-{'1' * 400}": "1", "nvidia.com/mig-1g.5gb": "1"}

    assert read_counts(limits, ResourceNames()) == {"nvidia.com/mig-1g.5gb": 1}


def test_of_many_resources_in_a_list_the_first_ones_count() -> None:
    listed = {f"nvidia.com/mig-{number:03}": "1" for number in range(100)}

    assert list(read_counts(listed, ResourceNames())) == list(listed)[:32]
