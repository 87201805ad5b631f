"""What kube-scheduler's questions cost while people look at the page.

`python -m bench.page` asks filter and prioritize of 5,000 nodes as `bench.webhooks` does, in turns
with and without ten open pages. The pages read all that they are told, as browsers do; Prometheus
has other values for every device each ten seconds, so each of them gets a whole fleet's looks.
"""

import argparse
import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Final
from urllib.parse import urlsplit

from bench.asking import percentile
from bench.machine import Bound, report
from bench.questions import EVERYDAY
from bench.webhooks import Asker, Times, trivial_handler
from bench.world import FleetSpec, open_world

NODES: Final = 5000
PAGES: Final = 10
TURNS: Final = 6
TRIES: Final = 100
RATIO_LIMIT: Final = 1.1
READ_BYTES: Final = 1 << 16
WAIT_SECONDS: Final = 30.0


class _Reader:
    """One open page, as far as the extender sees it."""

    def __init__(self, url: str) -> None:
        self.read_bytes = 0
        self.has_begun = threading.Event()
        self._socket: socket.socket | None = None
        parts = urlsplit(url)
        self._connection = HTTPConnection(str(parts.hostname), parts.port, timeout=WAIT_SECONDS)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._connection.request("GET", "/v1/page/stream")
        self._socket = self._connection.sock  # the answer takes it over
        response = self._connection.getresponse()
        with contextlib.suppress(OSError, HTTPException):  # closed, in the middle of whatever it is
            while some := response.read1(READ_BYTES):
                self.read_bytes += len(some)
                self.has_begun.set()

    def close(self) -> None:
        """Go away."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_SECONDS)
        self._connection.close()


@contextmanager
def pages(url: str, count: int) -> Iterator[list[_Reader]]:
    """Keep some pages open while the context is."""
    readers = [_Reader(url) for _ in range(count)]
    try:
        for reader in readers:
            reader.has_begun.wait(WAIT_SECONDS)
        yield readers
    finally:
        for reader in readers:
            reader.close()


def measure(nodes: int, turns: int, tries: int) -> tuple[dict[bool, dict[str, Times]], int]:
    """Return times by whether pages were open and by verb, and how many bytes the pages read."""
    times = {
        is_open: {verb: Times() for verb in ("filter", "prioritize")} for is_open in (False, True)
    }
    told = 0
    with (
        open_world(FleetSpec(nodes=nodes, gpu_pods=2 * nodes)) as world,
        trivial_handler() as trivial_url,
    ):
        world.wait_ready()
        world.wait_readings(1)
        asker = Asker(world, trivial_url)
        warm = {verb: Times() for verb in ("filter", "prioritize")}
        for wish in EVERYDAY * 3:
            asker.place(wish, warm)
        for turn in range(turns):
            is_open = bool(turn % 2)
            with pages(world.url, PAGES if is_open else 0) as readers:
                for number in range(tries):
                    asker.place(EVERYDAY[number % len(EVERYDAY)], times[is_open])
            told += sum(reader.read_bytes for reader in readers)
    return times, told


def main() -> int:
    """Measure, print and write the result; return 1 where a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--turns", type=int, default=TURNS, help="half of them with pages open")
    parser.add_argument("--tries", type=int, default=TRIES, help="pods placed in each turn")
    arguments = parser.parse_args()
    times, told = measure(arguments.nodes, arguments.turns, arguments.tries)
    rows: list[dict[str, object]] = [
        {
            "pages": PAGES if is_open else 0,
            "verb": verb,
            "questions": len(of_verb.ours),
            "median ms": percentile(of_verb.ours, 0.5),
            "p99 ms": percentile(of_verb.ours, 0.99),
            "trivial p99 ms": percentile(of_verb.trivial, 0.99),
        }
        for is_open, verbs in times.items()
        for verb, of_verb in verbs.items()
    ]
    bounds = [
        Bound(
            what=f"{verb}, {arguments.nodes} nodes: p99 with {PAGES} pages open by that without",
            limit=RATIO_LIMIT,
            measured=percentile(times[True][verb].ours, 0.99)
            / percentile(times[False][verb].ours, 0.99),
            unit="times",
        )
        for verb in ("filter", "prioritize")
    ]
    notes = [f"The pages were told {told / 1e6:.0f} MB in all."]
    is_met = report("page", "Questions while people look", rows=rows, bounds=bounds, notes=notes)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
