"""CPU, memory and ephemeral storage that pods request of their node."""

from typing import Any

import pytest

from extender.core.nodes.host_resources import (
    HostResources,
    _scaled_text,
    read_quantities,
    requested,
)
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_request
from extender.sources.kubernetes.records import reduce_node
from testkit.cards import IDLE
from testkit.world import World

GIB = 1 << 30


def container(cpu: object = None, memory: object = None, **more: object) -> dict[str, object]:
    said = {"cpu": cpu, "memory": memory}
    requests = {name: value for name, value in said.items() if value is not None}
    return {"resources": {"requests": requests}, **more}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({}, (0, 0), id="nothing"),
        pytest.param({"containers": [{}]}, (0, 0), id="no-requests"),
        pytest.param(
            {"containers": [container("500m", "1Gi"), container(2)]}, (2500, GIB), id="together"
        ),
        pytest.param(
            {"containers": [container("1")], "initContainers": [container("4", "2Gi")]},
            (4000, 2 * GIB),
            id="an-init-container-runs-before",
        ),
        pytest.param(
            {
                "containers": [container("1")],
                "initContainers": [container("1", restartPolicy="Always"), container("4")],
            },
            (5000, 0),
            id="beside-a-sidecar",
        ),
        pytest.param(
            {"containers": [container("1")], "overhead": {"cpu": "250m"}}, (1250, 0), id="overhead"
        ),
        pytest.param(
            {"containers": [{"resources": {"limits": {"cpu": "4", "memory": "1Gi"}}}]},
            (4000, GIB),
            id="limits-without-requests",
        ),
        pytest.param(
            {"containers": [{"resources": {"limits": {"cpu": "4"}, "requests": {"cpu": "1"}}}]},
            (1000, 0),
            id="requests-below-limits",
        ),
        pytest.param(
            {"containers": [container("1")], "resources": {"limits": {"cpu": "8", "memory": GIB}}},
            (1000, GIB),
            id="limits-of-the-pod-without-requests",
        ),
        pytest.param(
            {"containers": [container("1", "1Gi")], "resources": {"requests": {"cpu": "6"}}},
            (6000, GIB),
            id="what-the-pod-says-itself",
        ),
        pytest.param(
            {
                "containers": [{"resources": {"requests": {"ephemeral-storage": "2Gi"}}}] * 2,
                "resources": {"requests": {"cpu": "6"}},
                "overhead": {"ephemeral-storage": "1Gi"},
            },
            (6000, 0, 5 * GIB),
            id="storage-is-requested-by-containers-alone",
        ),
        pytest.param({"containers": [container("lots", "-1")]}, (0, 0), id="unreadable"),
        pytest.param({"containers": [container("0.1m")]}, (1, 0), id="rounded-up"),
    ],
)
def test_requests_add_up_as_kube_scheduler_adds_them(
    spec: dict[str, object], expected: tuple[int, ...]
) -> None:
    assert requested({"spec": spec}) == HostResources(*expected)


@pytest.mark.parametrize("name", ["cpu", "memory", "ephemeral-storage"])
@pytest.mark.parametrize("value", ["1E", "16Ei", "9223372036854775807", 1e300, 2**64])
def test_huge_values_fit_the_columns_of_a_decision(name: str, value: object) -> None:
    world = World()
    world.add({"sound": [IDLE]})
    offered = {"cpu": "64", "memory": "1Ti", "nvidia.com/gpu": "1", name: value}
    node: dict[str, Any] = {"metadata": {"name": "huge"}, "status": {"allocatable": offered}}
    container = {"resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {name: value}}}
    pod = {"metadata": {"name": "huge", "uid": "u"}, "spec": {"containers": [container] * 3}}
    record = reduce_node(node, ResourceNames())
    assert record is not None
    world.fleet.apply_node(record)
    asked = parse_request(pod, resources=ResourceNames(), defaults=world.policy).request

    decisions = [world.rank(), world.rank(asked)]

    assert [list(one.candidates) for one in decisions] == [["sound", "huge"]] * 2


def test_a_text_too_long_for_a_quantity_is_not_kept_in_the_cache() -> None:
    before = _scaled_text.cache_info().misses

    assert requested({"spec": {"containers": [container("9" * 1_000_000)]}}) == HostResources()
    assert _scaled_text.cache_info().misses == before


def test_amounts_are_added_and_subtracted_resource_by_resource() -> None:
    one, other = HostResources(5, 60, 700), HostResources(1, 20, 300)

    assert one.plus(other) == (6, 80, 1000)
    assert one.less(other) == (4, 40, 400)


def test_the_longest_text_of_a_quantity_counts() -> None:
    assert read_quantities("5".rjust(64, "0"), None).millicores == 5000
