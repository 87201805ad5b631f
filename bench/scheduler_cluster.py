"""Cluster for the real kube-scheduler: a real API server with nodes that have no kubelet.

On each node a tenant pod holds half of the GPUs. The pods of the benchmark have their own
namespace.
"""

import asyncio
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from bench.scheduler_names import (
    GPUS,
    HELD,
    MEMORY_MIB,
    MODEL,
    TENANTS,
    node_address,
    node_name,
    tenant_name,
)
from testkit.controlplane.client import ApiClient
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.plane import ADMIN, ControlPlane
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.waiting import wait_for

ROOT: Final = Path(__file__).parents[1]
PODS: Final = "bench"
"""Namespace of the pods whose placement is timed."""
TENANT_AGE_SECONDS: Final = 86_400.0
CHUNK: Final = 500
"""Number of objects that are built and created at once."""


def gpu_node(number: int) -> Object:
    """Build a node as kubelet, device plugin and GPU feature discovery would register it."""
    labels = {
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "topology.kubernetes.io/region": "us-east-2",
        "topology.kubernetes.io/zone": f"us-east-2{'abc'[number % 3]}",
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": MODEL.replace(" ", "-"),
        "nvidia.com/gpu.count": str(GPUS),
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.memory": str(MEMORY_MIB),
        "nvidia.com/gpu.family": "hopper",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "single",
    }
    return node(node_name(number), GPUS, labels=labels, address=node_address(number))


def gpu_pod(name: str, namespace: str, gpus: int) -> Object:
    """Build a pod that requests GPUs, with CPU and memory in proportion."""
    item = pod(name, gpus, namespace=namespace)
    requests = {"cpu": str(4 * gpus), "memory": f"{32 * gpus}Gi"}
    item["spec"]["containers"][0]["resources"]["requests"] = requests
    return item


async def register(client: ApiClient, nodes: int) -> None:
    """Create the nodes, and the pods that have held half of their GPUs for a day."""
    for namespace in (TENANTS, PODS):
        await client.create_namespace(namespace)
    for numbers in _chunks(nodes):
        await client.create_all(map(gpu_node, numbers))
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - TENANT_AGE_SECONDS))
    for numbers in _chunks(nodes):
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(_hold(client, number, started), name=tenant_name(number))


async def _hold(client: ApiClient, number: int, started: str) -> None:
    tenant = gpu_pod(tenant_name(number), TENANTS, HELD)
    tenant["spec"]["nodeName"] = node_name(number)
    await client.create(tenant)
    await client.set_phase(tenant, "Running", startTime=started)


def _chunks(count: int) -> Iterable[range]:
    return (range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def prometheus_server(folder: Path, nodes: int) -> tuple[ServerProcess, str]:
    """Describe the process of the simulated Prometheus; return it and its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    module = ["-m", "bench.scheduler_prometheus"]
    process = ServerProcess(
        name="prometheus",
        command=[sys.executable, *module, "--nodes", str(nodes), "--port", str(port)],
        folder=folder,
        ready_url=f"{url}/-/ready",
        environment={"PYTHONPATH": str(ROOT)},
    )
    return process, f"{url}/prometheus"


class Bindings:
    """Times of the pods' bindings, from a watch of the API server.

    Use it on one event loop.
    """

    def __init__(self) -> None:
        self._bound_at: dict[str, float] = {}
        self._changed = asyncio.Event()

    def take(self, event: Object, now: float) -> None:
        """Process an event of the watch.

        Raises:
            RuntimeError: the watch has failed.
        """
        if event["type"] == "ERROR":
            raise RuntimeError(f"cannot watch pods: {event['object']}")
        name = event["object"]["metadata"].get("name")
        if event["object"].get("spec", {}).get("nodeName"):
            self._bound_at.setdefault(name, now)
            self._changed.set()

    async def times(self, names: Iterable[str], deadline_seconds: float) -> list[float]:
        """Wait until all of these pods are bound; return the times of binding in ascending order.

        Raises:
            TimeoutError: a pod was not bound in time; the message has the number of bound pods.
        """
        wanted = set(names)
        try:
            async with asyncio.timeout(deadline_seconds):
                while not wanted <= self._bound_at.keys():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            count = len(wanted & self._bound_at.keys())
            raise TimeoutError(
                f"{count} of {len(wanted)} pods are bound after {deadline_seconds:.0f} s"
            ) from error
        return sorted(self._bound_at[name] for name in wanted)


@asynccontextmanager
async def watch_bindings(plane: ControlPlane, client: ApiClient) -> AsyncIterator[Bindings]:
    """Watch the pods of the benchmark while the context is open."""
    path = f"/api/v1/namespaces/{PODS}/pods"
    version = (await client.request("GET", path))["metadata"]["resourceVersion"]
    bindings = Bindings()
    async with (
        aiohttp.ClientSession(
            plane.server,
            headers=plane.users[ADMIN].headers,
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=plane.ca_file)),
            timeout=aiohttp.ClientTimeout(total=None),
            raise_for_status=True,
        ) as session,
        session.get(path, params={"watch": "true", "resourceVersion": version}) as stream,
        asyncio.TaskGroup() as group,
    ):
        follower = group.create_task(_follow(stream, bindings), name="watch bindings")
        yield bindings
        follower.cancel()


async def _follow(stream: aiohttp.ClientResponse, bindings: Bindings) -> None:
    async for line in stream.content:
        now = time.monotonic()
        bindings.take(json.loads(line), now)
    raise RuntimeError("cannot watch pods: the API server has ended the watch")


async def delete_pods(client: ApiClient) -> None:
    """Delete the pods of the benchmark and wait until they are gone."""
    path = f"/api/v1/namespaces/{PODS}/pods"
    await client.request("DELETE", path, parameters={"gracePeriodSeconds": "0"})

    async def are_gone() -> bool:
        return not await client.list_pods(PODS)

    await wait_for(are_gone, "the pods of the run are gone")
