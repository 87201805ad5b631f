"""Ports: who comes is counted from the first packet on, and nobody takes all the room.

A connection is the socket itself, from its acceptance to its close: TLS's handshake, and whoever
never ends one, are in the count. What is read and written on it later passes none of this.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from typing_extensions import override  # in typing from Python 3.12 on

from extender import memory
from extender.handshakes import EVERYDAY, HINTS, THEIRS, Failure, failure_of
from extender.pacing import unpace
from extender.seldom import Seldom
from extender.sharing import who_gives_way

logger = logging.getLogger(__name__)

BACKLOG: Final = 128
ACCEPTED_AT_ONCE: Final = 32
"""So many are accepted before others have a turn."""
HANDSHAKE_SECONDS: Final = 10.0
GOODBYE_SECONDS: Final = 5.0
"""Who does not take leave of a connection over TLS in so long is left."""
RETRY_SECONDS: Final = 0.5
"""Nothing is accepted for so long where the system refuses to."""
UNLIMITED: Final = 1 << 30
KEPT_SILENT: Final = 8
"""Connections on which an honest client may keep silent: Go keeps two for each server."""
SILENT_SECONDS: Final = 30.0
"""Who has said something so lately does not give way to those who say nothing."""
KEPT_BACK: Final = 100
"""File descriptors for what we ask ourselves: API server, Prometheus, replicas, files."""

FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Retry-After: 5\r\nConnection: close\r\nContent-Length: 48\r\n\r\n"
    b"there are too many connections: come back later\n"
)

Factory = Callable[[], asyncio.BaseProtocol]


class Refusal(StrEnum):
    """Why somebody was refused, or a connection ended for another."""

    FULL = "full"
    """The port has as many connections as it may."""
    DESCRIPTORS = "descriptors"
    """File descriptors run out: what is left is the webhooks'."""
    GAVE_WAY = "gave-way"
    """It ended for another: it had shown nothing yet, or its address holds the most of all."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """How many come to a port; counts are since the start.

    Attributes:
        connections: that there are.
        refusals: connections that were refused or ended for want of room, by reason.
        failures: handshakes of TLS that failed, by reason.
    """

    connections: int = 0
    refusals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))


class _Accepted(socket.socket):
    """A connection's socket, which says when it ends: when its file descriptor is given back."""

    address: str = ""
    gave_way: bool = False
    is_heard: bool = False
    on_end: Callable[["_Accepted"], None] | None = None

    @override
    def close(self) -> None:
        self._end()
        super().close()

    @override
    def detach(self) -> int:
        """Give the descriptor away: uvloop closes by it."""
        self._end()
        return super().detach()

    def _end(self) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)


class Heard(asyncio.BaseProtocol):
    """Handles a connection, and notes when something comes.

    Attributes:
        on_bytes: is called then.
    """

    on_bytes: Callable[[], None] = staticmethod(lambda: None)


class _Waiting:
    """Connections that may have to give way, the first one first, by address."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[_Accepted, None]] = {}

    def add(self, one: _Accepted) -> None:
        """Put a connection last."""
        self.discard(one)
        self._by_address.setdefault(one.address, {})[one] = None

    def discard(self, one: _Accepted) -> None:
        """Forget a connection."""
        held = self._by_address.get(one.address, {})
        held.pop(one, None)
        if not held:
            self._by_address.pop(one.address, None)

    def first_of(self, address: str) -> "_Accepted | None":
        """Return the first one of an address, None where it has none."""
        return next(iter(self._by_address.get(address, ())), None)

    def heaviest(self) -> tuple[int, _Accepted | None]:
        """Return how many the address with the most of them has, and its first one."""
        held = max(self._by_address.values(), key=len, default={})
        return len(held), next(iter(held), None)


class Listener:
    """Accepts the connections of one port.

    Where the port has as many as it may, a new connection takes the place of another:

    - of one whose TLS handshake is not over, or, where one address has many more of these, of one
      on which nothing was ever said: of the oldest one of the address that has the most;
    - else, of the address that holds the most of all, at least two more than the new one's address,
      or of the new one's own address: of one on which nothing was ever said, or of the one that
      has been silent longest, for at least `SILENT_SECONDS`;
    - else of the newest one of that other address. If there is none, the new one is refused.

    So no address keeps another out, and a connection on which something was said lately gives way
    to none of its own address. What is said is known only where the handler is `Heard`.

    Runs on the event loop's thread alone.

    Args:
        name: of the port, for log and metrics.
        address: host and port.
        factory: makes what a connection is handled by, once its handshake is over.
        most: says how many connections there may be.
        tls: None for without.
        spare: so many file descriptors are left to others.
        hint: what is to be done where a client's certificate is refused, for the log.
        refused: is told of whom there was no room for: their address.

    Attributes:
        figures: how many come.
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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.figures = Figures()
        self._address = address
        self._factory = factory
        self._most = most
        self._tls = tls
        self._highest = descriptors() - spare
        self._hint = hint
        self._refused = refused
        self._seldom = Seldom(monotonic=monotonic)
        self._sockets: list[socket.socket] = []
        self._held: dict[_Accepted, None] = {}
        self._unknown = _Waiting()
        self._mute = _Waiting()
        self._spoken: dict[_Accepted, float] = {}
        self._monotonic = monotonic
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_address: Counter[str] = Counter()

    @property
    def is_tls(self) -> bool:
        """Whether whoever comes has to speak TLS."""
        return self._tls is not None

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Where this listens: host and port of each socket."""
        return tuple(one.getsockname()[:2] for one in self._sockets)

    @property
    def coming(self) -> tuple[object, ...]:
        """Something for each connection whose handshake is not over."""
        return tuple(self._tasks)

    async def open(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be used.
        """
        loop = asyncio.get_running_loop()
        host, port = self._address
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, where in dict.fromkeys((one[0], one[4]) for one in found):
                self._sockets.append(socket.create_server(where, family=family, backlog=BACKLOG))
        except OSError:
            self.close()
            raise
        for one in self._sockets:
            one.settimeout(0.0)
            unpace(one)
            loop.add_reader(one, self._accept, one)

    def close(self) -> None:
        """Accept no more; who is there may go on."""
        loop = asyncio.get_running_loop()
        while self._sockets:
            one = self._sockets.pop()
            loop.remove_reader(one)
            one.close()

    async def end(self) -> None:
        """Accept no more, and end handshakes that are not over."""
        self.close()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- who comes --------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        """Accept those who have come, some at a time."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # no descriptor or no memory is left
                self._pause(listening, error)
                return
            self._take(accepted, str(address[0]))

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Leave the system alone for a moment."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        loop.call_later(RETRY_SECONDS, self._resume, listening)
        unlogged = self._seldom.due("accept", error.errno)
        if unlogged is not None:
            logger.error(
                "cannot accept connections",
                extra={"port": self.name, "cause": str(error), "also_unlogged": unlogged},
            )

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _take(self, accepted: socket.socket, address: str) -> None:
        """Take a connection on, or refuse it."""
        if accepted.fileno() >= self._highest:
            self._refuse(accepted, address, Refusal.DESCRIPTORS)
            return
        if len(self._held) >= self._most() and not self._make_room(address):
            self._refuse(accepted, address, Refusal.FULL)
            return
        held = _Accepted(accepted.family, accepted.type, accepted.proto, accepted.detach())
        held.settimeout(0.0)
        held.address, held.on_end = address, self._let_go
        self._held[held] = None
        self._by_address[address] += 1
        self.figures.connections += 1
        self._unknown.add(held)
        task = asyncio.get_running_loop().create_task(self._begin(held), name="connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, accepted: socket.socket, address: str, refusal: Refusal) -> None:
        self._note(refusal, address)
        if self._refused is not None:
            self._refused(address)
        with accepted:
            accepted.settimeout(0.0)
            if self._tls is None:
                with contextlib.suppress(OSError):
                    accepted.send(FULL)

    def _make_room(self, newcomer: str) -> bool:
        """Have somebody give way to who comes from an address; tell whether somebody did."""
        leaving = self._idle() or self._of_heaviest(newcomer)
        if leaving is None:
            return False
        self._note(Refusal.GAVE_WAY, leaving.address)
        self._let_go(leaving)
        leaving.gave_way = True
        with contextlib.suppress(OSError):
            # Whoever handles it sees that it has ended, whether it reads or writes.
            leaving.shutdown(socket.SHUT_RDWR)
        return True

    def _idle(self) -> _Accepted | None:
        """Return a connection on which nothing was said yet, None where there is none to spare."""
        unknown, in_handshake = self._unknown.heaviest() if self._tls is not None else (0, None)
        mute, silent = self._mute.heaviest()
        return silent if mute > unknown + KEPT_SILENT else in_handshake

    def _of_heaviest(self, newcomer: str) -> _Accepted | None:
        """Return a connection of the address that holds the most, None in fair shares."""
        heaviest = who_gives_way(self._by_address, newcomer)
        if (mute := self._mute.first_of(heaviest or newcomer)) is not None:
            return mute
        limit = self._monotonic() - SILENT_SECONDS
        for one, spoken_at in self._spoken.items():
            if spoken_at > limit:
                break
            if one.address == (heaviest or newcomer):
                return one
        if heaviest is None:
            return None
        return next(one for one in reversed(self._held) if one.address == heaviest)

    def _heard(self, held: _Accepted) -> None:
        """Note that something was said on a connection."""
        if held in self._held:
            if self._spoken.pop(held, None) is None:
                self._mute.discard(held)
            self._spoken[held] = self._monotonic()

    def _note(self, refusal: Refusal, address: str) -> None:
        """Count a refusal, and log it now and then."""
        self.figures.refusals[refusal] += 1
        unlogged = self._seldom.due(refusal)
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

    def _let_go(self, leaving: _Accepted) -> None:
        """Count a connection no more: it has ended, or is about to."""
        if leaving not in self._held:
            return
        del self._held[leaving]
        self._unknown.discard(leaving)
        self._mute.discard(leaving)
        self._spoken.pop(leaving, None)
        self.figures.connections -= 1
        self._by_address[leaving.address] -= 1
        if not self._by_address[leaving.address]:
            del self._by_address[leaving.address]

    # --- its handshake ----------------------------------------------------------------------------

    async def _begin(self, held: _Accepted) -> None:
        """Have a connection handled, after its handshake where there is TLS."""
        is_tls = self._tls is not None
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._handler(held),
                held,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if is_tls else None,
                ssl_shutdown_timeout=GOODBYE_SECONDS if is_tls else None,
            )
            if held.is_heard and held in self._held and held not in self._spoken:
                self._mute.add(held)
            _forget_buffer(transport)
        except OSError as error:  # an SSLError is one
            if is_tls and not held.gave_way:
                self._note_failure(error, held.address)
            held.close()
        except BaseException:
            held.close()
            raise
        finally:
            self._unknown.discard(held)

    def _handler(self, held: _Accepted) -> asyncio.BaseProtocol:
        """Return what handles a connection."""
        handler = self._factory()
        if isinstance(handler, Heard):
            handler.on_bytes = partial(self._heard, held)
            held.is_heard = True
        return handler

    def _note_failure(self, error: OSError, address: str) -> None:
        """Count a handshake that failed, and log it now and then."""
        failure = failure_of(error)
        self.figures.failures[failure] += 1
        if failure in EVERYDAY:
            return
        unlogged = self._seldom.due(failure, address)
        if unlogged is None:
            return
        logger.warning(
            "a client's certificate is refused" if failure in THEIRS else "TLS handshake failed",
            extra={
                "port": self.name,
                "reason": failure.value,
                "cause": str(error) or type(error).__name__,
                "address": address,
                "hint": self._hint if failure in THEIRS else HINTS.get(failure, ""),
                "also_unlogged": unlogged,
            },
        )


def _forget_buffer(transport: asyncio.BaseTransport) -> None:
    """Keep no memory for what a connection over TLS reads into, until something comes to be read.

    uvloop has 256 KiB for each, of which reports need a page or two; but it lies where other things
    lay before, so 107 KiB of it were in use (5,000 agents: 789 MiB without this, 263 with).
    Whatever `BufferedProtocol.get_buffer` returns is to be written over: nothing in it is needed.
    """
    protocol = transport.get_extra_info("uvloop.sslproto")
    get_buffer = getattr(protocol, "get_buffer", None)  # none of this is promised by uvloop
    if get_buffer is not None:
        memory.forget(get_buffer(1))


def descriptors() -> int:
    """Return how many file descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else UNLIMITED


def ask_for_descriptors(connections: int) -> int:
    """Have room for so many connections, as far as the system allows; return how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 2 * KEPT_BACK
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft not in {resource.RLIM_INFINITY, hard} and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return descriptors() - 2 * KEPT_BACK


def spare_for(connections: int) -> int:
    """Return how many file descriptors are left to a port that must be reached, and to ourselves.

    Args:
        connections: the most that this port has.
    """
    return min(connections + KEPT_BACK, descriptors() // 2)
