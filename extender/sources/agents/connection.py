"""One agent's connection: a request that must be granted, then updates, each after its length.

A protocol and no streams: a report costs two calls, and no task wakes for it.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

import h11
from typing_extensions import override  # in typing from Python 3.12 on

from agent.report import (
    LENGTH_BYTES,
    MAX_UPDATE_BYTES,
    PATH,
    UPGRADE,
    Farewell,
    ReportError,
    Update,
    decode_update,
    frame,
)
from extender.runtime.log_throttle import ThrottledLogger
from extender.sources.agents.refusal import STATUS, AgentRefusal, RefusedError
from extender.sources.agents.states import AgentState
from extender.sources.agents.tokens import Sender

MOST_HEAD_BYTES: Final = 32 << 10
"""A token of a kubelet has one or two KiB."""

MOST_CHUNKS: Final = 64
MOST_UPDATES: Final = 16
"""Pieces of data, and updates, that are taken of one connection between two batches: what comes
beyond waits, most of it in the sender's own memory."""

faults = ThrottledLogger(logging.getLogger(__name__))

_BEARER: Final = b"bearer "


class Desk(Protocol):
    """What a connection asks of whoever has them all."""

    def opened(self, connection: "AgentConnection") -> None:
        """Take note of a new connection, or end it."""

    def closed(self, connection: "AgentConnection") -> None:
        """Take note of its end."""

    async def admit(self, connection: "AgentConnection", token: str) -> Sender:
        """Return whose a token is.

        Raises:
            RefusedError: it is no agent's.
        """

    def granted(self, connection: "AgentConnection") -> None:
        """Take note that updates follow."""

    def take(self, connection: "AgentConnection", update: Update) -> None:
        """Take an update.

        Raises:
            RefusedError: it cannot be.
        """

    def note_refusal(self, connection: "AgentConnection", error: RefusedError) -> None:
        """Count and log a refusal."""

    def paused(self, connection: "AgentConnection") -> None:
        """Remember to let it go on with the next batch."""


class AgentConnection(asyncio.Protocol):
    """One connection of an agent.

    Args:
        desk: has all connections.
        monotonic: seconds since any moment.

    Attributes:
        opened_at: when it began, by `monotonic`.
        heard_at: when something last came.
        sender: whose it is; None as long as that is not known.
        state: what was said on it.
        address: where it comes from.
    """

    __slots__ = (
        "_buffer",
        "_chunks",
        "_desk",
        "_head",
        "_is_ended",
        "_is_paused",
        "_is_switched",
        "_monotonic",
        "_review",
        "_transport",
        "_updates",
        "address",
        "heard_at",
        "opened_at",
        "sender",
        "state",
    )

    def __init__(self, desk: Desk, monotonic: Callable[[], float]) -> None:
        self.opened_at = self.heard_at = monotonic()
        self.sender: Sender | None = None
        self.state: AgentState | None = None
        self.address = ""
        self._desk = desk
        self._monotonic = monotonic
        self._transport: asyncio.Transport | None = None
        self._head: h11.Connection | None = None
        self._is_switched = False
        self._review: asyncio.Task[None] | None = None
        self._buffer = bytearray()
        self._chunks = 0
        self._updates = 0
        self._is_paused = False
        self._is_ended = False

    # --- what the loop calls --------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport  # type: ignore[assignment] # a socket's; uvloop's is no subclass
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._desk.opened(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._is_ended = True
        self._transport = None
        if self._review is not None:
            self._review.cancel()
        self._desk.closed(self)

    @override
    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._is_ended:
            return
        self.heard_at = self._monotonic()
        self._chunks += 1
        if self._chunks >= MOST_CHUNKS:
            self._pause()
        try:
            if self._is_switched:
                self._buffer += data
                self._take_frames()
            else:
                # Made only now: many may be accepted in one step.
                self._head = self._head or h11.Connection(
                    h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES
                )
                self._take_head(self._head, data)
        except Exception as error:  # noqa: BLE001 - one agent's input ends its own connection alone
            self.fail(error)

    # --- the request ------------------------------------------------------------------------------

    def _take_head(self, head: h11.Connection, data: bytes) -> None:
        """Take the request; what follows it has to wait until it is granted."""
        if self._review is not None:
            self._buffer += data
            if len(self._buffer) > MAX_UPDATE_BYTES:
                raise RefusedError(
                    AgentRefusal.BAD_REQUEST, "updates came before they were asked for"
                )
            return
        try:
            head.receive_data(data)
            event = head.next_event()
            # Updates follow the answer; a body would stand where they begin.
            is_whole = not isinstance(event, h11.Request) or (
                isinstance(head.next_event(), h11.EndOfMessage)
            )
        except h11.RemoteProtocolError as error:
            raise RefusedError(AgentRefusal.BAD_REQUEST, f"no HTTP request: {error}") from error
        if not is_whole:
            raise RefusedError(
                AgentRefusal.BAD_REQUEST, "the request has a body: updates follow later"
            )
        if isinstance(event, h11.Request):
            token = _token_in(event)
            self._review = asyncio.get_running_loop().create_task(
                self._grant(head, token), name="agent review"
            )
        elif event is not h11.NEED_DATA:
            raise RefusedError(AgentRefusal.BAD_REQUEST, "no HTTP request")

    async def _grant(self, head: h11.Connection, token: str) -> None:
        """Have the token reviewed, and let updates follow."""
        try:
            sender = await self._desk.admit(self, token)
            self.sender, self.state = sender, AgentState(sender.node)
            self._switch(head)
            self._desk.granted(self)
            self._take_frames()
        except Exception as error:  # noqa: BLE001 - likewise
            self.fail(error)

    def _switch(self, head: h11.Connection) -> None:
        answer = head.send(
            h11.InformationalResponse(
                status_code=HTTPStatus.SWITCHING_PROTOCOLS,
                headers=[("Connection", "Upgrade"), ("Upgrade", UPGRADE)],
                reason=b"Switching Protocols",
            )
        )
        early, _ = head.trailing_data
        self._buffer[:0] = early
        self._head, self._is_switched = None, True
        if self._transport is not None and answer:
            self._transport.write(answer)

    # --- the updates ------------------------------------------------------------------------------

    def _take_frames(self) -> None:
        """Take every update that is there as a whole.

        Raises:
            RefusedError: one cannot be.
        """
        buffer, start = self._buffer, 0
        while len(buffer) - start >= LENGTH_BYTES and not self._is_ended:
            if self._updates >= MOST_UPDATES:
                self._pause()
                break
            size = int.from_bytes(buffer[start : start + LENGTH_BYTES], "big")
            if size > MAX_UPDATE_BYTES:
                raise RefusedError(
                    AgentRefusal.BAD_REPORT,
                    f"update of {size} bytes: must be at most {MAX_UPDATE_BYTES} bytes",
                )
            end = start + LENGTH_BYTES + size
            if len(buffer) < end:
                break
            content = bytes(buffer[start + LENGTH_BYTES : end])
            start = end
            try:
                update = decode_update(content)
            except ReportError as error:
                raise RefusedError(AgentRefusal.BAD_REPORT, str(error)) from error
            self._updates += 1
            self._desk.take(self, update)
        del buffer[:start]

    def _pause(self) -> None:
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
            self._desk.paused(self)

    # --- what the desk calls ----------------------------------------------------------------------

    @property
    def is_under_review(self) -> bool:
        """Whether it is being found out whose it is."""
        return self._review is not None and not self._review.done()

    def resume(self) -> None:
        """Count anew how much came, and go on where that was too much."""
        self._chunks = self._updates = 0
        if not self._is_paused:
            return
        self._is_paused = False
        if self._is_switched:
            try:
                self._take_frames()
            except Exception as error:  # noqa: BLE001 - likewise
                self.fail(error)
        transport = self._transport
        if not self._is_paused and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def fail(self, error: Exception) -> None:
        """End it because of an error; an unexpected one is a fault of ours, and logged in full."""
        if not isinstance(error, RefusedError):
            faults.error("fault", exc_info=error)
            text = f"the extender failed on this report: {type(error).__name__}"
            error = RefusedError(AgentRefusal.FAULT, text)
        self.refuse(error)

    def refuse(self, error: RefusedError) -> None:
        """Say why, and end it."""
        if self._is_ended:
            return
        self._is_ended = True
        self._desk.note_refusal(self, error)
        transport = self._transport
        if transport is None:
            return
        try:
            transport.write(self._last_words(error))
        except h11.LocalProtocolError:
            transport.abort()  # what came is so bad that it cannot even be answered
            return
        transport.close()

    def abort(self) -> None:
        """End it at once."""
        self._is_ended = True
        if self._transport is not None:
            self._transport.abort()

    def _last_words(self, error: RefusedError) -> bytes:
        text = str(error)
        if self._is_switched:
            return frame(Farewell(reason=text))
        head = self._head or h11.Connection(h11.SERVER)
        body = f"{text}\n".encode()
        response = h11.Response(
            status_code=STATUS.get(error.refusal, HTTPStatus.BAD_REQUEST),
            headers=[
                ("Content-Type", "text/plain; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ],
        )
        parts = (response, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(head.send(part) or b"" for part in parts)


def _token_in(request: h11.Request) -> str:
    """Return the token of a request for a stream of updates.

    Raises:
        RefusedError: it is another request, or has no token.
    """
    headers = {name.lower(): value for name, value in request.headers}
    path = request.target.partition(b"?")[0]
    if path != PATH.encode() or request.method != b"GET":
        raise RefusedError(
            AgentRefusal.BAD_REQUEST, f"only GET {PATH} is here, with Upgrade: {UPGRADE}"
        )
    if headers.get(b"upgrade", b"").lower() != UPGRADE.encode():
        raise RefusedError(
            AgentRefusal.BAD_REQUEST, f"the request lacks the header Upgrade: {UPGRADE}"
        )
    given = headers.get(b"authorization", b"")
    token = given[len(_BEARER) :].strip()
    if given[: len(_BEARER)].lower() != _BEARER or not token:
        raise RefusedError(
            AgentRefusal.NO_TOKEN,
            "the request has no token: send the projected service-account token as "
            "Authorization: Bearer",
        )
    return token.decode("latin-1")
