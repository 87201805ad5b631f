"""The simulated cluster as a whole."""

import asyncio

import aiohttp
from kubernetes_asyncio import client
from kubernetes_asyncio.config import new_client_from_config

from simulation.cluster import run_cluster
from simulation.demo_fleet import demo_fleet
from simulation.kubelet import UTILIZATION_ANNOTATION
from simulation.objects import pod_object


async def test_a_bound_pod_shows_in_telemetry_and_api() -> None:
    fleet = demo_fleet()
    fleet.warm_up_seconds = 0.0
    query = 'max by (Hostname) (DCGM_FI_DEV_GPU_UTIL{Hostname="gpu-h100-01",pod="busy"})'

    async with run_cluster(fleet, interval_seconds=0.05) as cluster:
        cluster.control.create_pod(pod_object("busy", annotations={UTILIZATION_ANNOTATION: "0.7"}))
        cluster.control.bind("default", "busy", "gpu-h100-01")

        assert await _value(cluster.prometheus_url, query) == "70"
        async with await new_client_from_config(str(cluster.kubeconfig)) as api_client:
            pod = await client.CoreV1Api(api_client).read_namespaced_pod("busy", "default")

    assert pod.spec.node_name == "gpu-h100-01"
    assert not cluster.kubeconfig.exists()


async def _value(url: str, query: str) -> str:
    """Return the value of the query's only element, as soon as there is one."""
    async with aiohttp.ClientSession(url) as session, asyncio.timeout(30):
        while True:
            async with session.get("/api/v1/query", params={"query": query}) as response:
                result = (await response.json())["data"]["result"]
            if result:
                return str(result[0]["value"][1])
            await asyncio.sleep(0.02)
