"""Runs blocking calls in one thread, and gives the thread up when a call does not return.

A thread that hangs in the driver cannot be killed. It is left behind, another takes its place, and
it ends by itself should the call ever return. Only so many may be left behind.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from typing_extensions import override  # in typing from Python 3.12 on

from agent.backend import Code, NvmlError

T = TypeVar("T")

_LOOK_SECONDS: Final = 0.25
"""The loop looks this often whether the call in progress is overdue."""


class GivenUpError(Exception):
    """Ends a thread whose call returned after it had been given up; never leaves the thread."""


class HungError(Exception):
    """A call did not return.

    Attributes:
        subject: whom it concerned: UUID of a card, "" for none.
        call: its name.
        seconds: how long it was waited for.
    """

    def __init__(self, subject: str, call: str, seconds: float) -> None:
        super().__init__(f"{call} has not returned for {seconds:g} s")
        self.subject = subject
        self.call = call
        self.seconds = seconds


class ExhaustedError(Exception):
    """So many threads hang that no other is started."""


class _Step(NamedTuple):  # one is made for every call
    subject: str
    call: str
    since: float
    limit_seconds: float


class Lane:
    """What a thread is doing; written by it, read by the loop.

    Attributes:
        busy_seconds: time spent in calls since `take_busy_seconds`.
        names: calls that were made so far.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.step: _Step | None = None
        self.is_given_up = False
        self.busy_seconds = 0.0
        self.names: set[str] = set()
        self._limit_seconds = limit_seconds
        self._lock = threading.Lock()

    def call(
        self,
        subject: str,
        name: str,
        function: Callable[..., T],
        *arguments: object,
        limit_seconds: float | None = None,
    ) -> T:
        """Make a call that may never return.

        Args:
            subject: whom it concerns: UUID of a card, "" for none.
            name: what it is called in messages.
            function: what to call.
            *arguments: with what.
            limit_seconds: after which it counts as hung; None for the usual limit.

        Raises:
            NvmlError: it raised any exception.
            GivenUpError: it returned, but nobody waits any more.
        """
        since = time.monotonic()
        limit = self._limit_seconds if limit_seconds is None else limit_seconds
        self.step = _Step(subject, name, since, limit)
        self.names.add(name)
        try:
            return function(*arguments)
        except NvmlError:
            raise
        except Exception as error:
            # A driver that is newer than the bindings answers what they cannot read (IndexError,
            # AttributeError): that costs one value of one card, and is named.
            raise NvmlError(name, Code.Unknown, f"{type(error).__name__}: {error}") from error
        finally:
            with self._lock:
                self.step = None
            self.busy_seconds += time.monotonic() - since
            if self.is_given_up:
                raise GivenUpError

    def give_up(self, step: _Step) -> bool:
        """Wait no longer for a call, unless it has returned meanwhile; tell whether that is so.

        Without the lock a thread might return at that very moment, end its job, and wait for
        another that nobody gives it: it would count as hung for ever.
        """
        with self._lock:
            self.is_given_up = self.step is step
        return self.is_given_up

    def take_busy_seconds(self) -> float:
        """Return the time spent in calls since the last time this was asked."""
        seconds, self.busy_seconds = self.busy_seconds, 0.0
        return seconds


_Job = tuple[Callable[[Lane], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class _Thread(threading.Thread):
    """Does one job after another; a daemon, because it may hang when the agent ends."""

    def __init__(self, number: int, limit_seconds: float) -> None:
        super().__init__(name=f"nvml-{number}", daemon=True)
        self.lane = Lane(limit_seconds)
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()

    @override
    def run(self) -> None:
        while not self.lane.is_given_up and (item := self.jobs.get()) is not None:
            job, future, loop = item
            try:
                result = job(self.lane)
            except GivenUpError:
                return
            except BaseException as error:  # noqa: BLE001 - who waits for it decides
                _tell(loop, _fail, future, error)
            else:
                _tell(loop, _succeed, future, result)


def _tell(loop: asyncio.AbstractEventLoop, how: Callable[..., None], *arguments: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(how, *arguments)


def _succeed(future: "asyncio.Future[Any]", result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class Worker:
    """One thread for blocking calls, replaced when it hangs; used by one task.

    Args:
        limit_seconds: a call that takes longer is given up.
        most_hung: so many threads may hang at once before no other is started.

    Attributes:
        given_up: how many threads were given up so far.
    """

    def __init__(self, *, limit_seconds: float, most_hung: int) -> None:
        self._limit_seconds = limit_seconds
        self._most_hung = most_hung
        self._thread: _Thread | None = None
        self._hung: list[tuple[_Thread, str]] = []
        self._started = 0
        self.given_up = 0

    def hung_subjects(self) -> frozenset[str]:
        """Return whom the calls concern that have not returned yet."""
        self._hung = [item for item in self._hung if item[0].is_alive()]
        return frozenset(subject for _, subject in self._hung)

    async def run(self, job: Callable[[Lane], T]) -> T:
        """Run a job in the thread, and return what it returns.

        Raises:
            HungError: a call of it did not return; the thread is given up.
            ExhaustedError: too many hang already.
        """
        thread = self._thread or self._start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        pause = min(_LOOK_SECONDS, self._limit_seconds)
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            step = thread.lane.step
            is_overdue = step is not None and time.monotonic() - step.since >= step.limit_seconds
            if step is not None and is_overdue and thread.lane.give_up(step):
                self._replace(thread, step)
                _fail(future, HungError(step.subject, step.call, step.limit_seconds))
            else:
                timer = loop.call_later(pause, look)

        timer = loop.call_later(pause, look)
        thread.jobs.put((job, future, loop))
        try:
            return await future
        finally:
            timer.cancel()

    def _start(self) -> _Thread:
        self.hung_subjects()
        if len(self._hung) >= self._most_hung:
            raise ExhaustedError(f"{len(self._hung)} calls have not returned")
        self._started += 1
        self._thread = _Thread(self._started, self._limit_seconds)
        self._thread.start()
        return self._thread

    def _replace(self, thread: _Thread, step: _Step) -> None:
        self._hung.append((thread, step.subject))
        self._thread = None
        self.given_up += 1

    def close(self) -> None:
        """Let the thread end after its job; one that hangs is left to the end of the process."""
        if self._thread is not None:
            self._thread.jobs.put(None)
            self._thread = None
