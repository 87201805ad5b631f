"""The routes /healthz and /readyz for the kubelet and operators."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import orjson
from aiohttp import web

_READY: Final = "ready"


def health_routes(
    ready_state: Callable[[], str], degraded: Callable[[], Mapping[str, str]]
) -> list[web.RouteDef]:
    """Return the routes.

    Args:
        ready_state: returns "ready", or the state that keeps the extender from answering; called
            for each request.
        degraded: returns the cause of each degradation by component; without pod data, because
            every client may read it.
    """

    async def readyz(_: web.Request) -> web.Response:
        causes = dict(degraded())
        state = ready_state()
        is_ready = state == _READY
        body = {"status": "degraded" if causes and is_ready else state, "degraded": causes}
        return web.Response(
            body=orjson.dumps(body),
            status=HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE,
            content_type="application/json",
        )

    return [web.get("/healthz", _healthz), web.get("/readyz", readyz)]


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")
