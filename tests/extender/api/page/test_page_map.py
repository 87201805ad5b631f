"""Navigation of the map: groups, zoom, theme, and small screens."""

import asyncio
import re
from typing import Any, Final

import numpy as np
import pytest
from playwright.async_api import Browser, Page, expect

from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.settings.config import Settings
from testkit.cards import CARD_BYTES, IDLE, Gpu
from testkit.page.acting import live, stop_clock
from testkit.page.serving import PHONE, Server, looking, serving
from testkit.page.small_world import ZONE
from testkit.world import World

pytestmark = pytest.mark.page

POOL = "cloud.google.com/gke-nodepool"
ROLES = "node-role.kubernetes.io/"
NODES = {  # zone, pool, model
    "n-1": ("east", "blue", "NVIDIA H100 80GB HBM3"),
    "n-2": ("west", "blue", "NVIDIA A10"),
    "n-3": ("east", "green", "NVIDIA A10"),
    "n-4": ("west", "green", "NVIDIA H100 80GB HBM3"),
}
WORKERS = ("n-1", "n-2", "n-3")
GROUPS = {
    "model": {"A10": ["n-2", "n-3"], "H100 80GB HBM3": ["n-1", "n-4"]},
    POOL: {"blue": ["n-1", "n-2"], "green": ["n-3", "n-4"]},
    ZONE: {"east": ["n-1", "n-3"], "west": ["n-2", "n-4"]},
    ROLES: {"gpu": ["n-4"], "gpu + worker": ["n-1", "n-2", "n-3"]},
}


def world_of_groups() -> World:
    """Return four one-GPU nodes that every grouping sorts differently."""
    world = World()
    infos = []
    for node, (zone, pool, model) in NODES.items():
        roles = ("worker", "gpu") if node in WORKERS else ("gpu",)
        world.register_node(
            node,
            gpus=1,
            labels={ZONE: zone, POOL: pool},
            other_labels={f"{ROLES}{role}": "" for role in roles} | {"disk": "ssd"},
        )
        infos.append(DeviceInfo(node=node, uuid=f"GPU-{node}", index=0, model=model))
    for _ in range(2):
        world.now += 10.0
        world.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=world.now,
                devices=tuple(infos),
                columns={
                    Signal.GPU_UTILIZATION: np.zeros(len(infos)),
                    Signal.MEMORY_USED: np.zeros(len(infos)),
                    Signal.MEMORY_TOTAL: np.full(len(infos), float(CARD_BYTES)),
                },
                measured_at=np.full(len(infos), world.now),
                tenants={},
            )
        )
    return world


async def _spoken(page: Page, keys: int) -> list[str]:
    """Return the nodes that the arrow keys select, one after the other."""
    nodes = []
    for _ in range(keys):
        before = await page.locator("#spoken").inner_text()
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#spoken")).not_to_have_text(before)
        nodes.append((await page.locator("#spoken").inner_text()).partition(",")[0])
    return nodes


@pytest.mark.parametrize("by", GROUPS)
async def test_nodes_stand_together_that_are_of_a_group(browser: Browser, by: str) -> None:
    groups = GROUPS[by]
    async with (
        serving(world_of_groups()) as server,
        looking(browser, server, "?as=table&group=none") as (page, _),
    ):
        await live(page)
        await expect(page.locator("#table tbody tr")).to_have_count(len(NODES))
        await expect(page.locator("#table .group-row")).to_have_count(0)

        await page.locator("#group").select_option(by)

        heads = [
            f"{name}, {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
            for name, nodes in groups.items()
        ]
        await expect(page.locator("#table .group-row")).to_have_text(heads)
        rows = await page.locator("#table tbody tr th").all_inner_texts()
        assert [row.partition(",")[0] for row in rows] == [
            name for group, nodes in groups.items() for name in (group, *nodes)
        ]
        await page.locator("#as-table").click()
        await page.locator("#map").focus()
        assert await _spoken(page, 4) == [node for nodes in groups.values() for node in nodes]


async def test_a_label_that_the_settings_name_is_the_first_to_group_by(browser: Browser) -> None:
    async with (
        serving(world_of_groups()) as server,
        looking(browser, server, "?as=table&group=disk") as (page, _),
    ):
        await live(page)
        await expect(page.locator("#group")).not_to_contain_text("disk")

        server.page.adopt(Settings(pool_labels=("disk",)))
        server.world.now += 10.0

        await expect(page.locator("#group option").nth(1)).to_have_text("disk")
        await expect(page.locator("#group")).to_have_value("disk")
        await expect(page.locator("#table .group-row")).to_have_text(["ssd, 4 nodes"])


_PAINTED: Final = """([condition, than]) => {
    const map = document.getElementById("map");
    // Of a copy: to read the map itself again and again would make it slower.
    const copy = new OffscreenCanvas(map.width, map.height).getContext("2d");
    copy.drawImage(map, 0, 0);
    const { data } = copy.getImageData(0, 0, map.width, map.height);
    const pixels = new Uint32Array(data.buffer);
    const counts = new Map();
    for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
    const painted = pixels.length - Math.max(...counts.values());
    return (condition === "more" ? painted > than : painted < than) && painted;
}"""


async def _until_painted(page: Page, condition: str, than: int) -> int:
    """Wait until the map has more (or fewer) painted pixels than a number; return their number.

    Pixels of the most common color do not count.
    """
    return int(await _until(page, _PAINTED, [condition, than]))


async def _until(page: Page, script: str, argument: object = None) -> Any:
    """Evaluate a script until its result is true, and return that result.

    Playwright's `wait_for_function` compiles its text in each frame, which the page's policy
    forbids.
    """
    async with asyncio.timeout(30):
        while not (result := await page.evaluate(script, argument)):
            await asyncio.sleep(0.02)
    return result


async def test_zooming_makes_cells_larger_and_fit_brings_them_back(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)
        first = await _until_painted(page, "more", 0)

        # Each step is awaited, because an intermediate image may equal that of another step.
        smaller = first
        for _ in range(3):
            await page.locator("#zoom-out").click()
            smaller = await _until_painted(page, "less", smaller)
        await expect(page).to_have_url(re.compile("zoom="))
        await page.locator("#map").focus()
        larger = smaller
        for _ in range(2):
            await page.keyboard.press("+")
            larger = await _until_painted(page, "more", larger)
        await page.keyboard.press("-")
        await _until_painted(page, "less", larger)
        await page.keyboard.press("0")

        await _until_painted(page, "more", larger)
        await expect(page).not_to_have_url(re.compile("zoom="))


async def test_a_zoom_through_many_sizes_changes_the_url_once(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server) as (page, _):
        await stop_clock(page)
        await page.evaluate(
            """() => {
                window.written = 0;
                const write = history.replaceState;
                history.replaceState = (...parts) => {
                    window.written++;
                    write.apply(history, parts);
                };
            }"""
        )
        for _ in range(20):
            await page.evaluate(
                """() => document.getElementById("map").dispatchEvent(new WheelEvent("wheel", {
                    deltaY: 25, ctrlKey: true, bubbles: true, cancelable: true }))"""
            )
            await page.clock.run_for(100)
        assert await page.evaluate("window.written") == 0
        await page.clock.run_for(500)

        assert await page.evaluate("window.written") == 1
        await expect(page).to_have_url(re.compile("zoom="))


async def test_the_theme_changes_by_key_and_by_button_and_stays(
    browser: Browser, server: Server
) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    async with looking(browser, server, color_scheme="light") as (page, _):
        await live(page)
        root = page.locator("html")
        await expect(root).to_have_attribute("data-theme", "light")
        light = await page.evaluate(back)

        await page.keyboard.press("t")

        await expect(root).to_have_attribute("data-theme", "dark")
        assert await page.evaluate(back) != light
        await page.reload()
        await expect(root).to_have_attribute("data-theme", "dark")
        await page.locator("#theme").click()
        await expect(root).to_have_attribute("data-theme", "light")
        assert await page.evaluate(back) == light


async def test_keys_lead_to_each_view(browser: Browser, server: Server) -> None:
    async with looking(browser, server) as (page, faults):
        faults.allowed = ("Failed to load resource: the server responded with a status of 404",)
        await live(page)

        for key, view in (("2", "decisions"), ("3", "pending"), ("4", "holders"), ("1", "fleet")):
            await page.keyboard.press(key)

            await expect(page.locator(f"#{view}")).to_be_visible()
            await expect(page.locator(".tabs [aria-current=page]")).to_have_attribute(
                "data-view", view
            )


@pytest.mark.parametrize("by", ["pod", "owner", "namespace"])
async def test_a_phone_shows_holders_without_scrolling_the_page_sideways(
    browser: Browser, by: str
) -> None:
    world = World()
    pod = "a-notebook-with-a-rather-long-name-that-a-user-made-up-0"
    world.add({"node-with-a-long-name.example.internal": [IDLE]})
    world.add_pod(pod, "node-with-a-long-name.example.internal", started=world.now - 7200.0)
    world.report({"node-with-a-long-name.example.internal": [Gpu(tenants=(f"team/{pod}",))]})
    world.watch(120.0)
    world.why.set_prices({"H100": 2.5})
    options = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    async with (
        serving(world) as server,
        looking(browser, server, f"?view=holders&idle=0&by={by}", **options) as (page, _),
    ):
        await live(page)
        cost = page.locator("#holders tbody td.num").last
        await expect(cost).to_be_attached()

        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        await cost.scroll_into_view_if_needed()
        await expect(cost).to_be_in_viewport()


async def test_a_stale_figure_is_not_crossed_by_its_hatching(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server) as (page, _):
        await live(page)

        await page.evaluate(
            """() => {
                window.drawn = { strokeText: [], fillText: [] };
                for (const name of Object.keys(window.drawn)) {
                    const write = CanvasRenderingContext2D.prototype[name];
                    CanvasRenderingContext2D.prototype[name] = function (...what) {
                        window.drawn[name].push(what.join(" "));
                        return write.apply(this, what);
                    };
                }
            }"""
        )
        await page.keyboard.press("t")  # redraws everything
        await _until(page, "window.drawn.strokeText.length")
        halos, figures = await page.evaluate("[window.drawn.strokeText, window.drawn.fillText]")

    # In the background color, below each figure of the only stale GPU.
    assert {text.split()[0] for text in halos} == {"50", "8.0"}
    assert set(halos) <= set(figures)


async def test_a_model_that_a_label_alone_reports_is_the_same_model(browser: Browser) -> None:
    world = World()
    world.add({"idle": [IDLE]})
    label = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"}
    world.register_node("silent", gpus=1, labels=label)
    async with (
        serving(world) as server,
        looking(browser, server, "?group=model&as=table") as (page, _),
    ):
        await expect(page.locator(".group-row")).to_have_count(1)
        await expect(page.locator(".group-row")).to_contain_text("H100 80GB HBM3, 2 nodes")


async def test_a_phone_shows_the_table_without_scrolling_it_sideways(
    browser: Browser, server: Server
) -> None:
    options = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    async with looking(browser, server, "?as=table", **options) as (page, _):
        row = page.get_by_role("row").filter(has=page.get_by_role("button", name="node-b"))
        memory = row.locator("[data-label='Mean memory']")
        await memory.scroll_into_view_if_needed()

        await expect(memory).to_be_in_viewport()
        await expect(row.locator("[data-label='stale']")).to_have_text("1")
        await expect(row.locator("[data-label='unhealthy']")).to_be_hidden()  # no cell is drawn
        caption = await page.locator("#table caption").bounding_box()
        assert caption is not None
        assert caption["height"] < 40  # one line
        table = "document.getElementById('table')"
        assert await page.evaluate(f"{table}.scrollWidth - {table}.clientWidth") == 0


async def test_a_phone_shows_how_many_of_a_group_are_idle_and_unhealthy(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server, viewport=PHONE) as (page, _):
        await live(page)

        texts = await page.evaluate(
            """async () => {
                const texts = [];
                const write = CanvasRenderingContext2D.prototype.fillText;
                CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
                    texts.push(text);
                    write.call(this, text, ...where);
                };
                document.getElementById("scroller").dispatchEvent(new Event("scroll"));
                for (let frames = 0; frames < 3; frames++) {
                    await new Promise(requestAnimationFrame);
                }
                return texts;
            }"""
        )

        assert any(text.startswith("12 GPUs  ·  5 idle  ·  1 unhealthy") for text in texts), texts


async def test_the_dot_of_a_held_gpu_is_beside_the_number_of_a_small_cell(
    browser: Browser, server: Server
) -> None:
    async with looking(browser, server) as (page, _):
        is_free = await page.evaluate(
            """async () => {
                const { Paint } = await import("./paint.js");
                const paint = new Paint(false), side = 26;
                const idle = paint.stamp(0, 0, side, side, false);
                const held = paint.stamp(8, 0, side, side, false);
                let differs = 0;
                for (let y = 9; y <= 16; y++) for (let x = 9; x <= 16; x++) {
                    differs += idle[y * side + x] !== held[y * side + x];
                }
                return differs === 0 && idle.some((pixel, at) => pixel !== held[at]);
            }"""
        )

        assert is_free
