"""The pages of a benchmark read what they are told, and say how much that was."""

import asyncio

import pytest

from bench.page_viewers import pages
from bench.world import BenchError
from tests.controlplane.process import free_port
from tests.extender.observe.page.conftest import small_world
from tests.extender.observe.page.serving import serving


async def test_pages_are_open_until_they_are_closed_and_tell_what_they_read() -> None:
    async with serving(small_world()) as server:

        def look() -> int:
            with pages(server.url, 3) as told:
                assert len(server.page.hub) == 3
                assert told.bytes == 0
            return told.bytes

        read = await asyncio.to_thread(look)

        async with asyncio.timeout(10):
            while len(server.page.hub):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)

    assert read > 3 * 1000  # each was told the fleet


def test_an_extender_that_is_not_there_is_said() -> None:
    with (
        pytest.raises(BenchError, match="did not open"),
        pages(f"http://127.0.0.1:{free_port()}", 1),
    ):
        pass


def test_no_pages_ask_nobody() -> None:
    with pages("http://127.0.0.1:1", 0) as told:
        assert told.bytes == 0
