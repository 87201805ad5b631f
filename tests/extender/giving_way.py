"""Whether other work gives way to a question."""

import asyncio

from extender.server.request_tracker import InFlight


async def makes_wait(in_flight: InFlight) -> None:
    """Wait until work gives way.

    Raises:
        TimeoutError: it does not.
    """
    async with asyncio.timeout(30):
        while True:
            work = asyncio.create_task(in_flight.give_way())
            for _ in range(3):
                await asyncio.sleep(0)
            if not work.done():
                work.cancel()
                return
            await asyncio.sleep(0.001)
