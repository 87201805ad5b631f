"""Run long work in steps on the event loop, and let other tasks run between the steps."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

_Result = TypeVar("_Result")

YieldControl = Callable[[], Awaitable[None]]
"""Yields the event loop to other tasks, and may wait for urgent ones."""


async def yield_to_loop() -> None:
    """Yield the event loop once."""
    await asyncio.sleep(0)


async def run_in_steps(
    steps: Generator[None, None, _Result], yield_control: YieldControl = yield_to_loop
) -> _Result:
    """Run work step by step, yield before each step, and return the result."""
    while True:
        await yield_control()
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
