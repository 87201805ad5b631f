"""Handle one agent's connection: an HTTP upgrade request, then updates with length prefixes.

It is an asyncio protocol without streams: a report costs two calls, and wakes no task.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

import h11
from typing_extensions import override  # in typing from Python 3.12 on

from agent.report.contract import (
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
from extender.runtime.logs import ThrottledLogger
from extender.sources.agents.refusal import HTTP_STATUS, AgentRefusal, RefusedError
from extender.sources.agents.states import AgentState
from extender.sources.agents.tokens import Sender

_MAX_HEAD_BYTES: Final = 32 << 10
"""Limit for the request; a kubelet's token has one or two KiB."""

_MAX_CHUNKS: Final = 64
_MAX_UPDATES: Final = 16
"""Limits for chunks of data and updates from one connection between two batches. Reading pauses
after them, so that more data waits mostly in the agent's memory."""

_UPDATE_BYTES: Final = 4 << 10
"""A larger update counts as several: the largest one takes tens of milliseconds."""

_faults = ThrottledLogger(logging.getLogger(__name__))

_BEARER: Final = b"bearer "


class _ConnectionOwner(Protocol):
    """Owner of all connections, which receives their events."""

    def opened(self, connection: "AgentConnection") -> None:
        """Register a new connection, or abort it."""

    def closed(self, connection: "AgentConnection") -> None:
        """Remove a closed connection."""

    async def authenticate(self, connection: "AgentConnection", token: str) -> Sender:
        """Return the identity of a token's owner.

        Raises:
            RefusedError: the token is not an agent's.
        """

    def accepted(self, connection: "AgentConnection") -> None:
        """Register a connection whose token was accepted; updates follow."""

    def receive(self, connection: "AgentConnection", update: Update) -> None:
        """Apply an update.

        Raises:
            RefusedError: the update is invalid.
        """

    def note_refusal(self, connection: "AgentConnection", error: RefusedError) -> None:
        """Count and log a refusal."""

    def paused(self, connection: "AgentConnection") -> None:
        """Register a paused connection, to be resumed with the next batch."""


class AgentConnection(asyncio.Protocol):
    """One connection of an agent.

    Attributes:
        opened_at: start of the connection, by `monotonic`.
        last_data_at: time of the last data, by `monotonic`.
        sender: identity of the agent; None until its token is accepted.
        state: last report on this connection; None until its token is accepted.
        address: IP address of the agent.
    """

    __slots__ = (
        "_buffer",
        "_chunks",
        "_http",
        "_is_ended",
        "_is_paused",
        "_is_upgraded",
        "_monotonic",
        "_owner",
        "_review",
        "_transport",
        "_updates",
        "address",
        "last_data_at",
        "opened_at",
        "sender",
        "state",
    )

    def __init__(self, owner: _ConnectionOwner, monotonic: Callable[[], float]) -> None:
        self.opened_at = self.last_data_at = monotonic()
        self.sender: Sender | None = None
        self.state: AgentState | None = None
        self.address = ""
        self._owner = owner
        self._monotonic = monotonic
        self._transport: asyncio.Transport | None = None
        self._http: h11.Connection | None = None
        self._is_upgraded = False
        self._review: asyncio.Task[None] | None = None
        self._buffer = bytearray()
        self._chunks = 0
        self._updates = 0
        self._is_paused = False
        self._is_ended = False

    # --- called by the event loop ---------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self._transport = transport  # type: ignore[assignment] # uvloop's class is not a subclass
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._owner.opened(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """End the review, and remove the connection."""
        self._is_ended = True
        self._transport = None
        if self._review is not None:
            self._review.cancel()
        self._owner.closed(self)

    @override
    def data_received(self, data: bytes) -> None:
        """Process received data."""
        if self._is_ended:
            return
        self.last_data_at = self._monotonic()
        self._chunks += 1
        if self._chunks >= _MAX_CHUNKS:
            self._pause()
        try:
            if self._is_upgraded:
                self._buffer += data
                self._read_updates()
            else:
                # Created late, because the loop may accept many connections in one step.
                self._http = self._http or h11.Connection(
                    h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES
                )
                self._read_request(self._http, data)
        except Exception as error:  # noqa: BLE001 - one agent's input must only end its connection
            self.fail(error)

    # --- the request ------------------------------------------------------------------------------

    def _read_request(self, http: h11.Connection, data: bytes) -> None:
        """Parse the request; data after it is buffered until the token is accepted."""
        if self._review is not None:
            self._buffer += data
            if len(self._buffer) > MAX_UPDATE_BYTES:
                raise RefusedError(
                    AgentRefusal.BAD_REQUEST, "updates came before the token was accepted"
                )
            return
        try:
            http.receive_data(data)
            event = http.next_event()
            # Updates follow the answer, so the request must not have a body.
            is_whole = not isinstance(event, h11.Request) or (
                isinstance(http.next_event(), h11.EndOfMessage)
            )
        except h11.RemoteProtocolError as error:
            raise RefusedError(AgentRefusal.BAD_REQUEST, f"not an HTTP request: {error}") from error
        if not is_whole:
            raise RefusedError(
                AgentRefusal.BAD_REQUEST, "the request has a body: updates follow later"
            )
        if isinstance(event, h11.Request):
            token = _token_in(event)
            self._review = asyncio.get_running_loop().create_task(
                self._authenticate(http, token), name="agent review"
            )
        elif event is not h11.NEED_DATA:
            raise RefusedError(AgentRefusal.BAD_REQUEST, "not an HTTP request")

    async def _authenticate(self, http: h11.Connection, token: str) -> None:
        """Have the token reviewed, and accept updates if it is an agent's."""
        try:
            sender = await self._owner.authenticate(self, token)
            self.sender, self.state = sender, AgentState(sender.node)
            self._upgrade(http)
            self._owner.accepted(self)
            self._read_updates()
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(error)

    def _upgrade(self, http: h11.Connection) -> None:
        answer = http.send(
            h11.InformationalResponse(
                status_code=HTTPStatus.SWITCHING_PROTOCOLS,
                headers=[("Connection", "Upgrade"), ("Upgrade", UPGRADE)],
                reason=b"Switching Protocols",
            )
        )
        early, _ = http.trailing_data
        self._buffer[:0] = early
        self._http, self._is_upgraded = None, True
        if self._transport is not None and answer:
            self._transport.write(answer)

    # --- the updates ------------------------------------------------------------------------------

    def _read_updates(self) -> None:
        """Process every complete update in the buffer."""
        buffer, start = self._buffer, 0
        while len(buffer) - start >= LENGTH_BYTES and not self._is_ended:
            if self._updates >= _MAX_UPDATES:
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
            self._updates += 1 + size // _UPDATE_BYTES
            self._owner.receive(self, update)
        del buffer[:start]

    def _pause(self) -> None:
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
            self._owner.paused(self)

    # --- called by the owner ----------------------------------------------------------------------

    @property
    def is_under_review(self) -> bool:
        """Whether the token is being reviewed."""
        return self._review is not None and not self._review.done()

    def resume(self) -> None:
        """Reset the limits of a batch, and continue to read."""
        self._chunks = self._updates = 0
        if not self._is_paused:
            return
        self._is_paused = False
        if self._is_upgraded:
            try:
                self._read_updates()
            except Exception as error:  # noqa: BLE001 - as above
                self.fail(error)
        transport = self._transport
        if not self._is_paused and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def fail(self, error: Exception) -> None:
        """End the connection because of an error; log an unexpected error in full: it is a bug."""
        if not isinstance(error, RefusedError):
            _faults.error("internal error", exc_info=error)
            text = f"the extender failed on this report: {type(error).__name__}"
            error = RefusedError(AgentRefusal.FAULT, text)
        self.refuse(error)

    def refuse(self, error: RefusedError) -> None:
        """Send the reason, and end the connection."""
        if self._is_ended:
            return
        self._is_ended = True
        self._owner.note_refusal(self, error)
        transport = self._transport
        if transport is None:
            return
        try:
            transport.write(self._encode_refusal(error))
        except h11.LocalProtocolError:
            transport.abort()  # the request is so malformed that h11 cannot answer it
            return
        transport.close()

    def _encode_refusal(self, error: RefusedError) -> bytes:
        text = str(error)
        if self._is_upgraded:
            return frame(Farewell(reason=text))
        http = self._http or h11.Connection(h11.SERVER)
        body = f"{text}\n".encode()
        response = h11.Response(
            status_code=HTTP_STATUS.get(error.refusal, HTTPStatus.BAD_REQUEST),
            headers=[
                ("Content-Type", "text/plain; charset=utf-8"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ],
        )
        parts = (response, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(http.send(part) or b"" for part in parts)


def _token_in(request: h11.Request) -> str:
    """Return the token of an upgrade request."""
    headers = {name.lower(): value for name, value in request.headers}
    path = request.target.partition(b"?")[0]
    if path != PATH.encode() or request.method != b"GET":
        raise RefusedError(
            AgentRefusal.BAD_REQUEST, f"only GET {PATH} with Upgrade: {UPGRADE} is served"
        )
    if headers.get(b"upgrade", b"").lower() != UPGRADE.encode():
        raise RefusedError(
            AgentRefusal.BAD_REQUEST, f"the request lacks the header Upgrade: {UPGRADE}"
        )
    header = headers.get(b"authorization", b"")
    token = header[len(_BEARER) :].strip()
    if header[: len(_BEARER)].lower() != _BEARER or not token:
        raise RefusedError(
            AgentRefusal.NO_TOKEN,
            "the request has no token: send the projected service-account token as "
            "Authorization: Bearer",
        )
    return token.decode("latin-1")
