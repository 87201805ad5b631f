"""Idle holders: their devices on a node, and pods that use only part of their devices."""

import numpy as np
import pytest
from playwright.async_api import Browser, expect

from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.core.nodes.inventory import NodeRecord, PodPhase, PodRecord
from testkit.cards import BUSY, CARD_BYTES, IDLE
from testkit.page.acting import live
from testkit.page.serving import looking, serving
from testkit.world import World
from tests.extender.api.page.feeds import held_by

pytestmark = pytest.mark.page

PROFILE = "1g.10gb"
INSTANCES = tuple(
    DeviceInfo(
        node="n",
        uuid="GPU-0",
        gpu_instance_id=str(number),
        index=0,
        model="NVIDIA H100 80GB HBM3",
        mig_profile=PROFILE,
    )
    for number in range(7, 14)
)
WHOLE = DeviceInfo(node="n", uuid="GPU-1", index=1, model="NVIDIA H100 80GB HBM3")


def cut_world() -> World:
    """Return a node whose first card has seven instances; pods hold one and the other card."""
    world = World()
    offered = {f"nvidia.com/mig-{PROFILE}": 7, "nvidia.com/gpu": 1}
    world.fleet.apply_node(NodeRecord(name="n", allocatable=offered, capacity=offered))
    for name, resource in (("whole", "nvidia.com/gpu"), ("part", f"nvidia.com/mig-{PROFILE}")):
        world.fleet.apply_pod(
            PodRecord(
                uid=f"uid-{name}",
                namespace="team",
                name=name,
                node="n",
                phase=PodPhase.RUNNING,
                resources={resource: 1},
                bound_at=world.now,
                started_at=world.now,
            )
        )
    devices = (*INSTANCES, WHOLE)
    for _ in range(3):
        world.now += 10.0
        world.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=world.now,
                devices=devices,
                columns={
                    Signal.GRAPHICS_ACTIVE: np.zeros(len(devices)),
                    Signal.MEMORY_USED: np.zeros(len(devices)),
                    Signal.MEMORY_TOTAL: np.full(len(devices), float(CARD_BYTES)),
                },
                measured_at=np.full(len(devices), world.now),
                tenants={WHOLE.key: ("team/whole",), INSTANCES[4].key: ("team/part",)},
            )
        )
        world.fleet.snapshot()
    world.watch(120.0)
    return world


@pytest.mark.parametrize(
    ("pod", "name", "uuid"),
    [("whole", "GPU 1", "GPU-1"), ("part", f"GPU 0 {PROFILE}", "GPU-0, instance 11")],
)
async def test_a_holders_node_opens_at_the_device_that_it_holds(
    browser: Browser, pod: str, name: str, uuid: str
) -> None:
    async with (
        serving(cut_world()) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        await live(page)

        row = page.get_by_role("row", name=f"team/{pod}")
        await row.get_by_role("button").click()

        shown = page.locator("#detail section.gpu")
        await expect(shown.locator("h3")).to_contain_text(name)
        await expect(shown).to_contain_text(uuid)


async def test_a_pod_that_uses_some_of_its_gpus_is_listed_and_marked(browser: Browser) -> None:
    world = World()
    cards = {
        "n": [held_by("some", BUSY), held_by("some", IDLE), held_by("some", IDLE)],
        "m": [held_by("none", IDLE), held_by("all", BUSY)],
    }
    world.add(cards)
    for name, node, gpus in (("some", "n", 3), ("none", "m", 1), ("all", "m", 1)):
        world.add_pod(name, node, gpus=gpus, started=world.now)
    for _ in range(10):
        world.now += 60.0
        world.report(cards)
        world.why.idleness.look()
    async with (
        serving(world) as server,
        looking(browser, server, "?view=holders&idle=300") as (page, _),
    ):
        await live(page)

        heads = page.locator("#holders tbody th")
        await expect(heads).to_have_count(2)
        some = page.get_by_role("row", name="team/some")
        await expect(some).to_contain_text("2 of 3")
        await expect(some.locator(".state")).to_have_text("uses 1 of 3 GPUs")
        none = page.get_by_role("row", name="team/none")
        await expect(none).to_contain_text("1 of 1")
        await expect(none.locator(".state")).to_have_count(0)
        note = page.locator("#holders [role=status]")
        await expect(note).to_contain_text("1 of those listed uses some of its GPUs")

        await page.locator("#holders select").nth(1).select_option("namespace")

        await expect(heads).to_have_count(1)
        await expect(page.locator("#holders tbody tr")).to_contain_text("3 of 4")


async def test_holders_are_sorted_by_the_column_that_the_reader_chooses(browser: Browser) -> None:
    async with (
        serving(cut_world()) as server,
        looking(browser, server, "?view=holders&idle=0") as (page, _),
    ):
        names = page.locator("#holders tbody th")
        await expect(names).to_have_count(2)
        listed = await names.all_inner_texts()

        await page.get_by_role("columnheader", name="Pod").get_by_role("button").click()

        await expect(names).to_have_text(["team/part", "team/whole"])

        await page.get_by_role("columnheader", name="GPU-hours").get_by_role("button").click()

        # a seventh of a GPU costs less
        await expect(names).to_have_text(["team/whole", "team/part"])
        await expect(page.locator("[aria-sort=descending]")).to_have_count(1)

        await page.get_by_role("columnheader", name="GPU-hours").get_by_role("button").click()

        await expect(names).to_have_text(listed)
        await expect(page.locator("[aria-sort]")).to_have_count(0)
