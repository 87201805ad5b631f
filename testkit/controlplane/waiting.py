"""Poll conditions with a deadline, so that tests need no fixed sleeps."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

Value = TypeVar("Value")
DEADLINE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.05
MOST_POLL_SECONDS: Final = 0.2
LONGER: Final = 1.2
"""Factor by which the interval grows, because each poll costs the servers CPU."""


async def wait_for(
    condition: Callable[[], Awaitable[Value | None]],
    what: str,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Value:
    """Poll a condition until its result is true, and return that result.

    Args:
        condition: function to poll; a truthy result ends the wait.
        deadline_seconds: timeout.

    Raises:
        TimeoutError: the result was not true in time; the message has the last result.
    """
    deadline = time.monotonic() + deadline_seconds
    pause_seconds = POLL_SECONDS
    while True:
        answer = await condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not so after {deadline_seconds} s: last seen {answer!r}")
        await asyncio.sleep(pause_seconds)
        pause_seconds = min(LONGER * pause_seconds, MOST_POLL_SECONDS)
