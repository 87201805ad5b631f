"""Run blocking driver calls in one thread, and abandon the thread when a call does not return.

A thread that hangs in the driver cannot be killed. The worker abandons the thread and starts a new
one; the abandoned thread ends when its call returns. The agent then skips the GPU whose call hangs.
So there is at most one abandoned thread per GPU, or two after a restart of NVML.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from typing_extensions import override  # in typing from Python 3.12 on

from agent.gpu.backend import NvmlError

_T = TypeVar("_T")

_CHECK_SECONDS: Final = 0.25
"""Interval at which the event loop checks whether the current call is overdue."""

_COOLDOWN_LIMITS: Final = 12
"""First cooldown of a GPU after a hang, in call limits: one minute by default.

Each further hang doubles the cooldown. Without a cooldown, GPUs whose calls return late would delay
every pass, and several of them would prevent reads of the healthy ones."""

_MAX_DOUBLINGS: Final = 4


class _CallAbandonedError(Exception):
    """Raised in an abandoned thread when its call returns, to end the thread."""


class HungError(Exception):
    """A driver call did not return within its limit.

    Attributes:
        subject: UUID of the GPU that the call was made for, "" for a call that concerns no GPU.
        call: name of the call.
        seconds: the limit that the call exceeded.
    """

    def __init__(self, subject: str, call: str, seconds: float) -> None:
        super().__init__(f"{call} has not returned for {seconds:g} s")
        self.subject = subject
        self.call = call
        self.seconds = seconds


class _PendingCall(NamedTuple):  # a NamedTuple for speed: one is created for every call
    subject: str
    call: str
    since: float
    limit_seconds: float


class CallTracker:
    """The driver call that a thread is making. Written by the thread, read by the event loop.

    Attributes:
        pending_call: the call in progress, None between calls.
        is_abandoned: the worker has abandoned the thread.
        names: names of all calls made so far.
    """

    def __init__(
        self, limit_seconds: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.pending_call: _PendingCall | None = None
        self.is_abandoned = False
        self._busy_seconds = 0.0
        self.names: set[str] = set()
        self._limit_seconds = limit_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()

    def call(
        self,
        subject: str,
        name: str,
        function: Callable[..., _T],
        *arguments: object,
        limit_seconds: float | None = None,
    ) -> _T:
        """Make a call that may never return.

        Args:
            subject: UUID of the GPU that the call is made for, "" for a call that concerns no GPU.
            name: name of the call in messages.
            function: the function to call.
            limit_seconds: duration after which the call counts as hung; None for the usual limit.

        Raises:
            NvmlError: the function raised an exception of any class.
            CallAbandonedError: the call returned after the worker had abandoned the thread.
        """
        since = self._monotonic()
        limit = self._limit_seconds if limit_seconds is None else limit_seconds
        self.pending_call = _PendingCall(subject, name, since, limit)
        self.names.add(name)
        try:
            return function(*arguments)
        except NvmlError:
            raise
        except Exception as error:
            raise NvmlError.from_exception(name, error) from error
        finally:
            with self._lock:
                self.pending_call = None
            self._busy_seconds += self._monotonic() - since
            if self.is_abandoned:
                raise _CallAbandonedError

    def abandon(self, pending_call: _PendingCall) -> bool:
        """Abandon the thread unless the call has returned; return whether the thread is abandoned.

        The lock prevents a race: a call that returned at this moment would end the job, and the
        thread would wait for its next job while the worker counted it as hung.
        """
        with self._lock:
            self.is_abandoned = self.pending_call is pending_call
        return self.is_abandoned

    def take_busy_seconds(self) -> float:
        """Return the seconds spent in calls, and reset the counter to zero."""
        seconds, self._busy_seconds = self._busy_seconds, 0.0
        return seconds


_Job = tuple[Callable[[CallTracker], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class _Thread(threading.Thread):
    """Runs jobs in order. A daemon thread, because a call may still hang when the agent exits."""

    def __init__(self, number: int, tracker: CallTracker) -> None:
        super().__init__(name=f"nvml-{number}", daemon=True)
        self.tracker = tracker
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()

    @override
    def run(self) -> None:
        while not self.tracker.is_abandoned and (item := self.jobs.get()) is not None:
            job, future, loop = item
            try:
                result = job(self.tracker)
            except _CallAbandonedError:
                return
            except BaseException as error:  # noqa: BLE001 - the awaiting task handles it
                _call_soon(loop, _fail, future, error)
            else:
                _call_soon(loop, _succeed, future, result)


def _call_soon(
    loop: asyncio.AbstractEventLoop, how: Callable[..., None], *arguments: object
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(how, *arguments)


def _succeed(future: "asyncio.Future[Any]", result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class _Hang(NamedTuple):
    thread: _Thread
    times: int
    cooldown_until: float


class Worker:
    """Runs blocking jobs in one thread, and replaces the thread when a call hangs.

    One task uses it.

    Args:
        limit_seconds: default limit of a call; the worker abandons a call that takes longer.
    """

    def __init__(
        self, *, limit_seconds: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_seconds = limit_seconds
        self._monotonic = monotonic
        self._thread: _Thread | None = None
        self._hangs: dict[str, _Hang] = {}
        self._started = 0

    def hung_subjects(self) -> frozenset[str]:
        """Return the subjects to skip: a call for them still hangs, or their cooldown lasts."""
        now = self._monotonic()
        return frozenset(
            subject
            for subject, hang in self._hangs.items()
            if hang.thread.is_alive() or now < hang.cooldown_until
        )

    def clear_hangs(self, skipped: frozenset[str]) -> None:
        """Forget past hangs of all subjects but those in `skipped`, because they answer again."""
        self._hangs = {name: hang for name, hang in self._hangs.items() if name in skipped}

    async def run(self, job: Callable[[CallTracker], _T]) -> _T:
        """Run a job in the thread and return its result.

        Raises:
            HungError: a call of the job did not return; the thread is abandoned.
        """
        thread = self._thread or self._start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        pause = min(_CHECK_SECONDS, self._limit_seconds)
        timer: asyncio.TimerHandle

        def check_overdue() -> None:
            nonlocal timer
            pending_call = thread.tracker.pending_call
            is_overdue = (
                pending_call is not None
                and self._monotonic() - pending_call.since >= pending_call.limit_seconds
            )
            if pending_call is not None and is_overdue and thread.tracker.abandon(pending_call):
                self._replace(thread, pending_call)
                _fail(
                    future,
                    HungError(pending_call.subject, pending_call.call, pending_call.limit_seconds),
                )
            else:
                timer = loop.call_later(pause, check_overdue)

        timer = loop.call_later(pause, check_overdue)
        thread.jobs.put((job, future, loop))
        try:
            return await future
        finally:
            timer.cancel()

    def _start(self) -> _Thread:
        self._started += 1
        tracker = CallTracker(self._limit_seconds, self._monotonic)
        self._thread = _Thread(self._started, tracker)
        self._thread.start()
        return self._thread

    def _replace(self, thread: _Thread, pending_call: _PendingCall) -> None:
        before = self._hangs.get(pending_call.subject)
        times = 1 if before is None else before.times + 1
        cooldown = self._limit_seconds * _COOLDOWN_LIMITS * 2 ** min(times - 1, _MAX_DOUBLINGS)
        # Calls that concern no GPU have no cooldown: nothing can be read until they succeed.
        cooldown_until = self._monotonic() + cooldown if pending_call.subject else 0.0
        self._hangs[pending_call.subject] = _Hang(thread, times, cooldown_until)
        self._thread = None

    def close(self) -> None:
        """End the thread after its current job; a thread that hangs ends with the process."""
        if self._thread is not None:
            self._thread.jobs.put(None)
            self._thread = None
