"""Real Prometheus that scrapes metrics of a test."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

from testkit.controlplane.objects import Object
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.tools import binary

SCRAPE_SECONDS: Final = 1.0
"""Interval and timeout of scrapes; on a busy machine shorter ones time out, and series end."""


@asynccontextmanager
async def serving(registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve a registry as the programs do; yield host and port."""
    app = web.Application()
    app.add_routes([web.get("/metrics", make_aiohttp_handler(registry=registry))])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


def prometheus(folder: Path, targets: dict[str, str]) -> tuple[ServerProcess, str]:
    """Describe a Prometheus that scrapes each target by its job's name; return it and its URL."""
    interval = f"{round(SCRAPE_SECONDS * 1000)}ms"
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [address]}]}
            for job, address in targets.items()
        ],
    }
    (folder / "prometheus.config").write_text(json.dumps(config))
    port = free_port()
    process = ServerProcess(
        name="monitoring-prometheus",
        command=[
            str(binary("prometheus")),
            f"--config.file={folder / 'prometheus.config'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        folder=folder,
        ready_url=f"http://127.0.0.1:{port}/-/ready",
    )
    return process, f"http://127.0.0.1:{port}"


async def fetch(session: aiohttp.ClientSession, url: str, query: str) -> list[Object]:
    """Return the result of an instant query."""
    async with session.get(f"{url}/api/v1/query", params={"query": query}) as response:
        answer: Object = await response.json()
        assert answer["status"] == "success", (query, answer)
        found: list[Object] = answer["data"]["result"]
        return found
