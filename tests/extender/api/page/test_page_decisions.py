"""The view of decisions after a time without data."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from extender.core.policy import Policy, Strategy
from extender.core.steps import finish
from testkit.cards import BUSY, IDLE
from testkit.page.acting import decide, live
from testkit.page.serving import Server, looking, serving
from testkit.world import World

pytestmark = pytest.mark.page

GONE = ("Failed to load resource: net::",)
"""Console message of the browser for a failed request."""


@pytest.fixture
def world() -> World:
    world = World(policy=Policy(strategy=Strategy.SPREAD))
    world.add({"idle": [IDLE] * 3, "busy": [BUSY] * 2, "full": [IDLE]})
    return world


@pytest_asyncio.fixture(loop_scope="session")
async def server(world: World) -> AsyncIterator[Server]:
    async with serving(world) as server:
        yield server


@asynccontextmanager
async def away(page: Page, server: Server) -> AsyncIterator[None]:
    """Make the extender unreachable for a while."""
    await server.stop()
    await expect(page.locator("#status")).to_have_attribute("data-lamp", "old")
    server.world.now += 10.0
    yield
    await server.start()
    await live(page)


@pytest.mark.parametrize("other", ["decisions", "pending"])
async def test_decisions_and_bindings_show_after_a_reconnect(
    browser: Browser, server: Server, world: World, other: str
) -> None:
    async with looking(browser, server, "?view=decisions") as (page, faults):
        faults.allowed = GONE
        await live(page)
        await decide(world, "early", "idle", "full")
        early = page.get_by_role("row", name="team/early")
        await expect(early.locator(".followed")).to_have_text("not bound yet")
        await page.locator(f"[data-view={other}]").click()

        async with away(page, server):
            world.history.note_bound("uid-early", "full")
            await decide(world, "missed", "idle", "full")
        await page.locator("[data-view=decisions]").click()

        await expect(early.locator(".followed")).to_contain_text("full")
        names = page.locator("#decisions tbody tr button.link[aria-label]")
        await expect(names).to_have_text(["team/missed", "team/early"])
        await expect(page.locator("#decisions .gap")).to_have_count(0)


async def test_forgotten_decisions_are_marked_missing_after_a_reconnect(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server, "?view=decisions") as (page, faults):
        faults.allowed = GONE
        await live(page)
        await decide(world, "early", "idle", "full")
        await expect(page.get_by_role("row", name="team/early")).to_be_visible()

        async with away(page, server):
            await decide(world, "lost", "idle", "full")
            world.now += 10.0
            await decide(world, "late", "idle", "full")
            finish(world.history.resize_in_steps(1))

        rows = page.locator("#decisions tbody tr")
        await expect(rows).to_have_count(3)
        await expect(rows.nth(0)).to_contain_text("team/late")
        await expect(rows.nth(1)).to_contain_text("Decisions may be missing here")
        await expect(rows.nth(2)).to_contain_text("team/early")
        await expect(rows.nth(2).locator(".followed")).to_have_text("unknown")


async def test_a_paused_page_catches_up_when_it_resumes(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server, "?view=decisions") as (page, faults):
        faults.allowed = GONE
        await live(page)
        await decide(world, "early", "idle", "full")
        rows = page.locator("#decisions tbody tr")
        await expect(rows).to_have_count(1)
        await page.get_by_role("button", name="Pause").click()

        async with away(page, server):
            await decide(world, "missed", "idle", "full")
        note = page.locator("#decisions [role=status]")
        await expect(note).to_have_text("at least 0 decisions since")
        await expect(rows).to_have_count(1)
        await page.get_by_role("button", name="Go on").click()

        await expect(rows).to_have_count(2)
        await expect(rows.nth(0)).to_contain_text("team/missed")


async def test_a_decision_of_another_day_shows_its_day(browser: Browser) -> None:
    world = World()
    world.now = datetime(2024, 5, 1, 9, 12).astimezone().timestamp()
    world.add({"idle": [IDLE]})
    async with serving(world) as server, looking(browser, server, "?view=decisions") as (page, _):
        await live(page)
        await decide(world, "old", "idle")

        row = page.get_by_role("row", name="team/old")
        await expect(row.locator(".time")).to_have_text(re.compile(r"^1 May, 09:12:\d\d$"))
