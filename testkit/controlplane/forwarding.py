"""Proxy from the API server to a program on loopback, in place of a pod network.

The API server refuses to proxy to a loopback address, so the proxy listens on another address of
the machine.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


def machine_address() -> str:
    """Return an address of this machine that is not loopback, "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # connecting a UDP socket sends nothing; it only selects a route
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if address.startswith("127.") else address


@asynccontextmanager
async def forwarding(address: str, url: str) -> AsyncIterator[int]:
    """Forward connections at another address to a URL, from that address; yield the port."""
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
