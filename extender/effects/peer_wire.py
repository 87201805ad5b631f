"""What replicas write to each other: JSON, versioned; unknown fields are ignored.

Replicas' clocks differ: questions have ages, and what a replica may rely on is told by marks, which
are times of its own clock that it gets back.
"""

from collections.abc import Collection, Iterable
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from extender.decoding import MalformedError, decode_with
from extender.placement.asked import PRIORITIZE, AnsweredQuestion

T = TypeVar("T")

VERSION: Final = 1
"""Grows where an older replica would misread a message; a new field alone is no reason."""

MAX_QUESTIONS: Final = 500
"""In one message."""

MAX_BYTES: Final = 4 << 20
"""Of one message: more than so many of the longest questions need."""

MAX_UID: Final = 128
MAX_NAME: Final = 320
"""Kubernetes' longest names have 253 characters; a resource has a domain besides its name."""
MAX_KEY: Final = 384
MAX_RESOURCES: Final = 16
MAX_FAULTS: Final = 16

_MAX_AGE_SECONDS: Final = 86_400.0
_MAX_COUNT: Final = 1_000_000
_MAX_MEMORY: Final = (1 << 63) - 1

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY)]
_Age = Annotated[float, msgspec.Meta(ge=0, le=_MAX_AGE_SECONDS)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MAX_COUNT)]
_Resources = Annotated[dict[_Name, _Count], msgspec.Meta(max_length=MAX_RESOURCES)]


class PeerError(ValueError):
    """A message that cannot be used; the text says what and where."""


class Asked(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What a replica was asked about a pod; see `AnsweredQuestion`."""

    verb: Literal["filter", "prioritize"]
    uid: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_UID)]
    pod: _Key = ""
    age_seconds: _Age
    choices: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)] = 0
    is_lost: bool = False
    node: _Name = ""
    resources: _Resources = {}
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=_MAX_MEMORY)] | None = None


class Message(msgspec.Struct, kw_only=True, frozen=True):
    """What a replica tells another.

    Attributes:
        version: of this form.
        instance: who tells; no two processes have the same.
        to: who answered the last message there, "" while no one has.
        gap_at: when questions were left out last, in seconds of the sender's monotonic clock: all
            since then are told.
        mark: of the last receipt of `to`: with this message, all is told that was asked before that
            mark was given. None where some of that is still to come.
        sent_at: when this was sent, in seconds of the sender's monotonic clock; see `Delay`.
        asked: the questions since the last message.
        faults: what has failed for long with whoever tells; None where it is not to be asked.
    """

    version: int
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    to: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    gap_at: float = 0.0
    mark: float | None = None
    sent_at: float | None = None
    asked: Annotated[list[Asked], msgspec.Meta(max_length=MAX_QUESTIONS)] = []
    faults: Annotated[list[_Name], msgspec.Meta(max_length=MAX_FAULTS)] | None = None


class Receipt(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to a message.

    Attributes:
        version: of this form.
        instance: who answers.
        mark: when, in seconds of its monotonic clock; None with an older release.
    """

    version: int
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    mark: float | None = None


class _Version(msgspec.Struct):
    version: int


_MESSAGE: Final = msgspec.json.Decoder(Message)
_RECEIPT: Final = msgspec.json.Decoder(Receipt)
_VERSION: Final = msgspec.json.Decoder(_Version)
_ENCODER: Final = msgspec.json.Encoder()


def is_tellable(question: AnsweredQuestion) -> bool:
    """Whether other replicas would take a question; kube-scheduler asks no other ones."""
    names = [name for name, _ in question.resources]
    return (
        0 < len(question.uid) <= MAX_UID
        and len(question.key) <= MAX_KEY
        and len(question.node) <= MAX_NAME
        and len(names) <= MAX_RESOURCES
        and all(len(name) <= MAX_NAME for name in names)
    )


def encode_message(
    instance: str,
    questions: Iterable[AnsweredQuestion],
    *,
    to: str,
    gap_at: float,
    mark: float | None,
    now: float,
    faults: Collection[str] | None = None,
) -> bytes:
    """Encode a message.

    Args:
        instance: who tells.
        questions: what was asked, all of it `is_tellable`.
        to: see `Message`, likewise the others.
        gap_at: on the clock of the questions.
        mark: on the receiver's clock.
        now: the time on the clock of the questions.
        faults: what is wrong with the sender.
    """
    asked = [
        Asked(
            verb="prioritize" if question.verb == PRIORITIZE else "filter",
            uid=question.uid,
            pod=question.key,
            age_seconds=_age(question.at, now),
            choices=question.choices,
            is_lost=question.is_lost,
            node=question.node,
            resources=dict(question.resources),
            memory_bytes=question.memory_bytes,
        )
        for question in questions
    ]
    return _ENCODER.encode(
        Message(
            version=VERSION,
            instance=instance,
            to=to,
            gap_at=gap_at,
            mark=mark,
            sent_at=now,
            asked=asked,
            faults=None if faults is None else list(faults),
        )
    )


def decode_message(body: bytes) -> Message:
    """Decode a message.

    Raises:
        PeerError: it is none, or of another version.
    """
    return _decode(_MESSAGE, body, "a message between replicas")


def encode_receipt(instance: str, mark: float) -> bytes:
    """Encode the answer to a message."""
    return _ENCODER.encode(Receipt(version=VERSION, instance=instance, mark=mark))


def decode_receipt(body: bytes) -> Receipt:
    """Decode the answer to a message.

    Raises:
        PeerError: it is none, as where another server has the address.
    """
    return _decode(_RECEIPT, body, "a replica's answer")


def questions_in(message: Message, sent_at: float) -> list[AnsweredQuestion]:
    """Return what a message tells that was sent then, by our own clock."""
    return [
        AnsweredQuestion(
            verb=asked.verb,
            uid=asked.uid,
            key=asked.pod,
            at=sent_at - asked.age_seconds,
            choices=asked.choices,
            is_lost=asked.is_lost,
            node=asked.node,
            resources=tuple(asked.resources.items()),
            memory_bytes=asked.memory_bytes,
        )
        for asked in message.asked
    ]


def _age(at: float, now: float) -> float:
    return min(max(now - at, 0.0), _MAX_AGE_SECONDS)


def _decode(decoder: "msgspec.json.Decoder[T]", body: bytes, what: str) -> T:
    try:
        version = decode_with(_VERSION.decode, body).version
        if version != VERSION:
            raise PeerError(f"cannot read {what}: $.version is {version}, must be {VERSION}")
        return decode_with(decoder.decode, body)
    except MalformedError as error:
        raise PeerError(f"cannot read {what}: {error}") from error
