"""Messages and queries between a replica and others at real addresses."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extender.effects import peer_link
from extender.effects import peers as module
from extender.effects.peer_link import (
    PATH,
    Message,
    PeerError,
    decode_message,
    encode_message,
    encode_receipt,
)
from extender.effects.peers import _SILENT_SECONDS, Peers, _Address, _read, build_peers
from extender.placement.request_log import AnsweredRequest
from extender.runtime.metrics import Metrics
from extender.settings import service as settings
from extender.settings.config import Settings
from testkit.fake_kube import eventually
from testkit.webhook_requests import MakeClient
from testkit.world import World

REQUEST = AnsweredRequest(verb="filter", uid="u", key="team/p", at=1000.0, choices=1)
SECRET = "0123456789abcdef" * 4


@dataclass
class Replica:
    """Server of a replica.

    Attributes:
        instance: name in its receipts.
        status: status of its answers to queries.
        body: body of its answers to queries.
        received: messages that it received.
        tokens: values of the header `Authorization`.
        address: host and port, once it listens.
    """

    instance: str = "them"
    status: int = 200
    body: bytes = b"nodes"
    received: list[Message] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    address: str = ""

    async def listen(self, make_client: MakeClient) -> "Replica":
        app = web.Application()
        app.add_routes([web.post(PATH, self._take), web.get("/v1/nodes", self._answer)])
        self.address = f"127.0.0.1:{(await make_client(app)).port}"
        return self

    async def _take(self, request: web.Request) -> web.Response:
        self.received.append(decode_message(await request.read()))
        self.tokens.add(request.headers.get("Authorization", ""))
        return web.Response(body=encode_receipt(self.instance, 7.0))

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status, body=self.body)


def peers_of(*addresses: str, **changes: Any) -> Peers:
    about = settings.PeersSettings(addresses=addresses)
    return Peers(about, lambda _: None, changes.pop("metrics", Metrics()), instance="us", **changes)


@asynccontextmanager
async def running(peers: Peers) -> AsyncIterator[None]:
    task = asyncio.create_task(peers.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def states(metrics: Metrics) -> tuple[float | None, float | None]:
    """Return the numbers of known and of answering replicas."""
    value = metrics.registry.get_sample_value
    return value("idlegpu_peers", {"state": "known"}), value(
        "idlegpu_peers", {"state": "answering"}
    )


def listed(peers: Peers, *addresses: _Address) -> Callable[[], Awaitable[set[_Address]]]:
    """Let the next look-ups find some addresses."""

    async def look_up() -> set[_Address]:
        return set(addresses)

    peers._addresses = look_up  # type: ignore[method-assign]
    return look_up


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        pytest.param(200, b"12345678", b"12345678", id="answer"),
        pytest.param(200, b"123456789", None, id="too-long"),
        pytest.param(404, b"no route", None, id="refused"),
    ],
)
async def test_a_query_returns_the_answers_of_all_other_replicas(
    aiohttp_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: bytes,
    found: bytes | None,
) -> None:
    monkeypatch.setattr(peer_link, "_MAX_ANSWER_BYTES", 8)
    them = await Replica(status=status, body=body).listen(aiohttp_client)
    us = await Replica("us").listen(aiohttp_client)
    metrics = Metrics()
    peers = peers_of(them.address, us.address, "127.0.0.1:1", metrics=metrics)

    async with running(peers):
        await eventually(lambda: us.received and states(metrics) == (2, 1))
        answers = await peers.query("/v1/nodes")
        each = [await peers.query_one(one, "/v1/nodes") for one in (them.address, "127.0.0.1:2")]

    assert answers == {them.address: found, "127.0.0.1:1": None}
    assert each == [found, None]


async def test_a_record_is_sent_to_all_other_replicas_with_the_secret(
    aiohttp_client: MakeClient,
) -> None:
    replicas = [await Replica(name).listen(aiohttp_client) for name in ("a", "b", "us")]
    peers = peers_of(*(one.address for one in replicas), secret=SECRET, faults=lambda: ["pods"])

    async with running(peers):
        await eventually(lambda: all(one.received for one in replicas))
        peers.report(REQUEST)
        await eventually(lambda: all(len(one.received) > 1 for one in replicas[:2]))

    received = [
        [record.uid for one in each.received for record in one.requests] for each in replicas
    ]
    assert received == [["u"], ["u"], []]
    assert all(one.tokens == {f"Bearer {SECRET}"} for one in replicas)
    assert {tuple(one.faults or ()) for each in replicas for one in each.received} == {("pods",)}


async def test_records_are_known_once_each_answering_replica_has_sent_a_message(
    aiohttp_client: MakeClient,
) -> None:
    them = await Replica().listen(aiohttp_client)
    now, metrics = 1000.0, Metrics()
    peers = peers_of(them.address, metrics=metrics, monotonic=lambda: now)
    assert (peers.are_pending, peers.until) == (True, -math.inf)  # before the first look-up

    async with running(peers):
        await eventually(lambda: states(metrics) == (1, 1))
        assert (peers.are_pending, peers.since) == (True, math.inf)

        now = 1003.0
        body = encode_message("them", [], to="us", gap_at=0.0, mark=1002.0, now=5.0)
        peers.receive(decode_message(body))

        assert not peers.are_pending
        assert (peers.since, peers.until) == (1003.0, 1000.0)


async def test_records_are_not_awaited_from_an_address_where_no_replica_answers() -> None:
    metrics = Metrics()
    peers = peers_of("127.0.0.1:1", metrics=metrics)

    async with running(peers):
        await eventually(lambda: peers._links and not peers.are_pending)

        assert states(metrics) == (1, 0)


async def test_a_replica_without_address_is_forgotten_once_it_is_silent() -> None:
    now = 1000.0
    peers = peers_of(monotonic=lambda: now)
    listed(peers)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        await peers._resolve(group, session)
        peers.receive(decode_message(message("them")))
        now += _SILENT_SECONDS - 1.0
        await peers._resolve(group, session)
        assert list(peers._received) == ["them"]
        assert peers.since == 1000.0

        now += 1.0
        await peers._resolve(group, session)

    assert list(peers._received) == []
    assert peers.since == now  # its last records may be lost


async def test_the_number_of_replicas_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MAX_PEERS", 2)
    metrics = Metrics()
    peers = peers_of(metrics=metrics)
    listed(peers, *(("127.0.0.1", port) for port in (1, 2, 3)))

    async with running(peers):
        await eventually(lambda: caplog.records)
        assert caplog.messages == ["too many replicas"]
        assert states(metrics)[0] == 2
        assert peers.until == -math.inf  # records of the third are unknown
    for number in range(5):
        peers.receive(decode_message(message(str(number))))

    assert list(peers._received) == ["1", "2", "3", "4"]


def message(instance: str) -> bytes:
    return encode_message(instance, [], to="us", gap_at=0.0, mark=None, now=0.0)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        pytest.param(b"{}", "cannot read a message between replicas", id="malformed"),
        pytest.param(b" " * 101, "the message is longer than 100 bytes", id="too-long"),
    ],
)
async def test_a_bad_message_is_refused_and_counted(
    aiohttp_client: MakeClient, monkeypatch: pytest.MonkeyPatch, body: bytes, cause: str
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    metrics = Metrics()
    app = web.Application()
    app.add_routes(peers_of(metrics=metrics).routes())
    client = await aiohttp_client(app)

    answer = await client.post(PATH, data=body)

    assert answer.status == 400
    assert (await answer.json())["error"].startswith(cause)
    value = metrics.registry.get_sample_value
    about = {"direction": "received", "outcome": "refused"}
    assert value("idlegpu_peer_messages_total", about) == 1.0


async def test_a_message_that_breaks_off_is_an_error() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionResetError("reset by peer")

    with pytest.raises(PeerError, match="cannot read the message: reset by peer"):
        await _read(broken())


async def test_replicas_share_the_requests_in_their_logs(
    aiohttp_client: MakeClient, tmp_path: Path
) -> None:
    them = await Replica().listen(aiohttp_client)
    request_log, elsewhere = World().request_log, list[str]()
    request_log.answered_elsewhere.subscribe(lambda uid, *_: elsewhere.append(uid))
    (tmp_path / "secret").write_text(SECRET)
    about = Settings(
        peers=settings.PeersSettings(addresses=(them.address,), secret_file=tmp_path / "secret")
    )
    peers = build_peers(
        about, request_log, Metrics(), instance="us", tls=lambda: None, faults=lambda: None
    )
    assert peers is not None

    async with running(peers):
        await eventually(lambda: them.received)
        request_log.note(replace(REQUEST, at=request_log.monotonic()))
        await eventually(lambda: any(one.requests for one in them.received))
    theirs = encode_message(
        "them", [replace(REQUEST, uid="theirs")], to="us", gap_at=0.0, mark=None, now=1000.0
    )
    peers.receive(decode_message(theirs))

    assert them.tokens == {f"Bearer {SECRET}"}
    assert elsewhere == ["theirs"]


def test_without_addresses_there_are_no_other_replicas() -> None:
    peers = build_peers(
        Settings(),
        World().request_log,
        Metrics(),
        instance="us",
        tls=lambda: None,
        faults=lambda: None,
    )

    assert peers is None
