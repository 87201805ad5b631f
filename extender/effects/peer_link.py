"""Send records of the requests that this replica answered to one other replica."""

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Final

import aiohttp

from extender.effects.peer_wire import (
    MAX_RECORDS,
    PeerError,
    Receipt,
    decode_receipt,
    encode_message,
    fits_message,
)
from extender.placement.request_log import AnsweredRequest

logger = logging.getLogger(__name__)

PATH: Final = "/v1/peers/asked"

_MAX_QUEUE: Final = 5000
"""Maximum number of queued records for a replica that does not answer; the oldest are dropped."""

_HEARTBEAT_SECONDS: Final = 1.0
"""Longest time between two messages."""

_BACKOFF_FIRST_SECONDS: Final = 0.1
_BACKOFF_MAX_SECONDS: Final = 5.0
_WARN_AFTER: Final = 5
"""Failures in a row before a warning: replicas start and stop in normal operation."""

_MAX_RECEIPT_BYTES: Final = 4096
_MAX_ANSWER_BYTES: Final = 16 << 20
"""Limit for an answer about decisions: enough for 1,000 short ones, or one about all nodes."""
_SHOWN: Final = 200

_FAILURES: Final = (aiohttp.ClientError, OSError, ValueError)
"""OSError includes TimeoutError."""


class PeerLink:
    """Sends messages to one replica's address, which may turn out to be our own.

    One task sends one message at a time. Records are added on the same event loop, and no caller
    waits for the other replica.

    Args:
        address: IP address and port.
        session: session for all requests.
        instance: name of this replica.
        interval_seconds: shortest time between two messages.
        monotonic: clock of the records.
        count: receives the outcome of each message.
        tls: returns the current TLS context, or None for plain HTTP; a new context opens new
            connections.
        faults: returns the sources that this replica cannot reach; see `Message`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        session: aiohttp.ClientSession,
        *,
        instance: str,
        interval_seconds: float,
        monotonic: Callable[[], float],
        count: Callable[[str], None],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        faults: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        host, port = address
        self.instance = ""
        """Name of the replica that answers at this address, or "" before the first answer."""
        scheme = "http" if tls() is None else "https"
        self._base = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._url = f"{self._base}{PATH}"
        self._session = session
        self._tls = tls
        self._own_instance = instance
        self._interval_seconds = interval_seconds
        self._monotonic = monotonic
        self._count = count
        self._faults = faults
        self._queue: deque[AnsweredRequest] = deque()
        self._under_way: list[AnsweredRequest] = []
        self._gap_at = monotonic()
        self._mark: float | None = None
        self._is_news = asyncio.Event()
        self._failures = 0

    @property
    def is_self(self) -> bool:
        """Whether this replica itself answers at the address."""
        return self.instance == self._own_instance

    @property
    def is_untried(self) -> bool:
        """Whether no message to this address has been answered or has failed yet."""
        return not self.instance and not self._failures

    @property
    def is_answering(self) -> bool:
        """Whether the last message was answered."""
        return bool(self.instance) and not self._failures

    def add(self, request: AnsweredRequest) -> None:
        """Queue a record for the next message."""
        if self.is_self:
            return
        if not fits_message(request):
            self._gap_at = self._monotonic()
            return
        self._queue.append(request)
        if len(self._queue) > _MAX_QUEUE:
            self._queue.popleft()
            self._gap_at = self._monotonic()
        self._is_news.set()

    async def run(self) -> None:
        """Send messages until cancelled."""
        while True:
            await self.send()
            if self._failures:
                await asyncio.sleep(self._pause_seconds())
                continue
            await asyncio.sleep(self._interval_seconds)
            if not self._queue:
                await self._wait()

    async def send(self) -> None:
        """Send one message; after a failure its records stay for the next one."""
        try:
            self.settle(await self._exchange(self.compose()))
        except _FAILURES as error:
            self._note_failure(error)

    def compose(self) -> bytes:
        """Encode the next message: the last message's records if it failed, otherwise new ones."""
        if not self._under_way:
            count = min(len(self._queue), MAX_RECORDS)
            self._under_way = [self._queue.popleft() for _ in range(count)]
        return encode_message(
            self._own_instance,
            self._under_way,
            to=self.instance,
            gap_at=self._gap_at,
            mark=None if self._queue else self._mark,
            now=self._monotonic(),
            faults=self._faults(),
        )

    def settle(self, receipt: Receipt) -> None:
        """Record that the message was accepted."""
        if receipt.instance != self.instance:
            if self.instance:  # earlier records went to another process
                self._gap_at = self._monotonic()
            self.instance = receipt.instance
            if self.is_self:
                self._queue.clear()
        self._mark = receipt.mark
        self._under_way = []
        if self._failures >= _WARN_AFTER:
            logger.info("a replica answers again", extra={"url": self._url})
        self._failures = 0
        self._count("taken")

    async def query(self, path: str) -> bytes | None:
        """Send a GET request to the replica, and return the body, or None if it fails."""
        try:
            url = f"{self._base}{path}"
            async with self._session.get(url, ssl=self._ssl, allow_redirects=False) as response:
                if response.status != HTTPStatus.OK:
                    return None
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _MAX_ANSWER_BYTES:
                        return None
                return bytes(body)
        except _FAILURES as error:
            cause = str(error) or type(error).__name__
            logger.debug("a replica does not answer", extra={"url": self._base, "cause": cause})
            return None

    @property
    def _ssl(self) -> ssl.SSLContext | bool:
        return self._tls() or True

    async def _wait(self) -> None:
        """Wait for a new record, for at most `_HEARTBEAT_SECONDS`."""
        self._is_news.clear()
        try:
            async with asyncio.timeout(_HEARTBEAT_SECONDS):
                await self._is_news.wait()
        except TimeoutError:
            return

    async def _exchange(self, body: bytes) -> Receipt:
        """Send a message and decode the receipt.

        Raises:
            aiohttp.ClientError, OSError, PeerError: the message was not accepted.
        """
        headers = {"Content-Type": "application/json"}
        async with self._session.post(
            self._url, data=body, headers=headers, ssl=self._ssl, allow_redirects=False
        ) as response:
            text = await response.content.read(_MAX_RECEIPT_BYTES)
            if response.status == HTTPStatus.OK:
                return decode_receipt(text)
            if response.status < HTTPStatus.INTERNAL_SERVER_ERROR and self._under_way:
                # The replica would refuse the same records again.
                self._gap_at = self._monotonic()
                self._under_way = []
            raise PeerError(f"status {response.status}: {text[:_SHOWN].decode(errors='replace')}")

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self._count("failed")
        if self._failures == _WARN_AFTER:
            cause = str(error) or type(error).__name__
            logger.warning("cannot send to a replica", extra={"url": self._url, "cause": cause})

    def _pause_seconds(self) -> float:
        pause = min(_BACKOFF_FIRST_SECONDS * 2.0 ** min(self._failures, 10), _BACKOFF_MAX_SECONDS)
        return pause * random.uniform(0.5, 1.0)
