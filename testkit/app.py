"""A running extender on a simulated cluster."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from extender.app import Extender, start
from extender.settings.config import Settings
from extender.settings.sources import Prometheus
from simulation.cluster import SimulatedCluster, run_cluster
from simulation.demo_fleet import demo_fleet
from simulation.objects import JsonObject
from testkit.fake_kube import eventually

DEADLINE_SECONDS = 20.0


@dataclass(frozen=True)
class Running:
    cluster: SimulatedCluster
    extender: Extender
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.extender.addresses[0]

    async def get(self, path: str) -> tuple[int, JsonObject]:
        async with self.session.get(f"{self.url}{path}") as answer:
            return answer.status, await answer.json()

    async def filter(self, pod: JsonObject, *nodes: str) -> JsonObject:
        arguments = {"Pod": pod, "Nodes": None, "NodeNames": list(nodes)}
        async with self.session.post(f"{self.url}/filter", json=arguments) as answer:
            found: JsonObject = await answer.json()
            return found


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[Running]:
    """Run an extender over the demo's fleet; yield it once it is ready and not degraded."""
    async with run_cluster(demo_fleet(), interval_seconds=0.5) as cluster:
        values: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "kubeconfig": cluster.kubeconfig,
            "prometheus": Prometheus(url=cluster.prometheus_url, interval_seconds=0.5),
            **changes,
        }
        async with start(Settings(**values)) as extender, aiohttp.ClientSession() as session:
            part = Running(cluster, extender, session)
            await eventually(lambda: extender.is_ready, deadline_seconds=DEADLINE_SECONDS)
            yield part
