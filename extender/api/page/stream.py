"""Server-sent events: send updates to each viewer, and disconnect viewers that do not read."""

import asyncio
import logging
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from extender.api.page.broadcaster import Broadcaster
from extender.server.json_answers import error_answer
from extender.server.redaction import VIEWER, AccessError

logger = logging.getLogger(__name__)

MOST_VIEWERS: Final = 64
"""Viewer limit: each buffers an event of some hundred kilobytes at worst."""
WRITE_SECONDS: Final = 20.0
"""Time limit for reading one event; a disconnected page reconnects by itself."""

HEADERS: Final = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Accel-Buffering": "no",  # a proxy must not buffer events
}


async def stream(broadcaster: Broadcaster, request: web.Request) -> web.StreamResponse:
    """Send updates to a viewer until it leaves, stops reading, or the server shuts down."""
    client = VIEWER.get().name or request.remote or ""
    is_asked_of_headers = request.method == hdrs.METH_HEAD
    if not is_asked_of_headers and not broadcaster.has_room_for(client, MOST_VIEWERS):
        refused = error_answer(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{MOST_VIEWERS} pages are open already, and enough of them are yours: close one, and "
            "this page will load",
        )
        refused.headers[hdrs.RETRY_AFTER] = "30"
        return refused
    response = web.StreamResponse(headers=HEADERS)
    response.force_close()
    await response.prepare(request)
    if is_asked_of_headers:
        return response
    viewer = broadcaster.join(client)
    try:
        while not (broadcaster.is_closing or viewer.is_let_go):
            await VIEWER.get().renew()
            for update in broadcaster.news_for(viewer):
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(update)
            await viewer.news.wait()
    except AccessError:
        logger.debug("a page lost its access")  # the page reconnects, and receives the reason
    except (ConnectionError, TimeoutError):
        # The client left or does not read: abort the connection with its buffered data.
        if request.transport is not None:
            request.transport.abort()
    finally:
        broadcaster.leave(viewer)
    return response
