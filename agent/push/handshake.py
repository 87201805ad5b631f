"""Open a stream of updates to the extender: TLS, and one HTTP Upgrade request with the token."""

import asyncio
import base64
import ipaddress
import json
import math
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

import h11

from agent.options import ReportOptions
from agent.report.contract import PATH, UPGRADE
from extender.runtime.decoding import MalformedError, decode_with

# aiohttp's client was tried for the Upgrade request. After status 101 it offers no stream: received
# bytes stay in a private buffer, and no public call waits until sent data has left. Code that used
# its private attributes would depend on its version.

Address = tuple[str, int]

_READ_BYTES: Final = 16 << 10
_MAX_REASON_BYTES: Final = 1 << 10
_MAX_TOKEN_BYTES: Final = 16 << 10


class UnsafeError(OSError):
    """The token must not be sent: the connection has no TLS, or an untrusted certificate."""


def client_context(options: ReportOptions) -> ssl.SSLContext | None:
    """Load the CA file and return a TLS context for the extender; None without TLS.

    Raises:
        UnsafeError: the CA file cannot be used.
    """
    if not options.ca_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cafile=options.ca_file)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise UnsafeError(
            f"cannot use reports.ca_file {options.ca_file}: {error.args[-1]}: must contain the "
            "CAs of the extender's certificate in PEM"
        ) from error
    return context


def server_name(options: ReportOptions) -> str:
    """Return the name that the extender's certificate must have.

    Example:
        >>> server_name(ReportOptions(service="idlegpu-agents.idlegpu.svc:9401"))
        'idlegpu-agents.idlegpu.svc'
    """
    return options.server_name or options.service.rpartition(":")[0].strip("[]")


def tls_error(error: ssl.SSLError, options: ReportOptions) -> OSError:
    """Return an error that describes a TLS failure and its remedy."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UnsafeError(
            f"the extender's certificate is not trusted: {error.verify_message}: reports.ca_file "
            f"({options.ca_file}) must contain its CA, and it must be valid for "
            f"reports.server_name ({server_name(options)})"
        )
    return OSError(
        f"the TLS handshake with the extender failed: {error.reason or error}: does the extender "
        "serve reports over TLS (agents.cert_file)?"
    )


def check_plain(address: str, options: ReportOptions) -> None:
    """Check that a connection without TLS is allowed to an address.

    Raises:
        UnsafeError: the address is another machine, and `allow_plain` is off.
    """
    if options.allow_plain or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    raise UnsafeError(
        f"{address} is another machine, and without TLS token and reports would be sent "
        "unencrypted: set reports.ca_file, or reports.allow_plain if the network is trusted"
    )


class RefusedError(Exception):
    """The extender refused the connection or ended it; the message is the extender's reason.

    Attributes:
        status: HTTP status; 0 if the extender ended an open stream.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Service-account token of the agent.

    Attributes:
        text: the token.
        expires_at: expiry from the token's `exp` claim, seconds since the epoch; None without one.
    """

    text: str
    expires_at: float | None = None


def read_token(path: Path) -> Token:
    """Read the token from its file.

    Raises:
        OSError: the file cannot be read or contains no token; the message has the remedy.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OSError(
            f"cannot read token {path}: {error.strerror or error}: is a projected service-account "
            "token mounted there?"
        ) from error
    text = content[: _MAX_TOKEN_BYTES + 1].strip()
    if not text or len(text) > _MAX_TOKEN_BYTES or not all(33 <= byte < 127 for byte in text):  # noqa: PLR2004 - printable ASCII
        raise OSError(f"cannot read token {path}: the file contains no token")
    return Token(text=text.decode("ascii"), expires_at=_expiry_of(text.decode("ascii")))


def _expiry_of(token: str) -> float | None:
    """Return the expiry from a JSON web token's `exp` claim, seconds since the epoch, or None."""
    try:
        expires_at = decode_with(_read_expiry, token)
    except MalformedError:
        return None
    return expires_at if math.isfinite(expires_at) else None


def _read_expiry(token: str) -> float:
    claims = token.split(".")[1]
    return float(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"])


async def open_stream(
    address: Address, host: str, token: Token, *, tls: ssl.SSLContext | None = None, name: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and request the stream; the caller sets a time limit.

    Args:
        address: IP address and port.
        host: the service's name and port, for the Host header.
        token: sent only after the TLS handshake has verified the extender.
        tls: TLS context, None for plain TCP.
        name: name that the certificate must have.

    Raises:
        OSError: the connection failed.
        RefusedError: the extender refused the stream.
    """
    reader, writer = await asyncio.open_connection(
        *address, ssl=tls, server_hostname=name if tls is not None else None
    )
    try:
        await _request_upgrade(reader, writer, host, token)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def _request_upgrade(
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
        status, reason = await _read_response(reader, protocol)
    except h11.ProtocolError as error:
        raise ConnectionError(f"the response is not HTTP: {error}") from error
    if status != HTTPStatus.SWITCHING_PROTOCOLS:
        raise RefusedError(f"status {status}: {reason or 'no reason given'}", status)


async def _read_response(reader: asyncio.StreamReader, protocol: h11.Connection) -> tuple[int, str]:
    """Return the status and the body text of the HTTP response."""
    status, body = 0, bytearray()
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            chunk = await (reader.read(_READ_BYTES) if status else _read_head(reader))
            if not chunk and not status:
                raise ConnectionError("the connection was closed before a response")
            protocol.receive_data(chunk)
        elif isinstance(event, h11.InformationalResponse):
            if event.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
                return event.status_code, ""
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > _MAX_REASON_BYTES:
                return status, _one_line(body)
        else:
            return status, _one_line(body)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Read the head of the response and no further: frames may follow at once."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        raise ConnectionError("the response is not HTTP: its head has no end") from error


def _one_line(body: bytearray) -> str:
    return " ".join(bytes(body[:_MAX_REASON_BYTES]).decode(errors="replace").split())
