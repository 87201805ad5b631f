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


Answer = TypeVar("Answer", bound=ReplicaAnswer)


@dataclass(frozen=True, slots=True)
class AnswerFormat(Generic[Answer]):
    """Decoder of a versioned answer.

    Attributes:
        decode: decodes the JSON; raises if it is malformed.
        version: version that can be decoded.
    """

    decode: Callable[[bytes], Answer]
    version: int

    def read(self, body: bytes | None) -> Answer | None:
        """Decode an answer; return None if it is malformed or of another version."""
        try:
            answer = decode_with(self.decode, body or b"")
        except MalformedError:
            return None
        return answer if answer.version == self.version else None


@dataclass(frozen=True, slots=True)
class ReplicaAnswers(Generic[Answer]):
    """Answers of the other replicas.

    Attributes:
        answers: address and answer of each replica.
        unreachable: addresses of replicas that did not answer or sent a malformed answer.
    """

    answers: Sequence[tuple[str, Answer]]
    unreachable: Sequence[str]


async def query_replicas(
    replicas: Replicas, path: str, form: AnswerFormat[Answer]
) -> ReplicaAnswers[Answer]:
    """Query all other replicas at a path; return their decoded answers."""
    answers: list[tuple[str, Answer]] = []
    unreachable: list[str] = []
    names = {replicas.name}  # a replica may have several addresses, and this one is among them
    for address, body in sorted((await replicas.others.query(path)).items()):
        answer = form.read(body)
        if answer is None:
            unreachable.append(address)
        elif answer.replica not in names:
            names.add(answer.replica)
            answers.append((address, answer))
        await asyncio.sleep(0)
    return ReplicaAnswers(answers=answers, unreachable=unreachable)
