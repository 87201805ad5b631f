"""Long work in steps on the event loop: before each others have their turn."""

import asyncio
from collections.abc import Awaitable, Callable

from extender.core.steps import Result, Steps

GiveWay = Callable[[], Awaitable[None]]
"""Lets others have a turn, some perhaps before others."""


async def next_turn() -> None:
    """Let everybody else have a turn."""
    await asyncio.sleep(0)


async def in_turns(steps: Steps[Result], give_way: GiveWay = next_turn) -> Result:
    """Do work in steps, and let whoever waits have a turn before each; return its result."""
    while True:
        await give_way()
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
