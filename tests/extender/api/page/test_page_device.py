"""The texts of a GPU's view and of a decision's line, compared with their numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from playwright.async_api import Browser, Locator, expect

from extender.core.devices.readings import DeviceKey, Signal
from extender.sources.prometheus.plots import _PlottedHour
from testkit.api_requests import strict
from testkit.builders import GPU
from testkit.cards import IDLE, Gpu
from testkit.cli_serving import call
from testkit.page.acting import live
from testkit.page.serving import looking, serving
from testkit.world import World

pytestmark = pytest.mark.page

GIB = 1 << 30


def fact(detail: Locator, name: str) -> Locator:
    """Return the value beside a name in a list of facts."""
    return detail.locator(".gpu .facts div").filter(has_text=name).locator("dd").first


async def test_power_heat_and_throttling_are_reported(browser: Browser) -> None:
    world = World()
    signs = {
        Signal.POWER: 312.4,
        Signal.TEMPERATURE: 71.0,
        Signal.CLOCK_EVENT_REASONS: float(0x04 | 0x40),
    }
    calm = signs | {Signal.CLOCK_EVENT_REASONS: 0.0}
    cards = {"node-a": [Gpu(busy=0.9, used_gib=60.0, signs=signs), Gpu(signs=calm)]}
    world.add(cards)
    async with (
        serving(world) as server,
        looking(browser, server, "?node=node-a&gpu=0") as (page, _),
    ):
        detail = page.locator("#detail")
        await expect(fact(detail, "Power")).to_have_text("312 W")
        await expect(fact(detail, "Temperature")).to_have_text("71 °C")
        await expect(fact(detail, "Throttling")).to_have_text(
            "software power cap, hardware thermal slowdown"
        )
        await expect(detail.get_by_role("row", name="power")).to_contain_text("312 W")

        await detail.get_by_role("button", name="GPU 1").click()

        await expect(fact(detail, "Throttling")).to_have_text("none")


async def test_unmeasured_values_are_not_shown_as_zero(browser: Browser) -> None:
    world = World()
    world.add({"node-a": [IDLE]})
    async with (
        serving(world) as server,
        looking(browser, server, "?node=node-a&gpu=0") as (page, _),
    ):
        detail = page.locator("#detail")
        await expect(fact(detail, "Throttling")).to_have_text("unknown")
        await expect(fact(detail, "Tenants")).to_have_text("none seen")
        await expect(detail.locator(".facts dt").filter(has_text="Power")).to_have_count(0)


async def test_replicas_in_use_and_pods_just_placed_are_reported(browser: Browser) -> None:
    world = World()
    labels = {
        "nvidia.com/gpu.count": "1",
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
    }
    world.register_node("shared", allocatable={GPU: 4}, capacity={GPU: 4}, labels=labels)
    world.add_pod("tenant", "shared")
    for _ in range(3):
        world.now += 10.0
        world.report({"shared": [Gpu(busy=0.1, used_gib=4.0, tenants=("team/tenant",))]})
        world.fleet.snapshot()
    async with (
        serving(world) as server,
        looking(browser, server, "?node=shared&gpu=0") as (page, _),
    ):
        detail = page.locator("#detail")
        await expect(fact(detail, "Shares")).to_have_text("1 of 4 in use")
        await expect(fact(detail, "Tenants")).to_have_text("team/tenant")
        await expect(detail.locator(".facts dt").filter(has_text="Just placed")).to_have_count(0)

        await call(world, "prioritize", "shared", name="fresh")

        await expect(detail.locator(".facts").first).to_contain_text("1 of 4 held, 1 assumed")

        world.add_pod("fresh", "shared", started=world.now)

        await expect(fact(detail, "Just placed")).to_contain_text("1 pod")
        await expect(fact(detail, "Shares")).to_have_text("2 of 4 in use")


@dataclass
class FromPrometheus:
    """Prometheus with the last hour of every device.

    Attributes:
        world: world with the clock.
        error: error of every query, "" for none.
    """

    world: World
    error: str = ""
    is_configured: bool = True

    async def hour(self, devices: Sequence[DeviceKey]) -> _PlottedHour:
        if self.error:
            return _PlottedHour(error=self.error)
        steps = 61
        times = tuple(self.world.now - 60.0 * (steps - 1 - step) for step in range(steps))
        return _PlottedHour(
            times=times,
            activity={key: [*[0.25] * (steps - 1), 0.75] for key in devices},
            memory_bytes={key: [40.0 * GIB] * steps for key in devices},
        )

    async def past(
        self, devices: Sequence[DeviceKey], *, seconds: float, steps: int
    ) -> _PlottedHour:
        raise NotImplementedError


async def test_the_last_hour_is_plotted_from_prometheus_where_it_reports(browser: Browser) -> None:
    world = World()
    world.add({"node-a": [IDLE] * 2})
    async with (
        serving(world, plots=FromPrometheus(world)) as server,
        looking(browser, server, "?node=node-a&gpu=1") as (page, _),
    ):
        plots = page.locator("#detail .plots")
        await expect(plots).to_contain_text("The last hour, from Prometheus")
        await expect(plots.get_by_role("img", name="activity")).to_have_attribute(
            "aria-label", "activity: now 75 %, at most 75 % in the last hour"
        )
        await expect(plots.get_by_role("img", name="memory")).to_have_attribute(
            "aria-label", "memory: now 50 %, at most 50 % in the last hour"
        )
        # The line spans the hour, is a quarter high, and rises steeply at its end.
        line = await plots.locator("path.curve").first.get_attribute("d")
        assert line is not None
        assert line.startswith("M0.0 32.5L")
        assert line.endswith("L320.0 11.5")


async def test_the_load_expected_in_the_next_hour_is_plotted_for_gpus_with_pods(
    browser: Browser,
) -> None:
    world = World()
    held = Gpu(busy=0.2, tenants=("team/tenant",))
    world.add({"node-a": [held, IDLE]})
    world.add_pod("tenant", "node-a")
    for busy in (0.6, 0.2, 0.6):
        world.now += 450.0
        world.report({"node-a": [replace(held, busy=busy), IDLE]})
    async with (
        serving(world, plots=FromPrometheus(world)) as server,
        looking(browser, server, "?node=node-a&gpu=0") as (page, _),
    ):
        detail = page.locator("#detail")
        # In the last eighth of an hour it was 60 %, in all longer times half 60 and half 20 %.
        await expect(fact(detail, "Next hour")).to_have_text("about 47 % (40 to 60 %)")
        await expect(detail.get_by_role("img", name="activity")).to_have_attribute(
            "aria-label",
            "activity: now 75 %, at most 75 % in the last hour; next hour: about 47 % (40 to 60 %)",
        )
        band = detail.locator(".plots rect.ahead")
        await expect(band).to_have_count(1)
        assert await band.get_attribute("x") == "320"
        assert await band.get_attribute("y") == f"{43 - 42 * 0.6:.1f}"

        await detail.get_by_role("button", name="GPU 1").click()

        await expect(fact(detail, "Tenants")).to_have_text("none seen")
        await expect(detail.locator(".facts dt").filter(has_text="Next hour")).to_have_count(0)
        await expect(band).to_have_count(0)


async def test_without_an_answer_of_prometheus_the_page_shows_reason_and_source(
    browser: Browser,
) -> None:
    world = World()
    world.add({"node-a": [IDLE]})
    plots = FromPrometheus(world, error="Prometheus does not answer: timed out")
    async with (
        serving(world, plots=plots) as server,
        looking(browser, server, "?node=node-a&gpu=0") as (page, _),
    ):
        shown = page.locator("#detail .plots")
        await expect(shown).to_contain_text("as far as this extender has run")
        await expect(shown).to_contain_text("Prometheus does not answer: timed out")


async def test_decision_line_shows_the_runner_up_and_the_duration(browser: Browser) -> None:
    world = World()
    world.add({"best": [IDLE], "next": [IDLE] * 3})
    async with serving(world) as server, looking(browser, server, "?view=decisions") as (page, _):
        await live(page)
        for verb in ("filter", "prioritize"):
            await call(world, verb, "best", "next", name="requester")
        newer, older = list(world.history)[:2]
        newer.seconds, older.seconds = 0.0123, 0.0045
        answer = await page.request.get(f"{server.url}/v1/explain?pod=team/requester")
        explained = strict(await answer.text())
        (runner_up,) = [one for one in explained["nodes"] if one["node"] == "next"]
        row = page.get_by_role("row", name="team/requester")

        await expect(row.locator("td").nth(3)).to_have_text("best")
        await expect(row.locator(".lost span").first).to_have_text("next")
        assert runner_up["lost_by"]
        await expect(row.locator(".reason")).to_have_text(runner_up["lost_by"])
        await expect(row.locator("td.num").nth(1)).to_have_text("2 of 2")
        await page.reload()  # live values were shown before the times were set
        await expect(row.locator("td.num").first).to_have_text("16.8 ms")
