"""Server-sent events: tells each viewer what is new, and lets go of those who do not read."""

import asyncio
import logging
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from extender.observe.answers import error_answer
from extender.observe.page.hub import Hub
from extender.observe.seen import VIEWER, AccessError

logger = logging.getLogger(__name__)

MOST_VIEWERS: Final = 64
"""Each keeps an event of some hundred kilobytes at worst."""
WRITE_SECONDS: Final = 20.0
"""Who takes longer to read one event is let go; the page comes back by itself."""

HEADERS: Final = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Accel-Buffering": "no",  # a proxy must not collect events
}


async def stream(hub: Hub, request: web.Request) -> web.StreamResponse:
    """Tell somebody what is new until they leave, stop reading, or the server ends."""
    who = VIEWER.get().name or request.remote or ""
    is_asked_of_headers = request.method == hdrs.METH_HEAD
    if not is_asked_of_headers and not hub.has_room_for(who, MOST_VIEWERS):
        refused = error_answer(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{MOST_VIEWERS} pages are open already, and enough of them are yours: close one, and "
            "this one will come up",
        )
        refused.headers[hdrs.RETRY_AFTER] = "30"
        return refused
    response = web.StreamResponse(headers=HEADERS)
    response.force_close()
    await response.prepare(request)
    if is_asked_of_headers:
        return response
    viewer = hub.join(who)
    try:
        while not (hub.is_closing or viewer.is_let_go):
            await VIEWER.get().renew()
            for told in hub.news_for(viewer):
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(told)
            await viewer.news.wait()
    except AccessError:
        logger.debug("a page may see no more")  # it asks again, and is told why not
    except (ConnectionError, TimeoutError):
        # Gone, or does not read: what is still buffered for them goes with the connection.
        if request.transport is not None:
            request.transport.abort()
    finally:
        hub.leave(viewer)
    return response
