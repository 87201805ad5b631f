import asyncio
from dataclasses import replace

import pytest
from playwright.async_api import Browser, expect

from extender.core.devices.readings import DeviceKey, ForeignProcess
from testkit.cards import BUSY, IDLE, Gpu
from testkit.page.acting import counts, live, map_corner
from testkit.page.serving import Server, looking, serving
from testkit.page.small_world import CARDS, wait_for_gpus
from testkit.world import World

pytestmark = pytest.mark.page


# --- the fleet ------------------------------------------------------------------------------------


async def test_each_gpu_counts_under_its_state(browser: Browser, server: Server) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)

        assert await counts(page) == {
            "idle": "5",
            "held": "1",
            "busy": "1",
            "stale": "1",
            "unknown": "1",
            "unhealthy": "1",
            "foreign": "1",
            "excluded": "1",
        }
        await expect(page.locator("#totals")).to_have_text("4 nodes, 12 GPUs")


async def test_the_map_distinguishes_states_by_shape_not_by_colour_alone(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)

        shapes = await page.evaluate(
            """async () => {
                const { Paint } = await import("./paint.js");
                const paint = new Paint(false);
                const states = [0, 8, 1, 2, 3, 4, 5, 6];
                return [4, 7, 14, 40].map((side) => states.map((state) => {
                    // One value for all, and of each colour only in which order they come.
                    const pixels = paint.stamp(state, 100, side, side, false);
                    const colors = [...new Set(pixels)];
                    return Array.from(pixels, (pixel) => colors.indexOf(pixel)).join("");
                }));
            }"""
        )

        for of_size in shapes:
            assert len(set(of_size)) == 8


async def test_a_busy_gpu_never_has_the_color_of_an_idle_one(browser: Browser) -> None:
    world = World()
    cards = {"node": [Gpu(busy=0.02, used_gib=70.0, tenants=("team/loaded",))]}
    world.add(cards)
    world.add_pod("loaded", "node", started=world.now - 3600.0)
    world.report(cards)
    async with serving(world) as server, looking(browser, server) as (page, _):
        await live(page)
        assert (await counts(page))["busy"] == "1"

        shade = await page.evaluate(
            """async () => {
                const { Fleet, BUSY, IDLE } = await import("./fleet.js");
                const fleet = Object.assign(new Fleet(), { state: [BUSY, IDLE], activity: [4, 4] });
                return [0, 1].map((device) => fleet.shade(device, "activity") / 200);
            }"""
        )

        assert shade == [0.3, 0.02]  # the threshold, and the value


async def test_the_tooltip_says_why_and_which_pods_hold_the_gpu(browser: Browser) -> None:
    world = World()
    cards = {"node": [Gpu(xid=79.0), Gpu(busy=0.9, tenants=("team/train",))]}
    world.add(cards)
    world.add_pod("train", "node", started=world.now - 3600.0)
    world.report(cards)
    async with serving(world) as server, looking(browser, server, "?zoom=40") as (page, _):
        await live(page)
        left, top = await map_corner(page)

        await page.mouse.move(left + 30, top + 70)

        tip = page.locator("#tip")
        await expect(tip.locator(".tip-why")).to_have_text(
            "cannot work: XID 79: fallen off the bus"
        )

        await page.mouse.move(left + 75, top + 70)

        await expect(tip).to_contain_text("excluded")
        await expect(tip).to_contain_text("excluded with its node: GPU 0 has XID 79")
        await expect(tip).to_contain_text("held by team/train")


async def test_a_foreign_gpu_names_the_processes_that_use_it(browser: Browser) -> None:
    world = World()
    world.add({"node": [Gpu(used_gib=68.0), IDLE]})
    process = ForeignProcess(
        pid=4711,
        name="python3<b>",
        memory_bytes=68 << 30,
        started_at=0.0,
        pod="",
        container="docker-3f2a1b4c5d6e.scope",
    )
    others = [replace(process, pid=pid, pod="team/sneaky", started_at=None) for pid in (1, 2)]
    world.fleet.note_foreign("node", {DeviceKey(("GPU-node-0", "")): (process, *others)})
    words = (
        "68.0 GiB by python3<b>, PID 4711, outside Kubernetes (docker-3f2a1b4c5d6e.scope), "
        "since 1 Jan, "
    )
    async with serving(world) as server, looking(browser, server, "?zoom=40") as (page, _):
        await live(page)
        left, top = await map_corner(page)

        await page.mouse.move(left + 30, top + 70)

        tip = page.locator("#tip")
        await expect(tip).to_contain_text("foreign")
        await expect(tip.locator("li").first).to_contain_text(words)
        await expect(tip.locator("li")).to_have_count(3)
        await expect(tip).to_contain_text("and 1 process more")

        await page.mouse.click(left + 30, top + 70)

        detail = page.locator("#detail")
        await expect(detail.locator("dd li").first).to_contain_text(words)
        await expect(detail.locator("dd li").last).to_contain_text("in pod team/sneaky (docker-")


async def test_overview_shows_idle_holders_and_waiting_pods(browser: Browser) -> None:
    world = World()
    world.add({"node": [IDLE]})
    wait_for_gpus(world, "patient", 2)
    async with serving(world) as server, looking(browser, server) as (page, _):
        overview = page.locator("#overview")
        await expect(overview).to_contain_text("no GPU-hours are recorded since")

        await overview.get_by_role("button", name="1 pod waits").click()

        await expect(page.locator(".card h3")).to_have_text("team/patient")


async def test_a_change_shows_without_a_reload(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)

        world.now += 10.0
        world.report(CARDS | {"node-c": [IDLE, IDLE]})

        await expect(page.locator("[data-kind=unhealthy] b")).to_have_text("0")
        await expect(page.locator("[data-kind=idle] b")).to_have_text("7")


async def test_an_added_node_shows_without_a_reload(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)

        world.add({"node-new": [IDLE] * 8})

        await expect(page.locator("#totals")).to_have_text("5 nodes, 20 GPUs")


async def test_search_filters_and_grouping_stand_in_the_url(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)
        await page.locator("#search").fill("node-b")
        await page.locator("[data-kind=stale]").click()
        await page.locator("#group").select_option("topology.kubernetes.io/zone")
        await page.locator("#color").select_option("memory")
        query = await page.evaluate("location.search")

    async with looking(browser, server, query) as (page, _):
        await live(page)

        await expect(page.locator("#search")).to_have_value("node-b")
        await expect(page.locator("[data-kind=stale]")).to_have_attribute("aria-pressed", "true")
        await expect(page.locator("#group")).to_have_value("topology.kubernetes.io/zone")
        await expect(page.locator("#color")).to_have_value("memory")
        await expect(page.locator("#totals")).to_have_text("1 of 4 nodes")


async def test_a_search_without_a_match_says_so_and_leads_back(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server, "?q=nowhere") as (page, _):
        await expect(page.locator("#empty")).to_contain_text("No node matches")

        await page.get_by_role("button", name="Show all nodes").click()

        await expect(page.locator("#totals")).to_have_text("4 nodes, 12 GPUs")


async def test_the_keyboard_alone_leads_from_gpu_to_gpu_and_into_one(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)
        await page.locator("#map").focus()

        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#spoken")).to_contain_text("node-a, GPU 0: idle")
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#spoken")).to_contain_text("node-a, GPU 1: idle")
        await page.keyboard.press("Enter")
        await expect(page.locator("#detail h2")).to_have_text("node-a")
        await page.keyboard.press("Escape")

        await expect(page.locator("#detail")).to_be_hidden()
        await page.keyboard.press("/")
        await expect(page.locator("#search")).to_be_focused()


async def test_the_table_says_the_same_as_the_map(browser: Browser, server: Server) -> None:
    async with looking(browser, server, "?as=table") as (page, _):
        row = page.get_by_role("row", name="node-b")

        await expect(row.get_by_role("cell")).to_have_text(
            ["H100 80GB HBM3", "4", "1", "1", "1", "1", "0", "0", "0", "0", "37 %", "25 %"]
        )


async def test_everything_that_can_be_used_has_a_name(browser: Browser, server: Server) -> None:
    for query in ("?node=node-b&gpu=1", "?view=decisions", "?as=table"):
        async with looking(browser, server, query) as (page, _):
            await live(page)

            unnamed = await page.evaluate(
                """() => [...document.querySelectorAll("button, input, select, canvas[tabindex]")]
                    .filter((one) => one.checkVisibility())
                    .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim()
                        || one.labels?.length))
                    .map((one) => one.outerHTML)"""
            )

            assert unnamed == []


# --- a node and a GPU -----------------------------------------------------------------------------


async def test_a_gpu_shows_its_state_with_reason_and_source(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server, "?node=node-d&gpu=0") as (page, _):
        detail = page.locator("#detail")

        await expect(detail.locator(".gpu .state")).to_have_text("foreign")
        await expect(detail.locator(".gpu .why")).to_contain_text("no pod holds it")
        await expect(detail).to_contain_text("30.0 GiB of 80.0 GiB")
        await expect(detail.get_by_role("row", name="GPU utilization")).to_contain_text("80 %")
        await expect(detail.get_by_role("row", name="GPU utilization")).to_contain_text(
            "prometheus"
        )


async def test_a_gpu_of_the_map_opens_as_the_same_gpu(browser: Browser, server: Server) -> None:
    async with looking(browser, server, "?node=node-b&gpu=0") as (page, _):
        detail = page.locator("#detail")
        await expect(detail.locator(".gpu .state")).to_have_text("busy")
        await expect(detail).to_contain_text("team/train")

        await detail.get_by_role("button", name="GPU 3").click()

        await expect(detail.locator(".gpu h3")).to_contain_text("GPU 3")
        await expect(detail.locator(".gpu .state")).to_have_text("idle")
        assert "gpu=3" in await page.evaluate("location.search")


async def test_the_last_hour_is_plotted_from_our_own_memory(
    browser: Browser, server: Server, world: World
) -> None:
    async with asyncio.timeout(60):
        while not server.page.memory._next:  # only its own first entry is dropped
            await asyncio.sleep(0.01)
    for minute in range(61):
        world.now += 60.0
        world.report(CARDS | {"node-a": [IDLE if minute % 2 else BUSY] * 4})
        for _ in server.page.memory.note_in_steps():
            pass

    async with looking(browser, server, "?node=node-a&gpu=0") as (page, _):
        plot = page.get_by_role("img", name="activity")

        await expect(plot).to_have_attribute(
            "aria-label", "activity: now 90 %, at most 90 % in the last hour"
        )


async def test_a_node_that_goes_away_is_reported(
    browser: Browser, server: Server, world: World
) -> None:
    async with looking(browser, server, "?node=node-a") as (page, faults):
        faults.allowed = ("Failed to load resource: the server responded with a status of 404",)
        await expect(page.locator("#detail .gpu")).to_be_visible()

        world.fleet.remove_node("node-a")

        await expect(page.locator("#detail")).to_contain_text("not known any more")
        await expect(page.locator("#totals")).to_have_text("3 nodes, 8 GPUs")
