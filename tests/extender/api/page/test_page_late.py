"""Late answers do not overwrite newer state of the page."""

from collections.abc import Generator

import pytest
from playwright.async_api import Browser, Page, expect

from testkit.cards import IDLE
from testkit.page.acting import choose, decide, hold, live
from testkit.page.serving import Server, looking, serving
from testkit.page.small_world import CARDS
from testkit.world import World
from tests.extender.api.page.feeds import held_by, until

pytestmark = pytest.mark.page


def world_of_holders() -> World:
    """Return two nodes whose pods have held an idle GPU for two minutes."""
    world = World()
    cards = {"a": [held_by("first", IDLE)], "b": [held_by("second", IDLE)]}
    world.add(cards, readings=1)
    for name, node in (("first", "a"), ("second", "b")):
        world.add_pod(name, node, started=world.now)
    world.report(cards)
    world.watch(120.0)
    return world


async def test_late_answer_does_not_replace_the_last_requested_node(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server, "?node=node-c&gpu=0") as (page, _):
        state = page.locator("#detail .gpu .state")
        await expect(state).to_have_text("unhealthy")
        older = await hold(page, "**/page/nodes/node-c")
        await older.given()
        world.now += 10.0
        world.report(CARDS | {"node-c": [IDLE, IDLE]})
        await expect(state).to_have_text("idle")

        await older.release()

        assert await state.inner_text() == "idle"


async def test_why_a_decision_is_not_explained_is_not_reported_of_another(browser: Browser) -> None:
    world = World()
    world.add({"best": [IDLE], "next": [IDLE] * 3})
    await decide(world, "requester", "best", "next")
    async with (
        serving(world) as server,
        looking(browser, server, "?view=decisions") as (page, faults),
    ):
        faults.allowed = ("Failed to load resource: the server responded with a status of 404",)
        await live(page)
        older = await hold(page, "**/explain?number=99")
        await choose(page, decision="99")
        await older.given()
        await page.get_by_role("button", name="Why, for team/requester").click()
        sheet = page.locator(".sheet")
        await expect(sheet).to_contain_text("best was first of 2 nodes")

        await older.release()

        assert "best was first of 2 nodes" in await sheet.inner_text()


async def test_late_answer_does_not_replace_the_last_requested_holders(browser: Browser) -> None:
    world = world_of_holders()
    async with (
        serving(world) as server,
        looking(browser, server, "?view=holders&idle=0&by=namespace") as (page, _),
    ):
        note = page.locator("#holders [role=status]")
        await live(page)
        older = await hold(page, "**/holders?*")
        await choose(page, by="pod")
        await older.given()
        await choose(page, by="namespace")
        world.fleet.remove_pod("uid-first", world.now)
        world.watch(60.0)
        await choose(page, by="pod")
        await expect(note).to_contain_text("1 pod:")

        await older.release()

        assert "1 pod:" in await note.inner_text()


async def _open_holder(page: Page, name: str) -> None:
    await page.get_by_role("row", name=f"team/{name}").get_by_role("button").click()


async def test_a_node_that_opens_late_does_not_lead_the_reader_back(browser: Browser) -> None:
    async with (
        serving(world_of_holders()) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        await live(page)
        first = await hold(page, "**/page/nodes/a")
        await _open_holder(page, "first")
        await first.given()
        second = await hold(page, "**/page/nodes/b")
        await _open_holder(page, "second")
        await second.given()

        await first.release()

        assert await page.locator("#holders").is_visible()
        await page.locator("[data-view=decisions]").click()
        await second.release()
        assert await page.locator("#decisions").is_visible()
        assert await page.locator("#detail").is_hidden()


async def test_a_page_is_live_only_once_it_knows_the_fleet(
    browser: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = server.page.broadcaster.fleet
    look = feed.refresh_in_steps
    is_slow = True

    def look_slowly() -> Generator[None, None, bool]:
        while is_slow:
            yield
        return (yield from look())

    monkeypatch.setattr(feed, "refresh_in_steps", look_slowly)
    async with looking(browser, server) as (page, _):
        await until(
            lambda: "GET /v1/session" in server.requested
        )  # requested when the stream opens
        assert await page.locator("#status-text").inner_text() == "Connecting"
        assert (
            await page.locator("#empty").inner_text() == "Connecting to the extender: no data yet."
        )
        shown = await page.locator("#totals, #chips .count").all_inner_texts()
        assert set(shown) == {""}  # no count is zero as long as it is unknown

        is_slow = False

        await live(page)
        assert await page.locator("#totals").inner_text() == "4 nodes, 12 GPUs"
