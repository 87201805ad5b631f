import asyncio

import pytest
from playwright.async_api import Browser, expect

from extender.server.readiness import SourceStatus
from testkit.cards import BUSY, IDLE, Gpu
from testkit.page.acting import decide, drawn, live
from testkit.page.serving import PHONE, Server, looking, serving
from testkit.page.small_world import CARDS, wait_for_gpus
from testkit.world import World

GONE = ("Failed to load resource: net::",)
"""Console message of the browser for a failed request."""

pytestmark = pytest.mark.page


async def test_an_extender_that_goes_away_and_comes_back(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server) as (page, faults):
        faults.allowed = GONE
        await live(page)

        await server.stop()
        await expect(page.locator("#notice")).to_contain_text("the data is")
        await expect(page.locator("#status")).to_have_attribute("data-lamp", "old")
        await expect(page.locator("html")).to_have_attribute("data-old", "")
        world.now += 10.0
        world.report(CARDS | {"node-c": [IDLE, IDLE]})
        await server.start()

        await live(page)
        await expect(page.locator("#notice")).to_be_hidden()
        await expect(page.locator("[data-kind=unhealthy] b")).to_have_text("0")


async def test_telemetry_that_fails_is_reported_while_the_page_is_live(
    browser: Browser, server: Server
) -> None:
    server.sources.append(
        SourceStatus(
            name="prometheus",
            last_success_at=server.world.now - 90.0,
            failures=3,
            error="timed out",
        )
    )
    async with looking(browser, server) as (page, _):
        await expect(page.locator("#notice")).to_have_text(
            "prometheus: timed out (last answer 90 s ago)"
        )


@pytest.mark.parametrize(
    ("status", "words"),
    [(502, "the extender does not answer (status 502)"), (403, "refuses this (status 403)")],
)
async def test_a_failure_of_a_proxy_is_shown_in_words(
    browser: Browser, server: Server, status: int, words: str
) -> None:
    async with looking(browser, server) as (page, faults):
        faults.allowed = ("Failed to load resource: the server responded",)
        await live(page)

        await page.route(
            "**/v1/holders?*", lambda route: route.fulfill(status=status, body="<html>nginx")
        )
        await page.locator("[data-view=holders]").click()

        await expect(page.locator("#holders [role=status]")).to_contain_text(words)
        await page.unroute("**/v1/holders?*")


HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script>\u202e\u200b${7*7}'


async def test_hostile_names_stay_text(browser: Browser) -> None:
    world = World()
    world.add({HOSTILE: [IDLE, IDLE], "plain": [IDLE]})
    world.add_pod(HOSTILE, HOSTILE)
    world.report({HOSTILE: [Gpu(tenants=(f"team/{HOSTILE}",)), IDLE]})
    wait_for_gpus(world, f"waiting{HOSTILE}", 1)
    world.watch(60.0)
    await decide(world, HOSTILE, HOSTILE, "plain")
    async with serving(world) as server:
        for query in ("?as=table", "?view=decisions", "?view=pending", "?view=holders&idle=0"):
            async with looking(browser, server, query) as (page, _):
                await live(page)
                shown = page.get_by_text("<img src=x onerror=alert(1)>").first
                await expect(shown).to_be_visible()

                assert await page.locator("main img, main script, main iframe").count() == 0
                assert "\u202e" not in await page.locator("main").inner_text()
        async with looking(browser, server, "?as=table") as (page, _):
            await page.get_by_role("button", name="<img src=x").first.click()

            await expect(page.locator("#detail h2")).to_contain_text("<img src=x")
            await expect(page.locator("#detail .gpu")).to_be_visible()


async def test_policy_violations_are_noticed(browser: Browser, server: Server) -> None:
    async with looking(browser, server) as (page, faults):
        await live(page)

        refused = await page.evaluate(
            """() => {
                const style = document.createElement("style");
                style.textContent = "body { color: red }";
                document.head.append(style);
                try { document.body.innerHTML = "<b>"; return false; } catch { return true; }
            }"""
        )
        assert refused
        async with asyncio.timeout(30):
            while not any("policy: style-src" in fault for fault in faults.found):
                await drawn(page)
        faults.found.clear()


async def test_the_page_sends_only_read_requests(browser: Browser, server: Server) -> None:
    async with looking(browser, server, "?node=node-a&gpu=0") as (page, _):
        await expect(page.locator("#detail .gpu")).to_be_visible()

    assert {requested.split()[0] for requested in server.requested} == {"GET"}


@pytest.mark.parametrize("query", ["", "?view=decisions", "?view=pending", "?node=node-b&gpu=1"])
async def test_a_phone_shows_it_without_scrolling_sideways(
    browser: Browser, server: Server, query: str
) -> None:
    options = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    async with looking(browser, server, query, **options) as (page, faults):
        faults.allowed = ("Failed to load resource: the server responded with a status of 404",)
        await live(page)

        wide = await page.evaluate("document.documentElement.scrollWidth")

        assert wide <= PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_contrast_with_their_background(
    browser: Browser, server: Server, scheme: str
) -> None:
    async with looking(browser, server, "?node=node-b&gpu=0", color_scheme=scheme) as (page, _):
        await expect(page.locator("#detail .gpu")).to_be_visible()

        ratios = await page.evaluate(
            """() => {
                const light = (color) => {
                    const part = color.match(/[\\d.]+/g).map(Number).slice(0, 3).map((value) => {
                        value /= 255;
                        return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
                    });
                    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
                };
                const style = getComputedStyle(document.documentElement);
                const shown = (name) => {
                    const probe = document.createElement("i");
                    probe.style.color = `var(--${name})`;
                    document.body.append(probe);
                    const color = getComputedStyle(probe).color;
                    probe.remove();
                    return light(color);
                };
                const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                return ["text", "muted", "pick", "good", "warn", "bad", "foreign"].map(
                    (name) => [name, Math.min(ratio(shown(name), shown("panel")),
                        ratio(shown(name), shown("back")))]);
            }"""
        )

        assert [name for name, ratio in ratios if ratio < 4.5] == []


async def test_forty_thousand_gpus_show_and_change(browser: Browser) -> None:
    world = World()
    cards = {f"node-{at:04}": [IDLE] * 4 + [BUSY] * 4 for at in range(5000)}
    world.add(cards, readings=1)
    async with serving(world) as server, looking(browser, server) as (page, _):
        await expect(page.locator("#totals")).to_have_text("5,000 nodes, 40,000 GPUs")
        await expect(page.locator("[data-kind=idle] b")).to_have_text("20,000")
        box = await page.locator("#map").bounding_box()
        assert box is not None
        await drawn(page)
        colors = await page.evaluate(
            """() => {
                const map = document.getElementById("map");
                const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
                return new Set(new Uint32Array(data.buffer)).size;
            }"""
        )
        assert colors >= 3

        world.now += 10.0
        world.report(cards | {"node-4999": [BUSY] * 8})

        await expect(page.locator("[data-kind=idle] b")).to_have_text("19,996")
        await page.locator("#search").fill("node-4999")
        await expect(page.locator("#totals")).to_have_text("1 of 5,000 nodes")
