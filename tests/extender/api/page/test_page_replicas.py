"""The page of one replica shows decisions of the others: real extenders on one cluster."""

import pytest
from playwright.async_api import Browser, expect

from simulation.objects import pod_object
from testkit.page.acting import live
from testkit.page.serving import looking_at
from testkit.replicas import NODES, Replica, running

pytestmark = pytest.mark.page


def page_of(replica: Replica) -> str:
    return f"{replica.extender.addresses[-1]}/page/"


async def test_decisions_of_another_replica_show_reasons_and_binding(browser: Browser) -> None:
    async with (
        running(2) as (cluster, (first, second)),
        looking_at(browser, f"{page_of(second)}?view=decisions") as (page, _),
    ):
        await first.choose(cluster.control.create_pod(pod_object("before")))
        await page.reload()
        await live(page)
        await expect(page.get_by_role("row", name="default/before")).to_be_visible()

        created = cluster.control.create_pod(pod_object("far"))
        chosen = await first.choose(created)
        await second.choose(cluster.control.create_pod(pod_object("near")))

        row = page.get_by_role("row", name="default/far")
        await expect(row).to_be_visible()
        await expect(page.get_by_role("row", name="default/near")).to_be_visible()
        await expect(row.locator(".reason")).not_to_be_empty()
        await expect(row.locator(".followed")).to_have_text("not bound yet")
        names = page.locator("#decisions tbody tr button.link[aria-label]")
        await expect(names).to_have_text(["default/near", "default/far", "default/before"])

        other = next(name for name in NODES if name != chosen)
        cluster.control.bind("default", "far", other)

        await expect(row.locator(".followed")).to_contain_text(other)
        await row.get_by_role("button", name="Why, for default/far").click()
        await expect(page.locator(".sheet")).to_contain_text(f"{chosen} was first of 4 nodes")
