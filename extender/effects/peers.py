"""Exchange answered requests and placements between replicas."""

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterable, Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp import web

from extender.effects.peer_link import (
    MAX_BYTES,
    PATH,
    Message,
    PeerError,
    PeerLink,
    decode_message,
    encode_receipt,
    requests_in,
)
from extender.kube.lease import make_identity
from extender.placement.request_log import AnsweredRequest, RequestLog
from extender.runtime.metrics import Metrics
from extender.runtime.supervision import keep
from extender.settings.config import Settings
from extender.settings.service import PeersSettings, split_address

# Estimate the delay of messages from a replica whose clock differs.

_WINDOW_SECONDS: Final = 10.0
"""NTP changes the speed of a clock by half a millisecond per second at most, so two clocks drift 20
ms apart during two windows."""


class _Delay:
    """Estimates how much later a message arrived than the fastest recent one.

    The offset between the clocks is unknown. But among the messages of some seconds at least one
    had almost no delay, so a larger difference between send and receive time is delay.
    """

    def __init__(self) -> None:
        self._since = -math.inf
        self._least = self._least_before = math.inf

    def of(self, sent_at: float, now: float) -> float:
        """Return the delay of a message in seconds.

        Args:
            sent_at: send time on the sender's monotonic clock, in seconds.
            now: receive time on our monotonic clock, in seconds.
        """
        apart = now - sent_at
        age_seconds = now - self._since
        if age_seconds >= _WINDOW_SECONDS:
            self._least_before = self._least if age_seconds < 2 * _WINDOW_SECONDS else math.inf
            self._since, self._least = now, apart
        self._least = min(self._least, apart)
        return apart - min(self._least, self._least_before)


logger = logging.getLogger(__name__)

_MAX_PEERS: Final = 32
_INTERVAL_SECONDS: Final = 0.01
"""Shortest time between two messages to one replica: the shorter it is, the better several replicas
spread pods that they place at once."""
_RESOLVE_SECONDS: Final = 5.0
"""Time between two look-ups of the addresses; a Service's DNS records live about as long."""
_TIMEOUT_SECONDS: Final = 2.0
"""Limit for the answer to one message; a slower replica counts as gone, and that is safe."""
_LAST_WORDS_SECONDS: Final = 0.5
"""Time at shutdown to send the last records."""

_SILENT_SECONDS: Final = 5.0
"""Silence after which a replica may be gone: it has missed more than three heartbeats."""

_Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Received:
    """State of the messages from one replica, in seconds of our monotonic clock.

    Attributes:
        since: start of the time for which all records of the replica are or will be received.
        until: time up to which they have been received.
        delay: estimates the delay of its messages.
    """

    since: float
    until: float
    gap_at: float
    at: float
    faults: frozenset[str] | None
    delay: _Delay


class Peers:
    """Sends our records to the other replicas, and receives theirs.

    Everything runs on the event loop's thread, and no webhook request waits for it.

    Args:
        settings: addresses of the replicas.
        take: receives each record of another replica.
        metrics: counts messages.
        listen: host on which all replicas listen; it selects IPv4 or IPv6 addresses of a service.
        monotonic: clock of the records.
        instance: name of this replica, unique to its process.
        secret: shared secret without TLS, or "" for none.
        tls: returns the TLS context for requests to replicas, or None.
        faults: returns the sources that this replica cannot reach; see `Message`.
    """

    def __init__(
        self,
        settings: PeersSettings,
        take: Callable[[AnsweredRequest], None],
        metrics: Metrics,
        *,
        listen: str = "",
        monotonic: Callable[[], float] = time.monotonic,
        instance: str = "",
        secret: str = "",
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        faults: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self.instance = instance or make_identity()
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._tls = tls
        self._faults = faults
        self._settings = settings
        self._take = take
        self._metrics = metrics
        self._family = _family(listen)
        self._monotonic = monotonic
        self._links: dict[_Address, PeerLink] = {}
        self._tasks: dict[_Address, asyncio.Task[None]] = {}
        self._received: OrderedDict[str, _Received] = OrderedDict()
        self._looked_up_at = -math.inf
        self._lost_at = math.inf
        self._lookup_error = ""
        metrics.peers.labels("known").set_function(lambda: len(self._others()))
        metrics.peers.labels("answering").set_function(
            lambda: sum(link.is_answering for link in self._others())
        )

    def report(self, request: AnsweredRequest) -> None:
        """Queue a record for every other replica."""
        for link in self._links.values():
            link.add(request)

    @property
    def since(self) -> float:
        """Start of the time for which all replicas' records are known (monotonic seconds).

        Records of a replica that is gone, or from before its first message, are lost.
        """
        others = [link.instance for link in self._others()]
        if any(instance not in self._received for instance in others):
            return math.inf
        return max(
            self._lost_at, *(received.since for received in self._received.values()), -math.inf
        )

    @property
    def until(self) -> float:
        """End of the time for which all replicas' records are known (monotonic seconds).

        A replica that appears later has no earlier records.
        """
        return min(
            self._looked_up_at, *(received.until for received in self._received.values()), math.inf
        )

    @property
    def are_pending(self) -> bool:
        """Whether the first message of a known replica has not arrived, but may soon."""
        return self._looked_up_at == -math.inf or any(
            link.is_untried or (link.is_answering and link.instance not in self._received)
            for link in self._others()
        )

    def peer_faults(self) -> list[frozenset[str]]:
        """Return the unreached sources of each ready replica that sent a message recently."""
        return [
            received.faults
            for received in self._received.values()
            if received.faults is not None and not self._is_silent(received)
        ]

    def _is_silent(self, received: _Received) -> bool:
        return self._monotonic() - received.at >= _SILENT_SECONDS

    async def query(self, path: str) -> dict[str, bytes | None]:
        """Send a GET request to all other replicas; return bodies by address, None for failures.

        An address may be our own until the first answer from it.
        """
        links = [(_name_address(at), link) for at, link in self._links.items() if not link.is_self]
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(link.query(path), name=f"query {name}")
                for name, link in links
            }
        return {name: task.result() for name, task in tasks.items()}

    async def query_one(self, address: str, path: str) -> bytes | None:
        """Send a GET request to the replica at an address; return the body, or None if it fails."""
        for at, link in self._links.items():
            if _name_address(at) == address:
                return await link.query(path)
        return None

    def routes(self) -> list[web.RouteDef]:
        """Return the route that receives the messages of other replicas."""
        return [web.post(PATH, self._receive)]

    async def run(self) -> None:
        """Look up replicas and send them messages until cancelled.

        A restart opens all links again: their HTTP session was closed.
        """
        for address in tuple(self._links):
            self._tasks.pop(address).cancel()
            self._drop(address)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        # A replica compresses nothing, and a small answer could unpack to a large one.
        async with aiohttp.ClientSession(
            timeout=timeout, headers=self._headers, auto_decompress=False
        ) as session:
            try:
                async with asyncio.TaskGroup() as group:
                    while True:
                        await self._resolve(group, session)
                        await asyncio.sleep(_RESOLVE_SECONDS)
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS_SECONDS):
                        for link in self._others():
                            if link.is_answering:
                                await link.send()

    # --- addresses -----------------------------------------------------------------------------

    async def _resolve(self, group: asyncio.TaskGroup, session: aiohttp.ClientSession) -> None:
        """Look up the addresses, open a link to each new one, and close links to old ones."""
        started_at = self._monotonic()
        try:
            addresses = await self._addresses()
        except OSError as error:  # the known addresses may still be right
            cause = str(error)
            if cause != self._lookup_error:
                logger.warning("cannot look up the replicas", extra={"cause": cause})
            self._lookup_error = cause
            return
        self._lookup_error = ""
        for address in self._links.keys() - addresses:
            self._tasks.pop(address).cancel()
            self._drop(address)
        for address in sorted(addresses - self._links.keys()):
            if len(self._links) >= _MAX_PEERS:
                logger.warning("too many replicas", extra={"most": _MAX_PEERS})
                break
            link = self._links[address] = PeerLink(
                address,
                session,
                instance=self.instance,
                interval_seconds=_INTERVAL_SECONDS,
                monotonic=self._monotonic,
                count=lambda outcome: self._metrics.peer_messages.labels("sent", outcome).inc(),
                tls=self._tls,
                faults=self._faults,
            )
            self._tasks[address] = group.create_task(
                keep("peer", link.run), name=f"peer {address[0]}"
            )
        else:
            self._note_members(started_at)

    def _drop(self, address: _Address) -> None:
        """Close the link to an address; records of a replica that never sent a message are lost."""
        link = self._links.pop(address)
        if not link.is_self and link.instance not in self._received:
            self._lost_at = self._monotonic()

    def _note_members(self, started_at: float) -> None:
        """Record that every replica that existed at `started_at` has a link."""
        if self._looked_up_at == -math.inf:
            self._lost_at = started_at
        self._looked_up_at = started_at
        linked = {link.instance for link in self._links.values()}
        for instance, received in tuple(self._received.items()):
            # A replica in shutdown still answers and sends after its address is removed.
            if instance not in linked and self._is_silent(received):
                self._lose(instance)

    def _lose(self, instance: str) -> None:
        """Forget a replica: the records that it did not send are lost."""
        del self._received[instance]
        self._lost_at = self._monotonic()

    async def _addresses(self) -> set[_Address]:
        """Look up the addresses of the service and of the list."""
        names = [(name, socket.AF_UNSPEC) for name in self._settings.addresses]
        if self._settings.service:
            names.append((self._settings.service, self._family))
        found: set[_Address] = set()
        for name, family in names:
            host, port = split_address(name)
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(
                    host, port, family=family, type=socket.SOCK_STREAM
                )
            except OSError as error:
                raise OSError(f"{name}: {error}") from error
            found |= {(str(info[4][0]), port) for info in infos}
        return found

    def _others(self) -> list[PeerLink]:
        return [link for link in self._links.values() if not link.is_self]

    # --- received messages ---------------------------------------------------------------------

    async def _receive(self, request: web.Request) -> web.Response:
        """Receive a message from another replica, or from ourselves: the service lists us, too."""
        try:
            body = await _read(request.content.iter_any())
            message = decode_message(body)
        except PeerError as error:
            self._metrics.peer_messages.labels("received", "refused").inc()
            return web.json_response({"error": str(error)}, status=HTTPStatus.BAD_REQUEST)
        if message.instance != self.instance:
            self.receive(message)
            self._metrics.peer_messages.labels("received", "taken").inc()
        receipt = encode_receipt(self.instance, self._monotonic())
        return web.Response(body=receipt, content_type="application/json")

    def receive(self, message: Message) -> None:
        """Store the records of a message, and update the state of its sender."""
        now = self._monotonic()
        before = self._received.pop(message.instance, None)
        delay = _Delay() if before is None else before.delay
        sent_at = now if message.sent_at is None else now - delay.of(message.sent_at, now)
        for request in requests_in(message, sent_at):
            self._take(request)
        since, gap_at = now, message.gap_at
        if before is not None and message.gap_at <= before.gap_at:
            since, gap_at = before.since, before.gap_at
        until = -math.inf if before is None else before.until
        if message.to == self.instance and message.mark is not None:
            until = max(until, message.mark)
        self._received[message.instance] = _Received(
            since=since,
            until=until,
            gap_at=gap_at,
            at=now,
            faults=None if message.faults is None else frozenset(message.faults),
            delay=delay,
        )
        if len(self._received) > 2 * _MAX_PEERS:
            self._lose(next(iter(self._received)))


def build_peers(
    settings: Settings,
    request_log: RequestLog,
    metrics: Metrics,
    *,
    instance: str,
    tls: Callable[[], ssl.SSLContext | None],
    faults: Callable[[], Collection[str] | None],
) -> Peers | None:
    """Connect the request log with other replicas' logs; None if no replicas are configured."""
    if not settings.peers.is_used:
        return None
    peers = Peers(
        settings.peers,
        request_log.take,
        metrics,
        listen=settings.listen_address[0],
        instance=instance,
        secret=settings.peer_secret(),
        tls=tls,
        faults=faults,
    )
    request_log.answered.subscribe(peers.report)
    return peers


def _name_address(address: _Address) -> str:
    """Format an address as host:port.

    Example:
        >>> _name_address(("::1", 8888))
        '[::1]:8888'
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    """Return the address family of a listen address; AF_UNSPEC for a host name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return socket.AF_UNSPEC
    return socket.AF_INET6 if isinstance(address, ipaddress.IPv6Address) else socket.AF_INET


async def _read(chunks: AsyncIterable[bytes]) -> bytes:
    """Read a body."""
    body = bytearray()
    try:
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_BYTES:
                raise PeerError(f"the message is longer than {MAX_BYTES} bytes")
    except (OSError, web.RequestPayloadError) as error:
        raise PeerError(f"cannot read the message: {error}") from error
    return bytes(body)
