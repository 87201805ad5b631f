"""Questions whose answer nobody reads: the sender is gone, or asks where we serve nothing."""

import select
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from aiohttp import web

from extender.placement.request_log import RequestLog

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GONE: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""The other side closed its end; POLLRDHUP is Linux' own."""


def is_gone(request: web.Request) -> bool:
    """Tell whether the sender of a question has hung up.

    The transport learns of it when the event loop reads next; the socket knows already. Who waits
    for an answer and hangs up has given up: kube-scheduler does so after httpTimeout.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        return True
    socket = transport.get_extra_info("socket")
    number = -1 if socket is None else socket.fileno()
    if number < 0:
        return False
    poll = select.poll()
    poll.register(number, _GONE)
    return bool(poll.poll(0))


def noting_wrong_paths(asked: RequestLog) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return a middleware that notes where questions come to that nobody answers."""

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status == HTTPStatus.NOT_FOUND and request.method == "POST":
                asked.note_wrong_path(request.path)
            raise

    return note
