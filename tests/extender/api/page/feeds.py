"""Feed of the page, and pods that hold GPUs."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from testkit.cards import Gpu


def held_by(pod: str, like: Gpu) -> Gpu:
    return replace(like, tenants=(f"team/{pod}",))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def read(reported: bytes) -> tuple[str, dict[str, Any]]:
    """Return the name and the document of an event."""
    name, data, *_ = reported.decode().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))
