"""What the other replicas tell: each is heard once, and who cannot be read is named."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from extender.decoding import MalformedError, decode_with
from extender.observe.replicas import Replicas


class Told(Protocol):
    """What one replica tells another, in a form that has a version."""

    @property
    def version(self) -> int:
        """Of the form; it grows where an older replica would misread what is told."""

    @property
    def replica(self) -> str:
        """Who tells, short."""


Word = TypeVar("Word", bound=Told)


@dataclass(frozen=True, slots=True)
class Form(Generic[Word]):
    """How what is told is read.

    Attributes:
        decode: of the form's JSON; raises where it is none.
        version: the one that can be read.
    """

    decode: Callable[[bytes], Word]
    version: int

    def read(self, body: bytes | None) -> Word | None:
        """Return what another replica told, None where it is nothing that can be read."""
        try:
            told = decode_with(self.decode, body or b"")
        except MalformedError:
            return None
        return told if told.version == self.version else None


@dataclass(frozen=True, slots=True)
class Heard(Generic[Word]):
    """What the other replicas told.

    Attributes:
        told: the address at which each was reached, and what it told.
        unreachable: addresses of those that did not answer, or not so that it can be read.
    """

    told: Sequence[tuple[str, Word]]
    unreachable: Sequence[str]


async def hear(replicas: Replicas, path: str, form: Form[Word]) -> Heard[Word]:
    """Ask all other replicas at a path, and return what each of them tells, by address."""
    told: list[tuple[str, Word]] = []
    unreachable: list[str] = []
    heard = {replicas.name}  # a replica may have two addresses, and we have one of our own
    for address, body in sorted((await replicas.others.ask(path)).items()):
        word = form.read(body)
        if word is None:
            unreachable.append(address)
        elif word.replica not in heard:
            heard.add(word.replica)
            told.append((address, word))
        await asyncio.sleep(0)
    return Heard(told=told, unreachable=unreachable)
