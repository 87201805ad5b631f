"""Open pages in one process, simulated by their requests to the extender.

`python -m bench.page_viewers --url URL --count 10` prints "ready" once each page has received the
fleet, and the pages' traffic as JSON once its standard input ends. The requests and their intervals
are those of `extender/api/page/static`: every view reads the stream; an open node is requested at
each update, and every five seconds at least; each visible decision requests its runner-up's
reasons; waiting pods are requested every 5 s and idle holders every 15 s, as if pods changed all
the time. The process has the lowest CPU priority, because real browsers run on other machines.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import orjson

from bench.world import ROOT, BenchError

WAIT_SECONDS: Final = 60.0
STREAM: Final = "page/stream"
VIEWS: Final = ("fleet", "node", "decisions", "pending", "holders")
"""Views that pages show in turn: of ten pages two each."""

NODE_SECONDS, NODE_LEAST_SECONDS, PAST_SECONDS = 5.0, 1.5, 60.0
PENDING_SECONDS: Final = 5.0
HOLDERS_SECONDS: Final = 15.0
OVERVIEW_SECONDS: Final = 15.0
OVERVIEW_PODS: Final = 500
LISTED_HOLDERS: Final = 300
LISTED_DECISIONS: Final = 200
ROWS: Final = 25
"""Decisions that fit on a desktop screen."""
REST_SECONDS: Final = 0.7
"""Time for which a decision is visible before a page requests its runner-up's reasons."""


@dataclass(slots=True)
class PageTraffic:
    """Traffic of the pages.

    Attributes:
        bytes: received by all pages; 0 until they are closed.
        requests: number of requests by path, without the stream.
        failures: number of requests without status 200.
    """

    bytes: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    failures: int = 0


@contextmanager
def pages(url: str, count: int) -> Iterator[PageTraffic]:
    """Keep pages open while the context is open.

    Raises:
        BenchError: the pages did not open.
    """
    traffic = PageTraffic()
    if not count:
        yield traffic
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.page_viewers", "--url", url, "--count", str(count)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise BenchError(f"{count} pages of {url} did not open")
        yield traffic
    finally:
        rest, _ = process.communicate(timeout=WAIT_SECONDS)
        document = orjson.loads(rest or "{}")
        traffic.bytes = document.get("bytes", 0)
        traffic.requests.update(document.get("requests", {}))
        traffic.failures = document.get("failures", 0)


class Viewer:
    """Simulated open page.

    Args:
        session: HTTP session of its requests.
        url: URL of the extender.
        traffic: counters of all pages.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, view: str, traffic: PageTraffic
    ) -> None:
        self.is_begun = asyncio.Event()
        self._session = session
        self._base = f"{url}/v1/"
        self._view = view
        self._traffic = traffic
        self._news = asyncio.Event()
        self._node = ""
        self._in_sight: dict[str, float] = {}
        self._explained: set[str] = set()

    async def run(self) -> None:
        """Read the stream and send the view's requests until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            await self.is_begun.wait()
            await self._request("session")
            if self._view in {"fleet", "node"}:
                group.create_task(self._look_at_overview())
            if self._view == "node":
                group.create_task(self._look_at_node())
            elif self._view == "pending":
                group.create_task(self._request_again("pending", PENDING_SECONDS))
            elif self._view == "holders":
                path = f"holders?idle_for=3600&some=true&limit={LISTED_HOLDERS}"
                group.create_task(self._request_again(path, HOLDERS_SECONDS))
            elif self._view == "decisions":
                path = f"decisions?brief=true&limit={LISTED_DECISIONS}"
                self._show(reversed(orjson.loads(await self._request(path) or "{}")["decisions"]))
                group.create_task(self._request_reasons())

    async def _listen(self) -> None:
        """Read the stream to its end."""
        rest = b""
        async with self._session.get(self._base + STREAM) as response:
            async for some in response.content.iter_any():
                self._traffic.bytes += len(some)
                rest = self._take(rest + some)
        raise BenchError("the stream of a page has ended")

    def _take(self, text: bytes) -> bytes:
        """Process the complete events; return the incomplete rest."""
        *events, rest = text.split(b"\n\n")
        for event in events:
            if event.startswith(b"event: fleet\n"):
                if not self._node:
                    self._node = orjson.loads(event.partition(b"data: ")[2])["nodes"][0]
                self.is_begun.set()
            elif event.startswith((b"event: looks\n", b"event: delta\n")):
                self._news.set()
            elif event.startswith(b"event: decisions\n") and self._view == "decisions":
                self._show(orjson.loads(event.partition(b"data: ")[2])["decisions"])
        return rest

    async def _look_at_node(self) -> None:
        """Request the open node, as the page does."""
        name, past_at = quote(self._node, safe=""), 0.0
        while True:
            began = time.monotonic()
            await self._request(f"page/nodes/{name}")
            if time.monotonic() - past_at > PAST_SECONDS:
                past_at = time.monotonic()
                await self._request(f"page/past/{name}")
            await asyncio.sleep(max(began + NODE_LEAST_SECONDS - time.monotonic(), 0.0))
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(began + NODE_SECONDS - time.monotonic(), 0.0)):
                    await self._news.wait()

    async def _look_at_overview(self) -> None:
        """Request the summary above the map."""
        while True:
            await self._request("usage?since=86400")
            await self._request(f"pending?limit={OVERVIEW_PODS}")
            await asyncio.sleep(OVERVIEW_SECONDS)

    async def _request_again(self, path: str, seconds: float) -> None:
        while True:
            await self._request(path)
            await asyncio.sleep(seconds)

    def _show(self, decisions: Any) -> None:  # noqa: ANN401 - JSON
        """Show new decisions at the top; a decision of prioritize replaces that of filter."""
        for one in decisions:
            name, _, number = one["id"].rpartition("-")
            if one["verb"] == "prioritize":
                self._in_sight.pop(f"{name}-{int(number) - 1}", None)
            if one["runner_up"]:
                self._in_sight[one["id"]] = time.monotonic()
        while len(self._in_sight) > ROWS:
            del self._in_sight[next(iter(self._in_sight))]

    async def _request_reasons(self) -> None:
        """Request the reasons of the visible runners-up."""
        while True:
            rested = time.monotonic() - REST_SECONDS
            due = [
                name
                for name, at in self._in_sight.items()
                if at <= rested and name not in self._explained
            ]
            if not due:
                await asyncio.sleep(0.05)
                continue
            self._explained.update(due)
            await self._request(f"page/lost?ids={quote(','.join(due))}")
            await asyncio.sleep(REST_SECONDS)

    async def _request(self, path: str) -> bytes:
        """Send a GET; return the body, empty if it failed."""
        self._traffic.requests["/".join(path.partition("?")[0].split("/")[:2])] += 1
        async with self._session.get(self._base + path) as response:
            body = await response.read()
            self._traffic.bytes += len(body)
            if response.status != HTTPStatus.OK:
                self._traffic.failures += 1
                return b""
            return body


async def look(url: str, count: int) -> PageTraffic:
    """Keep pages open until standard input ends.

    Raises:
        BenchError: the pages did not open, or one ended.
    """
    traffic = PageTraffic()
    # Six connections a page, as browsers have, so that pages do not wait for each other's
    # connections.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=WAIT_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        viewers = [
            Viewer(session, url, VIEWS[number % len(VIEWS)], traffic) for number in range(count)
        ]
        looking = [asyncio.create_task(viewer.run()) for viewer in viewers]
        over = asyncio.create_task(_input_ended())
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                begun = asyncio.create_task(_all_begun(viewers))
                await asyncio.wait([begun, *looking], return_when=asyncio.FIRST_COMPLETED)
                if not begun.done():
                    raise BenchError("a page did not open")
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await asyncio.wait([over, *looking], return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                raise BenchError("a page has ended")
        finally:
            for task in (over, *looking):
                task.cancel()
            await asyncio.wait([over, *looking])
    return traffic


async def _input_ended() -> None:
    """Wait until standard input ends."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)  # the parent never writes to it
    try:
        await ended.wait()
    finally:
        loop.remove_reader(sys.stdin)


async def _all_begun(viewers: list[Viewer]) -> None:
    for viewer in viewers:
        await viewer.is_begun.wait()


def main() -> int:
    """Keep pages open until standard input ends; return 1 if they did not open or stay open."""
    parser = argparse.ArgumentParser(prog="python -m bench.page_viewers", description=__doc__)
    parser.add_argument("--url", required=True, help="of the extender")
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    os.nice(19)
    try:
        traffic = asyncio.run(look(options.url, options.count))
    except (BenchError, OSError) as error:  # a timeout is an OSError
        sys.stderr.write(f"pages: {str(error) or 'they did not open in time'}\n")
        return 1
    document = {
        "bytes": traffic.bytes,
        "requests": dict(traffic.requests),
        "failures": traffic.failures,
    }
    sys.stdout.write(orjson.dumps(document).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
