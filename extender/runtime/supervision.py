"""Run background tasks: one that fails is logged, counted and started again."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from extender.runtime.logs import LogThrottle

FAULTS: Final[Counter[str]] = Counter()
"""Failures since the start of the process, by task."""

_FIRST_SECONDS: Final = 1.0
_MOST_SECONDS: Final = 30.0
"""Wait before a restart: doubled with each failure that follows soon after the last one."""

_HEALTHY_SECONDS: Final = 60.0
"""Length of a run after which the wait before a restart is reset."""

logger = logging.getLogger(__name__)

_THROTTLE: Final = LogThrottle()


async def keep(
    name: str, run: Callable[[], Awaitable[None]], *, fatal: tuple[type[Exception], ...] = ()
) -> None:
    """Run a task until it returns or is cancelled; start it again whenever it fails.

    A failing task must not end the process: the input that makes it fail comes from outside, and
    would come again after a restart of the process.

    Args:
        name: name of the task in logs and metrics.
        run: starts the task.
        fatal: exceptions that are raised and not retried: an address that is in use.
    """
    clock = asyncio.get_running_loop().time
    FAULTS.setdefault(name, 0)  # rate() sees the first failure only if the series existed before
    seconds = _FIRST_SECONDS
    while True:
        started = clock()
        try:
            await _run_once(run)
        except fatal:
            raise
        except Exception as error:
            FAULTS[name] += 1
            unlogged = _THROTTLE.due(name, type(error).__name__)
            if unlogged is not None:
                extra = {"task": name, "also_unlogged": unlogged}
                logger.exception("background task failed: starting it again", extra=extra)
        else:
            return
        if clock() - started >= _HEALTHY_SECONDS:
            seconds = _FIRST_SECONDS
        await asyncio.sleep(seconds)
        seconds = min(2 * seconds, _MOST_SECONDS)


async def _run_once(run: Callable[[], Awaitable[None]]) -> None:
    """Run in a separate task, so that `CancelledError` here means that this task was cancelled.

    A task group whose child fails while the group is being cancelled raises the child's error and
    swallows the cancellation; in Python 3.11 it may also leave its task marked as cancelled.

    Raises:
        RuntimeError: `run` awaited a future that was cancelled.
        Exception: as `run` raised it.
    """
    current = asyncio.current_task()
    name = None if current is None else current.get_name()

    async def attempt() -> None:
        await run()

    task = asyncio.create_task(attempt(), name=name)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        _ = task.cancelled() or task.exception()  # read the exception: asyncio logs unread ones
        raise
    if task.cancelled():
        raise RuntimeError("the task awaited a cancelled future")
    task.result()


class Tasks:
    """Background tasks by name; each restarts after a failure, and can be stopped.

    Tasks run while the context is open; leaving it waits for them, or cancels them after a fault.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._group.__aexit__(kind, error, traceback)

    def start(
        self, name: str, run: Callable[[], Awaitable[None]], fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        """Start a background task; arguments as in `keep`."""
        self._tasks[name] = self._group.create_task(keep(name, run, fatal=fatal), name=name)

    async def stop(self, name: str) -> None:
        """Cancel a task if it exists, and wait until it has ended."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
