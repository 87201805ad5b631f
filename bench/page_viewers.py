"""Open pages as far as the extender sees them: streams that are read to the end, in a process.

`python -m bench.page_viewers --url URL --count 10` says "ready" once each of them was told the
fleet, and how many bytes they were told once its standard input ends. It is as nice as can be:
browsers are not on the machine of the extender, and must not take its cores in a measurement.
"""

import argparse
import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from bench.world import ROOT, BenchError

READ_BYTES: Final = 1 << 20
WAIT_SECONDS: Final = 60.0
STREAM: Final = "/v1/page/stream"


@dataclass(slots=True)
class Told:
    """What the pages were told.

    Attributes:
        bytes: of all pages; 0 until they are closed.
    """

    bytes: int = 0


@contextmanager
def pages(url: str, count: int) -> Iterator[Told]:
    """Keep some pages open while the context is.

    Raises:
        BenchError: they did not come up.
    """
    told = Told()
    if not count:
        yield told
        return
    process = subprocess.Popen(  # noqa: S603 - ours
        [sys.executable, "-m", "bench.page_viewers", "--url", url, "--count", str(count)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None  # noqa: S101 - asked for
    try:
        if process.stdout.readline().strip() != "ready":
            raise BenchError(f"{count} pages of {url} did not open")
        yield told
    finally:
        rest, _ = process.communicate(timeout=WAIT_SECONDS)
        told.bytes = int(rest or 0)


def _opened(url: str) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), WAIT_SECONDS)
    connection.sendall(f"GET {STREAM} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    connection.setblocking(False)  # noqa: FBT003 - the name of the call says it
    return connection


def main() -> int:
    """Read until standard input ends; return 1 where the pages did not open."""
    parser = argparse.ArgumentParser(prog="python -m bench.page_viewers", description=__doc__)
    parser.add_argument("--url", required=True, help="of the extender")
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    os.nice(19)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    read_bytes = {_opened(options.url): 0 for _ in range(options.count)}
    for connection in read_bytes:
        selector.register(connection, selectors.EVENT_READ)
    deadline = time.monotonic() + WAIT_SECONDS
    begun: set[socket.socket] = set()
    is_ready = False
    while True:
        for key, _ in selector.select(WAIT_SECONDS):
            if key.fileobj is sys.stdin:
                sys.stdout.write(f"{sum(read_bytes.values())}\n")
                return 0
            reader = key.fileobj
            assert isinstance(reader, socket.socket)  # noqa: S101 - nothing else is registered
            with contextlib.suppress(BlockingIOError):
                some = reader.recv(READ_BYTES)
                read_bytes[reader] += len(some)
                if b"event: fleet\n" in some:
                    begun.add(reader)
        if not is_ready and len(begun) == len(read_bytes):
            is_ready = True
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        if not is_ready and time.monotonic() > deadline:
            return 1


if __name__ == "__main__":
    sys.exit(main())
