"""Helpers for HTTP requests to the API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from testkit.webhook_requests import Client, names_request, pod


def strict(text: str) -> Any:
    """Parse JSON strictly: NaN and Infinity are errors."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def get(client: Client, path: str, status: int = 200, **query: str) -> Any:
    response = await client.get(path, params=query)
    text = await response.text()
    assert response.status == status, text
    assert response.content_type == "application/json"
    return strict(text)


async def decide(client: Client, *nodes: str, **wishes: Any) -> None:
    body = names_request(*nodes, requester=pod(**wishes))
    assert (await client.post("/prioritize", data=json.dumps(body))).status == 200


@asynccontextmanager
async def meanwhile(act: Callable[[], object]) -> AsyncIterator[None]:
    """Call a function in each iteration of the event loop while the context is open."""

    async def act_on() -> None:
        while True:
            act()
            await asyncio.sleep(0)

    acting = asyncio.create_task(act_on())
    try:
        yield
    finally:
        acting.cancel()
        with suppress(asyncio.CancelledError):
            await acting
