"""Wait for a condition with a deadline, so that no test sleeps and hopes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

Value = TypeVar("Value")
DEADLINE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.05
MOST_POLL_SECONDS: Final = 0.2
LONGER: Final = 1.2
"""What has taken long is asked for less often: each answer costs the servers CPU."""


async def wait_for(
    condition: Callable[[], Awaitable[Value | None]],
    what: str,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Value:
    """Ask again and again until the answer is true, and return that answer.

    Args:
        condition: what to ask; anything that `bool` takes for true ends the wait.
        deadline_seconds: when to give up.

    Raises:
        TimeoutError: the answer was not true in time; the message holds the last answer.
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
