"""Turns at something that there is little of: whoever has had one waits until others had theirs."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Queue = deque[asyncio.Future[None]]


class BusyError(Exception):
    """Somebody has too many questions waiting, or has waited too long; the message says which."""


class Turns:
    """Lets so many have a turn at once, and so many in a second; asks everybody's name.

    Those who wait are let in one of each name, round and round: however many questions somebody
    has, another's next one waits for one of these at most.

    Args:
        at_once: so many have a turn at a time.
        waiting_each: so many questions of the same name may wait.
        wait_seconds: whoever waits longer than this goes without.
        per_second: so many turns begin in a second, on average; None for any number. It may be
            changed.
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
        self._queues: OrderedDict[str, Queue] = OrderedDict()
        self._taken = 0
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Wait for somebody's turn, which lasts as long as the context is open.

        Raises:
            BusyError: there is none.
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
            raise BusyError(f"{len(queue)} questions of the same caller are waiting already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._let_in()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except TimeoutError as error:
            self._give_up(name, turn)
            raise BusyError(f"there was no turn within {self._wait_seconds:g} s") from error
        except asyncio.CancelledError:
            self._give_up(name, turn)
            raise

    def _give_up(self, name: str, turn: asyncio.Future[None]) -> None:
        """Take back a question that has not had its turn, or gets it too late."""
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
        """Let in as many as may have a turn now."""
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
                self._queues[name] = queue  # at the end: the others come first
            if turn.done():  # cancelled, and not taken back yet
                continue
            # A burst of one second's worth, then one after the other.
            if self.per_second is not None:
                self._due_at = max(self._due_at, now - 1.0) + 1.0 / self.per_second
            self._taken += 1
            turn.set_result(None)

    def _on_time(self) -> None:
        self._timer = None
        self._let_in()
