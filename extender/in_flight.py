"""What has been asked and not answered yet: the end waits for it, other work gives way to it."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final

from aiohttp import web
from typing_extensions import override  # in typing from Python 3.12 on

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 0.02
"""Work that gives way goes on after so long, however much is asked."""

EXPECTED_SECONDS: Final = 0.005
"""So long after filter's answer prioritize's question is waited for: kube-scheduler takes a
millisecond or two to score a hundred nodes itself."""

CALM_SECONDS: Final = 0.25
"""A burst of questions is over once nothing was asked for so long."""

BURST_SECONDS: Final = 2.0
"""Work that waits for that goes on after so long, however long the burst is."""

LOOK_SECONDS: Final = 0.1
"""Time between looks whether somebody is left to ask."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InFlight:
    """Counts the requests that have been accepted and not answered yet.

    Attributes:
        requests: how many there are.
        is_draining: no more are asked for: the end is near.
        callers: says who is connected and may ask what is not asked again: `web.RequestHandler`s,
            and whatever stands for who is not as far yet. Set before the end.

    Args:
        urgent: paths of the questions that somebody waits for.
        lasting: paths of streams: nobody waits for their end, and they do not count.
        once: paths of the questions that are not asked again where a connection breaks.
    """

    def __init__(
        self,
        urgent: Collection[str] = (),
        lasting: Collection[str] = (),
        once: Collection[str] = (),
    ) -> None:
        self.is_draining = False
        self.requests = 0
        self.callers: Callable[[], Iterable[object]] = tuple
        self._urgent = frozenset(urgent)
        self._lasting = frozenset(lasting)
        self._once = frozenset(once)
        self._known: set[web.RequestHandler] = set()
        self._askers: set[web.RequestHandler] = set()
        # Connections whose request is being handled, and those of which one is coming, since when.
        self._handled: set[asyncio.BaseProtocol] = set()
        self._coming: dict[asyncio.BaseProtocol, float] = {}
        self._ends_at = math.inf
        self._waiting = 0
        self._expected: asyncio.TimerHandle | None = None
        self._nobody_waits = asyncio.Event()
        self._answered_at = time.monotonic()
        self._none = asyncio.Event()
        self._none.set()

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a request from its headers to the end of its answer."""
        connection, is_urgent = request.protocol, request.path in self._urgent
        if connection not in self._known:
            self._get_to_know(connection)
        if request.path in self._lasting:
            return await handler(request)
        self.requests += 1
        self._none.clear()
        if request.path in self._once:
            self._askers.add(connection)
        if is_urgent:
            self._waiting += 1
            self._expect_no_more()
        self._handled.add(connection)
        self._coming.pop(connection, None)
        try:
            response = await handler(request)
            if self.is_draining:
                response.force_close()
            return response
        finally:
            self._handled.discard(connection)
            self._waiting -= is_urgent
            self._tell_if_nobody_waits()
            self.requests -= 1
            self._answered_at = time.monotonic()
            if not self.requests:
                self._none.set()

    async def give_way(self) -> None:
        """Let everybody have a turn, and answers be finished that somebody waits for.

        A question needs several turns of the loop until it is answered: work that took each turn
        between them would delay it by that many steps.
        """
        await asyncio.sleep(0)
        if self._is_waited_for():
            self._nobody_waits.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._nobody_waits.wait()

    def expect(self) -> None:
        """Have other work wait for a question that is about to come, though not for long."""
        self._expect_no_more()
        loop = asyncio.get_running_loop()
        self._expected = loop.call_later(EXPECTED_SECONDS, self._expect_no_more)

    def _expect_no_more(self) -> None:
        if self._expected is not None:
            self._expected.cancel()
            self._expected = None
            self._tell_if_nobody_waits()

    def watch(self, connection: web.RequestHandler) -> asyncio.BaseProtocol:
        """Return what hands everything on to a connection, and notes when a question is coming."""
        return _Watched(connection, self)

    def note_bytes(self, connection: asyncio.BaseProtocol) -> None:
        """Note that something has come of a connection that has asked what is not asked again.

        It takes several turns of the loop until that is a request, and handled.
        """
        if connection in self._askers and connection not in self._handled:
            self._coming.setdefault(connection, time.monotonic())

    def note_end(self, connection: asyncio.BaseProtocol) -> None:
        """Note that nothing more will come of a connection."""
        self._coming.pop(connection, None)
        self._tell_if_nobody_waits()

    def _is_waited_for(self) -> bool:
        """Whether somebody waits for an answer, or will; what is no request ends some time."""
        if self._coming:
            since = time.monotonic() - PATIENCE_SECONDS
            self._coming = {one: at for one, at in self._coming.items() if at > since}
        return bool(self._waiting or self._coming or self._expected)

    def _tell_if_nobody_waits(self) -> None:
        if not (self._waiting or self._coming or self._expected):
            self._nobody_waits.set()

    async def calm(self) -> None:
        """Let a burst of questions pass, but for what goes on all the while.

        What is not urgent and may as well be done later competes with nobody then, be it on other
        processes' cores.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BURST_SECONDS):
                while (left := CALM_SECONDS - self._quiet_seconds()) > 0:  # noqa: ASYNC110 - nothing tells that nothing happens
                    await asyncio.sleep(left)

    def is_quiet(self, seconds: float) -> bool:
        """Whether nothing is under way, and nothing was for so long."""
        return not self.requests and self._quiet_seconds() >= seconds

    def _quiet_seconds(self) -> float:
        """For how long nothing has been under way."""
        return 0.0 if self.requests else time.monotonic() - self._answered_at

    async def take_leave(self, at_least_seconds: float, at_most_seconds: float) -> None:
        """Answer on, each time as the last on that connection, until nobody is left to ask.

        Whoever keeps a connection may ask on it just when it is closed, and kube-scheduler does not
        ask again. So nobody's is: an answer says that its connection ends, whereupon the next
        question goes elsewhere, and who asks nothing closes it in the end. That goes for who has
        not asked anything yet as well: kube-scheduler may open a connection that it needs only
        later.

        Args:
            at_least_seconds: somebody new may come for so long.
            at_most_seconds: for idle connections to be closed by those who hold them, after that.
        """
        self.is_draining = True
        await asyncio.sleep(at_least_seconds)
        self._ends_at = time.monotonic() + at_most_seconds
        while self._is_somebody_left() and time.monotonic() < self._ends_at:  # noqa: ASYNC110 - connections tell nobody of their end
            await asyncio.sleep(LOOK_SECONDS)

    def hurry(self, at_most_seconds: float) -> None:
        """Have the end come so soon, whatever is under way."""
        self._ends_at = time.monotonic() + at_most_seconds

    def _get_to_know(self, connection: web.RequestHandler) -> None:
        """Remember that something was asked on a connection; forget those that have ended."""
        self._known = {one for one in self._known if one.connected}
        self._known.add(connection)
        self._askers &= self._known

    def _is_somebody_left(self) -> bool:
        return (
            self.requests > 0
            or any(one.connected for one in self._askers)
            or any(one not in self._known for one in self.callers())
        )

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until every accepted request is answered, or the time is up.

        Args:
            timeout_seconds: what `take_leave` has waited counts.
        """
        self.is_draining = True
        left_seconds = max(self._ends_at - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(min(timeout_seconds, left_seconds)):
                await self._none.wait()
        except TimeoutError:
            logger.warning("requests left unanswered", extra={"requests": self.requests})


class _Watched(asyncio.Protocol):
    """Hands everything on to a connection, and tells first what comes.

    Args:
        connection: handles it.
        in_flight: is told.
    """

    def __init__(self, connection: web.RequestHandler, in_flight: InFlight) -> None:
        self._connection = connection
        self._in_flight = in_flight

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(transport)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._in_flight.note_end(self._connection)
        self._connection.connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        self._in_flight.note_bytes(self._connection)
        self._connection.data_received(data)

    @override
    def eof_received(self) -> bool | None:
        self._connection.eof_received()
        return None

    @override
    def pause_writing(self) -> None:
        self._connection.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._connection.resume_writing()
