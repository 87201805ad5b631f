"""Changed settings of agents while agents report."""

from pathlib import Path

import pytest

from extender.sources.agents.refusal import AgentRefusal
from simulation.agents import run_agents
from simulation.fleet import SimulatedFleet
from testkit.agent.desk import (
    NAMES,
    Desk,
    desk_with,
    eventually,
    farewell,
    granted,
    raw,
    request,
    two_nodes,
)
from testkit.agent.reviews import token


@pytest.fixture
def fleet() -> SimulatedFleet:
    return two_nodes()


def change(desk: Desk, **changes: object) -> None:
    """Apply changed settings."""
    desk.settings = desk.settings.model_copy(update=changes)
    desk.source.change(desk.settings)


async def status_of(desk: Desk, text: str) -> int:
    reader, _ = await raw(desk, request(text))
    return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


@pytest.mark.parametrize(
    "changes",
    [{"service_accounts": ("elsewhere/agent",)}, {"audience": "another"}],
    ids=["service-account", "audience"],
)
async def test_an_account_that_is_no_longer_accepted_is_disconnected_and_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    async with desk_with(tmp_path) as desk:
        reader, _ = await granted(desk)
        change(desk, **changes)

        assert "not accepted" in await farewell(reader)
        assert desk.refused(AgentRefusal.WRONG_ACCOUNT) == 1
        assert await status_of(desk, token("gpu-1")) in {401, 403}


async def test_a_newly_accepted_service_account_may_connect_at_once(tmp_path: Path) -> None:
    other = token("gpu-1", account="system:serviceaccount:ml:agent")
    async with desk_with(tmp_path) as desk:
        assert await status_of(desk, other) == 403
        change(desk, service_accounts=("ml/agent", *desk.settings.service_accounts))

        assert await status_of(desk, other) == 101


async def test_connections_that_a_change_does_not_affect_continue(
    tmp_path: Path, fleet: SimulatedFleet
) -> None:
    async with (
        desk_with(tmp_path) as desk,
        run_agents(fleet, NAMES, desk.service, desk.token_file),
    ):
        await eventually(lambda: all(desk.of(name) for name in NAMES))
        change(
            desk,
            service_accounts=("ml/agent", *desk.settings.service_accounts),
            batch_seconds=0.05,
            reviews_per_second=10.0,
        )
        before = desk.source.status().reports
        await eventually(lambda: desk.source.status().reports >= before + 6)

        assert desk.source.status().agents == len(NAMES)
        assert not any(desk.source.status().refused.values())


async def test_changed_limits_apply_at_once(tmp_path: Path) -> None:
    async with desk_with(tmp_path) as desk:
        reader, _ = await granted(desk)
        change(desk, silence_seconds=2.0, max_connections=1)
        await raw(desk, request(token("gpu-2")))

        await eventually(lambda: desk.refused(AgentRefusal.BUSY))
        assert "no data for" in await farewell(reader)
