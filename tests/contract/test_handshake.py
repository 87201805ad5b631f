"""Connections between an agent and an extender of different releases."""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from testkit.agent.pushing import Extender, eventually, extender, reporting
from testkit.agent.report_server import ReportServer, raw_connection, report_server
from testkit.agent.reviews import token
from tests.contract.handshake import (
    FAREWELL,
    GRANT,
    HEAD_ENDS,
    REFUSAL,
    REQUEST,
    handshake,
    with_token,
)
from tests.contract.reports import (
    MEANING,
    NODE,
    RECORDINGS,
    STREAM,
    plain,
    project_version,
    reports,
)

RELEASES: Final = sorted(RECORDINGS.iterdir())
RECORD_AGAIN: Final = (
    "the programs open or close connections differently now: python -m tests.contract.reports"
)

releases = pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)


def of_another_release(head: bytes) -> bytes:
    """Return a head as a later release may write it: other case and order, more headers."""
    first, *rest = head.removesuffix(HEAD_ENDS).split(b"\r\n")
    named = [line.partition(b":") for line in reversed(rest)]
    lines = [name.upper() + colon + b"  " + value.strip() for name, colon, value in named]
    return b"\r\n".join([first, b"X-Novelty: 1", *lines]) + HEAD_ENDS


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ReportServer]:
    async with report_server(tmp_path) as opened:
        opened.known.add(NODE)
        yield opened


@pytest_asyncio.fixture
async def other_side() -> AsyncIterator[Extender]:
    async with extender() as serving:
        yield serving


@releases
@pytest.mark.parametrize("is_later", [False, True], ids=["as-it-is", "with-news"])
async def test_extender_accepts_an_agent_of_that_release(
    server: ReportServer, folder: Path, is_later: bool
) -> None:
    request = with_token((folder / REQUEST).read_bytes(), token(NODE))
    said = (folder / STREAM).read_bytes()
    expected = json.loads((folder / MEANING).read_text())[-1]

    reader, _ = await raw_connection(
        server, of_another_release(request) if is_later else request, said
    )

    assert (await reader.readuntil(HEAD_ENDS)).startswith(b"HTTP/1.1 101 ")
    await eventually(
        lambda: server.source.status().reports == len(reports()) and server.readings_of(NODE)
    )
    last = server.readings_of(NODE)[-1]
    assert plain([asdict(info) for info in last.devices]) == expected["devices"]
    columns = {signal.value: column.tolist() for signal, column in last.columns.items()}
    assert plain(columns) == expected["columns"]
    assert sum(server.source.status().refused.values()) == 0


@releases
@pytest.mark.parametrize("is_later", [False, True], ids=["as-it-is", "with-news"])
async def test_agent_reports_to_an_extender_of_that_release(
    other_side: Extender, tmp_path: Path, folder: Path, is_later: bool
) -> None:
    grant = (folder / GRANT).read_bytes()
    other_side.answer = of_another_release(grant) if is_later else grant

    async with reporting(other_side.port, tmp_path):
        await eventually(lambda: other_side.updates and other_side.updates[0])


@releases
async def test_an_agent_says_why_an_extender_of_that_release_refuses_it(
    other_side: Extender, tmp_path: Path, folder: Path
) -> None:
    other_side.answer = (folder / REFUSAL).read_bytes()
    reason = other_side.answer.partition(HEAD_ENDS)[2].decode().strip()

    async with reporting(other_side.port, tmp_path) as running:
        await eventually(
            lambda: any(link.problem.startswith("status") for link in running.pusher.links.values())
        )

        (link,) = running.pusher.links.values()
        assert link.problem == f"status 401: {reason}"
        assert reason


@releases
async def test_agent_understands_the_close_of_an_extender_of_that_release(
    other_side: Extender, tmp_path: Path, folder: Path
) -> None:
    other_side.answer = (folder / GRANT).read_bytes() + (folder / FAREWELL).read_bytes()

    async with reporting(other_side.port, tmp_path) as running:
        # The agent notices a closed connection when it sends something.
        def has_disconnected() -> bool:
            running.look()
            return any(link.refusals for link in running.pusher.links.values())

        await eventually(has_disconnected)

        (link,) = running.pusher.links.values()
        assert link.problem.startswith("the extender ended the connection: ")
        assert "gpu-2" in link.problem


async def test_recording_of_this_release_matches_its_handshake(tmp_path: Path) -> None:
    folder = RECORDINGS / project_version()

    said = await handshake(tmp_path)

    assert {name: (folder / name).read_bytes() for name in said} == said, RECORD_AGAIN
