"""Changed settings of the watch: records stay, and no change is missed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.nodes.node_selection import Selection
from extender.core.request.gpu_resources import ResourceNames
from extender.kube.client import KubeClient
from extender.sources.kubernetes.cluster import ClusterSource
from extender.sources.kubernetes.records import _MAX_SELECTION, reduce_node, reduce_pod
from extender.sources.kubernetes.reflector import ReflectorSettings
from testkit.fake_kube import FakeKube, eventually, refusal, running_kube
from testkit.kube_objects import Object, node, pod, requesting
from tests.extender.sources.watched_cluster import FAST, Sink

AMD = "amd.com/gpu"
NVIDIA = "nvidia.com/gpu"

SSD = {"disk": "ssd"}


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        server.put("nodes", node("n"))
        server.put("pods", pod("p", node="n", phase="Running"))
        yield server


class Restarted:
    """Source whose task can be stopped and started again."""

    def __init__(self, kube: FakeKube, client: KubeClient) -> None:
        self._kube = kube
        self.sink = Sink()
        self.source = ClusterSource(
            client, self.sink, resources=ResourceNames(), settings=FAST, early_seconds=60.0
        )
        self._task = asyncio.create_task(self.source.run(), name="source")

    async def stop(self) -> None:
        assert not self._task.done(), "the source ended by itself"
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._kube.end_watches()  # the server does not notice that the client is gone
        await eventually(lambda: not self._kube.watchers)

    def start(
        self, *resources: str, early_seconds: float = 60.0, settings: ReflectorSettings = FAST
    ) -> None:
        names = ResourceNames(resources) if resources else ResourceNames()
        self.source.adopt(resources=names, early_seconds=early_seconds, settings=settings)
        self._task = asyncio.create_task(self.source.run(), name="source")

    async def watching(self) -> None:
        await eventually(lambda: self.source.is_synced and len(self._kube.watchers) == 2)


@contextlib.asynccontextmanager
async def restarted(
    kube: FakeKube, folder: Path, *, waits_for_sync: bool = True
) -> AsyncIterator[Restarted]:
    client = await KubeClient.connect(kube.write_kubeconfig(folder / "kubeconfig"))
    part = Restarted(kube, client)
    try:
        if waits_for_sync:
            await part.watching()
        yield part
    finally:
        await part.stop()
        await client.close()


async def test_changed_watch_settings_need_no_list(kube: FakeKube, tmp_path: Path) -> None:
    async with restarted(kube, tmp_path) as part:
        lists, calls = len(kube.lists), list(part.sink.calls)
        await part.stop()
        kube.put("pods", pod("meanwhile", node="n", phase="Running"))
        kube.delete("pods", "ns/p")
        part.start(settings=replace(FAST, silence_seconds=7.0))
        assert part.source.is_synced
        await eventually(lambda: set(part.sink.pods) == {"meanwhile"})

        assert len(kube.lists) == lists
        assert part.sink.calls == [*calls, "apply meanwhile", "remove p"]


async def test_objects_are_reduced_again_during_the_watch(kube: FakeKube, tmp_path: Path) -> None:
    raw = node("n")
    raw["status"]["allocatable"][AMD] = raw["status"]["capacity"][AMD] = "2"
    kube.put("nodes", raw)
    amd = pod("q", gpus=0, node="n", phase="Running")
    amd["spec"]["containers"][0]["resources"]["limits"] = {AMD: "1"}
    kube.put("pods", amd)
    gate = asyncio.Event()

    async def held_up(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await kube.answer(request)

    async with restarted(kube, tmp_path) as part:
        assert set(part.sink.pods) == {"p"}
        await part.stop()
        kube.faults["list"].extend([held_up, held_up])
        part.start(AMD)
        await part.watching()
        assert set(part.sink.pods) == {"p"}, "a record was removed before its removal was known"
        another = pod("r", gpus=0, node="n", phase="Running")
        another["spec"]["containers"][0]["resources"]["limits"] = {AMD: "1"}
        kube.put("pods", another)
        await eventually(lambda: set(part.sink.pods) == {"p", "r"})
        gate.set()
        await eventually(lambda: set(part.sink.pods) == {"q", "r"})
        await eventually(lambda: part.sink.nodes["n"].allocatable == {AMD: 2})

        assert not any("replace" in call for call in part.sink.calls[2:])
        assert part.source.status["pods"].is_listed


@pytest.mark.parametrize("last", ["nodes", "pods"])
async def test_a_new_resource_counts_once_nodes_and_pods_are_listed_again(
    kube: FakeKube, tmp_path: Path, last: str
) -> None:
    kube.put("pods", requesting("before", amd="1"))
    gate = asyncio.Event()

    async def held_up(request: web.Request) -> web.StreamResponse:
        if request.path.endswith(last):
            await gate.wait()
        return await kube.answer(request)

    async with restarted(kube, tmp_path) as part:
        await part.stop()
        kube.faults["list"].extend([held_up, held_up])
        part.start(NVIDIA, AMD)
        await part.watching()
        kube.put("pods", requesting("waits", amd="1"))
        kube.put("pods", requesting("gone", amd="1"))
        kube.put("pods", requesting("both", nvidia="2", amd="1"))
        kube.delete("pods", "ns/gone")
        await eventually(lambda: "both" in part.sink.pods)
        holder = requesting("holder", amd="1")
        holder["spec"]["nodeName"] = "n"
        kube.put("pods", holder)
        await eventually(lambda: "holder" in part.sink.pods)
        shown, known = set(part.sink.pods), part.source.resources.names
        assert dict(part.sink.pods["both"].resources) == {NVIDIA: 2}
        gate.set()
        await eventually(lambda: "waits" in part.sink.pods)

        assert (shown, known) == ({"p", "both", "holder"}, (NVIDIA,))
        assert part.source.resources.names == (NVIDIA, AMD)
        await eventually(lambda: set(part.sink.pods) == {*shown, "before", "waits"})
        assert dict(part.sink.pods["both"].resources) == {NVIDIA: 2, AMD: 1}


async def test_a_removed_resource_stops_counting_at_once(kube: FakeKube, tmp_path: Path) -> None:
    async with restarted(kube, tmp_path) as part:
        await part.stop()
        part.start("nvidia.com/mig-*")

        assert part.source.resources.names == ("nvidia.com/mig-*",)


async def test_a_change_that_is_reverted_early_has_no_effect(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("pods", requesting("waits", amd="1"))

    async with restarted(kube, tmp_path) as part:
        await part.stop()
        gate = asyncio.Event()

        async def held_up(request: web.Request) -> web.StreamResponse:
            await gate.wait()
            return await kube.answer(request)

        kube.faults["list"].extend([held_up, held_up])
        part.start(NVIDIA, AMD)
        await part.watching()
        kube.put("pods", requesting("withheld", amd="1"))
        kube.put("pods", pod("last", node="n", phase="Running"))
        await eventually(lambda: "last" in part.sink.pods)
        await part.stop()
        part.start(NVIDIA)
        gate.set()
        await eventually(lambda: not part.source._is_outdated)

        assert part.source.resources.names == (NVIDIA,)
        assert set(part.sink.pods) == {"p", "last"}
        assert "apply withheld" not in part.sink.calls


async def test_a_failed_list_after_a_change_is_retried_soon(kube: FakeKube, tmp_path: Path) -> None:
    async with restarted(kube, tmp_path) as part:
        await part.stop()
        kube.faults["list"].extend([refusal(500, "later")] * 4)
        part.start(AMD)

        await eventually(lambda: not part.sink.pods)


async def test_a_changed_limit_of_early_failures_applies_to_known_pods(
    kube: FakeKube, tmp_path: Path
) -> None:
    ended = {
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:10Z",
        "exitCode": 1,
        "reason": "Error",
    }
    statuses = [{"name": "main", "state": {"terminated": ended}}]
    failed = pod("f", node="n", phase="Failed", containerStatuses=statuses)
    kube.put("pods", failed)

    async with restarted(kube, tmp_path) as part:
        assert part.sink.pods["f"].is_failed_early
        await part.stop()
        part.start(early_seconds=5.0)

        await eventually(lambda: not part.sink.pods["f"].is_failed_early)


async def test_a_change_during_the_first_list_restarts_it(kube: FakeKube, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def never(_: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.Response()

    kube.faults["list"].extend([never, never])

    async with restarted(kube, tmp_path, waits_for_sync=False) as part:
        await eventually(lambda: len(kube.lists) == 2)
        await part.stop()
        part.start()
        await part.watching()
        gate.set()

        assert (set(part.sink.nodes), set(part.sink.pods)) == ({"n"}, {"p"})


async def test_a_change_during_a_list_discards_it(kube: FakeKube, tmp_path: Path) -> None:
    for number in range(5):
        kube.put("pods", pod(f"p{number}"))
    gate = asyncio.Event()

    async def never(_: web.Request) -> web.StreamResponse:
        await gate.wait()
        return web.Response()

    async with restarted(kube, tmp_path) as part:
        held = set(part.sink.pods)
        await part.stop()
        kube.faults["list"].extend([never, never])
        lists = len(kube.lists)
        part.start("nvidia.com/gpu")
        await eventually(lambda: len(kube.lists) == lists + 2)
        await part.stop()
        part.start("nvidia.com/*")
        await eventually(lambda: part.source.status["pods"].lists == 2)
        gate.set()

        assert set(part.sink.pods) == held


def selecting(selector: dict[str, str] | None = None, name: str = "p", **status: Any) -> Object:
    raw = pod(name, **status)
    raw["spec"]["nodeSelector"] = SSD if selector is None else selector
    return raw


def kept(raw: Object) -> PodRecord:
    record = reduce_pod(raw, ResourceNames(), early_seconds=60)
    assert record is not None
    return record


def labelled(name: str = "n", **labels: Any) -> NodeRecord:
    record = reduce_node(node(name, **labels), ResourceNames())
    assert record is not None
    return record


def test_a_pods_selection_is_stored_while_it_waits() -> None:
    bound = selecting()
    bound["spec"]["nodeName"] = "n"

    assert kept(selecting()).selection == Selection(labels=(("disk", "ssd"),))
    assert kept(bound).selection is None
    assert kept(selecting(phase="Failed")).selection is None


def test_equal_pods_share_their_selection() -> None:
    assert kept(selecting(name="a")).selection is kept(selecting(name="b")).selection


def test_a_pod_with_claims_only_has_no_selection() -> None:
    raw = selecting()
    raw["spec"] = {**raw["spec"], "containers": [{}], "resourceClaims": [{"name": "gpu"}]}

    assert kept(raw).selection is None


@pytest.mark.parametrize(
    "selector", [{"a": "x" * _MAX_SELECTION}, {f"l{at}": "x" for at in range(_MAX_SELECTION // 16)}]
)
def test_a_selection_that_is_too_large_is_not_stored(selector: dict[str, str]) -> None:
    assert kept(selecting(selector)).selection is None


def test_a_selection_with_too_many_terms_is_not_read() -> None:
    """Empty terms select no node and have no size: only their number shows that they cost time."""
    raw = selecting()
    terms: list[dict[str, str]] = [{}] * 1001
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    raw["spec"]["affinity"] = {"nodeAffinity": required}

    assert kept(raw).selection is None


def test_labels_that_pods_may_select_by_are_stored() -> None:
    record = labelled(
        **{
            "disk": "ssd",
            "kubernetes.io/hostname": "host",
            "nvidia.com/gpu.product": "NVIDIA-L4",
            "nvidia.com/gfd.timestamp": "1",
            "feature.node.kubernetes.io/cpu-model.id": "1",
        }
    )

    assert record.other_labels == SSD
    assert record.hostname == "host"
    assert record.labels == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    assert record.label("disk") == "ssd"
    assert record.label("kubernetes.io/hostname") == "host"
    assert record.label("nvidia.com/gpu.product") == "NVIDIA-L4"
    assert labelled().label("kubernetes.io/hostname") is None


def test_nodes_of_one_pool_share_their_labels() -> None:
    first = labelled("a", disk="ssd", arch="x", **{"kubernetes.io/hostname": "a"})
    second = labelled("b", arch="x", disk="ssd", **{"kubernetes.io/hostname": "b"})

    assert first.other_labels is second.other_labels


def test_a_changed_irrelevant_label_does_not_change_the_record() -> None:
    changing = "feature.node.kubernetes.io/network-latency"

    assert labelled(disk="ssd", **{changing: "1"}) == labelled(disk="ssd", **{changing: "2"})
