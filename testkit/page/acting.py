"""Actions that tests of the page share."""

import asyncio
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from playwright.async_api import Page, Request, Route, expect

from testkit.page.serving import CHANGED
from testkit.webhook_requests import names_request, pod
from testkit.world import World


async def live(page: Page) -> None:
    await expect(page.locator("#status-text")).to_have_text("Live")


async def stop_clock(page: Page) -> None:
    """Reload the page with a clock that only `page.clock.run_for` advances."""
    CHANGED.add(page)
    now = datetime.now(UTC)
    await page.clock.install(time=now)
    await page.clock.pause_at(now + timedelta(hours=1))
    await page.reload()
    await live(page)


async def drawn(page: Page) -> None:
    """Wait until all requested frames are drawn."""
    # The first frame may belong to an earlier request.
    await page.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


async def map_corner(page: Page) -> tuple[float, float]:
    """Return the top left corner of the map, once the bar above it is complete."""
    await expect(page.locator("#overview button")).to_have_count(2)
    box = await page.locator("#map").bounding_box()
    assert box is not None
    return box["x"], box["y"]


async def counts(page: Page) -> dict[str, str]:
    chips = page.locator("#chips .chip")
    return {
        await chip.get_attribute("data-kind") or "": await chip.locator("b").inner_text()
        for chip in await chips.all()
    }


async def decide(world: World, name: str, *nodes: str, **wishes: Any) -> None:
    body = names_request(*nodes, requester=pod(name, **wishes))
    await world.webhooks().prioritize(json.dumps(body).encode())


async def choose(page: Page, **what: str) -> None:
    """Change the view as a link of the page does, e.g. `node="node-a"`."""
    await page.evaluate("async (what) => (await import('./url.js')).go(what, true)", what)


@dataclass
class Held:
    """Answer that the server has sent and the page has not received yet."""

    page: Page
    _is_taken: bool = False
    _is_given: asyncio.Event = field(default_factory=asyncio.Event)
    _may_pass: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def given(self) -> None:
        """Wait until the server has answered."""
        async with asyncio.timeout(60):
            await self._is_given.wait()

    async def release(self) -> None:
        """Forward the answer to the page; return once the page has processed it."""
        self._may_pass.set()
        async with asyncio.timeout(60):
            await self._is_over.wait()
        await drawn(self.page)

    async def handle(self, route: Route) -> None:
        """Get the server's answer and hold it; let other requests pass."""
        if self._is_taken:
            await route.fallback()
            return
        self._is_taken = True

        def note(request: Request) -> None:
            if request == route.request:
                self._is_over.set()

        self.page.on("requestfinished", note)
        self.page.on("requestfailed", note)  # the page has cancelled the request
        response = await route.fetch()
        self._is_given.set()
        await self._may_pass.wait()
        await route.fulfill(response=response)


async def hold(page: Page, url: str) -> Held:
    """Hold the next answer to a URL (a glob) until it is released."""
    CHANGED.add(page)
    held = Held(page)
    # Not `times=1`: a handler that expires would also release the answers that other handlers hold.
    await page.route(url, held.handle)
    return held
