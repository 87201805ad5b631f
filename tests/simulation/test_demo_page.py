"""Every view of the page in a real browser, on the extender of the demo's simulated cluster."""

import re
from collections.abc import AsyncIterator
from io import StringIO

import aiohttp
import pytest
from playwright.async_api import Browser, expect
from rich.console import Console

from extender.app import start
from extender.settings.config import Settings
from extender.settings.service import Wake
from extender.settings.sources import Prometheus
from simulation.cluster import run_cluster
from simulation.demo import Demo
from simulation.demo_fleet import demo_fleet
from testkit.page.acting import counts, live
from testkit.page.serving import browsing, looking_at

pytestmark = [pytest.mark.page, pytest.mark.timeout(180)]

WAITS = "default/patient"
"""The demo's pod without a node."""


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Yield the URL of the page of an extender that has placed the demo's pods."""
    async with run_cluster(demo_fleet()) as cluster:
        settings = Settings(
            listen="127.0.0.1:0",
            kubeconfig=cluster.kubeconfig,
            prometheus=Prometheus(url=cluster.prometheus_url, interval_seconds=1.0),
            wake=Wake(enabled=False),
        )
        async with start(settings) as extender, aiohttp.ClientSession() as session:
            address = extender.addresses[0]
            await Demo(cluster, address, session, Console(file=StringIO())).play()
            yield f"{address}/page/"


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as browser:
        yield browser


async def test_each_view_shows_the_simulated_fleet_and_no_error(browser: Browser, url: str) -> None:
    fleet = demo_fleet()

    async with looking_at(browser, url) as (page, _):
        await live(page)
        await expect(page.locator("#totals")).to_contain_text(f"{len(fleet.nodes)} nodes")
        for kind in ("idle", "held", "busy", "unhealthy", "foreign"):
            await expect(page.locator(f"[data-kind={kind}] b")).not_to_have_text("0")
        seen = {kind: int(number.replace(",", "")) for kind, number in (await counts(page)).items()}
        assert sum(seen.values()) == sum(len(node.devices) for node in fleet.nodes.values())

    async with looking_at(browser, f"{url}?as=table") as (page, _):
        await expect(page.locator("#table tr[data-key]")).to_have_count(len(fleet.nodes))
        await expect(page.get_by_role("row", name="gpu-h100-03")).to_contain_text("H100")

    async with looking_at(browser, f"{url}?node=gpu-h100-03&gpu=0") as (page, _):
        detail = page.locator("#detail")
        await expect(detail.locator(".gpus li")).to_have_count(
            len(fleet.nodes["gpu-h100-03"].devices)
        )
        row = detail.get_by_role("row", name="GPU utilization")
        await expect(row).to_contain_text("prometheus")
        await expect(detail.get_by_role("img", name="activity")).to_have_attribute(
            "aria-label", re.compile("now [0-9]+ %")
        )

    async with looking_at(browser, f"{url}?view=decisions") as (page, _):
        row = page.get_by_role("row", name="default/stock")
        await expect(row.locator(".followed")).to_contain_text("followed")
        await expect(row.locator(".reason")).not_to_be_empty()
        await row.get_by_role("button", name="Why, for default/stock").click()
        await expect(page.locator(".sheet .source").first).to_contain_text("prometheus")

    async with looking_at(browser, f"{url}?view=pending") as (page, _):
        card = page.locator(".card", has_text=WAITS)
        await expect(card).to_contain_text("idlegpu refuses")
        await expect(card).to_contain_text("What would have to change")

    async with looking_at(browser, f"{url}?view=holders&idle=0") as (page, _):
        holder = page.get_by_role("row", name="vision/detector-train-0")
        await expect(holder).to_contain_text("gpu-a100-01")
        await expect(page.locator("#holders [role=status]")).to_contain_text("GPU-hours")
