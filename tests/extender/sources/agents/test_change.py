"""Changed settings of agents while agents report."""

from pathlib import Path

import pytest

from extender.sources.agents.refusal import AgentRefusal
from simulation.agents import run_agents
from simulation.fleet import SimulatedFleet
from testkit.agent.report_server import (
    NAMES,
    ReportServer,
    connected,
    eventually,
    farewell,
    raw_connection,
    report_server,
    request,
    two_nodes,
)
from testkit.agent.reviews import token


@pytest.fixture
def fleet() -> SimulatedFleet:
    return two_nodes()


def change(server: ReportServer, **changes: object) -> None:
    """Apply changed settings."""
    server.settings = server.settings.model_copy(update=changes)
    server.source.adopt(server.settings)


async def status_of(server: ReportServer, text: str) -> int:
    reader, _ = await raw_connection(server, request(text))
    return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


@pytest.mark.parametrize(
    "changes",
    [{"service_accounts": ("elsewhere/agent",)}, {"audience": "another"}],
    ids=["service-account", "audience"],
)
async def test_removed_account_is_disconnected_and_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    async with report_server(tmp_path) as server:
        reader, _ = await connected(server)
        change(server, **changes)

        assert "not accepted" in await farewell(reader)
        assert server.refused(AgentRefusal.WRONG_ACCOUNT) == 1
        assert await status_of(server, token("gpu-1")) in {401, 403}


async def test_a_newly_accepted_service_account_may_connect_at_once(tmp_path: Path) -> None:
    other = token("gpu-1", account="system:serviceaccount:ml:agent")
    async with report_server(tmp_path) as server:
        assert await status_of(server, other) == 403
        change(server, service_accounts=("ml/agent", *server.settings.service_accounts))

        assert await status_of(server, other) == 101


async def test_connections_that_a_change_does_not_affect_continue(
    tmp_path: Path, fleet: SimulatedFleet
) -> None:
    async with (
        report_server(tmp_path) as server,
        run_agents(fleet, NAMES, server.service, server.token_file),
    ):
        await eventually(lambda: all(server.readings_of(name) for name in NAMES))
        change(
            server,
            service_accounts=("ml/agent", *server.settings.service_accounts),
            hold_seconds=20.0,
        )
        before = server.source.status().reports
        await eventually(lambda: server.source.status().reports >= before + 6)

        assert server.source.status().agents == len(NAMES)
        assert not any(server.source.status().refused.values())


async def test_changed_limits_apply_at_once(tmp_path: Path) -> None:
    async with report_server(tmp_path) as server:
        reader, _ = await connected(server)
        change(server, silence_seconds=2.0, max_connections=1)
        await raw_connection(server, request(token("gpu-2")))

        await eventually(lambda: server.refused(AgentRefusal.BUSY))
        assert "no data for" in await farewell(reader)
