"""Deliveries of agents' reports, and the ends of connections, at exact times, without sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from typing_extensions import override  # in typing from Python 3.12 on

from agent.report.contract import Update
from extender.core.devices.readings import Readings
from extender.kube.client import KubeClient
from extender.settings.sources import Agents
from extender.sources.agents import source as source_module
from extender.sources.agents.connection import AgentConnection
from extender.sources.agents.refusal import AgentRefusal
from extender.sources.agents.source import AgentSource
from extender.sources.agents.states import AgentState
from extender.sources.agents.tokens import Sender
from testkit.agent.report_server import Fleet, update

SETTINGS = Agents()
(ACCOUNT,) = SETTINGS.usernames


class Closed(asyncio.Transport):
    """Transport that only closes."""

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert data

    @override
    def is_closing(self) -> bool:
        return False

    @override
    def close(self) -> None:
        pass


class Rig:
    """Source with a clock that stands still, and the nodes of each delivery."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.known = {"a", "b"}
        self.delivered: list[set[str]] = []
        self.broken = ""
        self.fleet = Fleet()
        self.source = AgentSource(
            SETTINGS,
            cast("KubeClient", None),
            self.fleet,
            is_known_node=lambda node: node in self.known,
            deliver=self._deliver,
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )

    async def _deliver(self, readings: Readings) -> None:
        nodes = {info.node for info in readings.devices}
        if self.broken in nodes:
            raise ZeroDivisionError
        self.delivered.append(nodes)

    def open(self) -> AgentConnection:
        """Open a connection without a token."""
        connection = AgentConnection(self.source, lambda: self.now)
        connection.connection_made(Closed())
        return connection

    def connect(self, node: str, **changes: Any) -> AgentConnection:
        """Open a connection whose token is accepted."""
        accepted = Sender(node=node, expires_at=1e9, account=ACCOUNT, audience=SETTINGS.audience)
        connection = self.open()
        connection.sender, connection.state = replace(accepted, **changes), AgentState(node)
        self.source.accepted(connection)
        return connection

    def report(self, connection: AgentConnection, **changes: Any) -> Update:
        """Send a report, with news unless `changes` say otherwise."""
        assert connection.sender is not None
        sent = update(connection.sender.node, **({"is_news": True} | changes))
        self.source.receive(connection, sent)
        return sent

    async def wait(self, seconds: float = 0.0) -> None:
        """Let time pass, and then some batches."""
        self.now += seconds
        for _ in range(40):
            await asyncio.sleep(0)

    def refused(self) -> list[str]:
        counts = self.source.status().refused
        return [reason for reason, count in counts.items() for _ in range(count)]


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    intervals = {"_BATCH_SECONDS": 0.0, "_ROUTINE_SECONDS": 2.0, "_SWEEP_SECONDS": 1.0}
    for name, seconds in intervals.items():
        monkeypatch.setattr(source_module, name, seconds)
    rig = Rig()
    task = asyncio.create_task(rig.source._deliver_batches())
    await rig.wait()
    yield rig
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_news_is_delivered_at_once_and_the_rest_every_two_seconds(rig: Rig) -> None:
    a, b = rig.connect("a"), rig.connect("b")
    rig.report(a)
    rig.report(b, is_news=False)
    await rig.wait()
    assert rig.delivered == [{"a"}]
    rig.report(a, is_news=False)
    await rig.wait(1.9)
    assert rig.delivered == [{"a"}]

    await rig.wait(0.1)
    assert rig.delivered == [{"a"}, {"a", "b"}]

    rig.report(b, is_news=False)
    await rig.wait(1.9)
    assert len(rig.delivered) == 2
    await rig.wait(0.1)
    assert rig.delivered[2:] == [{"b"}]


async def test_the_last_report_of_an_unknown_node_counts_once_it_is_known(rig: Rig) -> None:
    rig.report(rig.connect("new"))
    gone = rig.connect("gone")
    rig.report(gone)
    await rig.wait(2.0)
    assert (rig.delivered, rig.source.status().unknown_nodes) == ([], 2)

    gone.connection_lost(None)
    rig.known |= {"new", "gone"}
    await rig.wait(2.0)
    await rig.wait(2.0)

    assert (rig.delivered, rig.source.status().unknown_nodes) == ([{"new"}], 0)


async def test_a_report_that_cannot_be_delivered_ends_only_its_own_connection(rig: Rig) -> None:
    rig.broken = "b"
    for node in ("a", "b"):
        rig.report(rig.connect(node))
    await rig.wait()

    assert rig.delivered == [{"a"}]
    assert rig.refused() == [AgentRefusal.FAULT]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, AgentRefusal.SILENT),
        ({"expires_at": 1001.0}, AgentRefusal.EXPIRED),
        ({"account": "system:serviceaccount:x:y"}, AgentRefusal.WRONG_ACCOUNT),
        ({"audience": "vault"}, AgentRefusal.WRONG_ACCOUNT),
    ],
)
async def test_a_connection_ends_when_its_agent_is_silent_or_no_longer_accepted(
    rig: Rig, changes: dict[str, object], reason: AgentRefusal
) -> None:
    rig.connect("a", **changes)
    await rig.wait(0.9)
    assert rig.refused() == []
    await rig.wait(0.1)
    if reason is AgentRefusal.SILENT:
        await rig.wait(SETTINGS.silence_seconds - 1.0)
        assert rig.refused() == []
        await rig.wait(1.0)

    assert rig.refused() == [reason]


async def test_a_request_has_ten_seconds(rig: Rig) -> None:
    connection = rig.open()
    await rig.wait(10.0)
    assert rig.refused() == []
    connection.last_data_at = rig.now  # a byte does not prolong it
    await rig.wait(1.0)

    assert rig.refused() == [AgentRefusal.SILENT]


async def test_the_status_counts_devices_reports_and_agents(rig: Rig) -> None:
    before = rig.source.status()
    for node in ("a", "b"):
        rig.report(rig.connect(node))
    rig.now = 1003.5
    rig.open()
    rig.report(rig.connect("b"))
    await rig.wait(1.0)

    status = rig.source.status()
    assert (before.last_at, status.last_at) == (None, 1003.5)
    assert (status.connections, status.agents, status.devices, status.reports) == (4, 2, 2, 3)
    assert rig.refused() == [AgentRefusal.REPLACED]
