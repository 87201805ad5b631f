"""Tells kubelet and people whether this lives, and whether it can answer well."""

from collections.abc import Callable, Mapping
from typing import Final

import orjson
from aiohttp import web

STARTING: Final = 503


def health_routes(
    is_ready: Callable[[], bool], degraded: Callable[[], Mapping[str, str]]
) -> list[web.RouteDef]:
    """Return the routes.

    Args:
        is_ready: whether questions can be answered well; telemetry that is down only degrades.
        degraded: what is wrong all the same, by what it is wrong with; no word of pods, for
            anybody may read it.
    """

    async def readyz(_: web.Request) -> web.Response:
        causes = dict(degraded())
        ready = is_ready()
        body = {
            "status": ("degraded" if causes else "ready") if ready else "starting",
            "degraded": causes,
        }
        return web.Response(
            body=orjson.dumps(body),
            status=200 if ready else STARTING,
            content_type="application/json",
        )

    return [web.get("/healthz", _healthz), web.get("/readyz", readyz)]


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")
