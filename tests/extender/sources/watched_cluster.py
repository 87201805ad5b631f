"""A cluster source that watches a fake API server, and a sink that records its calls."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Final

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.kube.client import KubeClient
from extender.sources.kubernetes.cluster import ClusterSource
from extender.sources.kubernetes.reflector import ReflectorSettings
from testkit.fake_kube import FakeKube, eventually

FAST: Final = ReflectorSettings(
    page_size=2,
    page_timeout_seconds=5.0,
    silence_seconds=5.0,
    resync_seconds=3600.0,
    backoff_first_seconds=0.01,
    backoff_max_seconds=0.05,
)


class Sink:
    """Records its calls and the reported objects."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.pods: dict[str, PodRecord] = {}
        self.calls: list[str] = []
        self.removed_at: dict[str, float] = {}
        self.requested: dict[str, HostResources] = {}
        self.sizes: dict[str, int | None] = {}

    def replace_nodes(self, records: Iterable[NodeRecord]) -> None:
        self.nodes = {record.name: record for record in records}
        self.calls.append("replace nodes")

    def apply_node(self, record: NodeRecord) -> None:
        self.nodes[record.name] = record
        self.calls.append(f"apply {record.name}")

    def remove_node(self, name: str) -> None:
        del self.nodes[name]
        self.calls.append(f"remove {name}")

    def replace_pods(self, records: Iterable[PodRecord]) -> None:
        self.pods = {record.uid: record for record in records}
        self.calls.append("replace pods")

    def apply_pod(self, record: PodRecord) -> None:
        self.pods[record.uid] = record
        self.calls.append(f"apply {record.uid}")

    def remove_pod(self, uid: str, at: float) -> None:
        del self.pods[uid]
        self.removed_at[uid] = at
        self.calls.append(f"remove {uid}")

    def apply_host_use(self, node: str, requested: HostResources) -> None:
        self.requested[node] = requested

    def apply_group_size(self, key: str, size: int | None) -> None:
        self.sizes[key] = size


@contextlib.asynccontextmanager
async def watched_cluster(
    kube: FakeKube,
    folder: Path,
    settings: ReflectorSettings = FAST,
    *,
    waits_for_sync: bool = True,
    watches: int = 2,
) -> AsyncIterator[tuple[ClusterSource, Sink]]:
    client = await KubeClient.connect(kube.write_kubeconfig(folder / "kubeconfig"))
    sink = Sink()
    source = ClusterSource(client, sink, resources=ResourceNames(), settings=settings)
    task = asyncio.create_task(source.run(), name="source")
    try:
        if waits_for_sync:
            await eventually(lambda: source.is_synced and len(kube.watchers) == watches)
        yield source, sink
        assert not task.done(), "the source ended by itself"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()
