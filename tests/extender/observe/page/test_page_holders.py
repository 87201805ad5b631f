"""Idle holders: which device of a node is theirs, and who uses some of what they hold."""

import numpy as np
import pytest
from playwright.async_api import Browser, expect

from extender.core.inventory import NodeRecord, PodPhase, PodRecord
from extender.core.readings import DeviceInfo, Readings, Signal
from tests.extender.observe.page.acting import live
from tests.extender.observe.page.serving import looking, serving
from tests.extender.observe.whys import WhyWorld
from tests.extender.served import CARD_BYTES

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


def cut_world() -> WhyWorld:
    """Return a node whose first card is cut in seven; pods hold one of these and the other card."""
    world = WhyWorld()
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
