"""Simulated pages of a benchmark: they read the stream, and report its size."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, expect

from bench.page_viewers import VIEWS, PageTraffic, pages
from bench.world import BenchError
from testkit.cards import IDLE
from testkit.controlplane.process import free_port
from testkit.page.acting import decide, live
from testkit.page.serving import Server, browsing, looking, serving
from testkit.page.small_world import small_world
from testkit.world import World


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as browser:
        yield browser


async def test_pages_are_open_until_they_are_closed_and_report_the_bytes_read() -> None:
    async with serving(small_world()) as server:

        def look() -> PageTraffic:
            with pages(server.url, 3) as traffic:
                assert len(server.page.broadcaster) == 3
                assert traffic.bytes == 0
            return traffic

        read = await asyncio.to_thread(look)

        async with asyncio.timeout(30):
            while len(server.page.broadcaster):  # no event signals it
                await asyncio.sleep(0.01)

    assert read.bytes > 3 * 500  # each page received the fleet


@pytest.mark.page
async def test_simulated_pages_send_the_requests_of_real_ones(browser: Browser) -> None:
    world = World()
    world.add({"a": [IDLE] * 3, "b": [IDLE]})
    await decide(world, "requester", "a", "b")
    queries = ("", "?node=a&gpu=0", "?view=decisions", "?view=pending", "?view=holders")
    requested: dict[str, set[str]] = {}
    async with serving(world) as server:
        for query in queries:
            async with looking(browser, server, query) as (page, _):
                await live(page)
                if "decisions" in query:
                    await expect(page.locator(".reason").first).not_to_be_empty()
                if "node" in query:
                    await expect(page.locator(".plots")).to_be_visible()
        requested["real"] = _paths(server)
        server.requested.clear()

        def look() -> PageTraffic:
            with pages(server.url, len(VIEWS)) as traffic:
                deadline = time.monotonic() + 20
                while not requested["real"] <= _paths(server) and time.monotonic() < deadline:
                    time.sleep(0.05)
            return traffic

        traffic = await asyncio.to_thread(look)
        requested["ours"] = _paths(server)

    assert requested["ours"] == requested["real"]
    assert {path.split("/")[0] for path in traffic.requests} >= {"page", "holders", "pending"}
    assert traffic.failures == 0


def _paths(server: Server) -> set[str]:
    """Return the requested paths of the API."""
    return {path for path in server.requested if path.startswith("GET /v1/")}


def test_an_extender_that_is_not_there_is_said() -> None:
    with (
        pytest.raises(BenchError, match="did not open"),
        pages(f"http://127.0.0.1:{free_port()}", 1),
    ):
        pass


def test_no_pages_send_no_requests() -> None:
    with pages("http://127.0.0.1:1", 0) as traffic:
        assert traffic.bytes == 0
