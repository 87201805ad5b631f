"""Measure frame times of the page with 40,000 GPUs, in a headless Chromium without a GPU.

`python -m bench.frames` opens the page of an extender whose readings of every device change each
ten seconds, and scrolls and zooms it. It reports the times between frames; a browser aims at one
each 16.7 ms. The browser, which draws without a graphics card, the extender and the simulated
cluster share the machine.
"""

import argparse
import asyncio
import sys
from typing import Final

from playwright.async_api import Page, expect

from bench.machine import Bound, report
from bench.world import FleetSpec, open_world
from testkit.page.serving import browsing, looking_at

NODES: Final = 5000
CELLS: Final = (3, 5, 8, 14, 30, 60)
SECONDS: Final = 12.0
"""Duration of each movement: with 40,000 GPUs an update of all arrives every five to ten seconds.
"""
LOADED_MS: Final = 60_000.0

LIMITS_MS: Final = {"median": 33.4, "p95": 50.0}
"""Half of all frames come at 30 a second or faster. Of the others all but one in twenty skip at
most two of the browser's frames, because longer gaps are visible as jerks."""

_MOVES: Final = {
    "scroll": """() => {
        const reach = Math.max(1, scroller.scrollHeight - scroller.clientHeight);
        scroller.scrollTop = (at * 37) % reach;
    }""",
    "zoom": """() => map.dispatchEvent(new WheelEvent("wheel", {
        deltaY: (at % 30 < 15 ? -1 : 1) * 25,
        ctrlKey: true, bubbles: true, cancelable: true, clientX: 600, clientY: 500 }))""",
}
_MEASURE: Final = """async (seconds) => {
    const { Fleet } = await import("./fleet.js");
    let news = 0;
    for (const name of ["take", "takeLooks", "takeDelta"]) {
        const taken = Fleet.prototype[name];
        Fleet.prototype[name] = function (event) {
            news++;
            taken.call(this, event);
        };
    }
    const map = document.getElementById("map"), scroller = document.getElementById("scroller");
    const times = [], begun = performance.now();
    let at = 0, last = begun;
    const move = %s;
    // On without news for a while: what is measured is a map that changes as it moves.
    while (last - begun < seconds * (news ? 1000 : 3000)) {
        move();
        await new Promise(requestAnimationFrame);
        times.push(performance.now() - last);
        last = performance.now();
        at++;
    }
    return [news, ...times.sort((a, b) => a - b)];
}"""


async def _moved(page: Page, move: str, seconds: float) -> dict[str, object]:
    """Move the map for a time; return the row of the table."""
    news, *times = await page.evaluate(_MEASURE % _MOVES[move], seconds)
    return {
        "move": move,
        "frames": len(times),
        "news": news,
        "median ms": times[len(times) // 2],
        "p95 ms": times[int(len(times) * 0.95)],
        "most ms": times[-1],
    }


async def measure(url: str, gpus: int, seconds: float) -> list[dict[str, object]]:
    """Return a row for each size of cells and each way to move.

    Args:
        url: URL of the extender.
        gpus: number of GPUs on the page.
        seconds: duration of each movement.
    """
    rows: list[dict[str, object]] = []
    async with browsing() as browser:
        for cell in CELLS:
            for move in _MOVES:
                async with looking_at(browser, f"{url}/page/?zoom={cell}") as (page, _):
                    total = page.locator("#totals")
                    await expect(total).to_contain_text(f"{gpus:,} GPUs", timeout=LOADED_MS)
                    rows.append({"cells px": cell, **await _moved(page, move, seconds)})
    return rows


def _bounds(row: dict[str, object]) -> list[Bound]:
    """Return the bounds of a row; unmeasured if nothing changed on the page meanwhile."""
    return [
        Bound(
            what=f"{row['move']}, cells of {row['cells px']} px: {name} frame",
            limit=limit,
            measured=float(str(row[f"{name} ms"])) if row["news"] else float("nan"),
            unit="ms",
        )
        for name, limit in LIMITS_MS.items()
    ]


def main() -> int:
    """Run the benchmark, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES, help="of eight GPUs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each movement")
    arguments = parser.parse_args()
    nodes = arguments.nodes
    with open_world(FleetSpec(nodes=nodes, gpu_pods=2 * nodes)) as world:
        world.wait_ready()
        world.wait_readings(1)
        world.wait_past()
        rows = asyncio.run(measure(world.url, 8 * nodes, arguments.seconds))
    bounds = [bound for row in rows for bound in _bounds(row)]
    notes = [
        f"{nodes * 8} GPUs on a page of 1440 by 900, drawn without a graphics card; all "
        "readings change each ten seconds. News are "
        "events of the stream that changed the map while it moved."
    ]
    return 0 if report("frames", "Frames of the page", rows=rows, bounds=bounds, notes=notes) else 1


if __name__ == "__main__":
    sys.exit(main())
