"""Runs an aiohttp application on 127.0.0.1 inside the caller's event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

LATE_TURNS = 5
"""So many turns of the event loop may pass between accepting a connection and its being served."""


@asynccontextmanager
async def serve(app: web.Application, *, port: int = 0) -> AsyncIterator[str]:
    """Serve an application while the context is open.

    Args:
        app: what to serve.
        port: 0 for a free one.

    Yields:
        The base URL, `http://127.0.0.1:PORT`.
    """
    # A watch whose client has gone must end: nothing else would tell its handler.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", port))
    try:
        await web.SockSite(runner, listening).start()
        host, bound_port = listening.getsockname()
        yield f"http://{host}:{bound_port}"
    finally:
        # Until Python 3.12 asyncio forgets to close what it accepts just before a server's end.
        asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(LATE_TURNS):
            await asyncio.sleep(0)
        await runner.cleanup()
        listening.close()
