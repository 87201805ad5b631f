"""Run an aiohttp application on 127.0.0.1 in the caller's event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

LATE_ITERATIONS = 5
"""Most iterations of the event loop from accepting a connection to serving it."""


@asynccontextmanager
async def serve(app: web.Application, *, port: int = 0) -> AsyncIterator[str]:
    """Serve an application while the context is open.

    Args:
        port: the port, 0 for any free port.

    Yields:
        The base URL, `http://127.0.0.1:PORT`.
    """
    # Cancel the handler of a watch whose client has left: nothing else ends it.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", port))
    try:
        await web.SockSite(runner, listening).start()
        host, bound_port = listening.getsockname()
        yield f"http://{host}:{bound_port}"
    finally:
        # Before Python 3.12 asyncio does not close connections accepted right before a close.
        asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(LATE_ITERATIONS):
            await asyncio.sleep(0)
        await runner.cleanup()
        listening.close()
