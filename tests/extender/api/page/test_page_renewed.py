"""Updates of the page keep focus and opened details."""

import pytest
from playwright.async_api import Browser, Page, expect

from testkit.cards import IDLE
from testkit.page.acting import choose, live, stop_clock
from testkit.page.serving import Server, looking, serving
from testkit.page.small_world import CARDS, wait_for_gpus
from testkit.world import World
from tests.extender.api.page.feeds import held_by

pytestmark = pytest.mark.page


async def _ask_holders_for(page: Page, seconds: int) -> None:
    """Change the period of holders without moving the focus."""
    await page.evaluate(
        "async (idle) => (await import('./url.js')).go({ idle: String(idle) })", seconds
    )


async def test_waiting_pods_come_and_go_while_the_words_about_one_are_read(
    browser: Browser,
) -> None:
    world = World()
    world.add({"node": [IDLE]})
    wait_for_gpus(world, "gone", 1)
    wait_for_gpus(world, "read", 2)
    async with serving(world) as server, looking(browser, server, "?view=pending") as (page, _):
        card = page.locator(".card", has_text="team/read")
        summary = card.locator("summary")
        await summary.click()
        await expect(summary).to_be_focused()

        world.now += 3600.0
        world.fleet.remove_pod("uid-gone", world.now)
        wait_for_gpus(world, "new", 1)

        await expect(page.locator(".card h3")).to_have_text(["team/read", "team/new"])
        await expect(card.locator("header")).to_contain_text("65 min")
        await expect(summary).to_be_focused()
        await expect(card.locator("details")).to_have_attribute("open", "")
        await expect(page.locator(".card details[open]")).to_have_count(1)


async def test_a_new_waiting_pod_shows_at_once_and_few_other_requests_are_sent(
    browser: Browser,
) -> None:
    world = World()
    world.add({"node": [IDLE]})
    async with serving(world) as server, looking(browser, server) as (page, _):
        await stop_clock(page)
        await choose(page, view="pending")
        await expect(page.locator("#pending [role=status]")).to_have_text("No pod with GPUs waits.")
        await page.clock.run_for(7000)
        requested = server.requested.count("GET /v1/pending")

        wait_for_gpus(world, "new", 1)

        await expect(page.locator(".card h3")).to_have_text("team/new")
        assert server.requested.count("GET /v1/pending") == requested + 1


async def test_holders_and_their_sums_are_renewed_with_the_focus_on_one(browser: Browser) -> None:
    world = World()
    cards = {"a": [held_by("first", IDLE)], "b": [held_by("second", IDLE)]}
    world.add(cards, readings=1)
    for name, node in (("first", "a"), ("second", "b")):
        world.add_pod(name, node, started=world.now)
    world.report(cards)
    world.watch(120.0)
    async with (
        serving(world) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        note = page.locator("#holders [role=status]")
        await expect(note).to_contain_text("2 pods")
        button = page.get_by_role("row", name="team/second").get_by_role("button")
        await button.focus()

        world.now += 7200.0
        world.report({"b": [held_by("second", IDLE)]})
        world.fleet.remove_pod("uid-first", world.now)
        world.watch(60.0)
        await _ask_holders_for(page, 60)

        await expect(note).to_contain_text("1 pod: 2.1 GPU-hours")
        await expect(page.locator("#holders tbody tr")).to_have_count(1)
        await expect(button).to_be_focused()


async def test_the_table_is_renewed_with_the_focus_on_a_node(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server, "?as=table") as (page, _):
        row = page.get_by_role("row", name="node-c")
        await expect(row.get_by_role("cell").nth(7)).to_have_text("1")
        await row.get_by_role("button").focus()

        world.now += 10.0
        world.report(CARDS | {"node-c": [IDLE, IDLE]})

        await expect(row.get_by_role("cell").nth(7)).to_have_text("0")
        await expect(row.get_by_role("button")).to_be_focused()


async def test_a_node_in_full_is_renewed_with_the_focus_in_it(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server, "?node=node-c&gpu=0") as (page, _):
        detail = page.locator("#detail")
        await expect(detail.locator(".gpu .state")).to_have_text("unhealthy")
        close = detail.get_by_role("button", name="Close")
        await close.focus()

        world.now += 10.0
        world.report(CARDS | {"node-c": [IDLE, IDLE]})

        await expect(detail.locator(".gpu .state")).to_have_text("idle")
        await expect(close).to_be_focused()


async def test_moved_rows_are_recognized(browser: Browser, server: Server) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)

        result = await page.evaluate(
            """async () => {
                const { h, renew } = await import("./dom.js");
                const row = (key, text, ...more) =>
                    h("article", { "data-key": key, class: text }, ...more, h("details", {},
                        h("summary", {}, text)), h("button", { onclick: () => said.push(text) }));
                const said = [];
                const box = h("div");
                document.body.append(box);
                renew(box, row("a", "a1"), row("b", "b1", h("p", {}, "one")), h("p", {}, "end"));
                const [, second] = box.children;
                second.querySelector("details").open = true;
                second.querySelector("button").focus();
                renew(box, row("c", "c2"), row("b", "b2"), row("b", "b3"), row("a", "a2"));
                document.activeElement.click();
                return {
                    is_same: box.children[1] === second,
                    is_open: second.querySelector("details").open,
                    is_focused: document.activeElement === second.querySelector("button"),
                    said,
                    texts: [...box.children].map((one) => `${one.className} ${one.textContent}`),
                };
            }"""
        )

        assert result == {
            "is_same": True,
            "is_open": True,
            "is_focused": True,
            "said": ["b2"],
            "texts": ["c2 c2", "b2 b2", "b3 b3", "a2 a2"],
        }


async def test_the_selection_stays_when_earlier_rows_are_removed(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)

        selected = await page.evaluate(
            """async () => {
                const { h, renew } = await import("./dom.js");
                const row = (key) => h("p", { "data-key": key }, `row ${key}`);
                const box = h("div");
                document.body.append(box);
                renew(box, row("a"), row("b"), row("c"));
                getSelection().selectAllChildren(box.children[1]);
                renew(box, row("b"), row("c"), row("d"));
                return getSelection().toString();
            }"""
        )

        assert selected == "row b"
