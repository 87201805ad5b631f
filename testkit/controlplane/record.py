"""Record the real kube-scheduler's requests to an extender as golden files of the tests.

`python -m testkit.controlplane.record` rewrites tests/contract/golden/.
"""

import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

from testkit.controlplane.client import ApiClient
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.scheduler import extender, kube_scheduler, scheduler_config
from testkit.controlplane.stub import StubExtender
from testkit.controlplane.waiting import wait_for

GOLDEN: Final = Path(__file__).parents[2] / "tests" / "contract" / "golden"
NODES: Final = ("gpu-a", "gpu-b", "gpu-c")
GPUS_PER_NODE: Final = 8
# Labels of GPU feature discovery that a reader may use.
GFD_LABELS: Final = {
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.count": str(GPUS_PER_NODE),
    "nvidia.com/gpu.replicas": "1",
    "nvidia.com/gpu.sharing-strategy": "none",
    "nvidia.com/mig.capable": "true",
    "nvidia.com/mig.strategy": "single",
}


async def record(plane: ControlPlane, *, node_cache_capable: bool) -> dict[str, bytes]:
    """Let one pod be placed and another preempt, and return the last request of each verb.

    Args:
        plane: running control plane without nodes and pods.
        node_cache_capable: whether kube-scheduler sends names, or whole objects.
    """
    async with StubExtender(best=NODES[1]) as stub, plane.client() as client:
        config = scheduler_config([extender(stub.url, node_cache_capable=node_cache_capable)])
        scheduler = kube_scheduler(plane, config, name="recorded-scheduler")
        try:
            # A node that is created later might be unknown when the pod is placed.
            await client.create_all(
                node(name, GPUS_PER_NODE, labels=GFD_LABELS, address=f"10.0.0.{index}")
                for index, name in enumerate(NODES, start=1)
            )
            await scheduler.start()
            await client.create_priority_class("urgent", 1000)
            await _place_one(client)
            placed = {verb: stub.bodies[verb][-1] for verb in ("filter", "prioritize")}
            await _preempt_one(client)
            return {**placed, "preempt": stub.bodies["preempt"][-1]}
        finally:
            await scheduler.stop()


async def _place_one(client: ApiClient) -> None:
    """Let a pod be bound while every node has room, and delete it."""
    first = pod("trainer", 2, annotations={"idlegpu.io/gpu-memory": "20Gi"})
    await client.create(first)
    await client.wait_bound(first)
    await client.delete(first)


async def _preempt_one(client: ApiClient) -> None:
    """Let a pod be bound that must evict another because every node is full."""
    fillers = [pod(f"filler-{name}", GPUS_PER_NODE) for name in NODES]
    await client.create_all(fillers)
    for filler in fillers:
        await client.wait_bound(filler)
    urgent = pod("urgent", GPUS_PER_NODE, priorityClassName="urgent")
    await client.create(urgent)
    await client.wait_bound(urgent)
    await wait_for(partial(_one_is_gone, client, fillers), "one filler is evicted")


async def _one_is_gone(client: ApiClient, fillers: list[Object]) -> bool:
    left = {item["metadata"]["name"] for item in await client.list_pods()}
    return sum(filler["metadata"]["name"] in left for filler in fillers) == len(fillers) - 1


async def write_golden(folder: Path) -> None:
    """Record both forms of every request, each into its own file."""
    with tempfile.TemporaryDirectory(prefix="idlegpu-record-") as scratch:
        plane = ControlPlane(Path(scratch))
        try:
            await plane.start()
            for form, node_cache_capable in (("names", True), ("objects", False)):
                await plane.reset()
                for verb, body in (
                    await record(plane, node_cache_capable=node_cache_capable)
                ).items():
                    (folder / f"{verb}-{form}.json").write_bytes(body)
        finally:
            plane.stop()


if __name__ == "__main__":
    asyncio.run(write_golden(GOLDEN))
    sys.stdout.write(f"recorded into {GOLDEN}\n")
