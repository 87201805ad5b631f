"""Listen on ports, and limit the number of connections from TCP accept to close.

Sockets also count while their TLS handshake is in progress. After the handshake, reads and writes
bypass this module.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from typing_extensions import override  # in typing from Python 3.12 on

from extender.runtime import native_memory
from extender.runtime.logs import LogThrottle
from extender.server.tls import CLIENT_FAILURES, FAILURE_HINTS, TlsFailure, failure_of

logger = logging.getLogger(__name__)

# Avoid BBR on sockets, because BBR delays answers on connections that are often idle.
#
# BBR paces packets at the rate that it has measured on a connection. A connection of kube-scheduler
# is idle between two requests, and the end of an answer is acknowledged late, so BBR measures too
# low a rate. It delayed one of fifty answers with 5,000 names by 15 to 50 milliseconds. Every
# kernel has at least one algorithm without pacing.

_BBR: Final = "bbr"
_ALTERNATIVES: Final = ("cubic", "reno")
"""Algorithms without pacing, tried in this order; every kernel has reno."""
_NAME_BYTES: Final = 16  # TCP_CA_NAME_MAX

_BACKLOG: Final = 128
_ACCEPTED_AT_ONCE: Final = 32
"""Connections that are accepted before the event loop runs other work."""
_HANDSHAKE_SECONDS: Final = 10.0
_TLS_CLOSE_SECONDS: Final = 5.0
"""Time for a client to answer the end of a TLS connection before the connection is closed."""
_RETRY_SECONDS: Final = 0.5
"""Pause after `accept` failed for lack of descriptors or memory."""
_UNLIMITED: Final = 1 << 30
_ALLOWED_UNUSED: Final = 8
"""Unused connections that a normal client may hold: a Go client keeps two for each server."""
_SILENT_SECONDS: Final = 30.0
"""A connection that sent bytes within this time is not closed in favor of silent ones."""
RESERVED_DESCRIPTORS: Final = 100
"""File descriptors reserved for the extender's own connections to other servers, and for files."""
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Retry-After: 5\r\nConnection: close\r\nContent-Length: 38\r\n\r\n"
    b"too many connections: try again later\n"
)

Factory = Callable[[Callable[[], None]], asyncio.BaseProtocol]
"""Creates the protocol of a connection, which calls the argument whenever bytes arrive."""


def replace_bbr(one: socket.socket) -> None:
    """Replace BBR on a socket, or on all connections that a listening socket will accept.

    If no other algorithm is available, BBR stays: it only costs milliseconds.
    """
    if not _congestion_control(one).startswith(_BBR):
        return
    for name in _ALTERNATIVES:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return


def _congestion_control(one: socket.socket) -> str:
    """Return the name of a socket's congestion control, or "" if the system does not report it."""
    try:
        name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    except OSError:
        return ""
    return name.rstrip(b"\0").decode()


class _ConnectionRefusal(StrEnum):
    """Reason why a connection was refused or closed for lack of room, as a metric label."""

    FULL = "full"
    """The port has its maximum number of connections."""
    DESCRIPTORS = "descriptors"
    """File descriptors are scarce: the remaining ones are reserved for the webhooks' port."""
    EVICTED = "gave-way"
    """Closed for a new connection: its handshake was open, or its address had most connections."""


@dataclass(slots=True, kw_only=True)
class _Figures:
    """Connection figures of a port; counts start with the process.

    Attributes:
        refusals: connections refused or closed for lack of room, by reason.
    """

    connections: int = 0
    refusals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ConnectionRefusal, 0))
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TlsFailure, 0))


class _Accepted(socket.socket):
    """A connection's socket that calls `on_end` when its file descriptor is closed or detached."""

    def __init__(
        self, accepted: socket.socket, address: str, on_end: Callable[["_Accepted"], None]
    ) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self.address = address
        self.is_evicted = False
        self._on_end: Callable[[_Accepted], None] | None = on_end

    @override
    def close(self) -> None:
        self._end()
        super().close()

    @override
    def detach(self) -> int:
        """Detach the descriptor: uvloop detaches a socket before it closes it."""
        self._end()
        return super().detach()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)


class _Waiting:
    """Connections that may be closed to make room, oldest first, by client address."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[_Accepted, None]] = {}

    def add(self, one: _Accepted) -> None:
        """Add a connection as the newest one of its address."""
        self.discard(one)
        self._by_address.setdefault(one.address, {})[one] = None

    def discard(self, one: _Accepted) -> None:
        """Remove a connection."""
        held = self._by_address.get(one.address, {})
        held.pop(one, None)
        if not held:
            self._by_address.pop(one.address, None)

    def first_of(self, address: str) -> "_Accepted | None":
        """Return the oldest connection of an address, or None."""
        return next(iter(self._by_address.get(address, ())), None)

    def heaviest(self) -> tuple[int, _Accepted | None]:
        """Return the largest number of connections of one address, and its oldest connection."""
        held = max(self._by_address.values(), key=len, default={})
        return len(held), next(iter(held), None)


class Listener:
    """Accepts the connections of one port, and limits their number.

    If the port is full, a new connection replaces an existing one, by the first rule that applies:

    1. The oldest connection with an open TLS handshake of the address that has most of these. If
       another address has many more connections that never sent a byte, the oldest of these
       connections.
    2. A connection of the heaviest address, if that address holds at least two more than the new
       one's; otherwise a connection of the new one's own address. It must never have sent a byte,
       or have been silent for `_SILENT_SECONDS`; the one that is silent longest is replaced.
    3. The newest connection of the heaviest address.

    Otherwise the new connection is refused. So no address can exclude another address, and a
    connection with recent requests is never replaced by one from its own address.

    Use it on the event loop's thread only.

    Args:
        name: name of the port in log lines and metrics.
        address: host and port.
        factory: creates the protocol of a connection after its handshake.
        most: returns the maximum number of connections.
        tls: TLS context, or None for plain TCP.
        spare: file descriptors left for other uses.
        hint: log text with the remedy when a client's certificate is refused.
        refused: receives the address of each refused connection.
        measures_silence: whether the protocols report arriving bytes; without that no connection
            counts as silent.

    Attributes:
        figures: connection figures of this port.
    """

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        factory: Factory,
        *,
        most: Callable[[], int],
        tls: ssl.SSLContext | None = None,
        spare: int = 0,
        hint: str = "",
        refused: Callable[[str], None] | None = None,
        measures_silence: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.figures = _Figures()
        self._address = address
        self._factory = factory
        self._most = most
        self._tls = tls
        self._highest = descriptors() - spare
        self._hint = hint
        self._refused = refused
        self._measures_silence = measures_silence
        self._throttle = LogThrottle(monotonic=monotonic)
        self._sockets: list[socket.socket] = []
        self._held: dict[_Accepted, None] = {}
        self._in_handshake = _Waiting()
        self._unused = _Waiting()
        self._bytes_at: dict[_Accepted, float] = {}
        self._monotonic = monotonic
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_address: Counter[str] = Counter()

    @property
    def is_tls(self) -> bool:
        """Whether the port accepts only TLS connections."""
        return self._tls is not None

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each listening socket."""
        return tuple(one.getsockname()[:2] for one in self._sockets)

    @property
    def handshaking(self) -> tuple[object, ...]:
        """One object for each connection whose handshake has not ended."""
        return tuple(self._tasks)

    async def open(self) -> None:
        """Bind the address and accept connections.

        Raises:
            OSError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        host, port = self._address
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, where in dict.fromkeys((one[0], one[4]) for one in found):
                self._sockets.append(socket.create_server(where, family=family, backlog=_BACKLOG))
        except OSError:
            self.close()
            raise
        for one in self._sockets:
            one.settimeout(0.0)
            replace_bbr(one)
            loop.add_reader(one, self._accept, one)

    def close(self) -> None:
        """Accept no new connections; existing ones stay open."""
        loop = asyncio.get_running_loop()
        while self._sockets:
            one = self._sockets.pop()
            loop.remove_reader(one)
            one.close()

    async def end(self) -> None:
        """Accept no new connections, and cancel handshakes that have not ended."""
        self.close()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- limits ---------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        """Accept waiting connections, at most `_ACCEPTED_AT_ONCE`."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # no descriptor or no memory is left
                self._pause(listening, error)
                return
            self._admit(accepted, str(address[0]))

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Stop accepting for `_RETRY_SECONDS`, and log the error."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        loop.call_later(_RETRY_SECONDS, self._resume, listening)
        unlogged = self._throttle.due("accept", error.errno)
        if unlogged is not None:
            logger.error(
                "cannot accept connections",
                extra={"port": self.name, "cause": str(error), "also_unlogged": unlogged},
            )

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _admit(self, accepted: socket.socket, address: str) -> None:
        """Count an accepted connection and start its handshake, or refuse it."""
        if accepted.fileno() >= self._highest:
            self._refuse(accepted, address, _ConnectionRefusal.DESCRIPTORS)
            return
        if len(self._held) >= self._most() and not self._make_room(address):
            self._refuse(accepted, address, _ConnectionRefusal.FULL)
            return
        held = _Accepted(accepted, address, self._release)
        held.settimeout(0.0)
        self._held[held] = None
        self._by_address[address] += 1
        self.figures.connections += 1
        self._in_handshake.add(held)
        task = asyncio.get_running_loop().create_task(self._begin(held), name="connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, accepted: socket.socket, address: str, refusal: _ConnectionRefusal) -> None:
        self._note(refusal, address)
        if self._refused is not None:
            self._refused(address)
        with accepted:
            accepted.settimeout(0.0)
            if self._tls is None:
                with contextlib.suppress(OSError):
                    accepted.send(_FULL)

    def _make_room(self, newcomer: str) -> bool:
        """Close a connection to make room for `newcomer`; return whether one was closed."""
        leaving = self._idle() or self._of_heaviest(newcomer)
        if leaving is None:
            return False
        self._note(_ConnectionRefusal.EVICTED, leaving.address)
        self._release(leaving)
        leaving.is_evicted = True
        with contextlib.suppress(OSError):
            # The connection's protocol sees the closed socket on its next read or write.
            leaving.shutdown(socket.SHUT_RDWR)
        return True

    def _idle(self) -> _Accepted | None:
        """Return a connection that never completed a handshake or sent a byte, or None."""
        handshakes, in_handshake = (
            self._in_handshake.heaviest() if self._tls is not None else (0, None)
        )
        unused, silent = self._unused.heaviest()
        return silent if unused > handshakes + _ALLOWED_UNUSED else in_handshake

    def _of_heaviest(self, newcomer: str) -> _Accepted | None:
        """Return a connection of the heaviest address, or None if no address is heavier."""
        heaviest = connections_to_close(self._by_address, newcomer)
        if (unused := self._unused.first_of(heaviest or newcomer)) is not None:
            return unused
        limit = self._monotonic() - _SILENT_SECONDS
        for one, bytes_at in self._bytes_at.items():
            if bytes_at > limit:
                break
            if one.address == (heaviest or newcomer):
                return one
        if heaviest is None:
            return None
        return next(one for one in reversed(self._held) if one.address == heaviest)

    def _note_bytes(self, held: _Accepted) -> None:
        """Record that bytes arrived on a connection."""
        if held in self._held:
            if self._bytes_at.pop(held, None) is None:
                self._unused.discard(held)
            self._bytes_at[held] = self._monotonic()

    def _note(self, refusal: _ConnectionRefusal, address: str) -> None:
        """Count a refusal, and log it if a line is due."""
        self.figures.refusals[refusal] += 1
        unlogged = self._throttle.due(refusal)
        if unlogged is not None:
            logger.warning(
                "a port has no room for more connections",
                extra={
                    "port": self.name,
                    "reason": refusal.value,
                    "address": address,
                    "connections": self.figures.connections,
                    "limit": self._most(),
                    "also_unlogged": unlogged,
                },
            )

    def _release(self, leaving: _Accepted) -> None:
        """Remove a connection from the counts: it has ended, or is about to."""
        if leaving not in self._held:
            return
        del self._held[leaving]
        self._in_handshake.discard(leaving)
        self._unused.discard(leaving)
        self._bytes_at.pop(leaving, None)
        self.figures.connections -= 1
        self._by_address[leaving.address] -= 1
        if not self._by_address[leaving.address]:
            del self._by_address[leaving.address]

    # --- TLS handshake --------------------------------------------------------------------------

    async def _begin(self, held: _Accepted) -> None:
        """Complete the handshake if the port uses TLS, and create the connection's protocol."""
        is_tls = self._tls is not None
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._factory(partial(self._note_bytes, held)),
                held,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS if is_tls else None,
                ssl_shutdown_timeout=_TLS_CLOSE_SECONDS if is_tls else None,
            )
            if self._measures_silence and held in self._held and held not in self._bytes_at:
                self._unused.add(held)
            _forget_buffer(transport)
        except OSError as error:  # an SSLError is one
            if is_tls and not held.is_evicted:
                self._note_failure(error, held.address)
            held.close()
        except BaseException:
            held.close()
            raise
        finally:
            self._in_handshake.discard(held)

    def _note_failure(self, error: OSError, address: str) -> None:
        """Count a failed handshake, and log it if a line is due."""
        failure = failure_of(error)
        self.figures.failures[failure] += 1
        if failure is TlsFailure.LEFT:  # also occurs in normal operation
            return
        unlogged = self._throttle.due(failure, address)
        if unlogged is None:
            return
        logger.warning(
            "a client's certificate is refused"
            if failure in CLIENT_FAILURES
            else "TLS handshake failed",
            extra={
                "port": self.name,
                "reason": failure.value,
                "cause": str(error) or type(error).__name__,
                "address": address,
                "hint": self._hint
                if failure in CLIENT_FAILURES
                else FAILURE_HINTS.get(failure, ""),
                "also_unlogged": unlogged,
            },
        )


def _forget_buffer(transport: asyncio.BaseTransport) -> None:
    """Return the memory of a TLS connection's read buffer to the system until data arrives.

    uvloop allocates 256 KiB for each connection; agents' reports need one or two pages of it. The
    allocator reuses memory, so 107 KiB each were resident (5,000 agents: 789 MiB; 263 with this).
    The buffer that `BufferedProtocol.get_buffer` returns holds no data, so it may be discarded.
    """
    protocol = transport.get_extra_info("uvloop.sslproto")
    get_buffer = getattr(protocol, "get_buffer", None)  # uvloop documents none of this
    if get_buffer is not None:
        native_memory.forget(get_buffer(1))


def descriptors() -> int:
    """Return the soft limit of file descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else _UNLIMITED


def raise_descriptor_limit(connections: int) -> int:
    """Raise the soft limit of file descriptors for `connections`; return the allowed number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 2 * RESERVED_DESCRIPTORS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft not in {resource.RLIM_INFINITY, hard} and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return descriptors() - 2 * RESERVED_DESCRIPTORS


def spare_for(connections: int) -> int:
    """Return the number of file descriptors to reserve for another port and for the process.

    Args:
        connections: maximum number of connections of the other port.
    """
    return min(connections + RESERVED_DESCRIPTORS, descriptors() // 2)


def connections_to_close(held: Mapping[str, int], newcomer: str) -> str | None:
    """Return the client with the most connections, or None if none may be closed.

    It must hold at least two more than the newcomer. Otherwise two clients would take connections
    from each other without end.

    Args:
        held: number of connections by client.
        newcomer: the client that opens one more.

    Example:
        >>> connections_to_close({"a": 3, "b": 1}, "b"), connections_to_close({"a": 3, "b": 2}, "b")
        ('a', None)
    """
    if not held:
        return None
    heaviest = max(held, key=held.__getitem__)
    return heaviest if held[heaviest] >= held.get(newcomer, 0) + 2 else None
