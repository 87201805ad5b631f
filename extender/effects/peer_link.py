"""Send records of the requests that this replica answered to one other replica.

Messages are versioned JSON; unknown fields are ignored. Clocks of replicas differ. So records carry
ages, and a replica expresses its progress by marks: times of the receiver's own clock, which the
sender returns.
"""

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from typing import Annotated, Final, Literal, TypeVar

import aiohttp
import msgspec

from extender.placement.request_log import PRIORITIZE, AnsweredRequest
from extender.runtime.decoding import MalformedError, decode_with

_T = TypeVar("_T")

VERSION: Final = 1
"""Incremented only when an older release would misread a message; a new field does not count."""

_MAX_RECORDS: Final = 500
"""Maximum number of records in one message."""

MAX_BYTES: Final = 4 << 20
"""Largest message in bytes: more than `_MAX_RECORDS` of the longest records need."""

_MAX_UID: Final = 128
_MAX_NAME: Final = 320
"""Kubernetes names have at most 253 characters; a resource name also has a domain."""
_MAX_KEY: Final = 384
_MAX_RESOURCES: Final = 16
_MAX_FAULTS: Final = 16

_MAX_AGE_SECONDS: Final = 86_400.0
_MAX_TIME: Final = 1e12
"""Largest time on a monotonic clock, in seconds: differences of larger ones may be infinite."""
_MAX_COUNT: Final = 1_000_000
_MAX_MEMORY: Final = (1 << 63) - 1

_Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
_Key = Annotated[str, msgspec.Meta(max_length=_MAX_KEY)]
_Age = Annotated[float, msgspec.Meta(ge=0, le=_MAX_AGE_SECONDS)]
_Time = Annotated[float, msgspec.Meta(ge=-_MAX_TIME, le=_MAX_TIME)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MAX_COUNT)]
_Resources = Annotated[dict[_Name, _Count], msgspec.Meta(max_length=_MAX_RESOURCES)]


class PeerError(ValueError):
    """A message that cannot be decoded; the text says which field is wrong."""


class _ReportedRequest(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A record of an answered request about a pod; see `AnsweredRequest`."""

    verb: Literal["filter", "prioritize"]
    uid: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_UID)]
    pod: _Key = ""
    age_seconds: _Age
    choices: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)] = 0
    is_lost: bool = False
    node: _Name = ""
    resources: _Resources = {}
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=_MAX_MEMORY)] | None = None


class Message(msgspec.Struct, kw_only=True, frozen=True):
    """A message from one replica to another.

    Attributes:
        instance: name of the sender, unique to its process.
        to: name of the replica that answered the last message, "" before the first answer.
        gap_at: time of the last dropped record, on the sender's monotonic clock in seconds: all
            later records are sent.
        mark: mark of the last receipt: this message completes the records from before that mark.
            None while some of them are not sent.
        sent_at: send time on the sender's monotonic clock, in seconds, from which the receiver
            estimates the message's delay.
        requests: records since the last message.
        faults: sources that the sender has not reached for long; None if it is not ready.
    """

    version: int
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_NAME)]
    to: Annotated[str, msgspec.Meta(max_length=_MAX_NAME)] = ""
    gap_at: _Time = 0.0
    mark: _Time | None = None
    sent_at: _Time | None = None
    requests: Annotated[list[_ReportedRequest], msgspec.Meta(max_length=_MAX_RECORDS)] = (
        msgspec.field(default_factory=list)
    )
    faults: Annotated[list[_Name], msgspec.Meta(max_length=_MAX_FAULTS)] | None = None


class Receipt(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to a message.

    Attributes:
        instance: name of the replica that answers.
        mark: time of the answer on its monotonic clock, in seconds; None from an older release.
    """

    version: int
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_NAME)]
    mark: _Time | None = None


class _Version(msgspec.Struct):
    version: int


_MESSAGE: Final = msgspec.json.Decoder(Message)
_RECEIPT: Final = msgspec.json.Decoder(Receipt)
_VERSION: Final = msgspec.json.Decoder(_Version)
_ENCODER: Final = msgspec.json.Encoder()


def _fits_message(request: AnsweredRequest) -> bool:
    """Return whether a record fits the limits of the format; kube-scheduler's records always do."""
    names = [name for name, _ in request.resources]
    return (
        0 < len(request.uid) <= _MAX_UID
        and len(request.key) <= _MAX_KEY
        and len(request.node) <= _MAX_NAME
        and len(names) <= _MAX_RESOURCES
        and all(len(name) <= _MAX_NAME for name in names)
    )


def encode_message(
    instance: str,
    requests: Iterable[AnsweredRequest],
    *,
    to: str,
    gap_at: float,
    mark: float | None,
    now: float,
    faults: Collection[str] | None = None,
) -> bytes:
    """Encode a message.

    Args:
        instance: name of the sender.
        requests: records, each of them `_fits_message`.
        to: see `Message`, also for the other arguments.
        gap_at: time on the clock of the records.
        mark: time on the receiver's clock.
        now: current time on the clock of the records.
        faults: sources that the sender does not reach.
    """
    records = [
        _ReportedRequest(
            verb="prioritize" if request.verb == PRIORITIZE else "filter",
            uid=request.uid,
            pod=request.key,
            age_seconds=_age(request.at, now),
            choices=request.choices,
            is_lost=request.is_lost,
            node=request.node,
            resources=dict(request.resources),
            memory_bytes=request.memory_bytes,
        )
        for request in requests
    ]
    return _ENCODER.encode(
        Message(
            version=VERSION,
            instance=instance,
            to=to,
            gap_at=gap_at,
            mark=mark,
            sent_at=now,
            requests=records,
            faults=None if faults is None else list(faults),
        )
    )


def decode_message(body: bytes) -> Message:
    """Decode a message.

    Raises:
        PeerError: the body is not a message, or has another version.
    """
    return _decode(_MESSAGE, body, "a message between replicas")


def encode_receipt(instance: str, mark: float) -> bytes:
    """Encode the receipt for a message."""
    return _ENCODER.encode(Receipt(version=VERSION, instance=instance, mark=mark))


def decode_receipt(body: bytes) -> Receipt:
    """Decode the receipt for a message.

    Raises:
        PeerError: the body is not a receipt, for example because another server has the address.
    """
    return _decode(_RECEIPT, body, "a replica's answer")


def requests_in(message: Message, sent_at: float) -> list[AnsweredRequest]:
    """Return the records of a message that was sent at `sent_at` on our own clock."""
    return [
        AnsweredRequest(
            verb=record.verb,
            uid=record.uid,
            key=record.pod,
            at=sent_at - record.age_seconds,
            choices=record.choices,
            is_lost=record.is_lost,
            node=record.node,
            resources=tuple(record.resources.items()),
            memory_bytes=record.memory_bytes,
        )
        for record in message.requests
    ]


def _age(at: float, now: float) -> float:
    return min(max(now - at, 0.0), _MAX_AGE_SECONDS)


def _decode(decoder: "msgspec.json.Decoder[_T]", body: bytes, what: str) -> _T:
    try:
        version = decode_with(_VERSION.decode, body).version
        if version != VERSION:
            raise PeerError(f"cannot read {what}: $.version is {version}, must be {VERSION}")
        return decode_with(decoder.decode, body)
    except MalformedError as error:
        raise PeerError(f"cannot read {what}: {error}") from error


logger = logging.getLogger(__name__)

PATH: Final = "/v1/peers/requests"

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
"""Failures of a request; OSError includes TimeoutError."""


class PeerLink:
    """Sends messages to one replica's address, which may turn out to be our own.

    One task sends one message at a time. Records are added on the same event loop, and no caller
    waits for the other replica.

    Args:
        address: IP address and port.
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
        if not _fits_message(request):
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
            count = min(len(self._queue), _MAX_RECORDS)
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
