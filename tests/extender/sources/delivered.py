"""Deliveries of a Prometheus source."""

import asyncio
from collections.abc import Callable

from extender.sources.prometheus.node_identity import NodeIdentity

DEADLINE_SECONDS = 60.0  # a worker process starts late on a busy machine
NODES = NodeIdentity(names=frozenset({"gpu-1"}))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # the conditions have no event to wait for
            await asyncio.sleep(0.02)
