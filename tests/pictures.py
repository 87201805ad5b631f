"""Write the pictures of the documentation, from the demo's page: `python -m tests.pictures`."""

import asyncio
import io
from pathlib import Path
from typing import Final

from playwright.async_api import expect
from rich.console import Console

from simulation.demo import COLUMNS, playing
from testkit.page.serving import browsing, looking_at

FOLDER: Final = Path(__file__).parent.parent / "docs" / "pictures"
WIDTH: Final = 1360
RECORDED_MS: Final = 180_000
"""Longest time until enough GPU-hours are recorded for a sum, and readings show the demo's pods."""
PICTURES: Final = {
    "page.png": ("?theme=light&group=model", 470),
    "decisions.png": ("?theme=light&view=decisions", 400),
    "pods.png": ("?theme=light&view=pods&order=Use", 400),
}
"""Name of each picture, its view, and its height."""


async def main() -> None:
    """Play the demo and write every picture."""
    quiet = Console(file=io.StringIO(), width=COLUMNS)
    async with playing(quiet) as url, browsing() as browser:
        async with looking_at(browser, f"{url}/page/") as (page, _):
            hours = page.locator("#overview")
            await expect(hours).to_contain_text("held idle", timeout=RECORDED_MS)
        for name, (view, height) in PICTURES.items():
            size = {"width": WIDTH, "height": height}
            async with looking_at(browser, f"{url}/page/{view}", viewport=size) as (page, _):
                await expect(page.locator("#status-text")).to_have_text("Live")
                await page.wait_for_timeout(2000)  # the map is drawn, and decisions have arrived
                await page.screenshot(path=FOLDER / name)


if __name__ == "__main__":
    asyncio.run(main())
