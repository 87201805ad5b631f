"""Runs an aiohttp application on 127.0.0.1 inside the caller's event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


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
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        host, bound_port = runner.addresses[0][:2]
        yield f"http://{host}:{bound_port}"
    finally:
        await runner.cleanup()
