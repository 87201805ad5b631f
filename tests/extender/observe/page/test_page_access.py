"""Where a token is needed the page asks for one, keeps it from scripts, and shows what it may."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from extender.metrics import Metrics
from extender.observe.access import COOKIE, Access
from extender.settings.api import Api
from tests.extender.observe.page.acting import live
from tests.extender.observe.page.serving import Server, looking, serving
from tests.extender.observe.reviewers import Reviewers, reviewing
from tests.extender.served import World

pytestmark = pytest.mark.page

TOKEN = "token-of-alice"
REFUSED = ("Failed to load resource: the server responded with a status of 401",)
"""What the browser itself writes where a token is missing or wrong."""


@pytest_asyncio.fixture
async def guarded(world: World, tmp_path: Path) -> AsyncIterator[tuple[Server, Reviewers]]:
    async with reviewing(tmp_path) as (reviewers, kube):
        reviewers.users[TOKEN] = "alice"
        reviewers.rights["alice"] = {"team"}
        access = Access(
            kube,
            Api(),
            is_open=False,
            namespaces=lambda: {"team", "others"},
            requests=Metrics().api_requests,
        )
        async with serving(world, access=access) as server:
            yield server, reviewers


async def test_a_page_without_a_token_asks_for_one_and_shows_nothing(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server) as (page, faults):
        faults.allowed = REFUSED

        await expect(page.get_by_role("dialog", name="A token, please")).to_be_visible()
        await expect(page.locator("#sign-in-why")).to_contain_text("there is no token")
        await expect(page.locator("#status-text")).to_have_text("Token needed")
        await expect(page.locator("#totals")).to_have_text("0 nodes, 0 GPUs")


async def test_a_wrong_token_is_told_so_and_the_right_one_opens_the_page(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server, "?node=node-b&gpu=0") as (page, faults):
        faults.allowed = REFUSED
        dialog = page.get_by_role("dialog", name="A token, please")
        await dialog.get_by_role("textbox", name="Token").fill("token-of-nobody")
        await page.keyboard.press("Enter")
        await expect(page.locator("#sign-in-why")).to_contain_text("refuses the token")

        await dialog.get_by_role("textbox", name="Token").fill(TOKEN)
        await page.keyboard.press("Enter")

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


async def test_who_may_read_no_pod_sees_the_fleet_and_not_whose_it_is(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, reviewers = guarded
    reviewers.rights.clear()
    async with looking(browser, server, "?node=node-b&gpu=0") as (page, faults):
        faults.allowed = REFUSED
        await page.get_by_role("textbox", name="Token").fill(TOKEN)
        await page.keyboard.press("Enter")

        await expect(page.locator("#who-name")).to_have_text("alice sees no pods")
        await expect(page.locator("#detail")).to_contain_text("another pod")
        assert "train" not in await page.content()


async def test_signing_out_forgets_the_token_and_asks_again(
    browser: Browser, guarded: tuple[Server, Reviewers]
) -> None:
    server, _ = guarded
    async with looking(browser, server) as (page, faults):
        faults.allowed = REFUSED
        await page.get_by_role("textbox", name="Token").fill(TOKEN)
        await page.keyboard.press("Enter")
        await expect(page.locator("#who-name")).to_contain_text("alice")

        await page.locator("#sign-out").click()

        await expect(page.get_by_role("dialog", name="A token, please")).to_be_visible()
        assert await page.context.cookies(f"{server.url}/v1/") == []
