import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.request.annotations import AnnotationProblem
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import parse_pod_ref
from extender.effects.events import EventType, EventWriter
from extender.kube.client import KubeClient, KubeError
from extender.sources.kubernetes.cluster import ClusterSource
from extender.sources.kubernetes.records import reduce_node, reduce_pod
from extender.sources.kubernetes.reflector import ReflectorSettings
from testkit.controlplane.client import ApiClient
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NAMES = ResourceNames()
SETTINGS = ReflectorSettings(page_size=100, backoff_first_seconds=0.1, backoff_max_seconds=1.0)


class Sink:
    """Sink that stores the reported records."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.pods: dict[str, PodRecord] = {}
        self.requested: dict[str, HostResources] = {}

    def replace_nodes(self, records: Iterable[NodeRecord]) -> None:
        self.nodes = {record.name: record for record in records}

    def apply_node(self, record: NodeRecord) -> None:
        self.nodes[record.name] = record

    def remove_node(self, name: str) -> None:
        del self.nodes[name]

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        self.pods = {record.uid: record for record in records}

    def apply_pod(self, record: PodRecord) -> None:
        self.pods[record.uid] = record

    def remove_pod(self, uid: str, at: float) -> None:
        assert at > self.pods.pop(uid).created_at - 1

    def apply_host_use(self, node: str, requested: HostResources) -> None:
        self.requested[node] = requested

    def apply_group_size(self, key: str, size: int | None) -> None:
        """Ignore the size of a group."""


@contextlib.asynccontextmanager
async def following(plane: ControlPlane) -> AsyncIterator[tuple[ClusterSource, Sink]]:
    client = await KubeClient.connect(plane.kubeconfig())
    sink = Sink()
    source = ClusterSource(client, sink, resources=NAMES, settings=SETTINGS)
    task = asyncio.create_task(source.run(), name="source")
    try:
        await wait_for(lambda: _now(source.is_synced), "the source is synced")
        yield source, sink
        assert not task.done(), "the source must never end by itself"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()


async def _now(value: object) -> object:
    return value


async def differences(cluster: ApiClient, sink: Sink) -> list[str]:
    """Return the differences between a fresh list and the sink."""
    nodes: list[Object] = (await cluster.request("GET", "/api/v1/nodes"))["items"]
    pods: list[Object] = (await cluster.request("GET", "/api/v1/pods"))["items"]
    fresh_nodes = {record.name: record for raw in nodes if (record := reduce_node(raw, NAMES))}
    fresh_pods = {
        pod_record.uid: pod_record
        for raw in pods
        if raw["status"]["phase"] != "Succeeded"
        and (pod_record := reduce_pod(raw, NAMES, early_seconds=60))
    }
    return [
        f"{key}: fresh {fresh.get(key)}, held {held.get(key)}"
        for fresh, held in ((fresh_nodes, sink.nodes), (fresh_pods, sink.pods))
        for key in {*fresh, *held}
        if fresh.get(key) != held.get(key)
    ]


async def wait_equal(cluster: ApiClient, sink: Sink) -> None:
    async def is_equal() -> bool:
        return not await differences(cluster, sink)

    try:
        await wait_for(is_equal, "the records equal a fresh list")
    except TimeoutError:
        assert (await differences(cluster, sink))[:3] == []


async def delete_all(cluster: ApiClient, items: Iterable[Object]) -> None:
    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(cluster.delete(item), name="delete")


async def test_records_follow_a_busy_cluster(
    cluster: ApiClient, control_plane: ControlPlane
) -> None:
    nodes = [node(f"n{number}", address=f"10.0.1.{number % 250}") for number in range(300)]
    pods = [pod(f"p{number}", number % 3) for number in range(400)]
    bound = [pod(f"b{number}", 1, nodeName=f"n{number}") for number in range(100)]
    await cluster.create_all(nodes[:150])
    await cluster.create_all(pods[:200])
    async with following(control_plane) as (source, sink):
        await cluster.create_all([*nodes[150:], *pods[200:], *bound])
        for item in bound[:30]:
            await cluster.set_phase(item, "Running")
        for item in bound[:10]:
            await cluster.set_phase(item, "Succeeded")
        for item in bound[10:20]:
            await cluster.set_phase(item, "Failed", reason="UnexpectedAdmissionError")
        await delete_all(cluster, [*pods[::2], *nodes[:40]])

        await wait_equal(cluster, sink)

        assert len(sink.nodes) == 260
        assert sum(record.is_failed_early for record in sink.pods.values()) == 10
        assert all(status.errors == 0 for status in source.status.values())
        assert all(status.lists == 1 for status in source.status.values())


async def test_records_are_right_again_after_the_api_server_was_killed(
    cluster: ApiClient, control_plane: ControlPlane
) -> None:
    nodes = [node(f"n{number}") for number in range(50)]
    pods = [pod(f"p{number}") for number in range(50)]
    await cluster.create_all([*nodes, *pods])
    async with following(control_plane) as (source, sink):
        await delete_all(cluster, [*nodes[:10], *pods[:10]])

        control_plane.apiserver.kill()
        await wait_for(
            lambda: _now(all(not status.is_connected for status in source.status.values())),
            "the source has noticed",
        )
        assert source.is_synced
        assert len(sink.nodes) >= 40
        await control_plane.apiserver.start()
        await cluster.create_all([node("late"), pod("late")])
        await delete_all(cluster, [*nodes[10:20], *pods[10:20]])

        await wait_equal(cluster, sink)

        assert len(sink.nodes) == 31
        await wait_for(
            lambda: _now(all(status.is_connected for status in source.status.values())),
            "the source says so",
        )


async def test_an_event_is_shown_with_its_pod_and_repeats_are_a_series(
    cluster: ApiClient, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = pod("stock")
    ref = parse_pod_ref(await cluster.create(stock))
    problem = AnnotationProblem(
        annotation="idlegpu.io/strategy", value="sprad", allowed="pack", default_used="spread"
    )
    client = await KubeClient.connect(control_plane.kubeconfig())
    monkeypatch.setattr("extender.effects.events._REPEAT_SECONDS", 0.0)
    writers = [EventWriter(client, instance=f"e-{n}") for n in range(2)]
    tasks = [asyncio.create_task(writer.run(), name="events") for writer in writers]
    try:
        writers[0].warn_annotation(ref, problem)
        for count in range(1, 4):
            writers[0].post(ref, EventType.NORMAL, "Waiting", "for idle GPUs")
            await wait_for(lambda: _now(writers[0].counts.written > count), "it is written")  # noqa: B023 - waited for
        writers[1].post(ref, EventType.NORMAL, "Waiting", "for idle GPUs")
        await wait_for(lambda: _now(writers[1].counts.written), "the other replica's, too")
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await client.close()

    events = {event["reason"]: event for event in await cluster.events(stock)}
    assert sorted(events) == ["InvalidAnnotation", "Waiting"]
    assert events["Waiting"]["series"]["count"] >= 2
    shown = await control_plane.kubectl("describe", "pod", "stock")
    assert problem.message in shown


@pytest.mark.usefixtures("cluster")
async def test_an_api_server_that_cannot_be_verified_is_reported(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    config = json.loads(control_plane.kubeconfig().read_text())
    del config["clusters"][0]["cluster"]["certificate-authority"]
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    client = await KubeClient.connect(path)

    with pytest.raises(KubeError, match=r"TLS with https://.*verify failed.*the cluster's CA"):
        await client.get("/api/v1/nodes", action="list nodes", timeout_seconds=5)

    await client.close()
