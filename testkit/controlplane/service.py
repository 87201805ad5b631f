"""What a Service and the kubelets behind it do, between kube-scheduler and replicas.

As kube-proxy does it: a connection goes to one of the ready endpoints, picked when it is opened,
and stays there until either side ends it, even if the endpoint goes. What is read and
written on it passes as it is, TLS too. kube-proxy picks at random; this picks the unluckiest: one
that ends, as long as not every node has heard of it.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from testkit.controlplane.deployed import ExtenderServer
from testkit.controlplane.process import free_port

CHUNK: Final = 1 << 16
GOODBYE_BYTES: Final = 64
"""TLS takes leave in fewer; a question is longer."""
RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER by which a socket's end is a reset."""


class _Connection:
    """A connection between who asks and a replica.

    Attributes:
        is_waiting: something was asked last, not answered.
        is_broken: it ended so, or something was asked after the replica had ended it.
        is_given_up: who asked had enough of waiting.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        back: asyncio.StreamWriter,
    ) -> None:
        self.is_waiting = False
        self.is_broken = False
        self.is_given_up = False
        self._reader, self._writer = reader, writer
        self._there, self._back = there, back
        self._is_ended = False

    async def run(self) -> None:
        """Hand on what comes on either side, its end included."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask())
                group.create_task(self._answer())
        except* OSError:
            self.is_broken |= self.is_waiting
            _reset(self._writer)
        finally:
            for one in (self._back, self._writer):
                one.close()

    async def _ask(self) -> None:
        while chunk := await self._reader.read(CHUNK):
            if len(chunk) > GOODBYE_BYTES:
                self.is_waiting = True
            if self._is_ended:
                self.is_broken |= self.is_waiting
                return
            self._back.write(chunk)
            await self._back.drain()
        self.is_given_up = self.is_waiting
        self.is_waiting = False  # who asks has gone
        if not self._is_ended:
            self._back.write_eof()

    async def _answer(self) -> None:
        while chunk := await self._there.read(CHUNK):
            self.is_waiting = False
            self._writer.write(chunk)
            await self._writer.drain()
        self._is_ended = True
        self.is_broken |= self.is_waiting
        self._writer.write_eof()


@dataclass(eq=False)
class Endpoint:
    """One replica, as the Service has it.

    Attributes:
        server: the replica.
        is_ready: new connections go there.
        is_terminating: its pod was deleted; it is never ready again.
        connections: how many were opened there.
        open: those that there are.
    """

    server: ExtenderServer
    is_ready: bool = False
    is_terminating: bool = False
    connections: int = 0
    open: set[_Connection] = field(default_factory=set)

    @property
    def is_leaving(self) -> bool:
        """Whether it has ended, or was told to."""
        return self.is_terminating or not self.server.process.is_running

    @property
    def waiting(self) -> int:
        """Connections on which something was asked last, not answered."""
        return sum(one.is_waiting for one in self.open)


class Service:
    """Leads connections to the replicas that are ready.

    Args:
        servers: the replicas.
        lag_seconds: what becomes of a pod is known to every node so much later.
        period_seconds: time between two probes.
        threshold: so many probes in a row fail until a replica is not ready.
        probe_seconds: limit for one probe.

    Attributes:
        endpoints: one for each replica.
        broken: questions that were left without an answer, for their connection ended.
        refused: connections that the chosen replica did not take.
        given_up: questions that were not answered in time for who asked.
    """

    def __init__(
        self,
        servers: Sequence[ExtenderServer],
        *,
        lag_seconds: float,
        period_seconds: float = 0.2,
        threshold: int = 3,
        probe_seconds: float = 1.0,
    ) -> None:
        self.endpoints = [Endpoint(server) for server in servers]
        self.broken = 0
        self.refused = 0
        self.given_up = 0
        self.port = free_port()
        self._lag_seconds = lag_seconds
        self._period_seconds = period_seconds
        self._threshold = threshold
        self._probe_seconds = probe_seconds
        self._fair_queue = count()
        self._last: Endpoint | None = None

    @property
    def address(self) -> str:
        """Where it is reached: host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def failed(self) -> int:
        """Questions that got no answer."""
        return self.broken + self.refused + self.given_up

    @property
    def asked(self) -> Endpoint:
        """The endpoint that the newest connection leads to."""
        if self._last is None:
            raise RuntimeError("no connection yet")
        return self._last

    async def delete(self, endpoint: Endpoint, grace_seconds: float) -> None:
        """Delete a pod: it is told to end, at once, and every node hears of it a little later."""
        endpoint.is_terminating = True
        async with asyncio.TaskGroup() as group:
            group.create_task(self._withdraw(endpoint))
            group.create_task(endpoint.server.process.stop(grace_seconds))

    async def run(self) -> None:
        """Probe the replicas as kubelets do, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._probe_seconds)
        connector = aiohttp.TCPConnector(force_close=True, ssl=False)  # nor do kubelets check
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for endpoint in self.endpoints:
                group.create_task(self._probe(endpoint, session))

    # --- who is ready -----------------------------------------------------------------------------

    async def _probe(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        failures = 0
        while not endpoint.is_terminating:
            is_alive = endpoint.server.process.is_running
            if is_alive and await _is_ready(session, f"{endpoint.server.url}/readyz"):
                failures, endpoint.is_ready = 0, not endpoint.is_terminating
            else:
                failures += 1
            # That a container has ended the kubelet sees by itself.
            if endpoint.is_ready and (failures >= self._threshold or not is_alive):
                await self._withdraw(endpoint)
            await asyncio.sleep(self._period_seconds)

    async def _withdraw(self, endpoint: Endpoint) -> None:
        await asyncio.sleep(self._lag_seconds)
        endpoint.is_ready = False

    # --- connections ------------------------------------------------------------------------------

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lead a connection to a replica."""
        ready = [endpoint for endpoint in self.endpoints if endpoint.is_ready]
        if not ready:
            self.refused += 1
            _reset(writer)
            return
        leaving = [endpoint for endpoint in ready if endpoint.is_leaving]
        chosen = leaving or ready
        endpoint = self._last = chosen[next(self._fair_queue) % len(chosen)]
        address = urlsplit(endpoint.server.webhooks)
        try:
            there, back = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            self.refused += 1
            _reset(writer)
            return
        endpoint.connections += 1
        connection = _Connection(reader, writer, there, back)
        endpoint.open.add(connection)
        try:
            await connection.run()
        finally:
            endpoint.open.discard(connection)
            self.broken += connection.is_broken
            self.given_up += connection.is_given_up


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[Service]:
    """Run a Service while the context is open."""
    server = await asyncio.start_server(service.take, "127.0.0.1", service.port)
    probing = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        probing.cancel()
        server.close()
        with contextlib.suppress(asyncio.CancelledError):
            await probing


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a host does without a listener, or whose process has died."""
    taken: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
