"""Stand-in for a Service and its kubelets, between kube-scheduler and replicas.

Like kube-proxy it forwards a connection to one of the ready endpoints, chosen when the connection
is opened, until either side closes it, even if the endpoint is removed. Bytes are forwarded
unchanged, also with TLS. kube-proxy chooses at random; this stand-in chooses the worst case: a
terminating endpoint, as long as it is not removed from all nodes.
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
"""Upper limit of the size of TLS' closing messages; every request is longer."""
RESET: Final = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which closing a socket sends a reset."""


class _Connection:
    """Forwarded connection between a client and a replica.

    Attributes:
        is_waiting: whether the last request is unanswered.
        is_broken: whether the replica closed it with an unanswered request, or before one.
        is_given_up: whether the client closed it first, which kube-scheduler does after a timeout.
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
        """Forward bytes and the end of the stream in both directions."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward_requests())
                group.create_task(self._forward_answers())
        except* OSError:
            self.is_broken |= self.is_waiting
            _reset(self._writer)
        finally:
            for one in (self._back, self._writer):
                one.close()

    async def _forward_requests(self) -> None:
        while chunk := await self._reader.read(CHUNK):
            if len(chunk) > GOODBYE_BYTES:
                self.is_waiting = True
            if self._is_ended:
                self.is_broken |= self.is_waiting
                return
            self._back.write(chunk)
            await self._back.drain()
        self.is_given_up = not self._is_ended
        self.is_waiting = False  # the client has disconnected
        if not self._is_ended:
            self._back.write_eof()

    async def _forward_answers(self) -> None:
        while chunk := await self._there.read(CHUNK):
            self.is_waiting = False
            self._writer.write(chunk)
            await self._writer.drain()
        self._is_ended = True
        self.is_broken |= self.is_waiting
        self._writer.write_eof()


@dataclass(eq=False)
class Endpoint:
    """Replica as an endpoint of the Service.

    Attributes:
        server: extender's process.
        is_ready: whether it gets new connections.
        is_terminating: whether its pod was deleted; it is never ready again.
        connections: number of connections so far.
    """

    server: ExtenderServer
    is_ready: bool = False
    is_terminating: bool = False
    connections: int = 0
    open: set[_Connection] = field(default_factory=set)

    @property
    def is_leaving(self) -> bool:
        """Whether its process has ended or its pod was deleted."""
        return self.is_terminating or not self.server.process.is_running

    @property
    def waiting(self) -> int:
        """Number of connections with an unanswered request."""
        return sum(one.is_waiting for one in self.open)


class Service:
    """Forwarder of connections to ready replicas.

    Args:
        servers: extenders' processes.
        lag_seconds: delay until all nodes know a pod's change.
        period_seconds: interval of probes.
        threshold: number of consecutive failed probes after which a replica is not ready.
        probe_seconds: timeout of a probe.

    Attributes:
        endpoints: endpoints of the replicas.
        broken: number of requests without an answer because the replica closed the connection.
        refused: number of connections that no replica accepted.
        given_up: number of requests whose client timed out.
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
        """Host and port of the Service."""
        return f"127.0.0.1:{self.port}"

    @property
    def failed(self) -> int:
        """Number of requests without an answer."""
        return self.broken + self.refused + self.given_up

    @property
    def requested(self) -> Endpoint:
        """Endpoint of the newest connection."""
        if self._last is None:
            raise RuntimeError("no connection yet")
        return self._last

    async def delete(self, endpoint: Endpoint, grace_seconds: float) -> None:
        """Delete a pod: its process gets SIGTERM, and nodes remove the endpoint after the lag."""
        endpoint.is_terminating = True
        async with asyncio.TaskGroup() as group:
            group.create_task(self._withdraw(endpoint))
            group.create_task(endpoint.server.process.stop(grace_seconds))

    async def run(self) -> None:
        """Probe the replicas as kubelets do, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._probe_seconds)
        # kubelets do not verify certificates either
        connector = aiohttp.TCPConnector(force_close=True, ssl=False)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for endpoint in self.endpoints:
                group.create_task(self._probe(endpoint, session))

    # --- readiness --------------------------------------------------------------------------------

    async def _probe(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        failures = 0
        while not endpoint.is_terminating:
            is_alive = endpoint.server.process.is_running
            if is_alive and await _is_ready(session, f"{endpoint.server.url}/readyz"):
                failures, endpoint.is_ready = 0, not endpoint.is_terminating
            else:
                failures += 1
            # A kubelet notices the end of a container without a probe.
            if endpoint.is_ready and (failures >= self._threshold or not is_alive):
                await self._withdraw(endpoint)
            await asyncio.sleep(self._period_seconds)

    async def _withdraw(self, endpoint: Endpoint) -> None:
        await asyncio.sleep(self._lag_seconds)
        endpoint.is_ready = False

    # --- connections ------------------------------------------------------------------------------

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection to a replica."""
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
    """Reset a connection, as a host does without a listener or after its process has died."""
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
