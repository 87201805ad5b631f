"""Limit concurrent requests fairly: waiting callers are served round robin."""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_Queue = deque[asyncio.Future[None]]


class BusyError(Exception):
    """A caller has too many waiting requests, or waited too long; the message says which."""


class FairQueue:
    """A queue that limits concurrency and rate, and serves callers round robin.

    However many requests one caller has queued, the next request of another caller waits for at
    most one of them.

    Args:
        at_once: maximum number of requests at a time.
        waiting_each: maximum number of waiting requests of one caller.
        wait_seconds: longest wait before `BusyError`.
        per_second: maximum average rate, or None for no limit; may be changed.
    """

    def __init__(
        self,
        *,
        at_once: int,
        waiting_each: int,
        wait_seconds: float,
        per_second: float | None = None,
    ) -> None:
        self._at_once = at_once
        self._waiting_each = waiting_each
        self._wait_seconds = wait_seconds
        self.per_second = per_second
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._taken = 0
        self._due_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it while the context is open.

        Args:
            name: name of the caller.

        Raises:
            BusyError: too many requests of this caller wait, or the wait took too long.
        """
        await self._wait(name)
        try:
            yield
        finally:
            self._taken -= 1
            self._let_in()

    async def _wait(self, name: str) -> None:
        queue = self._queues.setdefault(name, deque())
        if len(queue) >= self._waiting_each:
            raise BusyError(f"{len(queue)} requests of the same caller are waiting already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._let_in()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except TimeoutError as error:
            self._give_up(name, turn)
            raise BusyError(f"no slot became free within {self._wait_seconds:g} s") from error
        except asyncio.CancelledError:
            self._give_up(name, turn)
            raise

    def _give_up(self, name: str, turn: asyncio.Future[None]) -> None:
        """Remove a waiting request, or release the slot that it got too late."""
        if turn.done() and not turn.cancelled():
            self._taken -= 1
            self._let_in()
            return
        queue = self._queues.get(name, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._queues.pop(name, None)

    def _let_in(self) -> None:
        """Give free slots to waiting requests."""
        loop = asyncio.get_running_loop()
        while self._queues and self._taken < self._at_once:
            now = loop.time()
            if self._due_at > now:
                if self._timer is None:
                    self._timer = loop.call_at(self._due_at, self._on_time)
                return
            name, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[name] = queue  # at the end: other callers come first
            if turn.done():  # cancelled, but not removed yet
                continue
            # Allow a burst of one second's worth, then pace the rest.
            if self.per_second is not None:
                self._due_at = max(self._due_at, now - 1.0) + 1.0 / self.per_second
            self._taken += 1
            turn.set_result(None)

    def _on_time(self) -> None:
        self._timer = None
        self._let_in()
