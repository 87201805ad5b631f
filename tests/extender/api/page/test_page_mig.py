"""MIG instances on the map: inside their card, with a width by their share."""

import pytest
from playwright.async_api import Browser, Page, expect

from testkit.mig import PROFILES, mig_world
from testkit.page.acting import counts, drawn, live, map_corner
from testkit.page.serving import looking, serving

pytestmark = pytest.mark.page

CELL = 70
"""Width of a cell in pixels: a multiple of a card's seven slices, to avoid rounding."""
SLICES = (0, 3, 5, 6, 7)
"""Borders of the instances, in slices."""
FOREIGN_COLOR = "122,63,208"
"""Color of the diamonds in the light theme."""


async def tip_at(page: Page, x: float, y: float) -> str:
    """Return the title of the tooltip at a point of the map, "" without a tooltip."""
    await page.mouse.move(x, y)
    tip = page.locator("#tip .tip-title span")
    return "" if await page.locator("#tip").is_hidden() else await tip.last.inner_text()


async def card_of(page: Page) -> tuple[float, float]:
    """Return the top left corner of the card: keyboard selection frames its first instance."""
    left, top = await map_corner(page)
    for y in range(10, 160, 10):
        for x in range(0, 60, 2):
            if await tip_at(page, left + x, top + y):
                return left + x, top + y
    raise AssertionError("no card is on the map")


async def test_a_card_in_instances_counts_once(browser: Browser) -> None:
    async with serving(mig_world()) as server, looking(browser, server) as (page, _):
        await expect(page.locator("#totals")).to_have_text("1 node, 4 MIG instances on 1 GPU")


async def test_the_table_and_the_choice_of_models_count_the_card_once(browser: Browser) -> None:
    async with serving(mig_world()) as server, looking(browser, server, "?as=table") as (page, _):
        row = page.locator("#table tbody tr")
        await expect(row.locator("[data-label=GPUs]")).to_have_text("4 MIG instances")
        await expect(row.locator("[data-label=idle]")).to_have_text("2")
        await expect(row.locator("[data-label=foreign]")).to_have_text("2")
        await expect(page.locator("#table caption")).to_contain_text(
            "each MIG instance has a state"
        )
        await expect(page.locator("#model option").nth(1)).to_contain_text("(1)")


async def test_instances_are_as_wide_as_their_part_of_the_card(browser: Browser) -> None:
    async with (
        serving(mig_world()) as server,
        looking(browser, server, f"?zoom={CELL}") as (page, _),
    ):
        await live(page)
        left, y = await card_of(page)

        tips = [await tip_at(page, left + x, y + 5) for x in range(0, CELL - 2, 2)]

    widths = {name: 2 * tips.count(name) for name in dict.fromkeys(tips) if name}
    assert list(widths) == ["GPU 0 3g.20gb", "GPU 0 2g.10gb", "GPU 0 1g.5gb"]
    assert widths["GPU 0 3g.20gb"] == pytest.approx(CELL * 3 / 7, abs=4)
    assert widths["GPU 0 2g.10gb"] == pytest.approx(CELL * 2 / 7, abs=4)
    assert widths["GPU 0 1g.5gb"] == pytest.approx(CELL * 2 / 7, abs=4)


async def test_each_mig_instance_is_drawn_in_its_state(browser: Browser) -> None:
    async with (
        serving(mig_world()) as server,
        looking(browser, server, f"?zoom={CELL}") as (page, _),
    ):
        await live(page)
        assert (await counts(page))["foreign"] == "2"
        corner = await map_corner(page)
        left, y = await card_of(page)
        await page.mouse.move(0, 0)
        await drawn(page)
        has_diamond: list[bool] = await page.evaluate(
            """([x, y, side, edges, color]) => {
                const context = document.getElementById("map").getContext("2d");
                const { data } = context.getImageData(x, y, side, side - 8);
                const sums = new Array(side).fill(0);
                for (let at = 0; at < data.length / 4; at++) {
                    if (data.slice(at * 4, at * 4 + 3).join() === color) sums[at % side]++;
                }
                return edges.slice(1).map((end, part) => sums
                    .slice(edges[part] * side / 7, end * side / 7 - 2)
                    .some((count) => count > 0));
            }""",
            [left - corner[0], y - corner[1], CELL, SLICES, FOREIGN_COLOR],
        )

        assert has_diamond == [True, False, False, True]


async def test_the_keyboard_goes_from_instance_to_instance(browser: Browser) -> None:
    async with serving(mig_world()) as server, looking(browser, server) as (page, _):
        await live(page)
        await page.locator("#map").focus()

        for profile, kind in zip(PROFILES, ("foreign", "idle", "idle", "foreign"), strict=True):
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("#spoken")).to_contain_text(f"GPU 0 {profile}: {kind}")
        await page.keyboard.press("Enter")

        await expect(page.locator("#detail .gpu .state")).to_have_text("foreign")
        await expect(page.locator("#detail")).to_contain_text("1g.5gb")
