"""One agent's connection, without a socket: its limits, and its end."""

import asyncio

import pytest
from typing_extensions import override  # in typing from Python 3.12 on

from agent.report.contract import LENGTH_BYTES, MAX_UPDATE_BYTES, Update, decode_farewell, frame
from extender.sources.agents.connection import (
    _MAX_CHUNKS,
    _MAX_UPDATES,
    _UPDATE_BYTES,
    AgentConnection,
)
from extender.sources.agents.refusal import AgentRefusal, RefusedError
from extender.sources.agents.tokens import Sender
from testkit.agent.report_server import eventually, request, update

ERROR = RefusedError(AgentRefusal.SILENT, "no data")
EMPTY = b"\0\0\0\0"
"""An update without content, which is refused."""


class Peer(asyncio.Transport):
    """Both sides of a connection: its transport, and the owner of all connections."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.7", 1234)})
        self.accepts = asyncio.Event()
        self.events: list[str] = []
        self.updates: list[Update] = []
        self.refused: list[AgentRefusal] = []
        self.written: list[bytes] = []

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    @override
    def close(self) -> None:
        self.events.append("end")

    @override
    def is_closing(self) -> bool:
        return "end" in self.events

    @override
    def pause_reading(self) -> None:
        self.events.append("pause")

    @override
    def resume_reading(self) -> None:
        self.events.append("resume")

    def opened(self, connection: AgentConnection) -> None:
        assert connection.address == "10.0.0.7"

    def closed(self, _: AgentConnection) -> None:
        self.events.append("closed")

    async def authenticate(self, _: AgentConnection, token: str) -> Sender:
        await self.accepts.wait()
        return Sender(node="gpu-1", expires_at=2e9, account=token, audience="")

    def accepted(self, connection: AgentConnection) -> None:
        assert connection.sender is not None
        assert connection.sender.account == "secret"

    def receive(self, _: AgentConnection, update: Update) -> None:
        self.updates.append(update)

    def note_refusal(self, _: AgentConnection, error: RefusedError) -> None:
        self.refused.append(error.refusal)

    def paused(self, _: AgentConnection) -> None:
        self.events.append("wait")


async def upgraded() -> tuple[AgentConnection, Peer]:
    """Return a connection whose token is accepted, at the start of a batch."""
    peer = Peer()
    connection = AgentConnection(peer, lambda: 5.0)
    connection.connection_made(peer)
    peer.accepts.set()
    connection.data_received(request("secret"))
    await eventually(lambda: peer.written)
    connection.resume()
    peer.written.clear()
    return connection, peer


async def test_reading_pauses_after_a_number_of_chunks_until_the_next_batch() -> None:
    connection, peer = await upgraded()
    for _ in range(2):
        for _ in range(_MAX_CHUNKS - 1):
            connection.data_received(b"")
        assert peer.events == []
        connection.data_received(b"")
        connection.data_received(b"")  # was on its way
        assert peer.events == ["pause", "wait"]
        connection.resume()
        assert peer.events == ["pause", "wait", "resume"]
        peer.events.clear()


@pytest.mark.parametrize(
    ("length", "most"),
    [
        pytest.param(0, _MAX_UPDATES, id="small"),
        pytest.param(_UPDATE_BYTES, _MAX_UPDATES // 2, id="counts-as-two"),
        pytest.param(_MAX_UPDATES * _UPDATE_BYTES, 1, id="counts-as-all"),
    ],
)
async def test_reading_pauses_after_a_number_of_updates_until_the_next_batch(
    length: int, most: int
) -> None:
    connection, peer = await upgraded()
    connection.data_received(frame(update("x" * length)) * (2 * most))
    assert (len(peer.updates), peer.events) == (most, ["pause", "wait"])

    connection.resume()

    assert len(peer.updates) == 2 * most
    assert peer.events == ["pause", "wait", "resume"]


async def test_a_refused_connection_gets_one_farewell_and_reads_no_more() -> None:
    connection, peer = await upgraded()
    connection.data_received(frame(update()))

    connection.data_received(EMPTY)
    connection.data_received(frame(update()))
    connection.refuse(ERROR)
    connection.resume()

    assert (len(peer.updates), peer.refused) == (1, [AgentRefusal.BAD_REPORT])
    assert peer.events == ["end"]
    (farewell,) = peer.written
    assert "no data" not in decode_farewell(farewell[LENGTH_BYTES:])


async def test_a_lost_connection_is_not_refused() -> None:
    connection, peer = await upgraded()

    connection.connection_lost(None)
    connection.refuse(ERROR)

    assert (peer.events, peer.refused, peer.written) == (["closed"], [], [])


async def test_an_update_has_a_longest_length() -> None:
    connection, peer = await upgraded()

    connection.data_received(MAX_UPDATE_BYTES.to_bytes(LENGTH_BYTES, "big"))
    assert peer.refused == []
    other, peer = await upgraded()
    other.data_received((MAX_UPDATE_BYTES + 1).to_bytes(LENGTH_BYTES, "big"))

    assert peer.refused == [AgentRefusal.BAD_REPORT]


async def test_little_data_waits_for_the_review_of_the_token() -> None:
    peer = Peer()
    connection = AgentConnection(peer, lambda: 5.0)
    connection.connection_made(peer)
    early, later = frame(update(at=1.0)), frame(update(at=2.0))
    connection.data_received(request("secret") + early)
    connection.data_received(later)
    assert connection.is_under_review

    peer.accepts.set()
    await eventually(lambda: peer.updates)

    assert [one.at for one in peer.updates] == [1.0, 2.0]
    assert not connection.is_under_review


async def test_much_data_during_the_review_of_the_token_is_refused() -> None:
    peer = Peer()
    connection = AgentConnection(peer, lambda: 5.0)
    connection.connection_made(peer)
    connection.data_received(request("secret"))

    connection.data_received(bytes(MAX_UPDATE_BYTES))
    assert peer.refused == []
    connection.data_received(b"x")

    assert peer.refused == [AgentRefusal.BAD_REQUEST]
    assert peer.written[0].startswith(b"HTTP/1.1 400 ")
    assert b"before the token was accepted" in peer.written[0]
    connection.connection_lost(None)
