"""Opens a stream of updates to one address: one HTTP request that carries the token."""

import asyncio
import base64
import binascii
import json
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

import h11

from agent.report import PATH, UPGRADE

Address = tuple[str, int]

_READ_BYTES: Final = 16 << 10
_MOST_REASON_BYTES: Final = 1 << 10
_MOST_TOKEN_BYTES: Final = 16 << 10


class RefusedError(Exception):
    """The extender does not take our updates; the message is its own.

    Attributes:
        status: as HTTP numbers it; 0 where it took them until now.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """What proves who we are.

    Attributes:
        text: the token.
        expires_at: seconds since the epoch, None where it does not say.
    """

    text: str
    expires_at: float | None = None


def read_token(path: Path) -> Token:
    """Read the token.

    Raises:
        OSError: it cannot be read, or is none; the message says what to do.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OSError(
            f"cannot read token {path}: {error.strerror or error}: is a projected service-account "
            "token mounted there?"
        ) from error
    text = content[: _MOST_TOKEN_BYTES + 1].strip()
    if not text or len(text) > _MOST_TOKEN_BYTES or not all(33 <= byte < 127 for byte in text):  # noqa: PLR2004 - printable ASCII
        raise OSError(f"cannot read token {path}: it holds no token")
    return Token(text=text.decode("ascii"), expires_at=expiry_of(text.decode("ascii")))


def expiry_of(token: str) -> float | None:
    """Return when a JSON web token expires, as it says itself; None where it does not."""
    parts = token.split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return None


@dataclass(frozen=True, slots=True)
class Stream:
    """A connection on which updates are taken.

    Attributes:
        reader: the extender's last words, if it has any.
        writer: takes frames.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def open_stream(
    address: Address,
    host: str,
    token: Token,
    *,
    tls: ssl.SSLContext | None = None,
    name: str = "",
) -> Stream:
    """Connect, and have the stream granted; there is no time limit.

    Args:
        address: IP address and port.
        host: the service's name and port.
        token: proves who we are; it is sent once the other side has proved who it is.
        tls: None: without.
        name: with TLS, that its certificate must have.

    Raises:
        OSError: the connection cannot be made, or broke.
        RefusedError: the extender says no, and why.
    """
    reader, writer = await asyncio.open_connection(
        *address, ssl=tls, server_hostname=name if tls is not None else None
    )
    try:
        await _ask(reader, writer, host, token)
    except BaseException:
        writer.transport.abort()
        raise
    return Stream(reader, writer)


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, token: Token
) -> None:
    protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_READ_BYTES)
    request = h11.Request(
        method="GET",
        target=PATH,
        headers=[
            ("Host", host),
            ("Connection", "Upgrade"),
            ("Upgrade", UPGRADE),
            ("Authorization", f"Bearer {token.text}"),
        ],
    )
    try:
        parts = [protocol.send(request), protocol.send(h11.EndOfMessage())]
        writer.write(b"".join(part for part in parts if part))
        await writer.drain()
        status, reason = await _answer(reader, protocol)
    except h11.ProtocolError as error:
        raise ConnectionError(f"the answer is no HTTP: {error}") from error
    if status != HTTPStatus.SWITCHING_PROTOCOLS:
        raise RefusedError(f"status {status}: {reason or 'no reason given'}", status)


async def _answer(reader: asyncio.StreamReader, protocol: h11.Connection) -> tuple[int, str]:
    """Return status and text of the answer."""
    status, body = 0, bytearray()
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            chunk = await (reader.read(_READ_BYTES) if status else _read_head(reader))
            if not chunk and not status:
                raise ConnectionError("the connection was closed before an answer")
            protocol.receive_data(chunk)
        elif isinstance(event, h11.InformationalResponse):
            if event.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
                return event.status_code, ""
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > _MOST_REASON_BYTES:
                return status, _shown(body)
        else:
            return status, _shown(body)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Return the head of an answer, and nothing beyond: frames may follow at once.

    Raises:
        ConnectionError: it has no end.
    """
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        raise ConnectionError("the answer is no HTTP: its head has no end") from error


def _shown(body: bytearray) -> str:
    return " ".join(bytes(body[:_MOST_REASON_BYTES]).decode(errors="replace").split())
