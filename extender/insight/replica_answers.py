"""Query all other replicas once each, and decode their versioned answers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from extender.insight.replicas import Replicas
from extender.runtime.decoding import MalformedError, decode_with


class ReplicaAnswer(Protocol):
    """A versioned answer of a replica."""

    @property
    def version(self) -> int:
        """Version of the format; it grows when an older replica would misread it."""

    @property
    def replica(self) -> str:
        """Short name of the answering replica."""


Word = TypeVar("Word", bound=ReplicaAnswer)


@dataclass(frozen=True, slots=True)
class AnswerFormat(Generic[Word]):
    """Decoder of a versioned answer.

    Attributes:
        decode: decodes the JSON; raises if it is malformed.
        version: version that can be decoded.
    """

    decode: Callable[[bytes], Word]
    version: int

    def read(self, body: bytes | None) -> Word | None:
        """Decode an answer; return None if it is malformed or of another version."""
        try:
            answer = decode_with(self.decode, body or b"")
        except MalformedError:
            return None
        return answer if answer.version == self.version else None


@dataclass(frozen=True, slots=True)
class ReplicaAnswers(Generic[Word]):
    """Answers of the other replicas.

    Attributes:
        told: address and answer of each replica.
        unreachable: addresses of replicas that did not answer or sent a malformed answer.
    """

    told: Sequence[tuple[str, Word]]
    unreachable: Sequence[str]


async def ask_replicas(
    replicas: Replicas, path: str, form: AnswerFormat[Word]
) -> ReplicaAnswers[Word]:
    """Query all other replicas at a path; return their decoded answers."""
    answers: list[tuple[str, Word]] = []
    unreachable: list[str] = []
    names = {replicas.name}  # a replica may have several addresses, and this one is among them
    for address, body in sorted((await replicas.others.ask(path)).items()):
        word = form.read(body)
        if word is None:
            unreachable.append(address)
        elif word.replica not in names:
            names.add(word.replica)
            answers.append((address, word))
        await asyncio.sleep(0)
    return ReplicaAnswers(told=answers, unreachable=unreachable)
