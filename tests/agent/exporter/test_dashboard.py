"""Grafana's dashboard 12239 on a real Prometheus that scrapes only a real agent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

from agent.app import start
from agent.options import Options
from testkit.agent.scripted import IDLE_GPM, ScriptedBackend, ScriptedCard, migs
from testkit.controlplane.scraping import Job, prometheus_process

pytestmark = pytest.mark.prometheus

OPTIONS: Final = Options(
    port=0, node="gpu-7", period_seconds=0.25, dcgm_names=True, kubelet_socket="", proc=""
)

SELECTED: Final = '{instance=~"127.*", gpu=~"0|1"}'
QUERIES: Final = {
    "GPU Temperature": f"DCGM_FI_DEV_GPU_TEMP{SELECTED}",
    "GPU Avg. Temp": f"avg(DCGM_FI_DEV_GPU_TEMP{SELECTED})",
    "GPU Power Usage": f"DCGM_FI_DEV_POWER_USAGE{SELECTED}",
    "GPU Power Total": f"sum(DCGM_FI_DEV_POWER_USAGE{SELECTED})",
    "GPU SM Clocks": f"DCGM_FI_DEV_SM_CLOCK{SELECTED} * 1000000",
    "GPU Utilization": f"DCGM_FI_DEV_GPU_UTIL{SELECTED}",
    "GPU Framebuffer Mem Used": f"DCGM_FI_DEV_FB_USED{SELECTED}",
    "Tensor Core Utilization": f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{SELECTED}",
}
"""The queries of the dashboard's panels."""


NOT_COUNTED: Final = {
    "hopper": frozenset[str](),
    "before-hopper": {"Tensor Core Utilization"},
    "mig-before-hopper": {"Tensor Core Utilization", "GPU Utilization"},
}
"""Panels that are empty for such cards according to docs/agent.md."""


def cards_of(kind: str) -> tuple[ScriptedCard, ...]:
    gpm = dict(IDLE_GPM) if kind == "hopper" else None
    instances = migs((1, "7g.80gb")) if kind.startswith("mig") else None
    return tuple(ScriptedCard(uuid, gpm=gpm, instances=instances) for uuid in ("GPU-0", "GPU-1"))


@pytest.fixture(params=NOT_COUNTED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def prometheus(tmp_path: Path, kind: str) -> AsyncIterator[aiohttp.ClientSession]:
    cards = cards_of(kind)
    async with start(replace(OPTIONS, pod_logs=""), ScriptedBackend(*cards)) as (_, address):
        host, port = address
        server = prometheus_process(tmp_path, f"{host}:{port}", {"agent": Job(page="metrics")})
        await server.start()
        try:
            async with aiohttp.ClientSession(server.ready_url.removesuffix("/-/ready")) as session:
                yield session
        finally:
            await server.stop()


async def fetch(session: aiohttp.ClientSession, path: str, **parameters: str) -> list[Any]:
    async with session.get(path, params=parameters) as answer:
        result = await answer.json()
    assert result["status"] == "success", result
    data = result["data"]
    return list(data["result"] if isinstance(data, dict) else data)


async def test_dashboard_12239_has_data_for_all_that_the_card_measures(
    prometheus: aiohttp.ClientSession, kind: str
) -> None:
    result = {panel: 1 if "(" in query else 2 for panel, query in QUERIES.items()}
    result |= dict.fromkeys(NOT_COUNTED[kind], 0)
    shown: dict[str, int] = {}
    with contextlib.suppress(TimeoutError):  # the difference says more
        async with asyncio.timeout(60):
            # The first scrape may come before the agent's second pass, which has the rates.
            while shown != result:
                await asyncio.sleep(0.1)
                shown = {
                    panel: len(await fetch(prometheus, "/api/v1/query", query=query))
                    for panel, query in QUERIES.items()
                }
    assert shown == result
    for label, values in (("gpu", ["0", "1"]), ("instance", None)):
        path, of = f"/api/v1/label/{label}/values", {"match[]": "DCGM_FI_DEV_GPU_TEMP"}
        chosen = await fetch(prometheus, path, **of)
        assert chosen == values if values else len(chosen) == 1
