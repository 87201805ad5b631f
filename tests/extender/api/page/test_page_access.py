"""The page with access checks: token, cookie, and only permitted data."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from extender.api.access import COOKIE, Access
from extender.runtime.metrics import Metrics
from extender.settings.api import ApiSettings
from testkit.cards import IDLE
from testkit.page.acting import choose, decide, hold, live
from testkit.page.serving import Server, looking, serving
from testkit.reviewers import Reviewers, reviewing
from testkit.world import World

pytestmark = pytest.mark.page

TOKEN = "token-of-alice"
REFUSED = ("Failed to load resource: the server responded with a status of 401",)
"""Console message of the browser for a missing or wrong token."""


@asynccontextmanager
async def guarding(world: World, tmp_path: Path) -> AsyncIterator[tuple[Server, Reviewers]]:
    """Serve a world only to callers with a token."""
    async with reviewing(tmp_path) as (reviewers, kube):
        reviewers.users[TOKEN] = "alice"
        reviewers.rights["alice"] = {"team"}
        access = Access(
            kube,
            ApiSettings(),
            is_open=False,
            namespaces=lambda: frozenset({"team", "others"}),
            requests=Metrics().api_requests,
        )
        async with serving(world, access=access) as server:
            yield server, reviewers


@pytest_asyncio.fixture(loop_scope="session")
async def guarded(world: World, tmp_path: Path) -> AsyncIterator[tuple[Server, Reviewers]]:
    async with guarding(world, tmp_path) as both:
        yield both


async def show_token(page: Page, token: str) -> None:
    await page.get_by_role("textbox", name="Token").fill(token)
    await page.keyboard.press("Enter")


async def test_page_without_a_token_requests_one_and_shows_nothing(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server) as (page, faults):
        faults.allowed = REFUSED

        await expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
        await expect(page.locator("#sign-in-why")).to_contain_text("there is no token")
        await expect(page.locator("#status-text")).to_have_text("Token needed")
        await expect(page.locator("#totals")).to_have_text("")


async def test_a_wrong_token_is_reported_so_and_the_right_one_opens_the_page(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server, "?node=node-b&gpu=0") as (page, faults):
        faults.allowed = REFUSED
        dialog = page.get_by_role("dialog", name="Sign in")
        await show_token(page, "unknown-token")
        await expect(page.locator("#sign-in-why")).to_contain_text("refuses the token")

        await show_token(page, TOKEN)

        await live(page)
        await expect(dialog).to_be_hidden()
        await expect(page.locator("#totals")).to_have_text("4 nodes, 12 GPUs")
        await expect(page.locator("#who-name")).to_have_text("alice sees pods of team")
        await expect(page.locator("#detail")).to_contain_text("team/train")
        kept = {
            cookie["name"]: cookie for cookie in await page.context.cookies(f"{server.url}/v1/")
        }
        assert (kept[COOKIE]["httpOnly"], kept[COOKIE]["sameSite"]) == (True, "Strict")
        assert TOKEN not in await page.content()
        assert await page.locator("#token").input_value() == ""
        assert await page.evaluate("localStorage.length + sessionStorage.length") == 0


async def test_caller_without_pod_rights_sees_no_owners(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, reviewers = guarded
    reviewers.rights.clear()
    async with looking(browser, server, "?node=node-b&gpu=0") as (page, faults):
        faults.allowed = REFUSED
        await show_token(page, TOKEN)

        await expect(page.locator("#who-name")).to_have_text("alice sees no pods")
        await expect(page.locator("#detail")).to_contain_text("another pod")
        assert "train" not in await page.content()


async def test_sign_out_drops_the_token_and_requests_one(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server) as (page, faults):
        faults.allowed = REFUSED
        await show_token(page, TOKEN)
        await expect(page.locator("#who-name")).to_contain_text("alice")

        await page.locator("#sign-out").click()

        await expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
        assert await page.context.cookies(f"{server.url}/v1/") == []


async def test_refused_token_message_stays_after_requests_without_a_token(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server) as (page, faults):
        faults.allowed = REFUSED
        why = page.locator("#sign-in-why")
        await expect(why).to_contain_text("there is no token")
        older = await hold(page, "**/page/stream")
        await older.given()
        await show_token(page, "unknown-token")
        await expect(why).to_contain_text("refuses the token")

        await older.release()

        assert "refuses the token" in await why.inner_text()
        newer = await hold(page, "**/page/stream")
        await newer.given()
        await newer.release()
        assert "refuses the token" in await why.inner_text()


async def test_refusals_from_before_sign_in_show_no_message(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server) as (page, faults):
        faults.allowed = REFUSED
        await expect(page.get_by_role("dialog")).to_be_visible()
        older = await hold(page, "**/page/nodes/node-b")
        await choose(page, node="node-b")
        await older.given()
        await show_token(page, TOKEN)
        detail = page.locator("#detail")
        await expect(detail).to_contain_text("team/train")

        await older.release()

        assert "no token" not in await detail.inner_text()
        assert "team/train" in await detail.inner_text()


async def test_late_refusal_requests_no_token_after_sign_in(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    is_asked = asyncio.Event()

    async def refuse_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 99\r\n\r\n{")
        is_asked.set()
        await reader.read()  # the rest of the body never arrives
        writer.close()

    slow = await asyncio.start_server(refuse_slowly, "127.0.0.1", 0)
    port = slow.sockets[0].getsockname()[1]

    async def lead_away(route: Route) -> None:
        await route.continue_(url=f"http://127.0.0.1:{port}/page/stream")

    async with slow, looking(browser, server) as (page, faults):
        faults.allowed = REFUSED
        dialog = page.get_by_role("dialog", name="Sign in")
        await expect(dialog).to_be_visible()
        await page.route("**/page/stream", lead_away, times=1)
        async with asyncio.timeout(60):
            await is_asked.wait()

        await show_token(page, TOKEN)

        await live(page)
        await expect(dialog).to_be_hidden()


async def test_decision_is_explained_after_sign_in(browser: Browser, tmp_path: Path) -> None:
    world = World()
    world.add({"best": [IDLE], "next": [IDLE] * 3})
    await decide(world, "requester", "best", "next")
    async with (
        guarding(world, tmp_path) as (server, _),
        looking(browser, server, "?view=decisions&decision=1") as (page, faults),
    ):
        faults.allowed = REFUSED
        sheet = page.locator(".sheet")
        await expect(sheet).to_contain_text("there is no token")

        await show_token(page, TOKEN)

        await expect(sheet).to_contain_text("best was first of 2 nodes")


async def test_a_sign_in_on_one_page_opens_the_others_of_the_browser(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server) as (page, faults):
        faults.allowed = REFUSED
        dialog = page.get_by_role("dialog", name="Sign in")
        await expect(dialog).to_be_visible()
        other = await page.context.new_page()
        await other.goto(f"{server.url}/page/")

        await show_token(other, TOKEN)

        await live(page)
        await expect(dialog).to_be_hidden()
