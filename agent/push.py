"""Push reports to all extender replicas: resolve their addresses, and keep one link to each."""

import asyncio
import contextlib
import logging
import math
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override  # in typing from Python 3.12 on

from agent.foreign_processes import foreign_processes
from agent.options import Options, ReportOptions
from agent.push_digest import Digest, DigestBuilder
from agent.push_handshake import (
    Address,
    RefusedError,
    Stream,
    Token,
    UnsafeError,
    check_plain,
    client_context,
    open_stream,
    read_token,
    server_name,
    tls_error,
)
from agent.report import (
    AGE,
    FOREIGN_MEMORY,
    FOREIGN_UTILIZATION,
    LENGTH_BYTES,
    MAX_UPDATE_BYTES,
    MEAN,
    MEAN_SQUARE,
    XID_AGE,
    Device,
    ForeignProcess,
    Holders,
    Layout,
    Part,
    Place,
    Report,
    Update,
    decode_farewell,
    frame,
)
from agent.sampler import LatestReport
from extender.core.devices.readings import Signal
from extender.runtime.supervision import keep

logger = logging.getLogger(__name__)

MEAN_SECONDS: Final = 5.0
"""Minimum period of a mean; each mean counts as one reading in the extender's window."""
SHARES_SECONDS: Final = 60.0
"""Interval of memory shares of shared devices; the extender's advice needs no more."""

_SIGNALS: Final = tuple(signal.value for signal in Signal)
_REST: Final = (AGE, XID_AGE, FOREIGN_MEMORY, FOREIGN_UTILIZATION, MEAN, MEAN_SQUARE)

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
"""A timeout is an OSError."""

_Number = float | None


class UpdateBuilder:
    """Builds the updates of one connection; omits what the connection has already carried."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._holders: Holders | None = None
        self._foreign: tuple[ForeignProcess, ...] = ()
        self._means_at = -math.inf
        self._shares_at = -math.inf
        self._totals: dict[tuple[str, str], tuple[int, float, float]] = {}

    def build(self, report: Report, digest: Digest, *, is_news: bool, sent_at: float) -> Update:
        """Build the update for a report; the caller must send it, and in this order.

        Args:
            report: the report.
            digest: digest of the report.
            is_news: whether the report may change a decision.
            sent_at: time of sending, seconds since the epoch.
        """
        names, columns = self._columns(report, digest)
        layout = Layout(
            driver_version=report.driver_version,
            topology_policy=report.topology_policy,
            topology_scope=report.topology_scope,
            devices=tuple(map(_part, report.devices)),
            rows=names,
        )
        holders = Holders(pods=tuple(map(_pods, report.devices)))
        foreign = foreign_processes(report.devices)
        known = self._foreign if layout == self._layout else ()
        update = Update(
            node=report.node,
            started_at=report.started_at,
            sequence=report.sequence,
            at=report.at,
            sent_at=sent_at,
            is_news=is_news,
            layout=None if layout == self._layout else layout,
            holders=None if holders == self._holders else holders,
            values=_pack(columns),
            shares=self._shares(report),
            foreign=None if foreign == known else foreign,
        )
        self._layout, self._holders, self._foreign = layout, holders, foreign
        return update

    def _shares(self, report: Report) -> tuple[tuple[int, str, int], ...]:
        """Return (device number, pod UID, memory in bytes) of shared devices when due, else ()."""
        if report.at - self._shares_at < SHARES_SECONDS:
            return ()
        self._shares_at = report.at
        return tuple(
            (place, uid, count)
            for place, device in enumerate(report.devices)
            if len(shares := _shares_of(device)) > 1
            for uid, count in sorted(shares.items())
        )

    def _columns(
        self, report: Report, digest: Digest
    ) -> tuple[tuple[str, ...], list[Sequence[_Number]]]:
        """Return the names and columns of all rows that have values."""
        devices = report.devices
        means = self._means(report, digest)
        foreign = [device.foreign for device in devices]
        rest: tuple[Sequence[_Number], ...] = (
            [device.age_seconds for device in devices],
            [device.xid_age_seconds for device in devices],
            [None if one is None else one.memory_bytes for one in foreign],
            [None if one is None else one.utilization_ratio for one in foreign],
            [mean for mean, _ in means],
            [square for _, square in means],
        )
        names = tuple(name for name in _SIGNALS if name in report.signals)
        return (*names, *_REST), [*(report.signals[name] for name in names), *rest]

    def _means(self, report: Report, digest: Digest) -> list[tuple[_Number, _Number]]:
        """Return each device's mean activity since the last sent mean, and the mean square."""
        if report.at - self._means_at < MEAN_SECONDS:
            return [(None, None)] * len(report.devices)
        means: list[tuple[_Number, _Number]] = []
        for device in report.devices:
            count, total, square = digest.totals.get(device.key, (0, 0.0, 0.0))
            passes, before, squares = self._totals.get(device.key, (0, 0.0, 0.0))
            if not self._totals or count <= passes:
                means.append((None, None))  # no mean over the time before this connection
                continue
            new = count - passes
            means.append(((total - before) / new, max((square - squares) / new, 0.0)))
        self._totals, self._means_at = dict(digest.totals), report.at
        return means


def _shares_of(device: Device) -> dict[str, int]:
    """Return the memory in bytes of each pod on the device, by UID; {} if it is not fully known.

    A pod that holds a share and has no process on the device uses none of its memory.
    """
    used_by = device.used_by
    if used_by is None or any(
        one.place is Place.UNKNOWN or (one.place is Place.POD and not one.uid) for one in used_by
    ):
        return {}
    shares = {one.uid: 0 for one in device.allocated_to or () if one.uid}
    for one in used_by:
        if one.place is not Place.POD:
            continue
        if one.memory_bytes is None:
            return {}
        shares[one.uid] = shares.get(one.uid, 0) + one.memory_bytes
    return shares


def _part(device: Device) -> Part:
    return Part(
        uuid=device.uuid,
        gpu_instance_id=device.gpu_instance_id,
        index=device.index,
        model=device.model,
        mig_profile=device.mig_profile,
        replicas=device.replicas,
        numa_node=device.numa_node,
        nvlink_peers=device.nvlink_peers,
    )


def _pods(device: Device) -> tuple[tuple[str, str, str], ...] | None:
    """Return the pods on a device: its holders, else the pods of its processes; None if unknown.

    Processes show no holder that runs none, and processes of unknown location may belong to any
    pod.
    """
    if device.allocated_to is not None:
        found = {(one.namespace, one.pod, one.uid) for one in device.allocated_to}
        return tuple(sorted(found))
    used_by = device.used_by
    if used_by is None or any(one.place is Place.UNKNOWN for one in used_by):
        return None
    inside = [one for one in used_by if one.place is Place.POD]
    if not inside or not all(one.pod for one in inside):
        return None
    return tuple(sorted({(one.namespace, one.pod, one.uid) for one in inside}))


def _pack(columns: Sequence[Sequence[_Number]]) -> bytes:
    values = [math.nan if value is None else value for column in columns for value in column]
    return struct.pack(f"<{len(values)}d", *values)


class ReportLink:
    """Connection to one extender address; sends the latest report, and keeps no queue.

    Args:
        address: IP address and port.
        latest: the agent's latest report.
        digest_builder: decides which reports are news.
        options: settings of the reports.
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
        stream = await self._open(token)
        farewell_task = asyncio.create_task(_read_farewell(stream.reader), name="report listener")
        try:
            _set_socket_options(stream.writer)
            self._record_success()
            await self._send_updates(stream, farewell_task, self._connection_deadline(token))
        finally:
            farewell_task.cancel()
            with contextlib.suppress(asyncio.CancelledError, *_FAILURES):
                await farewell_task
            stream.writer.transport.abort()

    async def _open(self, token: Token) -> Stream:
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
        self, stream: Stream, farewell_task: asyncio.Task[None], until: float
    ) -> None:
        """Send updates until a time of the event loop; skip reports that were missed meanwhile."""
        loop, updates, bucket = asyncio.get_running_loop(), UpdateBuilder(), _TokenBucket()
        last_sent, last_sent_at, confirmations, sequence = Digest(), 0.0, 0, 0
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
            stream.writer.write(frame(update))
            async with asyncio.timeout(self._options.timeout_seconds):
                await stream.writer.drain()
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
        elif self._consecutive_failures < _WARN_AFTER:
            self.problem = self.problem or "the connection broke"

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
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)


class Pusher(Collector):
    """Keeps a link to each extender replica, and exports metrics of the links.

    Args:
        options: all settings.
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
                address,
                self._latest,
                self._digest_builder,
                self._options,
                clock=self._clock,
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
    return {
        "sent": link.sent,
        "failed": link.failures - link.refusals,
        "refused": link.refusals,
    }
