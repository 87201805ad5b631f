"""Real source of reports on a real socket, with clients for it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agent.report.contract import (
    LENGTH_BYTES,
    PATH,
    UPGRADE,
    Layout,
    LayoutDevice,
    Update,
    decode_farewell,
)
from extender.core.devices.readings import DeviceKey, ForeignProcess, Readings, Signal
from extender.core.policy import Policy
from extender.settings.sources import Agents
from extender.sources.agents.refusal import AgentRefusal
from extender.sources.agents.source import AgentSource
from simulation.fleet import SimulatedFleet
from simulation.models import H100
from simulation.nodes import NodeSpec
from testkit import fake_kube
from testkit.agent.reviews import Reviews, reviewing, token
from testkit.controlplane.process import free_port

eventually = partial(fake_kube.eventually, deadline_seconds=30.0)

NAMES = ("gpu-1", "gpu-2")


def settings(**changes: Any) -> Agents:
    return Agents.model_validate({"listen": f"127.0.0.1:{free_port()}", **changes})


@dataclass
class Fleet:
    """Stand-in for the fleet that records the reported memory by pod."""

    policy: Policy = field(default_factory=Policy)
    shares: list[object] = field(default_factory=list)
    foreign: dict[str, object] = field(default_factory=dict)
    contested: int = 0

    def note_shares(
        self, node: str, shares: Sequence[tuple[DeviceKey, str, int]], at: float
    ) -> None:
        assert at
        self.shares.append((node, tuple(shares)))

    def note_foreign(
        self, node: str, processes: Mapping[DeviceKey, tuple[ForeignProcess, ...]]
    ) -> None:
        self.foreign[node] = processes

    def expire_silent(self) -> None:
        """Do nothing: this fleet has no other source."""


@dataclass
class ReportServer:
    """Running source of reports, with the recorded deliveries."""

    source: AgentSource
    settings: Agents
    reviews: Reviews
    folder: Path
    known: set[str]
    shares: list[object]
    foreign: dict[str, object]
    readings: list[Readings] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def service(self) -> str:
        return self.settings.listen

    def refused(self, reason: AgentRefusal) -> int:
        return self.source.status().refused[reason.value]

    def token_file(self, node: str, text: str | None = None) -> Path:
        path = self.folder / f"{node}.token"
        path.write_text(token(node) if text is None else text)
        return path

    def readings_of(self, node: str) -> list[Readings]:
        return [one for one in self.readings if one.own is not None and node in one.own.nodes]

    def values(self, node: str, signal: Signal) -> list[float]:
        """Return the last values of a node's devices."""
        last = self.readings_of(node)[-1]
        return [
            value
            for info, value in zip(last.devices, last.columns[signal].tolist(), strict=True)
            if info.node == node
        ]


@contextlib.asynccontextmanager
async def report_server(
    tmp_path: Path, *, tls: ssl.SSLContext | None = None, **changes: Any
) -> AsyncIterator[ReportServer]:
    async with reviewing(tmp_path) as (reviews, client):
        how, clock = settings(**changes), FLEET_CLOCK
        server: ReportServer

        async def deliver(readings: Readings) -> None:
            server.readings.append(readings)

        known, fleet = set(NAMES), Fleet()
        source = AgentSource(
            how,
            client,
            fleet,
            is_known_node=lambda node: node in known,
            deliver=deliver,
            clock=clock,
            tls=tls,
        )
        server = ReportServer(source, how, reviews, tmp_path, known, fleet.shares, fleet.foreign)
        task = asyncio.create_task(source.run())
        await eventually(lambda: source.is_listening)
        try:
            yield server
        finally:
            task.cancel()
            await asyncio.wait([task])
            for writer in server.writers:
                writer.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
        if not task.cancelled():
            task.result()


FLEET = SimulatedFleet()
FLEET_CLOCK: Callable[[], float] = FLEET.clock


def two_nodes() -> SimulatedFleet:
    made = SimulatedFleet()
    for name in NAMES:
        made.add(NodeSpec(name=name, model=H100, cards=2, address="10.0.0.1"))
    return made


async def raw_connection(
    server: ReportServer, *parts: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.settings.address
    reader, writer = await asyncio.open_connection(host, port)
    server.writers.append(writer)
    for part in parts:
        writer.write(part)
    return reader, writer


def request(text: str | None, path: str = PATH) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: it", "Connection: Upgrade", f"Upgrade: {UPGRADE}"]
    if text is not None:
        lines.append(f"Authorization: Bearer {text}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def connected(
    server: ReportServer, node: str = "gpu-1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await raw_connection(server, request(token(node)))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    return reader, writer


async def farewell(reader: asyncio.StreamReader) -> str:
    async with asyncio.timeout(30):
        size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return decode_farewell(await reader.readexactly(size))


def update(node: str = "gpu-1", **changes: Any) -> Update:
    said: dict[str, object] = {
        "node": node,
        "at": 1.0,
        "sent_at": 1.0,
        "layout": Layout(devices=(LayoutDevice(uuid="GPU-1"),), rows=(Signal.POWER,)),
        "values": bytes(8),
    }
    return Update(**{**said, **changes})
