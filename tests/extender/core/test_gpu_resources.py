"""Intersection of two lists of names of GPU resources."""

import pytest

from extender.core.request.gpu_resources import _NO_NAMES, MOST_CONTAINERS, ResourceNames, excess_of

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
