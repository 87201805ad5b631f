"""Growing counters, and XIDs with a series each, in a real Prometheus."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extender.core.devices.readings import REMAPPED_SECONDS, DeviceKey, Signal
from extender.sources.prometheus.dcgm import DEFAULT_METRICS, build_table
from extender.sources.prometheus.dcgm_devices import xids_of
from extender.sources.prometheus.promql import metric_query
from testkit.controlplane.scraping import Job, Pages, prometheus_process

pytestmark = pytest.mark.prometheus

PAGE = """
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{UUID="GPU-1",gpu="0"}} {count}
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{UUID="GPU-2",gpu="1"}} 5000
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{UUID="GPU-1",gpu="0",exported_pod="p{count}"}} {count}
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{UUID="GPU-2",gpu="1"}} 40
DCGM_EXP_XID_ERRORS_COUNT{{UUID="GPU-1",gpu="0",window_size_in_ms="300000",xid="79"}} 1
DCGM_EXP_XID_ERRORS_COUNT{{UUID="GPU-1",gpu="0",window_size_in_ms="300000",xid="31"}} 4
DCGM_EXP_XID_ERRORS_COUNT{{UUID="GPU-2",gpu="1",window_size_in_ms="300000"}} 0
"""


@pytest_asyncio.fixture
async def scraped(tmp_path: Path) -> AsyncIterator[tuple[Pages, aiohttp.ClientSession]]:
    pages = Pages()
    pages.text["dcgm"] = PAGE.format(count=0)
    server = prometheus_process(tmp_path, pages.address, {"dcgm": Job(page="dcgm")})
    await server.start()
    try:
        async with aiohttp.ClientSession(server.ready_url.removesuffix("/-/ready")) as session:
            yield pages, session
    finally:
        await server.stop()
        pages.close()


async def fetch(session: aiohttp.ClientSession, name: str) -> list[Any]:
    metric = next(one for one in DEFAULT_METRICS if one.name == name)
    return await answer_to(session, metric_query(metric, ""))


async def answer_to(session: aiohttp.ClientSession, query: str) -> list[Any]:
    async with session.get("/api/v1/query", params={"query": query}) as answer:
        document = await answer.json()
    assert document["status"] == "success", document
    return list(document["data"]["result"])


async def test_only_growing_counters_are_returned(
    scraped: tuple[Pages, aiohttp.ClientSession],
) -> None:
    pages, session = scraped
    rows: list[Any] = []
    async with asyncio.timeout(60):
        for count in range(10_000):
            pages.text["dcgm"] = PAGE.format(count=count)
            rows = await fetch(session, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER")
            if rows:
                break
            await asyncio.sleep(0.1)

    assert [row["metric"] for row in rows] == [{"UUID": "GPU-1"}]
    assert float(rows[0]["value"][1]) > 0


async def test_added_rows_are_returned_even_if_pods_change(
    scraped: tuple[Pages, aiohttp.ClientSession],
) -> None:
    pages, session = scraped
    added = next(one for one in build_table() if one.signal is Signal.ROWS_REMAPPED_LATELY)
    in_a_day = metric_query(added, "")
    in_a_second = in_a_day.replace(f"{REMAPPED_SECONDS:.0f}s", "1s")
    rows: list[Any] = []
    async with asyncio.timeout(60):
        for count in range(10_000):
            pages.text["dcgm"] = PAGE.format(count=count)
            rows = await answer_to(session, in_a_second)
            if rows:
                break
            await asyncio.sleep(0.1)

    assert [row["metric"] for row in rows] == [{"UUID": "GPU-1"}]
    assert float(rows[0]["value"][1]) > 0
    assert await answer_to(session, in_a_day) == [], "there are no samples of a day ago"


async def test_the_most_severe_of_several_xids_is_returned(
    scraped: tuple[Pages, aiohttp.ClientSession],
) -> None:
    _, session = scraped
    rows: list[Any] = []
    async with asyncio.timeout(60):
        while not rows:
            rows = await fetch(session, "DCGM_EXP_XID_ERRORS_COUNT")
            await asyncio.sleep(0.1)

    assert dict(xids_of(rows)) == {DeviceKey(("GPU-1", "")): 79.0}
