"""Measure the latency of filter while a client misuses one port of the extender.

`python -m bench.abuse` calls filter and prioritize over TLS for one pod after the other. Every
tenth pod uses a new connection, as kube-scheduler does after a pause. Meanwhile a second process,
the abuser, misuses one port in one way, from another IP address. It counts the connections that it
opened, and those that the extender refused or closed. At the webhook port the abuser presents
kube-scheduler's own certificate; without it the TLS handshake would fail.
"""

import argparse
import asyncio
import gzip
import itertools
import json
import os
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from agent.report.contract import PATH as REPORT_PATH
from bench.machine import RESULTS, Bound, report
from bench.noise import noise_server
from bench.placing import Connection, Placed, Scheduler, percentile
from bench.processes import watching_memory
from bench.timing import Phase, place_and_free, request_noise
from bench.world import BenchError, FleetSpec, World, open_world
from extender.webhook.admission import PATH as ADMISSION_PATH
from testkit.certificates import client_context, issue
from testkit.controlplane.process import free_port

ANSWER_MS: Final = 1000.0
"""`httpTimeout` of the shipped scheduler configuration: kube-scheduler drops later answers."""

MOST_MIB: Final = 1536.0
"""Memory limit of the extender's pod in `manifests/`."""

ABUSER: Final = "127.0.0.2"
KEPT: Final = 50
FRESH_EACH: Final = 10
PAUSE_SECONDS: Final = 0.02
SETTLE_SECONDS: Final = 3.0
END_SECONDS: Final = 60.0
IDLE_CONNECTIONS: Final = 5000
SLOW_CONNECTIONS: Final = 400
BUSY_CONNECTIONS: Final = 16
BOMBS: Final = 8
BOMB_BYTES: Final = 300 << 20
LARGE_BYTES: Final = 4 << 20
KEY_PAIR: Final = (("cert", "crt"), ("key", "key"))
NONE: Final[Mapping[str, int]] = MappingProxyType({})
CONNECTIONS: Final = dict.fromkeys(("opened", "refused", "ended"), 0)
"""Connections of the abuser (this process). Those still open at the end were never closed."""

HANDSHAKES: Final = asyncio.Semaphore(64)
"""Limits concurrent TLS handshakes, because thousands at once would all time out: the abuser needs
CPU for each."""

LONG_REQUEST: Final = json.dumps(
    {
        "Pod": {
            "metadata": {"name": "requester", "namespace": "team", "uid": "uid"},
            "spec": {
                "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
            },
        },
        "NodeNames": [f"strange-{number}" for number in range(5000)],
    },
    separators=(",", ":"),
).encode()
TOKEN: Final = "Authorization: Bearer " + "x" * 800 + "\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of the extender.

    Attributes:
        name: purpose of the port.
        number: port number on 127.0.0.1.
        path: path of the requests.
        has_tls: whether it serves TLS.
        shows: folder of the client certificate that the abuser presents; "" for none.
        answers_at_length: path of a GET request with a long answer; "" if there is none.
    """

    name: str
    number: int
    path: str
    has_tls: bool = False
    shows: str = ""
    answers_at_length: str = ""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect from the abuser's IP address."""
        context = _context(self.shows) if self.has_tls else None
        try:
            async with HANDSHAKES:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self.number, local_addr=(ABUSER, 0), ssl=context
                )
        except OSError:
            CONNECTIONS["refused"] += 1
            raise
        CONNECTIONS["opened"] += 1
        try:
            yield reader, writer
        finally:
            CONNECTIONS["ended"] += 1
            writer.transport.abort()

    def head(self, length: int, *, extra: str = "") -> bytes:
        """Return the request line and headers of a POST."""
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: it\r\nContent-Type: application/json\r\n{extra}"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()


@cache
def _context(shows: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shows:
        context.load_cert_chain(f"{shows}/tls.crt", f"{shows}/tls.key")
    return context


async def send_bombs(port: Port) -> None:
    """Send small compressed bodies that unpack to hundreds of megabytes."""
    body = gzip.compress(bytes(BOMB_BYTES), 9)
    message = port.head(len(body), extra="Content-Encoding: gzip\r\n") + body
    await _each(BOMBS, lambda: _request(port, message))


async def send_large(port: Port) -> None:
    """Send large bodies, and JSON with very many small values."""
    body = b'{"Pod":[' + b"{}," * (LARGE_BYTES // 3) + b"{}]}"
    await _each(BOMBS, lambda: _request(port, port.head(len(body)) + body))


async def flood(port: Port) -> None:
    """Send invalid requests without a token, each as soon as the last is answered."""
    await _each(BUSY_CONNECTIONS, lambda: _request(port, port.head(2) + b"{}"))


async def flood_with_tokens(port: Port) -> None:
    """Send invalid requests with forged tokens, each as soon as the last is answered."""
    await _each(BUSY_CONNECTIONS, lambda: _request(port, port.head(2, extra=TOKEN) + b"{}"))


async def send_slow_heads(port: Port) -> None:
    """Send request headers byte by byte."""
    await _each(SLOW_CONNECTIONS, lambda: _drip(port, f"POST {port.path} HTTP/1.1\r\nX: ".encode()))


async def send_slow_bodies(port: Port) -> None:
    """Announce a body of one megabyte and send it byte by byte."""
    await _each(SLOW_CONNECTIONS, lambda: _drip(port, port.head(1 << 20)))


async def connect_only(port: Port) -> None:
    """Open thousands of connections and send nothing."""
    await _each(IDLE_CONNECTIONS, lambda: _drip(port, b"", pause_seconds=3600.0))


async def never_read(port: Port) -> None:
    """Request long answers repeatedly without reading them."""
    message = port.head(len(LONG_REQUEST)) + LONG_REQUEST
    if port.answers_at_length:
        message = f"GET {port.answers_at_length} HTTP/1.1\r\nHost: it\r\n\r\n".encode()

    async def ask() -> None:
        async with port.connect() as (_, writer):
            while True:
                writer.write(message)
                await writer.drain()
                await asyncio.sleep(0.01)

    await _each(BUSY_CONNECTIONS, ask)


ABUSES: Final[dict[str, Callable[[Port], Coroutine[Any, Any, None]]]] = {
    "bombs": send_bombs,
    "large bodies": send_large,
    "flood": flood,
    "flood with tokens": flood_with_tokens,
    "slow heads": send_slow_heads,
    "slow bodies": send_slow_bodies,
    "idle connections": connect_only,
    "answers never read": never_read,
}


async def _each(count: int, act: Callable[[], Awaitable[None]]) -> None:
    """Run `count` copies of an action concurrently, and restart each when it ends."""

    async def again() -> None:
        while True:
            try:
                await act()
            except OSError:  # the extender refused or closed the connection, as intended
                await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(again(), name=f"abuser {number}")


async def _request(port: Port, message: bytes) -> None:
    async with port.connect() as (reader, writer):
        while True:
            writer.write(message)
            await writer.drain()
            if not await reader.read(1 << 16):
                return


async def _drip(port: Port, start: bytes, pause_seconds: float = 1.0) -> None:
    async with port.connect() as (reader, writer):
        writer.write(start)
        while not reader.at_eof():
            writer.write(b"x" if start else b"")
            await writer.drain()
            try:
                async with asyncio.timeout(pause_seconds):
                    await reader.read(1 << 16)
            except TimeoutError:
                continue


def report_at_the_end() -> None:
    """Wait until standard input ends, print the counts of connections, and exit."""
    sys.stdin.read()
    sys.stdout.write(json.dumps(CONNECTIONS))
    sys.stdout.flush()
    os._exit(0)  # without closing thousands of connections one by one


@contextmanager
def misusing(port: Port, abuse: str) -> Iterator[dict[str, int]]:
    """Misuse a port from another process while the context is open.

    Yields:
        Counts of connections by outcome, filled in at the end.

    Raises:
        BenchError: the abuser's process failed.
    """
    counts: dict[str, int] = {}
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "bench.abuse", "--abuse", abuse),
            *("--port", json.dumps(asdict(port))),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        time.sleep(SETTLE_SECONDS)
        yield counts
        said, _ = process.communicate(timeout=END_SECONDS)
        if process.returncode or not said:
            raise BenchError(f"{abuse} at {port.name} failed: see above")
        counts.update(json.loads(said))
    finally:
        process.kill()
        process.wait()


def place_for(seconds: float, scheduler: Scheduler, noise: Connection) -> tuple[Phase, int]:
    """Place pods as kube-scheduler does; return latencies and the number of lost answers."""
    phase, lost, running, is_connected = Phase(""), 0, list[Placed](), True
    deadline = time.perf_counter() + seconds
    for number in itertools.count(1):
        try:
            if number % FRESH_EACH == 0 or not is_connected:
                is_connected = False
                scheduler.reconnect()
                is_connected = True
            phase.note(place_and_free(scheduler, KEPT, running))
        except (OSError, BenchError) as error:
            sys.stderr.write(f"lost: {error}\n")
            lost, is_connected = lost + 1, False
        request_noise(noise, phase)
        time.sleep(PAUSE_SECONDS)
        if time.perf_counter() > deadline:
            break
    scheduler.remove(running)
    return phase, lost


def open_ports(world: World, admission: int, agents: int, certificates: Path) -> tuple[Port, ...]:
    """Return the ports of an extender that can be misused."""
    port, status = (urlsplit(url).port or 0 for url in (world.url, world.status_url))
    return (
        Port(
            name="webhooks",
            number=port,
            path="/filter",
            has_tls=True,
            shows=str(certificates / "kube-scheduler"),
        ),
        Port(name="status", number=status, path="/v1/best", answers_at_length="/v1/nodes"),
        Port(name="admission", number=admission, path=ADMISSION_PATH, has_tls=True),
        Port(name="agents", number=agents, path=REPORT_PATH),
    )


def row(
    port: str,
    abuse: str,
    phase: Phase,
    lost: int,
    peak_mib: float = 0.0,
    connections: Mapping[str, int] = NONE,
) -> dict[str, object]:
    """Return a row of the table."""
    return {
        "port": port,
        "misused with": abuse,
        **{name: connections.get(name, 0) for name in CONNECTIONS},
        "answers": len(phase.answers_ms),
        "lost": lost,
        "p50 ms": percentile(phase.answers_ms, 0.5),
        "p99 ms": percentile(phase.answers_ms, 0.99),
        "max ms": percentile(phase.answers_ms, 1.0),
        "trivial p50 ms": percentile(phase.noise_ms, 0.5),
        "trivial max ms": percentile(phase.noise_ms, 1.0),
        "peak MiB": round(peak_mib),
    }


def measure(nodes: int, seconds: float, only: Sequence[str]) -> list[dict[str, object]]:
    """Misuse one port after the other; return the table's rows, the undisturbed one first."""
    admission, agents, status = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="idlegpu-abuse-") as name:
        certificates = Path(name)
        issue(certificates)
        files = {f"{kind}_file": f"{name}/extender/server/tls.{end}" for kind, end in KEY_PAIR}
        settings = {
            "status_listen": f"127.0.0.1:{status}",
            "api": {"allow_plain": True},
            "tls": {**files, "client_ca_file": f"{name}/extender/ca.crt"},
            "admission": {"listen": f"127.0.0.1:{admission}", **files},
            "agents": {"listen": f"127.0.0.1:{agents}"},
        }
        spec = FleetSpec(nodes=nodes, gpu_pods=4 * nodes, other_pods=nodes)
        with open_world(spec, settings=settings) as world, noise_server() as noise:
            world.wait_ready()
            world.wait_readings()
            shown = client_context(certificates, shows=certificates)
            scheduler = Scheduler(world, tls=shown)
            place_for(seconds, scheduler, noise)
            rows = [row("-", "nothing", *place_for(seconds, scheduler, noise))]
            for port in open_ports(world, admission, agents, certificates):
                for abuse in ABUSES:
                    if only and abuse not in only:
                        continue
                    with (
                        watching_memory(lambda: world.extender_pid) as peak,
                        misusing(port, abuse) as connections,
                    ):
                        phase, lost = place_for(seconds, scheduler, noise)
                    rows.append(row(port.name, abuse, phase, lost, peak.rss_mib, connections))
                    sys.stderr.write(f"{rows[-1]}\n")
            return rows


def bounds(rows: Sequence[Mapping[str, Any]]) -> list[Bound]:
    """Return the bounds: no answer is lost, none is late, and memory is limited."""
    misused = rows[1:]
    return [
        Bound(
            what="answers lost",
            limit=0,
            measured=sum(row["lost"] for row in misused),
            unit="answers",
        ),
        Bound(
            what="abuses that opened no connection",
            limit=0,
            measured=sum(not row["opened"] for row in misused),
            unit="abuses",
        ),
        Bound(
            what="slowest answer",
            limit=ANSWER_MS,
            measured=max(row["max ms"] for row in misused),
            unit="ms",
        ),
        Bound(
            what="memory of the extender",
            limit=MOST_MIB,
            measured=max(row["peak MiB"] for row in misused),
            unit="MiB",
        ),
    ]


def main() -> int:
    """Run the benchmark, print and write the result; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.abuse", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--quick", action="store_true", help="100 nodes, 3 s; nothing is written")
    parser.add_argument("--only", nargs="*", default=[], metavar="ABUSE")
    parser.add_argument("--abuse", choices=ABUSES, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.abuse:
        port = Port(**json.loads(options.port))
        # even if the event loop is busy
        threading.Thread(target=report_at_the_end, daemon=True).start()
        asyncio.run(ABUSES[options.abuse](port))
        return 0
    nodes, seconds = (100, 3.0) if options.quick else (options.nodes, options.seconds)
    rows = measure(nodes, seconds, options.only)
    is_met = report(
        "abuse",
        "Filter while ports are misused",
        rows=rows,
        bounds=bounds(rows),
        notes=[
            __doc__.strip(),
            f"{nodes} nodes, {seconds:g} s a row. The abuser uses the same cores: the latency "
            "of a trivial server, called at the "
            "same time, shows the effect of that.",
        ],
        folder=None if options.quick or options.only else RESULTS,
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
