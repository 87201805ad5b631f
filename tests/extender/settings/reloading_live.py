"""Extender on the demo's fleet, whose settings file changes like a ConfigMap's."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extender.app import Extender, start
from extender.settings.config import load_settings
from extender.settings.reload import SettingsFile
from simulation.cluster import SimulatedCluster, run_cluster
from simulation.demo_fleet import demo_fleet
from simulation.objects import JsonObject
from testkit.fake_kube import eventually
from tests.extender.settings.config_map import ConfigMap

DEADLINE_SECONDS = 60.0  # a worker process starts late on a busy machine


@dataclass
class Live:
    """Extender whose settings file is that of a ConfigMap."""

    cluster: SimulatedCluster
    extender: Extender
    session: aiohttp.ClientSession
    mounted: ConfigMap
    values: dict[str, Any]
    statuses: set[int] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.extender.addresses[0]

    async def metric(self, name: str, **labels: str) -> float | None:
        async with self.session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if (sample.name, sample.labels) == (f"idlegpu_{name}", labels):
                    return float(sample.value)
        return None

    async def change(self, **changes: Any) -> None:
        """Change settings in the file, None to remove them; wait until they are in force."""
        name = "settings_reloads_total"
        before = await self.metric(name, outcome="applied") or 0.0
        self.values = {**self.values, **changes}
        self.values = {key: value for key, value in self.values.items() if value is not None}
        self.mounted.write(yaml.safe_dump(self.values))
        async with asyncio.timeout(DEADLINE_SECONDS):
            now = before
            while now == before:
                await asyncio.sleep(0.02)
                now = await self.metric(name, outcome="applied") or 0.0
        assert await self.metric(name, outcome="fault") == 0
        assert await self.metric(name, outcome="rejected") == 0

    async def get(self, path: str) -> Any:
        async with self.session.get(f"{self.url}{path}") as answer:
            self.statuses.add(answer.status)
            return await answer.json()

    async def filter(self, pod: JsonObject, *nodes: str) -> dict[str, Any]:
        answer: dict[str, Any] = await self._ask("filter", pod, nodes)
        return answer

    async def prioritize(self, pod: JsonObject, *nodes: str) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = await self._ask("prioritize", pod, nodes)
        return answer

    async def _ask(self, verb: str, pod: JsonObject, nodes: Sequence[str]) -> Any:
        request = orjson.dumps({"Pod": pod, "Nodes": None, "NodeNames": nodes})
        async with self.session.post(f"{self.url}/{verb}", data=io.BytesIO(request)) as answer:
            self.statuses.add(answer.status)
            return await answer.json()

    async def degraded(self, part: str, *, is_so: bool) -> str:
        """Wait until a part is degraded or recovered; return the text about it."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                degraded: dict[str, str] = (await self.get("/readyz"))["degraded"]
                if (part in degraded) is is_so:
                    return degraded.get(part, "")
                await asyncio.sleep(0.05)


@asynccontextmanager
async def live(folder: Path, **changes: Any) -> AsyncIterator[Live]:
    """Run an extender on the demo's fleet; yield it once it is ready and not degraded."""
    async with run_cluster(demo_fleet(), interval_seconds=0.5) as cluster:
        values = {
            "listen": "127.0.0.1:0",
            "kubeconfig": str(cluster.kubeconfig),
            "prometheus": {"url": cluster.prometheus_url, "interval_seconds": 0.5},
            **changes,
        }
        mounted = ConfigMap(folder / "etc", yaml.safe_dump(values))
        file = SettingsFile(mounted.path, {}, poll_seconds=0.5)
        async with (
            start(load_settings(mounted.path, {}), file=file) as extender,
            aiohttp.ClientSession() as session,
        ):
            part = Live(cluster, extender, session, mounted, values)
            await eventually(lambda: extender.is_ready, deadline_seconds=DEADLINE_SECONDS)
            await part.degraded("prometheus", is_so=False)
            part.statuses.clear()
            yield part
