"""Compare the cost of receiving a report by transport and encoding.

`python -m bench.transports` sends the same report of eight GPUs a thousand times a second over a
hundred connections to a server on uvloop, and reads the server's CPU time from /proc. An aiohttp
handler reads JSON or the compact update from a POST, or the update from a WebSocket; a protocol
like the extender's reads JSON or updates as frames of one stream. The server only decodes the
reports.
"""

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import uvloop
from aiohttp import web
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from agent.options import ReportOptions
from agent.push.updates import DigestBuilder, UpdateBuilder
from agent.report.contract import Report, decode_update, encode, frame
from agent.tenants.foreign import Threshold
from bench.agent import cpu_seconds
from bench.agent_swarm import report_of
from bench.backend_fleet import BenchFleet, FleetSpec
from bench.machine import report as write_result
from bench.world import ROOT, wait_until
from extender.core.policy import Thresholds
from testkit.agent.json_report import decode_report
from testkit.controlplane.process import free_port

CONNECTIONS: Final = 100
PER_SECOND: Final = 1000
LENGTH: Final = 4

Send = Callable[[int], Awaitable[object]]


def bodies() -> tuple[bytes, bytes]:
    """Return a report as JSON, and the compact update with the same values."""
    fleet = BenchFleet(FleetSpec(nodes=1, gpu_pods=0))
    said: Report = report_of(fleet, 0, {})
    updates = UpdateBuilder()
    digest = DigestBuilder(ReportOptions(), Thresholds(), Threshold()).build(said)
    updates.build(said, digest, is_news=True, sent_at=1.0)
    return encode(said), frame(updates.build(said, digest, is_news=True, sent_at=2.0))[LENGTH:]


class Stream(asyncio.Protocol):
    """Server protocol that reads frames.

    Args:
        take: decodes a frame.
    """

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take = take
        self._buffer = bytearray()

    @override
    def data_received(self, data: bytes) -> None:
        buffer, start = self._buffer, 0
        buffer += data
        while len(buffer) - start >= LENGTH:
            end = start + LENGTH + int.from_bytes(buffer[start : start + LENGTH], "big")
            if len(buffer) < end:
                break
            self._take(bytes(buffer[start + LENGTH : end]))
            start = end
        del buffer[:start]


async def serve(way: str, port: int) -> None:
    """Receive reports by one transport until cancelled."""
    take: Callable[[bytes], object] = decode_report if way.endswith("JSON") else decode_update
    if way.startswith("stream"):
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Stream(take), "127.0.0.1", port)
        await server.serve_forever()

    async def post(request: web.Request) -> web.Response:
        take(await request.read())
        return web.Response()

    async def socket_(request: web.Request) -> web.WebSocketResponse:
        it = web.WebSocketResponse()
        await it.prepare(request)
        async for message in it:
            take(message.data)
        return it

    app = web.Application()
    app.add_routes([web.post("/", post), web.get("/", socket_)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def load(way: str, port: int, seconds: float, body: bytes) -> int:
    """Send reports at the fixed rate for a time; return their number."""
    async with contextlib.AsyncExitStack() as stack:
        send = await _sender(way, port, body, stack)
        count, began = 0, time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while time.perf_counter() - began < seconds:
                for _ in range(int((time.perf_counter() - began) * PER_SECOND) - count):
                    count += 1
                    group.create_task(_once(send, count), name="send")
                await asyncio.sleep(0.01)
    return count


async def _once(send: Send, number: int) -> None:
    await send(number)


async def _sender(way: str, port: int, body: bytes, stack: contextlib.AsyncExitStack) -> Send:
    if way.startswith("stream"):
        message = len(body).to_bytes(LENGTH, "big") + body
        writers = [
            (await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(CONNECTIONS)
        ]

        async def write(number: int) -> None:
            writers[number % CONNECTIONS].write(message)

        return write
    session = await stack.enter_async_context(
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS))
    )
    url = f"http://127.0.0.1:{port}/"
    if way.startswith("WebSocket"):
        sockets = [
            await stack.enter_async_context(session.ws_connect(url)) for _ in range(CONNECTIONS)
        ]

        async def say(number: int) -> None:
            await sockets[number % CONNECTIONS].send_bytes(body)

        return say

    async def post(_: int) -> None:
        async with session.post(url, data=body) as answer:
            await answer.read()

    return post


@contextmanager
def server(way: str, port: int) -> Iterator[int]:
    """Run a server while the context is open; yield its PID."""
    command = [sys.executable, "-m", "bench.transports", "--serve", way, "--port", str(port)]
    with subprocess.Popen(command, cwd=Path(ROOT)) as process:
        try:
            wait_until(lambda: _answers(port), "the server is there", 20.0)
            yield process.pid
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


WAYS: Final = ("POST, JSON", "POST, update", "WebSocket, update", "stream, JSON", "stream, update")


def main() -> int:
    """Measure every transport."""
    parser = argparse.ArgumentParser(prog="python -m bench.transports", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each way")
    parser.add_argument("--serve", metavar="WAY", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(options.serve, options.port))
        return 0
    as_json, compact = bodies()
    rows = []
    for way in WAYS:
        port, body = free_port(), as_json if way.endswith("JSON") else compact
        with server(way, port) as pid:
            before = cpu_seconds(pid)
            count = uvloop.run(load(way, port, options.seconds, body))
            time.sleep(0.5)
            spent = cpu_seconds(pid) - before
        rows.append({"way": way, "bytes": len(body), "CPU us a report": 1e6 * spent / count})
    write_result("transports", "Ways to report", rows=rows, bounds=[], notes=[__doc__.strip()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
