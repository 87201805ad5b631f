import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from extender.core.request.gpu_resources import ResourceNames
from extender.kube.client import KubeClient
from extender.sources.kubernetes.cluster import _NODES, _PodFeed
from extender.sources.kubernetes.objects import Pacer
from extender.sources.kubernetes.reflector import Reflector, ReflectorSettings
from testkit.fake_kube import FakeKube, eventually, line, running_kube
from testkit.kube_objects import node, pod, requesting
from tests.extender.sources.watched_cluster import Sink, watched_cluster


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        yield server


async def test_the_first_list_is_read_in_pages(kube: FakeKube, tmp_path: Path) -> None:
    for number in range(5):
        kube.put("nodes", node(f"n{number}"))
        kube.put("pods", pod(f"p{number}"))

    async with watched_cluster(kube, tmp_path) as (source, sink):
        assert sorted(sink.nodes) == [f"n{number}" for number in range(5)]
        assert sorted(sink.pods) == [f"p{number}" for number in range(5)]
        assert sorted(sink.calls) == ["replace nodes", "replace pods"]
        assert source.nodes == sink.nodes
        assert source._pods.object_cache.records == sink.pods
    assert [query.get("limit") for resource, query in kube.lists if resource == "nodes"] == [
        "2"
    ] * 3
    assert not any("resourceVersion" in query for _, query in kube.lists)


@pytest.mark.parametrize("late", ["nodes", "pods"])
async def test_the_source_is_synced_once_nodes_and_pods_are_listed(
    kube: FakeKube, tmp_path: Path, late: str
) -> None:
    gate = asyncio.Event()

    async def held_up(request: web.Request) -> web.StreamResponse:
        if request.path.endswith(late):
            await gate.wait()
        return await kube.answer(request)

    kube.faults["list"].extend([held_up, held_up])
    async with watched_cluster(kube, tmp_path, waits_for_sync=False) as (source, _):
        await eventually(lambda: any(status.is_listed for status in source.status.values()))
        assert not source.is_synced

        gate.set()
        await eventually(lambda: source.is_synced)


async def test_changes_arrive_through_the_watch(kube: FakeKube, tmp_path: Path) -> None:
    kube.put("nodes", node("n"))
    async with watched_cluster(kube, tmp_path) as (_, sink):
        kube.put("nodes", node("n", gpus=7))
        kube.put("nodes", node("m"))
        kube.put("pods", pod("p"))
        kube.put("pods", pod("p", node="n", phase="Running"))
        kube.put("pods", pod("cpu-only", gpus=0))
        kube.delete("nodes", "/m")

        await eventually(lambda: "m" not in sink.nodes and sink.pods and sink.pods["p"].node)

        assert sink.nodes["n"].allocatable == {"nvidia.com/gpu": 7}
        assert list(sink.pods) == ["p"]


async def test_an_irrelevant_change_is_not_reported(kube: FakeKube, tmp_path: Path) -> None:
    kube.put("nodes", node("n"))
    async with watched_cluster(kube, tmp_path) as (_, sink):
        heartbeat = node("n")
        heartbeat["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:00:00Z"
        kube.put("nodes", heartbeat)
        kube.put("nodes", node("last"))

        await eventually(lambda: "last" in sink.nodes)

        assert "apply n" not in sink.calls


async def test_a_succeeded_pod_is_removed_at_once(kube: FakeKube, tmp_path: Path) -> None:
    kube.put("pods", pod("old", phase="Succeeded"))
    kube.put("pods", pod("p", node="n", phase="Running"))
    async with watched_cluster(kube, tmp_path) as (_, sink):
        assert list(sink.pods) == ["p"]
        before = time.time()

        kube.put("pods", pod("p", node="n", phase="Succeeded"))

        await eventually(lambda: not sink.pods)
        assert before <= sink.removed_at["p"] <= time.time()


async def test_the_last_state_of_a_deleted_pod_is_reported_before_its_removal(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("pods", pod("p", node="n", phase="Running"))
    async with watched_cluster(kube, tmp_path) as (_, sink):
        last = pod("p", node="n", phase="Failed", reason="UnexpectedAdmissionError")
        kube.say("pods", line("DELETED", last))

        await eventually(lambda: not sink.pods)

        assert sink.calls[-2:] == ["apply p", "remove p"]


async def test_the_watch_continues_from_the_last_received_version(
    kube: FakeKube, tmp_path: Path
) -> None:
    async with watched_cluster(kube, tmp_path) as (source, sink):
        kube.bookmark()
        version = kube.version
        await eventually(
            lambda: (
                all(status.last_event_at for status in source.status.values())
                and not any(watcher.lines.qsize() for watcher in kube.watchers)
            )
        )
        kube.put("nodes", node("n"))
        await eventually(lambda: sink.nodes)
        lists = len(kube.lists)

        kube.end_watches()

        await eventually(lambda: len(kube.watches) >= 4 and len(kube.watchers) == 2)
        resumed = {resource: query["resourceVersion"] for resource, query in kube.watches[2:]}
        assert resumed["pods"] == str(version)
        assert resumed["nodes"] == str(version + 1)
        assert len(kube.lists) == lists
        assert all(query["allowWatchBookmarks"] == "true" for _, query in kube.watches)


async def test_a_resync_corrects_missed_changes(kube: FakeKube, tmp_path: Path) -> None:
    kube.put("nodes", node("stays"))
    kube.put("nodes", node("goes"))
    kube.put("pods", pod("p"))
    settings = ReflectorSettings(page_size=1, resync_seconds=0.2)
    async with watched_cluster(kube, tmp_path, settings) as (_, sink):
        kube.put("nodes", node("stays", gpus=3), is_watched=False)
        kube.delete("nodes", "/goes", is_watched=False)
        kube.delete("pods", "ns/p", is_watched=False)

        await eventually(lambda: list(sink.nodes) == ["stays"] and not sink.pods)

        assert sink.nodes["stays"].allocatable == {"nvidia.com/gpu": 3}
        assert [resource for resource, _ in kube.watches].count("nodes") == 1


async def test_a_list_never_undoes_newer_changes_of_the_watch(
    kube: FakeKube, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        kube.put("nodes", node(name))
    settings = ReflectorSettings(page_size=1, resync_seconds=0.2)
    async with watched_cluster(kube, tmp_path, settings) as (source, sink):
        pages: list[str] = []

        def change_meanwhile(resource: str) -> None:
            if resource == "nodes":
                pages.append(resource)
                if len(pages) == 2:  # the list is as of the first page
                    kube.delete("nodes", "/a")
                    kube.put("nodes", node("b", gpus=1))
                    kube.put("nodes", node("d"))

        kube.before_page = change_meanwhile

        await eventually(lambda: source.status["nodes"].lists >= 2)

        await eventually(lambda: sorted(sink.nodes) == ["b", "c", "d"])
        assert sink.nodes["b"].allocatable == {"nvidia.com/gpu": 1}
        assert sink.calls.count("apply d") == 1
        assert sink.calls.count("apply b") == 1


async def test_exporters_are_indexed_by_name_and_address(kube: FakeKube, tmp_path: Path) -> None:
    exporter = pod(
        "nvidia-dcgm-exporter-x", gpus=0, node="n", phase="Running", podIP="10.1.0.7",
        podIPs=[{"ip": "10.1.0.7"}, {"ip": "fd00::7"}],
    )  # fmt: skip
    kube.put("pods", exporter)
    async with watched_cluster(kube, tmp_path) as (source, sink):
        names = ("nvidia-dcgm-exporter-x", "ns/nvidia-dcgm-exporter-x")
        assert source.exporter_pods == dict.fromkeys(names, "n")
        assert source.exporter_addresses == {"10.1.0.7": "n", "fd00::7": "n"}
        assert source.exporter_pods is source.exporter_pods
        assert not sink.pods

        kube.delete("pods", "ns/nvidia-dcgm-exporter-x")

        await eventually(lambda: not source.exporter_pods)


async def test_a_pod_that_no_longer_says_that_it_is_an_exporter_is_none(
    kube: FakeKube, tmp_path: Path
) -> None:
    metrics = pod("metrics", gpus=0, node="n", phase="Running")
    metrics["metadata"]["labels"] = {"app": "dcgm-exporter"}
    kube.put("pods", metrics)
    async with watched_cluster(kube, tmp_path) as (source, _):
        assert source.exporter_pods["ns/metrics"] == "n"

        kube.put("pods", pod("metrics", gpus=0, node="n", phase="Running"))

        await eventually(lambda: not source.exporter_pods)


async def test_a_tenants_pod_does_not_take_the_name_of_an_exporter(
    kube: FakeKube, tmp_path: Path
) -> None:
    kube.put("pods", pod("dcgm-exporter-x", gpus=0, node="n", phase="Running"))
    impostor = pod("dcgm-exporter-x", gpus=0, node="m", uid="other", phase="Running")
    impostor["metadata"]["namespace"] = "tenant"
    kube.put("pods", impostor)
    async with watched_cluster(kube, tmp_path) as (source, _):
        assert source.exporter_pods == {"ns/dcgm-exporter-x": "n", "tenant/dcgm-exporter-x": "m"}


class SlowFeed:
    """Feed that takes a millisecond for each listed object and each stored record."""

    def __init__(self) -> None:
        self.turns = 0  # iterations of the event loop, counted by another task
        self.turns_at: list[int] = []

    def is_relevant(self, _: object) -> bool:
        return True

    def irrelevant_change(self, _: bytes) -> None:
        return None

    def begin_list(self) -> None:
        pass

    def add_listed(self, _: Mapping[str, object]) -> None:
        time.sleep(0.001)
        self.turns_at.append(self.turns)

    def keep_unreadable(self, _: Mapping[str, object]) -> None:
        raise AssertionError("every object can be read")

    async def end_list(self, _: Pacer) -> None:
        pass

    def abort_list(self) -> None:
        raise AssertionError("no list may break off")

    def put(self, raw: Mapping[str, object]) -> None:
        self.add_listed(raw)

    def drop(self, _: Mapping[str, object]) -> None:
        raise AssertionError("nothing is dropped")


@pytest.mark.parametrize("how", ["list", "watch"])
async def test_a_burst_yields_the_loop_to_other_tasks(
    kube: FakeKube, tmp_path: Path, how: str
) -> None:
    feed = SlowFeed()
    client = await KubeClient.connect(kube.write_kubeconfig(tmp_path / "kubeconfig"))
    reflector = Reflector(client, _NODES, feed, ReflectorSettings(page_size=100), clock=time.time)

    async def count_turns() -> None:
        while True:
            feed.turns += 1
            await asyncio.sleep(0)

    burst = [node(f"n{number}") for number in range(100)]
    if how == "list":
        for raw in burst:
            kube.put("nodes", raw)
    tasks = [asyncio.create_task(work) for work in (reflector.run(), count_turns())]
    if how == "watch":
        await eventually(lambda: kube.watchers)
        kube.say("nodes", b"".join(line("ADDED", raw) for raw in burst))
    await eventually(lambda: len(feed.turns_at) == 100)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await client.close()

    assert len(set(feed.turns_at)) >= 25  # one iteration every 2 ms would make 50


def withholding(sink: Sink) -> _PodFeed:
    """Return a feed that does not know yet which pods hold a new resource."""
    feed = _PodFeed(
        sink,
        ResourceNames(("nvidia.com/gpu", "amd.com/gpu")),
        early_seconds=60.0,
        exporter_words=(),
        held_by=lambda _namespace, _name: None,
        clock=lambda: 0.0,
    )
    feed.listed_resources = ResourceNames(("nvidia.com/gpu",))
    return feed


async def test_a_pod_withheld_on_the_first_page_is_reported_after_the_last() -> None:
    sink, pacer = Sink(), Pacer()
    feed = withholding(sink)

    feed.begin_list()
    feed.add_listed(requesting("waits", amd="1"))
    feed.listed_resources = None
    await feed.report_withheld(pacer)
    await feed.end_list(pacer)

    assert set(sink.pods) == {"waits"}


def test_a_change_of_a_pod_without_gpus_is_skipped_unless_the_pod_is_known() -> None:
    feed = withholding(Sink())
    raw = pod("p")
    raw["metadata"]["resourceVersion"] = "7"
    del raw["spec"]["containers"][0]["resources"]
    event = orjson.dumps({"type": "MODIFIED", "object": raw})

    assert feed.irrelevant_change(event) is not None
    feed.put(requesting("p", nvidia="1"))
    assert feed.irrelevant_change(event) is None


async def test_a_withheld_pod_that_a_list_has_unreadable_is_reported_as_it_was() -> None:
    sink, pacer = Sink(), Pacer()
    feed = withholding(sink)
    feed.begin_list()
    await feed.end_list(pacer)
    raw = requesting("waits", amd="1")
    feed.put(raw)
    assert not sink.pods

    feed.begin_list()
    feed.keep_unreadable(raw)
    await feed.end_list(pacer)
    feed.listed_resources = None
    await feed.report_withheld(pacer)

    assert set(sink.pods) == {"waits"}
