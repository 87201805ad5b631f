"""What tests of the page do again and again."""

import json
from typing import Any

from playwright.async_api import Page, expect

from tests.extender.served import World, names_question, pod


async def live(page: Page) -> None:
    await expect(page.locator("#status-text")).to_have_text("Live")


async def counts(page: Page) -> dict[str, str]:
    chips = page.locator("#chips .chip")
    return {
        await chip.get_attribute("data-kind") or "": await chip.locator("b").inner_text()
        for chip in await chips.all()
    }


async def decide(world: World, name: str, *nodes: str, **wishes: Any) -> None:
    asked = names_question(*nodes, asker=pod(name, **wishes))
    await world.webhooks().prioritize(json.dumps(asked).encode())
