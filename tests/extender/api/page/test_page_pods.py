"""The view of pods: their GPUs, use and waits; search, namespaces, order and pages."""

import re

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from testkit.cards import IDLE, Gpu, card
from testkit.page.serving import PHONE, looking, serving
from testkit.page.small_world import wait_for_gpus
from testkit.world import World

pytestmark = pytest.mark.page

CARDS = {
    "node-a": [
        *[card("team/train", busy=0.9, used_gib=40.0)] * 3,
        card("blue/notebook<b>", used_gib=2.0),
    ],
    "node-b": [IDLE, card("team/train", busy=0.9, used_gib=40.0)],
}
MANY = 250


def world_of_pods() -> World:
    """Return a world with a busy pod, an idle one, and one that waits."""
    world = World()
    cards = {"node-a": CARDS["node-a"]}
    world.add(cards)
    world.hold("train", "node-a", 3, owner="Job train", memory_bytes=30 << 30)
    world.hold("notebook<b>", "node-a", 1, namespace="blue")
    world.live(cards, 600.0)
    wait_for_gpus(world, "patient", 2)
    return world


def row(page: Page, pod: str) -> Locator:
    return page.locator("#pods tbody tr").filter(has=page.get_by_text(pod, exact=True))


def cell(page: Page, pod: str, name: str) -> Locator:
    return row(page, pod).locator(f"[data-label='{name}']")


async def shown(page: Page) -> list[str]:
    return await page.locator("#pods tbody th").all_inner_texts()


async def test_each_pod_shows_its_gpus_use_memory_idleness_and_wait(browser: Browser) -> None:
    async with serving(world_of_pods()) as server, looking(browser, server) as (page, _):
        await page.get_by_role("link", name="Pods").click()

        await expect(page.locator("#pods .bar .muted")).to_have_text("2 pods with GPUs, 1 waiting")
        assert await shown(page) == ["team/patient", "blue/notebook<b>", "team/train"]
        await expect(cell(page, "team/train", "GPUs")).to_contain_text("GPUs 0\u20132")
        await expect(cell(page, "team/train", "GPUs")).to_contain_text("H100 80GB HBM3")
        await expect(cell(page, "team/train", "Use")).to_have_text("90 %")
        await expect(cell(page, "team/train", "Memory")).to_have_text("120 of 90.0 GiB")
        await expect(row(page, "team/train").locator(".trouble")).to_be_visible()
        await expect(cell(page, "team/train", "Idle for")).to_have_text("in use")
        await expect(cell(page, "team/train", "Owner")).to_have_text("Job train")
        await expect(cell(page, "blue/notebook<b>", "Idle for")).to_have_text(re.compile("≥ 9 min"))
        await expect(cell(page, "team/patient", "Waits")).to_have_text(re.compile("5 min"))
        await expect(cell(page, "team/patient", "Why it waits")).to_have_text(
            "too few working GPUs"
        )

        await row(page, "blue/notebook<b>").get_by_role("button", name="node-a").click()

        await expect(page.locator("#detail .gpu h3")).to_contain_text("GPU 3")


async def test_search_namespace_state_and_order_are_in_the_url(browser: Browser) -> None:
    async with (
        serving(world_of_pods()) as server,
        looking(browser, server, "?view=pods") as (page, _),
    ):
        await expect(page.locator("#pods tbody tr")).to_have_count(3)

        await page.locator("#pods select").first.select_option("blue")
        await expect(page.locator("#pods tbody tr")).to_have_count(1)
        await page.locator("#pods select").first.select_option("")
        await page.locator("#pods select").last.select_option("holds")
        await page.locator("#pods thead").get_by_role("button", name="Use").click()
        await expect(page.locator("#pods tbody tr").first).to_contain_text("team/train")
        await expect(page.locator("#pods th[aria-sort=descending]")).to_contain_text("Use")
        await page.get_by_label("Show pods by name").fill("TRAIN")
        await expect(page.locator("#pods tbody tr")).to_have_count(1)
        assert all(part in page.url for part in ("pods=holds", "order=Use", "find=TRAIN"))

        await page.get_by_label("Show pods by name").fill("nothing")

        await expect(page.locator("#pods")).to_contain_text("No pod with GPUs matches.")
        await page.reload()
        await expect(page.get_by_label("Show pods by name")).to_have_value("nothing")


async def test_many_pods_are_shown_page_by_page(browser: Browser) -> None:
    world = World()
    nodes = {
        f"node-{at}": [card(f"team/pod-{8 * at + index:03}") for index in range(8)]
        for at in range(MANY // 8 + 1)
    }
    world.add(nodes)
    for at in range(MANY):
        world.hold(f"pod-{at:03}", f"node-{at // 8}", 1)
    async with (
        serving(world) as server,
        looking(browser, server, "?view=pods&order=Pod") as (page, _),
    ):
        await expect(page.locator("#pods .bar .muted")).to_contain_text(
            "250 pods with GPUs, 0 waiting; 1 to 100 of 250 are shown"
        )
        assert await page.locator("#pods tbody tr").count() == 100

        for shown_now in ("101 to 200", "201 to 250"):
            await page.get_by_role("button", name="Next").click()
            await expect(page.locator("#pods .bar .muted")).to_contain_text(f"{shown_now} of 250")
        assert (await shown(page))[-1] == "team/pod-249"
        await expect(page.get_by_role("button", name="Next")).to_be_disabled()

        await page.go_back()

        await expect(page.locator("#pods .bar .muted")).to_contain_text("101 to 200 of 250")


async def test_an_ended_pod_leaves_the_view_without_a_reload(browser: Browser) -> None:
    world = world_of_pods()
    async with serving(world) as server, looking(browser, server, "?view=pods") as (page, _):
        await expect(page.locator("#pods tbody tr")).to_have_count(3)

        world.fleet.remove_pod("uid-patient", world.now)

        await expect(page.locator("#pods tbody tr")).to_have_count(2)


async def test_the_view_fits_a_phone(browser: Browser) -> None:
    world = world_of_pods()
    world.report({"node-a": [Gpu(used_gib=1.0), IDLE, IDLE, IDLE]})
    async with (
        serving(world) as server,
        looking(browser, server, "?view=pods", viewport=PHONE) as (page, _),
    ):
        await expect(page.locator("#pods tbody tr")).to_have_count(3)

        width = await page.evaluate("document.querySelector('#pods').scrollWidth")
        assert width <= PHONE["width"]
