"""Encode and decode the messages between replicas as versioned JSON; ignore unknown fields.

Clocks of replicas differ. So records carry ages, and a replica expresses its progress by marks:
times of the receiver's own clock, which the sender returns.
"""

from collections.abc import Collection, Iterable
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from extender.placement.request_log import PRIORITIZE, AnsweredRequest
from extender.runtime.decoding import MalformedError, decode_with

_T = TypeVar("_T")

VERSION: Final = 1
"""Incremented only when an older release would misread a message; a new field does not count."""

MAX_RECORDS: Final = 500
"""Maximum number of records in one message."""

MAX_BYTES: Final = 4 << 20
"""Largest message in bytes: more than `MAX_RECORDS` of the longest records need."""

_MAX_UID: Final = 128
_MAX_NAME: Final = 320
"""Kubernetes names have at most 253 characters; a resource name also has a domain."""
_MAX_KEY: Final = 384
_MAX_RESOURCES: Final = 16
_MAX_FAULTS: Final = 16

_MAX_AGE_SECONDS: Final = 86_400.0
_MAX_COUNT: Final = 1_000_000
_MAX_MEMORY: Final = (1 << 63) - 1

_Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
_Key = Annotated[str, msgspec.Meta(max_length=_MAX_KEY)]
_Age = Annotated[float, msgspec.Meta(ge=0, le=_MAX_AGE_SECONDS)]
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
        version: version of the format.
        instance: name of the sender, unique to its process.
        to: name of the replica that answered the last message, "" before the first answer.
        gap_at: time of the last dropped record, on the sender's monotonic clock in seconds: all
            later records are sent.
        mark: mark of the last receipt: this message completes the records from before that mark.
            None while some of them are not sent.
        sent_at: send time on the sender's monotonic clock, in seconds; see `Delay`.
        requests: records since the last message; `asked` on the wire.
        faults: sources that the sender has not reached for long; None if it is not ready.
    """

    version: int
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_NAME)]
    to: Annotated[str, msgspec.Meta(max_length=_MAX_NAME)] = ""
    gap_at: float = 0.0
    mark: float | None = None
    sent_at: float | None = None
    requests: Annotated[list[_ReportedRequest], msgspec.Meta(max_length=MAX_RECORDS)] = (
        msgspec.field(name="asked", default_factory=list)
    )
    faults: Annotated[list[_Name], msgspec.Meta(max_length=_MAX_FAULTS)] | None = None


class Receipt(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to a message.

    Attributes:
        version: version of the format.
        instance: name of the replica that answers.
        mark: time of the answer on its monotonic clock, in seconds; None from an older release.
    """

    version: int
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_NAME)]
    mark: float | None = None


class _Version(msgspec.Struct):
    version: int


_MESSAGE: Final = msgspec.json.Decoder(Message)
_RECEIPT: Final = msgspec.json.Decoder(Receipt)
_VERSION: Final = msgspec.json.Decoder(_Version)
_ENCODER: Final = msgspec.json.Encoder()


def fits_message(request: AnsweredRequest) -> bool:
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
        requests: records, each of them `fits_message`.
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
