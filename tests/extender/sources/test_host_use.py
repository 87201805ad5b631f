"""Sums of the requests of all pods on a node, from lists and watches."""

from pathlib import Path

import orjson
import pytest

from extender.core.nodes.host_resources import NONE, HostResources, PlacedPod
from extender.core.request.gpu_resources import ResourceNames
from extender.sources.kubernetes.json_text import PodFilter
from extender.sources.kubernetes.objects import HostUse, Pacer
from testkit.fake_kube import eventually, running_kube
from tests.extender.sources.watched_cluster import watched_cluster

ONE = HostResources(1000, 1 << 30)
TWO = ONE.plus(ONE)


class HostSums:
    """Keeps the latest sum of each node."""

    def __init__(self) -> None:
        self.sums: dict[str, HostResources] = {}
        self.use = HostUse(self.sums.__setitem__)


async def test_a_list_corrects_missed_changes() -> None:
    host = HostSums()
    host.use.put("stays", PlacedPod("a", ONE))
    host.use.put("lost", PlacedPod("a", ONE))
    assert host.sums == {"a": TWO}

    host.use.begin_list()
    host.use.add_listed("stays", PlacedPod("a", ONE))
    host.use.add_listed("new", PlacedPod("b", ONE))
    host.use.add_listed("ended-meanwhile", PlacedPod("b", ONE))
    host.use.put("ended-meanwhile", None)
    host.use.put("came-meanwhile", PlacedPod("b", ONE))
    await host.use.end_list(Pacer())

    assert host.sums == {"a": ONE, "b": TWO}


async def test_an_incomplete_list_changes_nothing() -> None:
    host = HostSums()
    host.use.put("pod", PlacedPod("a", ONE))

    host.use.begin_list()
    host.use.abort_list()
    host.use.put("pod", None)

    assert host.sums == {"a": NONE}


def pod(cpu: str, **more: object) -> dict[str, object]:
    return {
        "metadata": {"uid": "u", "name": "web", "resourceVersion": "7"},
        "spec": {
            "nodeName": "a",
            "containers": [{"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}],
        },
        **more,
    }


def container(cpu: str, memory: str) -> dict[str, object]:
    return {"resources": {"requests": {"cpu": cpu, "memory": memory}}}


def pod_with(**spec: object) -> dict[str, object]:
    containers = {"containers": [container("1", "1Gi")]}
    return pod("1", spec={"nodeName": "a", **containers, **spec})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(pod("1"), PlacedPod("a", ONE), id="runs"),
        pytest.param(pod("1", status={"phase": "Failed"}), None, id="has-failed"),
        pytest.param(pod("1", status={"phase": "Succeeded"}), None, id="has-ended"),
        pytest.param(
            pod_with(initContainers=[container("2", "3Gi")]),
            PlacedPod("a", HostResources(2000, 3 << 30)),
            id="init-container-before-it",
        ),
        pytest.param(
            pod_with(initContainers=[container("2", "3Gi") | {"restartPolicy": "Always"}]),
            PlacedPod("a", HostResources(3000, 4 << 30)),
            id="sidecar",
        ),
        pytest.param(
            pod_with(overhead={"cpu": "500m"}),
            PlacedPod("a", HostResources(1500, 1 << 30)),
            id="overhead",
        ),
        pytest.param(
            pod_with(resources={"requests": {"cpu": "4"}}),
            PlacedPod("a", HostResources(4000, 1 << 30)),
            id="request-of-the-pod",
        ),
        pytest.param({"metadata": {"uid": "u", "name": "web"}, "spec": {}}, None, id="on-no-node"),
    ],
)
def test_requests_of_pods_without_gpus_are_reported(
    value: dict[str, object], expected: PlacedPod | None
) -> None:
    noted: list[tuple[str, PlacedPod | None]] = []
    pod_filter = PodFilter(
        ResourceNames(),
        ("dcgm-exporter",),
        on_listed=lambda *placed: noted.append(placed),
        on_watched=lambda *placed: noted.append(placed),
    )

    pod_filter.is_relevant(orjson.dumps(value))
    for kind in ("ADDED", "DELETED"):
        version = {"metadata": {"uid": "u", "name": "web", "resourceVersion": "7"}}
        pod_filter.irrelevant_change(orjson.dumps({"type": kind, "object": value | version}))

    assert noted == [("/web", expected), ("/web", expected), ("/web", None)]


async def test_pods_without_gpus_count_on_their_node_until_they_end(tmp_path: Path) -> None:
    async with running_kube() as kube:
        kube.put("pods", pod("1"))
        async with watched_cluster(kube, tmp_path) as (_, sink):
            assert sink.requested == {"a": ONE}
            assert sink.pods == {}

            kube.put("pods", pod("2"))
            await eventually(lambda: sink.requested["a"] == HostResources(2000, 1 << 30))
            kube.delete("pods", "/web")
            await eventually(lambda: sink.requested["a"] == NONE)
