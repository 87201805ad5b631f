"""A way to a server that may be shut: what another replica still reaches, this one does not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from testkit.controlplane.process import free_port


class Gate:
    """Leads to a server while it is open.

    Args:
        url: the server's.

    Attributes:
        url: the way's.
    """

    def __init__(self, url: str) -> None:
        self.is_open = False
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._there = urlsplit(url)
        self._writers: set[asyncio.StreamWriter] = set()

    def open(self) -> None:
        """Lead there from now on."""
        self.is_open = True

    def shut(self) -> None:
        """Lead nowhere, and end what there is."""
        self.is_open = False
        for writer in self._writers:
            writer.close()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lead a connection there, or nowhere."""
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
    """Have a gate, shut at first."""
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
