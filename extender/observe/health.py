"""Tells kubelet and people whether this lives, and whether it can answer well."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import orjson
from aiohttp import web

READY: Final = "ready"


def health_routes(
    standing: Callable[[], str], degraded: Callable[[], Mapping[str, str]]
) -> list[web.RouteDef]:
    """Return the routes.

    Args:
        standing: whether questions are to come, and can be answered well: "ready", or what it is;
            called for each who asks.
        degraded: what is wrong all the same, by what it is wrong with; no word of pods, for
            anybody may read it.
    """

    async def readyz(_: web.Request) -> web.Response:
        causes = dict(degraded())
        stands = standing()
        is_ready = stands == READY
        body = {"status": "degraded" if causes and is_ready else stands, "degraded": causes}
        return web.Response(
            body=orjson.dumps(body),
            status=HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE,
            content_type="application/json",
        )

    return [web.get("/healthz", _healthz), web.get("/readyz", readyz)]


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")
