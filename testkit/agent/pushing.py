"""Pusher of an agent, and a scripted extender that receives its reports."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from agent.options import Options, ReportOptions
from agent.push.pusher import Pusher
from agent.push.updates import Digest
from agent.report.contract import LENGTH_BYTES, Report, Update, decode_update
from simulation.agents import SimulatedAgent
from simulation.fleet import SimulatedFleet
from simulation.models import H100
from simulation.nodes import NodeSpec
from testkit import fake_kube
from testkit.agent.reviews import token

eventually = partial(fake_kube.eventually, deadline_seconds=30.0)
GRANTED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: idlegpu-reports\r\n\r\n"
)


@dataclass
class Extender:
    """A scripted extender that accepts connections.

    Attributes:
        answer: response to each request.
        requests: request lines and headers of the requests.
        updates: updates received, by connection.
        writers: writers of the connections.
        is_reading: whether it reads from the connections.
    """

    answer: bytes = GRANTED
    requests: list[str] = field(default_factory=list)
    updates: list[list[Update]] = field(default_factory=list)

    def has_said(self, count: int) -> bool:
        """Return whether the first connection has received at least `count` updates."""
        return len(self.updates[0]) == count

    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    is_reading: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            said: list[Update] = []
            self.updates.append(said)
            writer.write(self.answer)
            if not self.answer.startswith(b"HTTP/1.1 101"):
                writer.close()
                return
            while True:
                await self.is_reading.wait()
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                said.append(decode_update(await reader.readexactly(size)))


@contextlib.asynccontextmanager
async def extender() -> AsyncIterator[Extender]:
    made = Extender()
    made.is_reading.set()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, limit=1 << 12)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for writer in made.writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@dataclass
class Running:
    """An agent that pushes reports.

    Attributes:
        considered: numbers of the reports that the link has decided to send or skip.
    """

    agent: SimulatedAgent
    pusher: Pusher
    fleet: SimulatedFleet

    considered: list[int]

    def look(self) -> Report:
        return self.agent.look()

    async def consider(self) -> None:
        """Trigger a pass, and wait until the link has decided whether to send its report."""
        self.look()
        await eventually(lambda: self.considered[-1] == self.agent.sequence)


@contextlib.asynccontextmanager
async def reporting(
    port: int, folder: Path, *, text: str | None = None, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[Running]:
    path = folder / "token"
    path.write_text(token("gpu-1") if text is None else text)
    fleet = SimulatedFleet()
    fleet.add(NodeSpec(name="gpu-1", model=H100, cards=2, address="10.0.0.1"))
    how = replace(
        ReportOptions(
            service=f"{host}:{port}",
            token_file=str(path),
            heartbeat_seconds=600,
            resolve_seconds=0.1,
            timeout_seconds=2.0,
            reconnect_seconds=0.1,
            max_backoff_seconds=0.2,
        ),
        **options,
    )
    agent = SimulatedAgent(node="gpu-1", fleet=fleet)
    pusher = Pusher(Options(node="gpu-1", reports=how), agent.latest)
    running = Running(agent, pusher, fleet, considered=[])
    build = pusher._digest_builder.build

    def consider(report: Report) -> Digest:
        running.considered.append(report.sequence)
        return build(report)

    pusher._digest_builder.build = consider  # type: ignore[method-assign] # to see when it is called
    task = asyncio.create_task(pusher.run())
    try:
        agent.look()
        yield running
    finally:
        task.cancel()
        await asyncio.wait([task])
