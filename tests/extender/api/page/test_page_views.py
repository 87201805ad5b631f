import re

import pytest
from playwright.async_api import Browser, Locator, expect

from extender.core.nodes.inventory import PodPhase, PodRecord
from extender.core.policy import Policy, Strategy
from testkit.cards import BUSY, IDLE, Gpu
from testkit.page.acting import decide, live
from testkit.page.serving import looking, serving
from testkit.page.small_world import wait_for_gpus
from testkit.world import World

pytestmark = pytest.mark.page


@pytest.fixture
def why_world() -> World:
    world = World(policy=Policy(strategy=Strategy.SPREAD))
    world.add({"idle": [IDLE] * 3, "busy": [BUSY] * 2, "full": [IDLE]})
    return world


async def test_a_decision_shows_as_it_is_made_and_whether_it_was_followed(
    browser: Browser, why_world: World
) -> None:
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=decisions") as (page, _),
    ):
        await live(page)
        await decide(why_world, "requester", "idle", "full")
        row = page.get_by_role("row", name="team/requester")
        await expect(row).to_contain_text("idle")
        await expect(row.locator(".lost")).to_contain_text("full")
        await expect(row.locator(".reason")).not_to_be_empty()
        await expect(row.locator(".followed")).to_have_text("not bound yet")

        why_world.history.note_bound("uid-requester", "full")

        await expect(row.locator(".followed")).to_contain_text("full")
        await row.get_by_role("button", name="Why, for team/requester").click()
        await expect(page.locator(".sheet")).to_contain_text("idle was first of 2 nodes")
        await expect(row).to_have_attribute("aria-current", "true")

        await page.get_by_role("button", name="Close").click()

        await expect(row).not_to_have_attribute("aria-current", "true")


async def test_every_decision_in_view_says_why_its_runner_up_lost(
    browser: Browser, why_world: World
) -> None:
    names = ("a", "b", "c")
    for name in names:
        await decide(why_world, name, "idle", "full")
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=decisions") as (page, _),
    ):
        for name in names:
            row = page.get_by_role("row", name=f"team/{name}")
            await expect(row.locator(".reason")).not_to_be_empty()


async def test_an_explanation_has_each_signal_with_its_source_and_age(
    browser: Browser, why_world: World
) -> None:
    why_world.now += 10.0
    why_world.report({"idle": [Gpu(age=5.0)] * 3, "full": [IDLE]})
    await decide(why_world, "requester", "idle", "full")
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=decisions") as (page, _),
    ):
        await live(page)
        await page.get_by_role("button", name="Why, for team/requester").click()
        device = page.locator(".sheet li", has_text="GPU 0: idle").first
        await expect(device.locator(".source")).to_have_text(
            ["utilization (GPU utilization), memory: prometheus, 5 s before"]
        )

        result = await page.evaluate(
            """async () => (await import("./signals.js")).sourcesOf({ signals: {
                utilization: { source: "agent", age_seconds: 2, signal: "sm_active_ratio" },
                memory: { source: "prometheus", age_seconds: 40 },
                temperature: { source: "agent", age_seconds: 2, temperature_celsius: 71.2 },
                throttling: { source: "agent", age_seconds: 2, reasons: ["power cap", "heat"] },
            } })"""
        )

        assert result == [
            "utilization (SMs), temperature (71 °C), throttling (power cap, heat): "
            "agent, 2 s before",
            "memory: prometheus, 40 s before",
        ]


async def test_decisions_in_shadow_are_marked(browser: Browser, why_world: World) -> None:
    why_world.placer.is_shadow = True
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=decisions") as (page, _),
    ):
        await live(page)
        await decide(why_world, "requester", "idle", "full")
        row = page.get_by_role("row", name="team/requester")
        await expect(row.locator(".followed")).to_have_text("shadow not bound yet")

        why_world.history.note_bound("uid-requester", "full")

        await expect(row.locator(".followed")).to_have_text("shadow went to full")
        await row.get_by_role("button", name="Why, for team/requester").click()
        await expect(page.locator(".sheet")).to_contain_text(
            "kube-scheduler did not receive the choice"
        )


async def test_a_waiting_pod_shows_the_reasons_as_kube_scheduler_counts_them(
    browser: Browser, why_world: World
) -> None:
    wait_for_gpus(why_world, "train-7", 2)
    async with serving(why_world) as server, looking(browser, server, "?view=pending") as (page, _):
        card = page.locator(".card")

        await expect(card.locator("h3")).to_have_text("team/train-7")
        await expect(card).to_contain_text("Insufficient nvidia.com/gpu")
        await expect(card).to_contain_text("node(s) had too few working GPUs")
        await expect(card).to_contain_text("What would have to change")


async def test_waiting_pods_are_grouped_by_reason_and_searched(
    browser: Browser, why_world: World
) -> None:
    wait_for_gpus(why_world, "first", 2)
    wait_for_gpus(why_world, "second", 2)
    why_world.fleet.apply_pod(
        PodRecord(
            uid="uid-gated",
            namespace="team",
            name="gated",
            node="",
            phase=PodPhase.PENDING,
            resources={"nvidia.com/gpu": 1},
            is_gated=True,
        )
    )
    async with serving(why_world) as server, looking(browser, server, "?view=pending") as (page, _):
        groups = page.locator("#pending section > .group-name")
        await expect(groups).to_have_count(2)
        await expect(groups.filter(has_text="held back by scheduling gates, 1 pod")).to_be_visible()

        await page.get_by_label("Show waiting pods").fill("second")

        await expect(page.locator(".card h3")).to_have_text("team/second")

        await page.get_by_label("Show waiting pods").fill("nothing like it")

        await expect(page.locator("#pending")).to_contain_text("No waiting pod matches.")


def _leave_idle(world: World) -> None:
    """Let a pod hold a GPU for two hours, of which two minutes are measured as idle."""
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
    world.report({"full": [Gpu(tenants=("team/notebook",))]})
    world.watch(120.0)


COST = 2.5 * 7320 / 3600
"""Cost of a GPU for the time that the pod has held it; it was idle for two minutes, less the first
interval."""


async def _figures(row: Locator) -> list[str]:
    """Return the last values of a row: hours, idle hours, used cost, idle cost."""
    return (await row.locator("td.num").all_inner_texts())[-4:]


async def test_idle_holders_show_use_and_idle_time(browser: Browser, why_world: World) -> None:
    _leave_idle(why_world)
    why_world.why.set_prices({"H100": 2.5, "A100": 9.0})
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        row = page.get_by_role("row", name="team/notebook")
        await expect(row).to_contain_text("StatefulSet notebook")
        used, idle = COST - 2.5 * 60 / 3600, 2.5 * 60 / 3600
        figures = ["2.0", "0.0", f"{used:.2f}", f"{idle:.2f}"]
        assert await _figures(row) == figures
        head = await page.locator("#holders thead th").all_inner_texts()
        assert head[-3:] == ["Cost used", "Cost idle", "Why"]
        said = f"cost {used:.2f} used, {idle:.2f} idle"
        await expect(page.locator("#holders [role=status]")).to_contain_text(said)

        for by, name in (("owner", "team/StatefulSet notebook"), ("namespace", "team")):
            await page.locator("#holders select").nth(1).select_option(by)
            row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name))
            await expect(row).to_be_visible()
            assert await _figures(row) == figures
            await expect(page.locator("#holders [role=status]")).to_contain_text(said)


async def test_without_a_price_list_no_cost_is_shown(browser: Browser, why_world: World) -> None:
    _leave_idle(why_world)
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        await expect(page.get_by_role("row", name="team/notebook")).to_be_visible()
        await expect(page.locator("#holders")).not_to_contain_text(
            re.compile("cost", re.IGNORECASE)
        )


async def test_more_holders_than_are_listed_are_in_the_sums(
    browser: Browser, why_world: World
) -> None:
    cards = {f"many-{node}": [Gpu(tenants=(f"team/held-{node}",))] for node in range(310)}
    why_world.add(cards, readings=1)
    for node in range(310):
        why_world.add_pod(f"held-{node}", f"many-{node}", started=why_world.now - 3600.0)
    why_world.report(cards)
    why_world.fleet.snapshot()
    why_world.why.idleness.look()
    why_world.why.set_prices({"H100": 2.0})
    async with (
        serving(why_world) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        note = page.locator("#holders [role=status]")
        await expect(note).to_contain_text("310 pods: 310.0 GPU-hours")
        await expect(note).to_contain_text("cost 620.00 used")
        await expect(note).to_contain_text("the first 300 of 310 are listed")
        await expect(page.locator("#holders tbody tr")).to_have_count(300)

        await page.locator("#holders select").nth(1).select_option("namespace")

        await expect(page.locator("#holders tbody tr")).to_have_count(1)
        await expect(page.locator("#holders tbody tr")).to_contain_text("620.00")
