"""Check that background work yields to a request."""

import asyncio

from extender.server.request_tracker import RequestTracker


async def makes_wait(request_tracker: RequestTracker) -> None:
    """Wait until background work yields to a request.

    Raises:
        TimeoutError: background work does not yield in time.
    """
    async with asyncio.timeout(30):
        while True:
            work = asyncio.create_task(request_tracker.yield_control())
            for _ in range(3):
                await asyncio.sleep(0)
            if not work.done():
                work.cancel()
                return
            await asyncio.sleep(0.001)
