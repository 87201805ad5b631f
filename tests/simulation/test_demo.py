"""`make demo`, as a newcomer uses it."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import aiohttp
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
async def test_it_prints_the_pages_link_serves_the_page_there_and_ends_on_ctrl_c() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "simulation.demo", cwd=ROOT, stdout=PIPE, stderr=STDOUT
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = ""
        while not (link := re.search(r"^ +(http://\S+/page/) in a browser$", said, re.MULTILINE)):
            line = await process.stdout.readline()
            assert line, f"it ended and said {said}"
            said += line.decode()
        async with aiohttp.ClientSession() as session, session.get(link[1]) as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            assert "<title>idlegpu" in await response.text()

        process.send_signal(signal.SIGINT)
        rest, _ = await process.communicate()
        assert rest.decode().endswith("\nbye\n")
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
