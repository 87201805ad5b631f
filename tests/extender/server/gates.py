"""Proxy to a server that a test can close, so that one replica loses access to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from testkit.controlplane.process import free_port


class Gate:
    """Proxy that forwards to a server while it is open.

    Args:
        url: URL of the server.

    Attributes:
        url: URL of the proxy.
    """

    def __init__(self, url: str) -> None:
        self.is_open = False
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._there = urlsplit(url)
        self._writers: set[asyncio.StreamWriter] = set()

    def open(self) -> None:
        """Forward from now on."""
        self.is_open = True

    def shut(self) -> None:
        """Refuse connections, and close the existing ones."""
        self.is_open = False
        for writer in self._writers:
            writer.close()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward or refuse a connection."""
        if not self.is_open:
            writer.close()
            return
        there, back = await asyncio.open_connection(self._there.hostname, self._there.port)
        both = {writer, back}
        self._writers |= both
        try:
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pass(reader, back))
                    group.create_task(_pass(there, writer))
        finally:
            self._writers -= both
            for one in both:
                one.close()


@asynccontextmanager
async def gate(url: str) -> AsyncIterator[Gate]:
    """Run a proxy, closed at first."""
    made = Gate(url)
    server = await asyncio.start_server(made.take, "127.0.0.1", made.port)
    try:
        yield made
    finally:
        made.shut()
        server.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
        await writer.drain()
    writer.close()
