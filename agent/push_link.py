"""Tells one extender replica what changes, over one connection at a time, for ever."""

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.options import ReportOptions
from agent.push_handshake import (
    Address,
    RefusedError,
    Stream,
    Token,
    open_stream,
    read_token,
)
from agent.push_news import Digest, Digests
from agent.push_tls import UnsafeError, check_plain, client_context, explain, server_name
from agent.push_update import Updates
from agent.report import (
    LENGTH_BYTES,
    MAX_UPDATE_BYTES,
    Report,
    decode_farewell,
    frame,
)
from agent.sampler import Latest

logger = logging.getLogger(__name__)

REOPEN_SHARE: Final = (0.80, 0.90)
"""After such a part of its token's life a connection is opened anew: the kubelet has a new token
ready after 80 %, and agents that started together should not come together."""

BURST: Final = 10
PER_SECOND: Final = 0.5
"""Changes that are told at once: so many in a row, and so many a second for ever. What flickers
beyond that waits for the heartbeat."""

CONFIRMATIONS: Final = 2
"""So many readings follow one that finds a device used by nobody's pod, or used no more: two that
agree are asked for, and the one in which the use began or ended may be of both kinds."""

WARN_AFTER: Final = 3
"""Failures in a row: a replica that comes or goes is no news; a refusal is told at once, and so is
that nothing may be sent."""

_SEND_BUFFER_BYTES: Final = 64 << 10
_FAILURES: Final = (OSError, RefusedError, asyncio.IncompleteReadError)
"""A time limit that ran out is an OSError."""


class ReportLink:
    """The way to one address. Nothing is kept for it but what the agent has anyhow: the latest.

    Args:
        address: IP address and port.
        latest: the agent's reports.
        digests: says what of them is news.
        options: how they are sent.
        clock: seconds since the epoch.

    Attributes:
        is_connected: updates are taken.
        sent: updates that left.
        failures: connections that could not be opened, or broke.
        refusals: those of them that the extender refused or ended, with its reason.
        problem: why nothing is told, "" while something is.
    """

    def __init__(
        self,
        address: Address,
        latest: Latest,
        digests: Digests,
        options: ReportOptions,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.is_connected = False
        self.sent = 0
        self.failures = 0
        self.refusals = 0
        self.problem = "not tried yet"
        self._address = address
        self._latest = latest
        self._digests = digests
        self._options = options
        self._clock = clock
        self._in_a_row = 0

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            try:
                await self._serve()
            except _FAILURES as error:
                self._note_failure(error)
                await asyncio.sleep(self._pause_seconds())
            finally:
                self.is_connected = False

    async def _serve(self) -> None:
        """Open a connection and tell until it is time for a new one.

        Raises:
            OSError, RefusedError: it could not be opened, or broke.
        """
        token = read_token(Path(self._options.token_file))
        stream = await self._open(token)
        listening = asyncio.create_task(_hear(stream.reader), name="report listener")
        try:
            _tune(stream.writer)
            self._note_success()
            await self._tell(stream, listening, self._lasts_until(token))
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError, *_FAILURES):
                await listening
            stream.writer.transport.abort()

    async def _open(self, token: Token) -> Stream:
        """Connect, and have the stream granted.

        Raises:
            OSError, RefusedError: it could not be opened.
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
            raise explain(error, options) from error

    async def _tell(self, stream: Stream, listening: asyncio.Task[None], until: float) -> None:
        """Send updates until a time of the loop; what was missed meanwhile is not made up for."""
        loop, updates, pace = asyncio.get_running_loop(), Updates(), _Pace()
        told, told_at, confirmations, sequence = Digest(), 0.0, 0, 0
        while loop.time() < until:
            report = await self._next(sequence)
            if listening.done():
                listening.result()
            sequence, digest = report.sequence, self._digests.of(report)
            is_first = not told.sequence
            is_news = is_first or self._digests.is_news(told, digest)
            is_due = loop.time() - told_at >= self._options.heartbeat_seconds
            if not is_due and not confirmations and not (is_news and pace.allows(loop.time())):
                continue
            update = updates.make(
                report, digest, is_news=is_news or confirmations > 0, sent_at=self._clock()
            )
            if not is_first and digest.is_used != told.is_used:
                confirmations = CONFIRMATIONS
            elif confirmations:
                confirmations -= 1
            stream.writer.write(frame(update))
            async with asyncio.timeout(self._options.timeout_seconds):
                await stream.writer.drain()
            told, told_at = digest, loop.time()
            self.sent += 1

    async def _next(self, sequence: int) -> Report:
        return await self._latest.newer(sequence)

    def _lasts_until(self, token: Token) -> float:
        """Return until when a connection is used, as the loop counts time."""
        now = asyncio.get_running_loop().time()
        if token.expires_at is None:
            return now + 3600.0
        life = max(token.expires_at - self._clock(), 1.0)
        return now + life * random.uniform(*REOPEN_SHARE)

    def _note_success(self) -> None:
        logger.info(
            "reports are taken",
            extra={"extender": self._options.service, "address": self._address[0]},
        )
        self.is_connected, self.problem, self._in_a_row = True, "", 0

    def _note_failure(self, error: BaseException) -> None:
        self.failures += 1
        self._in_a_row += 1
        is_refused = isinstance(error, RefusedError)
        self.refusals += is_refused
        cause = str(error) or type(error).__name__
        is_certain = is_refused or isinstance(error, UnsafeError)
        if cause != self.problem and (is_certain or self._in_a_row >= WARN_AFTER):
            logger.warning(
                "cannot report to the extender",
                extra={
                    "extender": self._options.service,
                    "address": self._address[0],
                    "cause": cause,
                },
            )
            self.problem = cause
        elif self._in_a_row < WARN_AFTER:
            self.problem = self.problem or "the connection broke"

    def _pause_seconds(self) -> float:
        """Return how long to wait: agents that lost a replica together do not come together."""
        first = self._options.reconnect_seconds
        longest = max(first, self._options.max_backoff_seconds)
        pause = min(first * 2.0 ** min(self._in_a_row - 1, 10), longest)
        return pause * random.uniform(0.1, 1.0)


class _Pace:
    """Limits how often changes are told at once."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._at = 0.0

    def allows(self, now: float) -> bool:
        self._left = min(BURST, self._left + (now - self._at) * PER_SECOND)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


async def _hear(reader: asyncio.StreamReader) -> None:
    """Wait for the end of the connection.

    Raises:
        RefusedError: the extender ended it, and says why.
        OSError: it broke.
    """
    try:
        size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if size > MAX_UPDATE_BYTES:
            raise ConnectionError("the extender says what cannot be understood")
        reason = decode_farewell(await reader.readexactly(size))
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the extender closed the connection") from error
    raise RefusedError(f"the extender ended it: {reason}")


def _tune(writer: asyncio.StreamWriter) -> None:
    """Let nothing pile up unsent, and a peer that is gone be noticed."""
    # Not 0: with TLS, asyncio would take that for a buffer that is always full.
    writer.transport.set_write_buffer_limits(high=1, low=0)
    connection = writer.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
