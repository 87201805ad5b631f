"""Proxy in front of two extenders that sends the requests of every other pod to the second."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web

MAX_BYTES = 64 << 20
PACE_SECONDS = 0.02
"""Time that kube-scheduler needs for a pod with 5,000 nodes is 20 to 40 ms."""


@asynccontextmanager
async def alternating(
    urls: Sequence[str], port: int, certificates: Path | None, may_pass: asyncio.Event
) -> AsyncIterator[str]:
    """Run the proxy on a port and yield its URL; each request takes as long as in a large cluster.

    Args:
        urls: base URLs of the extenders.
        port: port to serve on.
        certificates: folder with the certificates of extender and kube-scheduler, None for plain
            HTTP. The proxy acts as the extender to its client, and as kube-scheduler to the
            extenders.
        may_pass: requests wait for it.
    """
    serving = asking = None
    if certificates is not None:
        serving = _context(certificates / "extender", ssl.Purpose.CLIENT_AUTH)
        asking = _context(certificates / "kube-scheduler", ssl.Purpose.SERVER_AUTH)
    went: dict[str, str] = {}
    numbers = count()

    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            uid = orjson.loads(body)["Pod"]["metadata"]["uid"]
            if uid not in went:
                went[uid] = urls[next(numbers) % len(urls)]
            await may_pass.wait()
            await asyncio.sleep(PACE_SECONDS)
            url = f"{went[uid]}{request.path}"
            async with session.post(url, data=body, ssl=asking or True) as answer:
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type="application/json"
                )

        app = web.Application(client_max_size=MAX_BYTES)
        app.add_routes([web.post("/{verb}", forward)])
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=serving).start()
        try:
            yield f"{'http' if serving is None else 'https'}://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


def _context(folder: Path, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Return a TLS context of one side, which requires a peer certificate of the same CA."""
    context = ssl.create_default_context(purpose, cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED
    return context
