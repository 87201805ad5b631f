"""Track open requests: shutdown waits for them, and background work yields to them."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from aiohttp import web

logger = logging.getLogger(__name__)

_MAX_YIELD_SECONDS: Final = 0.02
"""Longest time for which one step of background work waits for open requests."""

_EXPECTED_SECONDS: Final = 0.005
"""Time for which background work waits for the prioritize request after a filter answer.
kube-scheduler takes a millisecond or two to score a hundred nodes itself."""

_QUIET_SECONDS: Final = 0.25
"""A burst of requests has ended when no request was open for this long."""

_BURST_SECONDS: Final = 2.0
"""Longest time for which `wait_for_quiet` waits for the end of a burst."""

_CHECK_SECONDS: Final = 0.1
"""Time between checks for clients that are still connected."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestTracker:
    """Counts the requests that were accepted and are not answered yet.

    Attributes:
        requests: number of open requests.
        is_draining: whether the extender is shutting down.

    Args:
        urgent: paths of the requests to which background work yields.
        lasting: paths of streams, which are not counted: they end only when the client leaves.
        once: paths of the requests that the client does not repeat if the connection breaks.
    """

    def __init__(
        self,
        urgent: Collection[str] = (),
        lasting: Collection[str] = (),
        once: Collection[str] = (),
    ) -> None:
        self.is_draining = False
        self.requests = 0
        self._urgent = frozenset(urgent)
        self._lasting = frozenset(lasting)
        self._once = frozenset(once)
        self._known: set[web.RequestHandler] = set()
        self._once_clients: set[web.RequestHandler] = set()
        # Connections whose request is being handled, and when the next request began to arrive.
        self._handled: set[asyncio.BaseProtocol] = set()
        self._arriving: dict[asyncio.BaseProtocol, float] = {}
        self._ends_at = math.inf
        self._waiting = 0
        self._expected: asyncio.TimerHandle | None = None
        self._no_urgent = asyncio.Event()
        self._answered_at = time.monotonic()
        self._none = asyncio.Event()
        self._none.set()

    @web.middleware
    async def count(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Count a request from its headers to the end of its answer."""
        connection, is_urgent = request.protocol, request.path in self._urgent
        if connection not in self._known:
            self._remember(connection)
        if request.path in self._lasting:
            return await handler(request)
        self.requests += 1
        self._none.clear()
        if request.path in self._once:
            self._once_clients.add(connection)
        if is_urgent:
            self._waiting += 1
            self._stop_expecting()
        self._handled.add(connection)
        self._arriving.pop(connection, None)
        try:
            response = await handler(request)
            if self.is_draining:
                response.force_close()
            return response
        finally:
            self._handled.discard(connection)
            self._waiting -= is_urgent
            self._wake_if_no_urgent()
            self.requests -= 1
            self._answered_at = time.monotonic()
            if not self.requests:
                self._none.set()

    async def yield_control(self) -> None:
        """Yield the event loop, and wait while an urgent request is open.

        A request needs several iterations of the event loop. A task that ran a step in each
        iteration would delay the answer by that many steps.
        """
        await asyncio.sleep(0)
        if self._has_urgent():
            self._no_urgent.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MAX_YIELD_SECONDS):
                    await self._no_urgent.wait()

    def expect(self) -> None:
        """Make background work wait `_EXPECTED_SECONDS` for a request that is about to come."""
        self._stop_expecting()
        loop = asyncio.get_running_loop()
        self._expected = loop.call_later(_EXPECTED_SECONDS, self._stop_expecting)

    def _stop_expecting(self) -> None:
        if self._expected is not None:
            self._expected.cancel()
            self._expected = None
            self._wake_if_no_urgent()

    def note_bytes(self, connection: asyncio.BaseProtocol) -> None:
        """Record that bytes arrived on a connection that has sent a request of `once` before.

        Several iterations of the event loop pass until aiohttp handles the bytes as a request.
        """
        if connection in self._once_clients and connection not in self._handled:
            self._arriving.setdefault(connection, time.monotonic())

    def note_end(self, connection: asyncio.BaseProtocol) -> None:
        """Record that a connection has ended."""
        self._arriving.pop(connection, None)
        self._wake_if_no_urgent()

    def _has_urgent(self) -> bool:
        """Return whether an urgent request is open, arriving or expected.

        Bytes that do not become a request count for `_MAX_YIELD_SECONDS`.
        """
        if self._arriving:
            since = time.monotonic() - _MAX_YIELD_SECONDS
            self._arriving = {one: at for one, at in self._arriving.items() if at > since}
        return bool(self._waiting or self._arriving or self._expected)

    def _wake_if_no_urgent(self) -> None:
        if not (self._waiting or self._arriving or self._expected):
            self._no_urgent.set()

    async def wait_for_quiet(self) -> None:
        """Wait until a burst of requests has ended, at most `_BURST_SECONDS`.

        Work that can be done later then does not compete with the burst, even on other cores.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BURST_SECONDS):
                while (left := _QUIET_SECONDS - self._quiet_seconds()) > 0:  # noqa: ASYNC110 - no event is set when nothing happens
                    await asyncio.sleep(left)

    def is_quiet(self, seconds: float) -> bool:
        """Return whether no request has been open for this long."""
        return not self.requests and self._quiet_seconds() >= seconds

    def _quiet_seconds(self) -> float:
        """Return the seconds since the last request was answered, or 0 while one is open."""
        return 0.0 if self.requests else time.monotonic() - self._answered_at

    async def drain_connections(
        self,
        at_least_seconds: float,
        at_most_seconds: float,
        callers: Callable[[], Iterable[object]] = tuple,
    ) -> None:
        """Drain connections: announce their end with each answer, until no client is connected.

        kube-scheduler does not repeat a request if its connection is closed at that moment. So the
        extender closes no connection. A client that reads the announcement sends its next request
        to another replica, and closes idle connections itself. This also waits for connections
        without a request so far: kube-scheduler may have opened them for later.

        Args:
            at_least_seconds: time during which new clients may still arrive.
            at_most_seconds: time after that for clients to close their idle connections.
            callers: returns the connections that may still send a request of `once`: a
                `web.RequestHandler`, or any object for an unfinished handshake.
        """
        self.is_draining = True
        await asyncio.sleep(at_least_seconds)
        self._ends_at = time.monotonic() + at_most_seconds
        while self._is_client_left(callers()) and time.monotonic() < self._ends_at:  # noqa: ASYNC110 - no event is set when a connection ends
            await asyncio.sleep(_CHECK_SECONDS)

    def shorten_drain(self, at_most_seconds: float) -> None:
        """Shorten the shutdown to this time, even if requests are open."""
        self._ends_at = time.monotonic() + at_most_seconds

    def _remember(self, connection: web.RequestHandler) -> None:
        """Remember a connection that sent a request, and forget those that have ended."""
        self._known = {one for one in self._known if one.connected}
        self._known.add(connection)
        self._once_clients &= self._known

    def _is_client_left(self, callers: Iterable[object]) -> bool:
        return (
            self.requests > 0
            or any(one.connected for one in self._once_clients)
            or any(one not in self._known for one in callers)
        )

    async def drain_requests(self, timeout_seconds: float) -> None:
        """Wait until every accepted request is answered, or the time is up.

        Args:
            timeout_seconds: longest wait; the deadline that `drain_connections` set still applies.
        """
        self.is_draining = True
        left_seconds = max(self._ends_at - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(min(timeout_seconds, left_seconds)):
                await self._none.wait()
        except TimeoutError:
            logger.warning("requests left unanswered", extra={"requests": self.requests})
