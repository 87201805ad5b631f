"""Stands before two extenders, as a Service does: every other pod's questions go to the other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

import aiohttp
import orjson
from aiohttp import web

MAX_BYTES = 64 << 20
PACE_SECONDS = 0.02
"""With 5,000 nodes kube-scheduler needs 20 to 40 ms for a pod."""


@asynccontextmanager
async def alternating(urls: Sequence[str], port: int) -> AsyncIterator[None]:
    """Serve on a port. Each question takes at least as long as it does in a large cluster."""
    went: dict[str, str] = {}
    numbers = count()

    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            uid = orjson.loads(body)["Pod"]["metadata"]["uid"]
            if uid not in went:
                went[uid] = urls[next(numbers) % len(urls)]
            await asyncio.sleep(PACE_SECONDS)
            async with session.post(f"{went[uid]}{request.path}", data=body) as answer:
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type="application/json"
                )

        app = web.Application(client_max_size=MAX_BYTES)
        app.add_routes([web.post("/{verb}", forward)])
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield
        finally:
            await runner.cleanup()
