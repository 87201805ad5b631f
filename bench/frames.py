"""How smoothly the page scrolls and zooms 40,000 GPUs, in a headless Chromium without a GPU.

`python -m bench.frames` opens the page on a fleet that is fed by hand, and scrolls and zooms it.
Told are the times between frames; a browser aims at one each 16.7 ms.
"""

import argparse
import asyncio
import random
import sys
from typing import Final

from playwright.async_api import Page

from bench.machine import Bound, report
from tests.extender.observe.page.serving import browsing, looking, serving
from tests.extender.served import BUSY, IDLE, Gpu, World

NODES: Final = 5000
CELLS: Final = (3, 5, 8, 14, 30, 60)
FRAMES: Final = 120
LIMIT_MS: Final = 33.4
LOADED_MS: Final = 60_000.0

_SCROLL: Final = """async (frames) => {
    const scroller = document.getElementById("scroller");
    const reach = Math.max(1, scroller.scrollHeight - scroller.clientHeight);
    const times = [];
    let last = performance.now();
    for (let at = 0; at < frames; at++) {
        scroller.scrollTop = (at * 37) % reach;
        await new Promise(requestAnimationFrame);
        times.push(performance.now() - last);
        last = performance.now();
    }
    return times.sort((a, b) => a - b);
}"""
_ZOOM: Final = """async (frames) => {
    const map = document.getElementById("map");
    const times = [];
    let last = performance.now();
    for (let at = 0; at < frames; at++) {
        map.dispatchEvent(new WheelEvent("wheel", { deltaY: (at % 30 < 15 ? -1 : 1) * 25,
            ctrlKey: true, bubbles: true, cancelable: true, clientX: 600, clientY: 500 }));
        await new Promise(requestAnimationFrame);
        times.push(performance.now() - last);
        last = performance.now();
    }
    return times.sort((a, b) => a - b);
}"""


def _world(nodes: int) -> World:
    """Return a fleet with something of everything."""
    chance = random.Random(7)  # the same each time
    kinds = (IDLE, IDLE, IDLE, BUSY, BUSY, BUSY, BUSY, Gpu(busy=None, used_gib=None))
    world = World()
    world.add(
        {f"gpu-node-{at:05}": [chance.choice(kinds) for _ in range(8)] for at in range(nodes)},
        readings=2,
    )
    return world


async def _times(page: Page, script: str) -> list[float]:
    times: list[float] = await page.evaluate(script, FRAMES)
    return times


async def measure(nodes: int) -> list[dict[str, object]]:
    """Return a row for each size of cells and each way to move."""
    rows: list[dict[str, object]] = []
    async with serving(_world(nodes)) as server, browsing() as browser:
        for cell in CELLS:
            async with looking(browser, server, f"?zoom={cell}") as (page, _):
                total = page.locator("#totals")
                await total.filter(has_text="GPUs").wait_for(timeout=LOADED_MS)
                for what, script in (("scroll", _SCROLL), ("zoom", _ZOOM)):
                    times = await _times(page, script)
                    rows.append(
                        {
                            "cells px": cell,
                            "move": what,
                            "frames": len(times),
                            "median ms": times[len(times) // 2],
                            "p95 ms": times[int(len(times) * 0.95)],
                            "most ms": times[-1],
                        }
                    )
    return rows


def main() -> int:
    """Measure, print and write the result; return 1 where a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES, help="of eight GPUs")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.nodes))
    bounds = [
        Bound(
            what=f"{row['move']}, cells of {row['cells px']} px: median frame",
            limit=LIMIT_MS,
            measured=float(str(row["median ms"])),
            unit="ms",
        )
        for row in rows
    ]
    notes = [f"{arguments.nodes * 8} GPUs on a page of 1440 by 900, drawn without a graphics card."]
    return 0 if report("frames", "Frames of the page", rows=rows, bounds=bounds, notes=notes) else 1


if __name__ == "__main__":
    sys.exit(main())
