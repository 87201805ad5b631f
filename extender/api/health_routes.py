"""The routes /healthz and /readyz for the kubelet and operators."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import web

from extender.answers import routes
from extender.answers.service import Readiness
from extender.server.json_answers import json_answer

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
        return json_answer(
            Readiness(status="degraded" if causes and is_ready else state, degraded=causes),
            HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    return [web.get(routes.HEALTHZ.path, _healthz), web.get(routes.READYZ.path, readyz)]


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")
