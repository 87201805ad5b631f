"""The way from the API server to a program on loopback, in place of a pod network.

The API server proxies to no loopback address, so this listens on another of the machine's.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


def machine_address() -> str:
    """Return an address of this machine that is no loopback, "" where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only looks for a route
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if address.startswith("127.") else address


@asynccontextmanager
async def forwarding(address: str, url: str) -> AsyncIterator[int]:
    """Let a URL be reached at another address, from which it is asked; yield the port."""
    host, _, port = url.rpartition("/")[2].rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
        async with asyncio.TaskGroup() as group:
            group.create_task(copy(reader, back))
            group.create_task(copy(there, writer))

    server = await asyncio.start_server(forward, address, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
