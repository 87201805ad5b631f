"""Every command of the command line on the demo's fleet, in a terminal of 80 columns."""

import asyncio
import re
import threading
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from extender.cli import session
from extender.cli.__main__ import COMMANDS
from simulation.demo import playing
from testkit.cli_serving import runner

COLUMNS = 80
STYLE = re.compile(r"\x1b\[[0-9;]*m")

TABLES = [
    "nodes",
    "nodes --model H100",
    "gpus",
    "gpus gpu-a100-mig-01",
    "top --once",
    "best",
    "best --gpus 2 --memory 60Gi",
    "best --resource nvidia.com/gpu.shared --memory 8Gi",
    "explain stock",
    "explain patient",
    "explain train --scores",
    "explain big-model --node gpu-a100-01",
    "pending",
    "holders",
    "holders --idle-for 0 --some",
    "costs",
    "costs --by pod",
    "costs --since 1d",
    "decisions",
    "decisions burst-3",
    "regret",
    "advise",
    "advise --all",
    "defrag --for gpus=8",
]
OTHERS = ["size --text llama", "doctor", "smoke gpu-h100-01 --dry-run", "run --dry-run -- x"]
NOT_TABLES = {"replay", "completion"}
"""Subcommands that query no extender."""


@pytest.fixture
def url() -> Iterator[str]:
    """Yield the URL of an extender that has played the demo."""
    started, address = threading.Event(), list[str]()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with playing(Console(file=StringIO(), width=COLUMNS)) as at:
            address.append(at)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="demo")
    thread.start()
    assert started.wait(120)
    yield address[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join(60)
    loop.close()


@pytest.mark.timeout(240)
def test_no_line_is_longer_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, url: str, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(
        session, "_make_console", lambda: Console(width=COLUMNS, force_terminal=True, markup=False)
    )
    run = runner(url)

    for command in (*TABLES, *(f"{table} -o wide" for table in TABLES), *OTHERS):
        with subtests.test(command):
            result = run(*command.split())

            lines = STYLE.sub("", result.stdout + result.stderr).splitlines()
            assert lines
            assert [line for line in lines if cell_len(line) > COLUMNS] == []
            assert result.exception is None or isinstance(result.exception, SystemExit)


def test_every_command_is_tried() -> None:
    tried = {one.split()[0] for one in (*TABLES, *OTHERS)}

    assert tried == set(COMMANDS) - NOT_TABLES


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_page_is_wider(name: str) -> None:
    result = runner("http://127.0.0.1:9")(name, "--help")

    assert [line for line in result.stdout.splitlines() if cell_len(line) > COLUMNS] == []
