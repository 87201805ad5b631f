"""Run long work in steps on the event loop, and let other tasks run between the steps."""

import asyncio
from collections.abc import Awaitable, Callable

from extender.core.steps import Result, Steps

GiveWay = Callable[[], Awaitable[None]]
"""Yields the event loop to other tasks, and may wait for urgent ones."""


async def next_turn() -> None:
    """Yield the event loop once."""
    await asyncio.sleep(0)


async def in_turns(steps: Steps[Result], give_way: GiveWay = next_turn) -> Result:
    """Run work step by step, yield before each step, and return the result."""
    while True:
        await give_way()
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
