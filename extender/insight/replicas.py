"""This replica's identity, and the interface to the other replicas."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from aiohttp import web

from extender.runtime.decoding import MalformedError, decode_with
from extender.server.json_api import Handler, check_parameters, error_answer, refusing

ALONE: Final = "here"

_NOT_AUTHENTICATED: Final = (
    "without TLS (tls.*) replicas cannot be authenticated: decisions are not shared"
)


class Others(Protocol):
    """Interface to the other replicas."""

    async def query(self, path: str) -> Mapping[str, bytes | None]:
        """Query all other replicas; return each answer by address, None for no answer."""

    async def query_one(self, address: str, path: str) -> bytes | None:
        """Query one replica; return its answer, None for no answer."""


class NoReplicas:
    """Implementation of `Others` without other replicas."""

    async def query(self, path: str) -> Mapping[str, bytes | None]:  # noqa: ARG002 - see Others
        """Return an empty mapping."""
        return {}

    async def query_one(self, address: str, path: str) -> bytes | None:  # noqa: ARG002 - see Others
        """Return None."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """This replica's identity, and its connection to the others.

    Attributes:
        name: short unique name of this process, without hyphens.
        host: name of the extender pod.
        answers_peers: whether peer requests may be answered: they are authenticated, or no data is
            protected.
    """

    name: str = ALONE
    host: str = ""
    others: Others = field(default_factory=NoReplicas)
    answers_peers: bool = False

    @classmethod
    def of(cls, identity: str, others: Others | None, *, answers_peers: bool) -> "Replicas":
        """Create from an identity of the form `host_name`."""
        host, _, name = identity.rpartition("_")
        return cls(name=name, host=host, others=others or NoReplicas(), answers_peers=answers_peers)

    def id_of(self, number: int) -> str:
        """Return a decision's id, which is unique across replicas and restarts."""
        return f"{self.name}-{number}"

    def is_ours(self, wanted: str) -> bool:
        """Check whether a decision's id belongs to this replica."""
        return wanted.startswith(f"{self.name}-")

    def peer_routes(
        self, path: str, handler: Handler, parameters: Collection[str] = ()
    ) -> list[web.RouteDef]:
        """Return the route of a handler that answers other replicas.

        Args:
            path: path of the route.
            handler: answers another replica, which redacts the answer for its own caller.
            parameters: names of the query parameters.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            if not self.answers_peers:
                return error_answer(403, _NOT_AUTHENTICATED)
            check_parameters(request.query, parameters)
            return await handler(request)

        return [web.get(path, refusing(answer))]


ONE: Final = Replicas()
"""Default for a process without other replicas."""


class _ReplicaAnswer(Protocol):
    """A versioned answer of a replica."""

    @property
    def version(self) -> int:
        """Version of the format; it grows when an older replica would misread it."""

    @property
    def replica(self) -> str:
        """Short name of the answering replica."""


_Answer = TypeVar("_Answer", bound=_ReplicaAnswer)


@dataclass(frozen=True, slots=True)
class AnswerFormat(Generic[_Answer]):
    """Decoder of a versioned answer.

    Attributes:
        decode: decodes the JSON; raises if it is malformed.
        version: version that can be decoded.
    """

    decode: Callable[[bytes], _Answer]
    version: int

    def read(self, body: bytes | None) -> _Answer | None:
        """Decode an answer; return None if it is malformed or of another version."""
        try:
            answer = decode_with(self.decode, body or b"")
        except MalformedError:
            return None
        return answer if answer.version == self.version else None


async def query_replicas(
    replicas: Replicas, path: str, form: AnswerFormat[_Answer]
) -> tuple[list[tuple[str, _Answer]], list[str]]:
    """Query all other replicas at a path.

    Returns:
        Address and answer of each replica, and the addresses without an answer or with a malformed
        one.
    """
    answers: list[tuple[str, _Answer]] = []
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
    return answers, unreachable
