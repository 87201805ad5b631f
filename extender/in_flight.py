"""What has been asked and not answered yet, so that the end can wait for it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InFlight:
    """Counts the requests that have been accepted and not answered yet.

    Attributes:
        requests: how many there are.
        is_draining: no more are asked for: the end is near.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.requests = 0
        self._answered_at = time.monotonic()
        self._none = asyncio.Event()
        self._none.set()

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a request from its headers to the end of its answer."""
        self.requests += 1
        self._none.clear()
        try:
            response = await handler(request)
            if self.is_draining:
                response.force_close()
            return response
        finally:
            self.requests -= 1
            self._answered_at = time.monotonic()
            if not self.requests:
                self._none.set()

    def is_quiet(self, seconds: float) -> bool:
        """Whether nothing is under way, and nothing was for so long."""
        return not self.requests and time.monotonic() - self._answered_at >= seconds

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until every accepted request is answered, or the time is up."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._none.wait()
        except TimeoutError:
            logger.warning("requests left unanswered", extra={"requests": self.requests})
