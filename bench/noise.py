"""Measure the latency that the machine itself adds, with a server that answers two bytes.

The server is called between the calls of the extender, over a similar connection and with a similar
body. It does no work: if its slowest answers take 20 ms, the machine was busy for 20 ms.
"""

import argparse
import asyncio
import contextlib
import http.client
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import uvloop

from bench.placing import Connection
from testkit.controlplane.process import ProcessError, ServerProcess, free_port

ROOT: Final = Path(__file__).parents[1]
ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
START_SECONDS: Final = 20.0


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests until the client disconnects."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            at = head.find(b"content-length:")
            if at >= 0:
                await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
            writer.write(ANSWER)
            await writer.drain()
    writer.close()


async def serve(port: int) -> None:
    """Serve on 127.0.0.1 until cancelled."""
    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=1 << 24)
    async with server:
        await server.serve_forever()


@contextmanager
def noise_server() -> Iterator[Connection]:
    """Run the server as a process while the context is open; yield a connection to it.

    Raises:
        ProcessError: the process did not start.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="idlegpu-noise-") as folder:
        process = ServerProcess(
            name="noise",
            command=[sys.executable, "-m", "bench.noise", "--port", str(port)],
            folder=Path(folder),
            ready_url="",
            environment={"PYTHONPATH": str(ROOT)},
        )
        process.spawn()
        try:
            with contextlib.closing(_connected(process, port)) as connection:
                yield connection
        finally:
            process.kill()


def _connected(process: ServerProcess, port: int) -> Connection:
    deadline = time.perf_counter() + START_SECONDS
    while True:
        try:
            return Connection(f"http://127.0.0.1:{port}")
        except (OSError, http.client.HTTPException) as error:
            if time.perf_counter() > deadline or not process.is_running:
                raise ProcessError(f"cannot start {process.name}: {process.describe()}") from error
            time.sleep(0.05)


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m bench.noise", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
