"""What serves simulated parts leaves nothing behind."""

import asyncio
import gc
import socket
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from simulation.serving import serve


@pytest.mark.parametrize("turns", range(6))
async def test_who_comes_at_the_very_end_is_closed_too(turns: int) -> None:
    with socket.socket() as late:
        async with serve(web.Application()) as url:
            address = urlsplit(url)
            late.connect((address.hostname, address.port))
            for _ in range(turns):
                await asyncio.sleep(0)

        gc.collect()  # a transport that nobody closes complains here, and the test fails
        late.settimeout(5)
        try:
            left = late.recv(1)
        except ConnectionResetError:
            left = b""
    assert not left
