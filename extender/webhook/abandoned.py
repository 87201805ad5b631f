"""Detect requests whose client has disconnected, and count requests for unknown paths."""

import select
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from aiohttp import web

from extender.placement.request_log import RequestLog

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GONE: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""Poll events of a connection that the peer closed; POLLRDHUP exists on Linux only."""


def is_gone(request: web.Request) -> bool:
    """Return whether the client of a request has disconnected.

    The transport notices this only at the event loop's next read, so the socket is polled.
    kube-scheduler disconnects after `httpTimeout`.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        return True
    socket = transport.get_extra_info("socket")
    if socket is None or socket.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(socket, _GONE)
    return bool(poll.poll(0))


def noting_wrong_paths(request_log: RequestLog) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return a middleware that records the paths of POST requests that no route serves."""

    @web.middleware
    async def note(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status == HTTPStatus.NOT_FOUND and request.method == "POST":
                request_log.note_wrong_path(request.path)
            raise

    return note
