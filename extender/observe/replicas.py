"""This replica among the others: any of them answers any question of the API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from aiohttp import web

from extender.observe.answers import error_answer

ALONE: Final = "here"


class Others(Protocol):
    """The way to the other replicas."""

    async def ask(self, path: str) -> Mapping[str, bytes | None]:
        """Return what each of them answers, by its address; None where one does not."""

    async def ask_one(self, address: str, path: str) -> bytes | None:
        """Return what one of them answers, None where it does not."""


class Nobody:
    """There is no other replica."""

    async def ask(self, path: str) -> Mapping[str, bytes | None]:  # noqa: ARG002 - see Others
        """Return nothing."""
        return {}

    async def ask_one(self, address: str, path: str) -> bytes | None:  # noqa: ARG002 - see Others
        """Return nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Who we are, and the way to the others.

    Attributes:
        name: a short name of this process that no other has, without hyphens.
        host: which pod that is, for people.
        others: the other replicas.
        tells: whether it is known of those who come to the peers' paths that they are replicas, or
            nothing is hidden from anybody.
    """

    name: str = ALONE
    host: str = ""
    others: Others = field(default_factory=Nobody)
    tells: bool = False

    @classmethod
    def of(cls, identity: str, others: Others | None, *, tells: bool) -> "Replicas":
        """Return this replica by who it is for the others: its host, and what no other has."""
        host, _, name = identity.rpartition("_")
        return cls(name=name, host=host, others=others or Nobody(), tells=tells)

    def id_of(self, number: int) -> str:
        """Return what a decision of ours is called, as no other of any replica and process is."""
        return f"{self.name}-{number}"

    def is_ours(self, wanted: str) -> bool:
        """Whether a decision of that name is ours, if it is anybody's."""
        return wanted.startswith(f"{self.name}-")

    def refusal(self) -> web.Response | None:
        """Return what to answer who says to be a replica and may not be one; None to go on."""
        if self.tells:
            return None
        return error_answer(
            403, "without TLS (tls.*) nobody can be known as a replica: decisions stay here"
        )


ONE: Final = Replicas()
"""A replica without others."""
