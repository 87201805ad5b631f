import asyncio

import pytest
from playwright.async_api import Browser, Route, expect

from extender.core.inventory import PodPhase, PodRecord
from tests.extender.observe.page.acting import decide, live
from tests.extender.observe.page.conftest import wait_for_gpus
from tests.extender.observe.page.serving import looking, serving
from tests.extender.observe.whys import WhyWorld
from tests.extender.served import BUSY, IDLE, Gpu

pytestmark = pytest.mark.page


@pytest.fixture
def why_world() -> WhyWorld:
    world = WhyWorld()
    world.add({"idle": [IDLE] * 3, "busy": [BUSY] * 2, "full": [IDLE]})
    return world


async def test_a_decision_shows_as_it_is_made_and_whether_it_was_followed(
    browser: Browser, why_world: WhyWorld
) -> None:
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=decisions") as (page, _),
    ):
        await live(page)
        await decide(why_world, "asker", "idle", "full")
        row = page.get_by_role("row", name="team/asker")
        await expect(row).to_contain_text("idle")
        await expect(row.locator(".lost")).to_contain_text("full")
        await expect(row.locator(".reason")).not_to_be_empty()
        await expect(row.locator(".followed")).to_have_text("not bound yet")

        why_world.history.note_bound("uid-asker", "full")

        await expect(row.locator(".followed")).to_contain_text("full")
        await row.get_by_role("button", name="Why, for team/asker").click()
        await expect(page.locator(".sheet")).to_contain_text("idle was first of 2 nodes")


async def test_decisions_in_shadow_are_marked(browser: Browser, why_world: WhyWorld) -> None:
    why_world.placer.is_shadow = True
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=decisions") as (page, _),
    ):
        await live(page)
        await decide(why_world, "asker", "idle", "full")
        row = page.get_by_role("row", name="team/asker")
        await expect(row.locator(".followed")).to_have_text("shadow not bound yet")

        why_world.history.note_bound("uid-asker", "full")

        await expect(row.locator(".followed")).to_have_text("shadow went to full")
        await row.get_by_role("button", name="Why, for team/asker").click()
        await expect(page.locator(".sheet")).to_contain_text("kube-scheduler was not told")


async def test_a_waiting_pod_tells_the_reasons_as_kube_scheduler_counts_them(
    browser: Browser, why_world: WhyWorld
) -> None:
    wait_for_gpus(why_world, "train-7", 2)
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=pending") as (page, _),
    ):
        card = page.locator(".card")

        await expect(card.locator("h3")).to_have_text("team/train-7")
        await expect(card).to_contain_text("Insufficient nvidia.com/gpu")
        await expect(card).to_contain_text("node(s) had too few working GPUs")
        await expect(card).to_contain_text("What would have to change")


def _leave_idle(world: WhyWorld) -> None:
    """A pod has held a GPU for two hours, two minutes seen idle."""
    world.fleet.apply_pod(
        PodRecord(
            uid="uid-a",
            namespace="team",
            name="notebook",
            node="full",
            phase=PodPhase.RUNNING,
            resources={"nvidia.com/gpu": 1},
            bound_at=world.now - 7200.0,
            started_at=world.now - 7200.0,
            owner="StatefulSet notebook",
        )
    )
    world.tell({"full": [Gpu(tenants=("team/notebook",))]})
    world.watch(120.0)


async def test_idle_holders_show_with_their_cost(browser: Browser, why_world: WhyWorld) -> None:
    _leave_idle(why_world)
    async with (
        serving(why_world, prices={"H100": 2.5, "A100": 9.0}) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        row = page.get_by_role("row", name="team/notebook")
        await expect(row).to_contain_text("StatefulSet notebook")
        await expect(row).to_contain_text("5.08")

        await page.locator("#holders select").nth(1).select_option("owner")

        await expect(page.get_by_role("row", name="team/StatefulSet notebook")).to_contain_text(
            "5.08"
        )


async def test_holders_that_came_before_the_fleet_get_their_cost_with_it(
    browser: Browser, why_world: WhyWorld
) -> None:
    _leave_idle(why_world)
    is_fleet_told, is_over = asyncio.Event(), asyncio.Event()

    async def wait(route: Route) -> None:
        await (is_over if is_fleet_told.is_set() else is_fleet_told).wait()
        await route.continue_()

    async with (
        serving(why_world, prices={"H100": 2.5}) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        await page.route("**/v1/page/stream", wait)
        await page.reload()
        row = page.get_by_role("row", name="team/notebook")
        await expect(row).to_contain_text("StatefulSet notebook")
        await expect(row).not_to_contain_text("5.08")

        # Once it has a stream, the page asks for the holders again: those stay away.
        await page.route("**/v1/holders*", wait)
        is_fleet_told.set()

        await expect(row).to_contain_text("5.08")
        is_over.set()
