"""`make demo`, as a new user runs it."""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from simulation import demo

ROOT = Path(__file__).parents[2]
COLUMNS = 80


@pytest.mark.timeout(180)
async def test_output_adds_up_its_link_and_commands_work_and_ctrl_c_ends_it() -> None:
    async with _demo() as process:
        assert process.stdout is not None
        text = ""
        while len(commands := re.findall(r"^   (\S+ \S.* --url \S+)$", text, re.MULTILINE)) < 3:
            line = await process.stdout.readline()
            assert line, f"it ended and said {text}"
            text += line.decode()
        link = re.search(r"^ +(http://\S+/page/) in a browser$", text, re.MULTILINE)
        assert link, text
        async with aiohttp.ClientSession() as session, session.get(link[1]) as response:
            assert response.status == 200
            assert response.content_type == "text/html"
            assert "<title>idlegpu" in await response.text()

        answers = [await _output(command) for command in commands]
        assert "gpu-h100-01" in answers[0]
        assert "notebooks/jupyter-carol-0" in answers[1]
        assert "default/patient: waits" in answers[2]

        process.send_signal(signal.SIGINT)
        rest, _ = await process.communicate()
        assert rest.decode().endswith("\nbye\n")
        assert process.returncode == 0

    text += rest.decode()
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
    _assert_tally_adds_up(text)


def _assert_tally_adds_up(text: str) -> None:
    rows = re.findall(r"^   \S+ +(\S+) +without: (\S+) *(.*)$", text, re.MULTILINE)
    tally = {
        name: (int(ours), int(without))
        for name, ours, without in re.findall(
            r"^   (on \w+ GPUs|out of memory|waiting) +(\d+) +(\d+) +[\d.]+$", text, re.MULTILINE
        )
    }
    assert f"{len(rows)} pods; without idlegpu 1 on saturated GPUs, 2 on broken GPUs" in text
    assert [sum(column) for column in zip(*tally.values(), strict=True)] == [len(rows)] * 2
    assert tally["waiting"] == tuple([row[side] for row in rows].count("waits") for side in (0, 1))
    reasons = {
        "on saturated GPUs": "% busy",
        "on broken GPUs": "lost GPU",
        "out of memory": "is free",
    }
    for fate, reason in reasons.items():
        assert tally[fate] == (0, sum(reason in row[2] for row in rows))


@pytest.mark.timeout(30)
async def test_with_once_it_ends_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def played(*_: object) -> AsyncIterator[str]:
        yield "http://127.0.0.1"

    monkeypatch.setattr(demo, "playing", played)
    monkeypatch.setattr(sys, "argv", ["demo", "--once"])

    await asyncio.to_thread(demo.main)


@asynccontextmanager
async def _demo() -> AsyncIterator[Process]:
    """Run the demo while the context is open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "simulation.demo", cwd=ROOT, stdout=PIPE, stderr=STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _output(command: str) -> str:
    """Run a command in the repository's root, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_shell(
        command, cwd=ROOT, stdout=PIPE, stderr=STDOUT, env=environment
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()
