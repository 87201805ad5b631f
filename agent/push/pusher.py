"""Push reports to all extender replicas: resolve their addresses, and keep one link to each."""

import asyncio
import logging
import math
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from agent.options import Options, ReportOptions
from agent.push.handshake import (
    Address,
    RefusedError,
    Token,
    UnsafeError,
    check_plain,
    client_context,
    open_stream,
    read_token,
    server_name,
    tls_error,
)
from agent.push.updates import Digest, DigestBuilder, UpdateBuilder
from agent.report.contract import LENGTH_BYTES, MAX_UPDATE_BYTES, decode_farewell, frame
from agent.sampler import LatestReport
from extender.runtime.supervision import keep

logger = logging.getLogger(__name__)

_MAX_REPLICAS: Final = 32

_REOPEN_LIFETIME_RATIO: Final = (0.80, 0.90)
"""Range of the token lifetime after which a connection is reopened. The kubelet renews tokens at
80 %; the random part spreads the load of agents that started together."""

_BURST: Final = 10
_PER_SECOND: Final = 0.5
"""Token bucket for news: number of updates in a burst, and sustained updates per second. Faster
changes wait for the heartbeat."""

_CONFIRMATIONS: Final = 2
"""Number of readings sent after foreign use began or ended. The extender requires two that agree,
and the first one may cover both states."""

_WARN_AFTER: Final = 3
"""Consecutive failures before a warning, because replicas come and go. A refusal, or an unsafe
connection, is logged at once."""

_SEND_BUFFER_BYTES: Final = 64 << 10
_FAILURES: Final = (OSError, RefusedError, asyncio.IncompleteReadError)
"""Failures of a connection; a timeout is an OSError."""


class ReportLink:
    """Connection to one extender address; sends the latest report, and keeps no queue.

    Args:
        address: IP address and port.
        latest: the agent's latest report.
        digest_builder: decides which reports are news.
        clock: seconds since the epoch.

    Attributes:
        is_connected: whether a stream is open.
        sent: updates sent.
        failures: connections that could not be opened, or broke.
        refusals: failures in which the extender gave a reason.
        problem: why no reports are sent; "" while they are.
    """

    def __init__(
        self,
        address: Address,
        latest: LatestReport,
        digest_builder: DigestBuilder,
        options: ReportOptions,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.is_connected = False
        self.sent = 0
        self.failures = 0
        self.refusals = 0
        self.problem = "no connection has been opened yet"
        self._address = address
        self._latest = latest
        self._digest_builder = digest_builder
        self._options = options
        self._clock = clock
        self._consecutive_failures = 0

    async def run(self) -> None:
        """Send reports until cancelled; reconnect after failures."""
        while True:
            try:
                await self._serve()
            except _FAILURES as error:
                self._record_failure(error)
                await asyncio.sleep(self._backoff_seconds())
            finally:
                self.is_connected = False

    async def _serve(self) -> None:
        """Open a connection and send reports until it must be reopened with a new token.

        Raises:
            OSError, RefusedError: the connection could not be opened, or broke.
        """
        token = read_token(Path(self._options.token_file))
        reader, writer = await self._open(token)
        farewell_task = asyncio.create_task(_read_farewell(reader), name="report listener")
        try:
            _set_socket_options(writer)
            self._record_success()
            await self._send_updates(writer, farewell_task, self._connection_deadline(token))
        finally:
            writer.transport.abort()
            farewell_task.cancel()
            await asyncio.wait([farewell_task])  # awaiting the task would hide our own cancellation
            _ = farewell_task.cancelled() or farewell_task.exception()  # asyncio logs unread ones

    async def _open(self, token: Token) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect and request the stream.

        Raises:
            OSError, RefusedError: the stream could not be opened.
        """
        options = self._options
        tls = client_context(options)
        if tls is None:
            check_plain(self._address[0], options)
        try:
            async with asyncio.timeout(options.timeout_seconds):
                return await open_stream(
                    self._address, options.service, token, tls=tls, name=server_name(options)
                )
        except ssl.SSLError as error:
            raise tls_error(error, options) from error

    async def _send_updates(
        self, writer: asyncio.StreamWriter, farewell_task: asyncio.Task[None], until: float
    ) -> None:
        """Send updates until a time of the event loop; skip reports that were missed meanwhile."""
        loop, updates, bucket = asyncio.get_running_loop(), UpdateBuilder(), _TokenBucket()
        last_sent, last_sent_at, confirmations, sequence = Digest(), -math.inf, 0, 0
        while loop.time() < until:
            report = await self._latest.wait_newer(sequence)
            if farewell_task.done():
                farewell_task.result()
            sequence, digest = report.sequence, self._digest_builder.build(report)
            is_first = not last_sent.sequence
            is_news = is_first or self._digest_builder.is_news(last_sent, digest)
            is_due = loop.time() - last_sent_at >= self._options.heartbeat_seconds
            if not is_due and not confirmations and not (is_news and bucket.take(loop.time())):
                continue
            update = updates.build(
                report, digest, is_news=is_news or confirmations > 0, sent_at=self._clock()
            )
            if not is_first and digest.is_used != last_sent.is_used:
                confirmations = _CONFIRMATIONS
            elif confirmations:
                confirmations -= 1
            writer.write(frame(update))
            async with asyncio.timeout(self._options.timeout_seconds):
                await writer.drain()
            last_sent, last_sent_at = digest, loop.time()
            self.sent += 1

    def _connection_deadline(self, token: Token) -> float:
        """Return the event-loop time at which to reopen the connection."""
        now = asyncio.get_running_loop().time()
        if token.expires_at is None:
            return now + 3600.0
        lifetime = max(token.expires_at - self._clock(), 1.0)
        return now + lifetime * random.uniform(*_REOPEN_LIFETIME_RATIO)

    def _record_success(self) -> None:
        logger.info(
            "connected to the extender",
            extra={"extender": self._options.service, "address": self._address[0]},
        )
        self.is_connected, self.problem, self._consecutive_failures = True, "", 0

    def _record_failure(self, error: BaseException) -> None:
        self.failures += 1
        self._consecutive_failures += 1
        is_refused = isinstance(error, RefusedError)
        self.refusals += is_refused
        cause = str(error) or type(error).__name__
        is_certain = is_refused or isinstance(error, UnsafeError)
        if cause != self.problem and (is_certain or self._consecutive_failures >= _WARN_AFTER):
            logger.warning(
                "cannot report to the extender",
                extra={
                    "extender": self._options.service,
                    "address": self._address[0],
                    "cause": cause,
                },
            )
            self.problem = cause
        elif not self.problem:
            self.problem = "the connection broke"

    def _backoff_seconds(self) -> float:
        """Return a random delay, so that agents that lost a replica together spread out."""
        first = self._options.reconnect_seconds
        longest = max(first, self._options.max_backoff_seconds)
        pause = min(first * 2.0 ** min(self._consecutive_failures - 1, 10), longest)
        return pause * random.uniform(0.1, 1.0)


class _TokenBucket:
    """Limits the rate of updates with news."""

    def __init__(self) -> None:
        self._left = float(_BURST)
        self._at = 0.0

    def take(self, now: float) -> bool:
        self._left = min(_BURST, self._left + (now - self._at) * _PER_SECOND)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


async def _read_farewell(reader: asyncio.StreamReader) -> None:
    """Read until the extender ends the connection.

    Raises:
        RefusedError: the extender ended the connection and gave a reason.
        OSError: the connection broke.
    """
    try:
        size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if size > MAX_UPDATE_BYTES:
            raise ConnectionError("the extender sent a malformed farewell")
        reason = decode_farewell(await reader.readexactly(size))
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the extender closed the connection") from error
    raise RefusedError(f"the extender ended the connection: {reason}")


def _set_socket_options(writer: asyncio.StreamWriter) -> None:
    """Keep unsent data small, and detect a dead peer within 20 s."""
    # Not 0: with TLS, asyncio would treat the buffer as always full.
    writer.transport.set_write_buffer_limits(high=1, low=0)
    connection = writer.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


class Pusher(Collector):
    """Keeps a link to each extender replica, and exports metrics of the links.

    Args:
        latest: the agent's latest report.
        clock: seconds since the epoch.
    """

    def __init__(
        self, options: Options, latest: LatestReport, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._options = options.reports
        self._latest = latest
        self._clock = clock
        self._digest_builder = DigestBuilder(
            options.reports, options.verdict_policy.thresholds, options.foreign
        )
        self._links: dict[Address, ReportLink] = {}
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self._closed_link_counts = {"sent": 0, "failed": 0, "refused": 0}
        self._lookup_error = ""

    @property
    def links(self) -> Mapping[Address, ReportLink]:
        """Links by address."""
        return self._links

    async def run(self) -> None:
        """Push reports to every replica until cancelled; a second run opens all links again."""
        for address in tuple(self._links):
            self._close(address)
        async with asyncio.TaskGroup() as group:
            while True:
                await self._resolve(group)
                await asyncio.sleep(self._options.resolve_seconds)

    async def _resolve(self, group: asyncio.TaskGroup) -> None:
        """Resolve the service; open links to new addresses, and close links to others."""
        try:
            async with asyncio.timeout(self._options.timeout_seconds):
                addresses = await self._addresses()
        except OSError as error:  # keep the known addresses
            cause = str(error) or "timed out"
            if cause != self._lookup_error:
                logger.warning(
                    "cannot look up the extender",
                    extra={"service": self._options.service, "cause": cause},
                )
            self._lookup_error = cause
            return
        self._lookup_error = ""
        for address in self._links.keys() - addresses:
            self._close(address)
        for address in sorted(addresses - self._links.keys()):
            if len(self._links) >= _MAX_REPLICAS:
                logger.warning("too many replicas", extra={"most": _MAX_REPLICAS})
                break
            link = self._links[address] = ReportLink(
                address, self._latest, self._digest_builder, self._options, clock=self._clock
            )
            self._tasks[address] = group.create_task(
                keep("report", link.run), name=f"report to {address[0]}"
            )

    async def _addresses(self) -> set[Address]:
        """Return the addresses of the service.

        Raises:
            OSError: the name cannot be resolved.
        """
        host, _, port = self._options.service.rpartition(":")
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        return {(str(info[4][0]), int(port)) for info in infos}

    def _close(self, address: Address) -> None:
        """Close the link to an address; its counts remain."""
        self._tasks.pop(address).cancel()
        link = self._links.pop(address)
        for name, count in _counts(link).items():
            self._closed_link_counts[name] += count

    @override
    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield metrics of replicas and reports."""
        links = list(self._links.values())
        replicas = GaugeMetricFamily(
            "idlegpu_agent_extender_replicas",
            "Replicas of the extender: known addresses, and open connections.",
            labels=["state"],
        )
        replicas.add_metric(["known"], len(links))
        replicas.add_metric(["taking"], sum(link.is_connected for link in links))
        yield replicas
        outcomes = CounterMetricFamily(
            "idlegpu_agent_reports",
            "Reports sent, and connections that failed or were refused.",
            labels=["outcome"],
        )
        for name, closed_count in self._closed_link_counts.items():
            outcomes.add_metric([name], closed_count + sum(_counts(link)[name] for link in links))
        yield outcomes


def _counts(link: ReportLink) -> Mapping[str, int]:
    return {"sent": link.sent, "failed": link.failures - link.refusals, "refused": link.refusals}
