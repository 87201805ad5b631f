"""Link to one replica: kept and dropped requests, and the receiver's guarantees."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn, cast

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from extender.effects.peer_link import (
    _HEARTBEAT_SECONDS,
    _MAX_QUEUE,
    _MAX_RECORDS,
    _WARN_AFTER,
    PATH,
    VERSION,
    Message,
    PeerError,
    PeerLink,
    Receipt,
    _fits_message,
    decode_message,
    decode_receipt,
    encode_message,
    encode_receipt,
    requests_in,
)
from extender.effects.peers import Peers, _family
from extender.placement.request_log import AnsweredRequest
from extender.runtime.metrics import Metrics
from extender.settings import service as settings

NAMES = st.text(st.characters(codec="utf-8"), max_size=40)


@st.composite
def answered_requests(draw: st.DrawFn) -> AnsweredRequest:
    return AnsweredRequest(
        verb=draw(st.sampled_from(("filter", "prioritize"))),
        uid=draw(NAMES.filter(bool)),
        key=draw(NAMES),
        at=draw(st.floats(900, 1000)),
        choices=draw(st.integers(0, 5000)),
        is_lost=draw(st.booleans()),
        node=draw(NAMES),
        resources=tuple(draw(st.dictionaries(NAMES, st.integers(1, 16), max_size=3)).items()),
        memory_bytes=draw(st.none() | st.integers(0, 1 << 40)),
    )


@given(st.lists(answered_requests(), max_size=5))
def test_records_keep_their_values_on_another_clock(sent: list[AnsweredRequest]) -> None:
    body = encode_message("a", sent, to="b", gap_at=700.0, mark=5.0, now=1000.0)
    message = decode_message(body)
    arrived = requests_in(message, sent_at=1000.0)

    assert all(map(_fits_message, sent))
    assert [it.at for it in arrived] == pytest.approx([it.at for it in sent])
    assert [replace(it, at=0.0) for it in arrived] == [replace(it, at=0.0) for it in sent]
    assert (message.to, message.gap_at, message.mark) == ("b", 700.0, 5.0)
    assert message.sent_at == 1000.0


def message(**changes: Any) -> bytes:
    requested = {"verb": "filter", "uid": "u", "age_seconds": 1.0}
    return json.dumps(
        {"version": VERSION, "instance": "a", "requests": [{**requested, **changes}]}
    ).encode()


def about(**changes: Any) -> bytes:
    return json.dumps({"version": VERSION, "instance": "a", **changes}).encode()


@pytest.mark.parametrize("faults", [None, [], ["apiserver/pods", "prometheus"]])
def test_a_message_has_the_faults_of_its_sender_or_none_if_not_ready(
    faults: list[str] | None,
) -> None:
    body = encode_message("a", [], to="", gap_at=0.0, mark=None, now=0.0, faults=faults)

    assert decode_message(body).faults == faults


def test_a_message_without_faults_counts_as_not_ready() -> None:
    assert decode_message(message()).faults is None  # as in an older release


def test_unknown_fields_are_ignored() -> None:
    (request,) = requests_in(decode_message(message(colour="red")), sent_at=10.0)

    assert (request.uid, request.at) == ("u", 9.0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(b"{", "truncated", id="not-json"),
        pytest.param(b"[]", "Expected `object`", id="a-list"),
        pytest.param(b"{}", "version", id="no-version"),
        pytest.param(b'{"version":2,"instance":"a"}', "$.version is 2, must be 1", id="version"),
        pytest.param(b'{"version":1}', "instance", id="no-instance"),
        pytest.param(message(verb="bind"), "$.requests[0].verb", id="verb"),
        pytest.param(message(uid=7), "$.requests[0].uid", id="uid-is-no-text"),
        pytest.param(message(uid=""), "$.requests[0].uid", id="no-uid"),
        pytest.param(message(uid="u" * 129), "$.requests[0].uid", id="long-uid"),
        pytest.param(message(age_seconds=-1), "$.requests[0].age_seconds", id="negative-age"),
        pytest.param(message(resources={"g": 0}), "$.requests[0].resources", id="no-devices"),
        pytest.param(
            message(resources={f"g{n}": 1 for n in range(17)}), "$.requests[0].resources", id="many"
        ),
        pytest.param(message(memory_bytes=-5), "$.requests[0].memory_bytes", id="negative-memory"),
        pytest.param(about(sent_at=-1e13), "$.sent_at", id="sent-at-no-time"),
        pytest.param(about(mark=1e308), "$.mark", id="mark-at-no-time"),
        pytest.param(about(gap_at=1e13), "$.gap_at", id="gap-at-no-time"),
        pytest.param(b"\xff" + message(), "", id="no-unicode"),
        pytest.param(b"[" * 100_000, "", id="deep"),
    ],
)
def test_bad_message_is_refused_with_the_place(body: bytes, words: str) -> None:
    with pytest.raises(PeerError, match="cannot read a message between replicas") as caught:
        decode_message(body)

    assert words in str(caught.value)


def test_message_with_too_many_records_is_refused() -> None:
    one = json.loads(message())
    one["requests"] *= _MAX_RECORDS + 1

    with pytest.raises(PeerError, match=r"length <= 500.*\$\.requests"):
        decode_message(json.dumps(one).encode())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"uid": ""}, id="no-uid"),
        pytest.param({"uid": "u" * 129}, id="uid"),
        pytest.param({"key": "k" * 385}, id="key"),
        pytest.param({"node": "n" * 321}, id="node"),
        pytest.param({"resources": (("r" * 321, 1),)}, id="resource"),
        pytest.param({"resources": tuple((str(n), 1) for n in range(17))}, id="resources"),
    ],
)
def test_a_record_that_others_would_refuse_is_not_sent(changes: dict[str, Any]) -> None:
    record = {"verb": "filter", "uid": "u", "key": "k", "at": 0.0, "choices": 1}
    values: dict[str, Any] = record | changes

    assert not _fits_message(AnsweredRequest(**values))


def test_receipt_has_the_replica_and_the_time() -> None:
    receipt = decode_receipt(encode_receipt("b", 7.0))

    assert (receipt.instance, receipt.mark) == ("b", 7.0)
    assert decode_receipt(b'{"version":1,"instance":"b"}').mark is None  # of an older release
    with pytest.raises(PeerError, match="cannot read a replica's answer"):
        decode_receipt(b"<html>")


OWN = "us"
INTERVAL_SECONDS = 0.001


@dataclass
class Replica:
    """Another replica at the far end of a link, with the link's clock.

    Attributes:
        messages: received messages.
        marks: number of its receipts.
        answers: next answers as (status, body); if empty, it answers its instance.
    """

    instance: str = "them"
    now: float = 1000.0
    messages: list[Message] = field(default_factory=list)
    marks: int = 0
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        self.messages.append(decode_message(await request.read()))
        status, body = self.answers.pop(0) if self.answers else (200, b"")
        self.marks += not body
        return web.Response(status=status, body=body or encode_receipt(self.instance, self.marks))

    def received(self) -> list[list[str]]:
        return [[record.uid for record in message.requests] for message in self.messages]


def answered(uid: str, at: float = 1000.0) -> AnsweredRequest:
    return AnsweredRequest(verb="filter", uid=uid, key=f"team/{uid}", at=at, choices=1)


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.fixture
async def link(replica: Replica) -> AsyncIterator[PeerLink]:
    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post(PATH, replica.take)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield PeerLink(
            runner.addresses[0],
            session,
            instance=OWN,
            interval_seconds=INTERVAL_SECONDS,
            monotonic=lambda: replica.now,
            count=replica.outcomes.append,
        )
    await runner.cleanup()


async def test_records_are_sent_once(replica: Replica, link: PeerLink) -> None:
    link.add(answered("a"))
    await link.send()
    await link.send()

    assert replica.received() == [["a"], []]
    assert [message.instance for message in replica.messages] == [OWN, OWN]
    assert replica.outcomes == ["taken", "taken"]


async def test_a_redirect_is_not_followed(replica: Replica, link: PeerLink) -> None:
    async def redirect(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(PATH)

    app = web.Application()
    app.add_routes([web.post(PATH, replica.take), web.route("*", "/elsewhere", redirect)])
    app.add_routes([web.get(PATH, replica.take)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    link._base, link._url = f"http://{host}:{port}", f"http://{host}:{port}/elsewhere"

    await link.send()
    answer = await link.query("/elsewhere")
    await runner.cleanup()

    assert (replica.messages, answer) == ([], None)
    assert replica.outcomes == ["failed"]


async def test_message_returns_the_last_mark_and_its_replica(
    replica: Replica, link: PeerLink
) -> None:
    for _ in range(3):
        replica.now += 7.0
        await link.send()

    marks = [(message.to, message.mark) for message in replica.messages]
    assert marks == [("", None), ("them", 1.0), ("them", 2.0)]
    assert {message.gap_at for message in replica.messages} == {1000.0}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((503, b"later"), id="overloaded"),
        pytest.param((200, b"<html>"), id="another-server"),
        pytest.param((200, b'{"version":2,"instance":"x"}'), id="another-version"),
    ],
)
async def test_records_of_a_failed_message_are_sent_again(
    replica: Replica, link: PeerLink, answer: tuple[int, bytes]
) -> None:
    replica.answers = [answer]
    link.add(answered("a"))
    await link.send()
    link.add(answered("b"))
    await link.send()
    await link.send()

    assert replica.received() == [["a"], ["a"], ["b"]]
    assert {message.gap_at for message in replica.messages} == {1000.0}
    assert [message.mark for message in replica.messages] == [None, None, 1.0]
    assert replica.outcomes == ["failed", "taken", "taken"]


async def test_a_replica_answers_from_its_first_answer_until_a_failure(
    replica: Replica, link: PeerLink
) -> None:
    seen = [(link.is_untried, link.is_answering)]
    for answers in ([(503, b"later")], [], [(503, b"later")]):
        replica.answers = list(answers)
        await link.send()
        seen.append((link.is_untried, link.is_answering))

    assert seen == [(True, False), (False, False), (False, True), (False, False)]


async def test_refused_records_are_not_sent_again_and_leave_a_gap(
    replica: Replica, link: PeerLink
) -> None:
    replica.answers = [(400, b"no")]
    link.add(answered("a", at=1003.0))
    replica.now = 1010.0
    await link.send()
    await link.send()

    assert replica.received() == [["a"], []]
    assert [message.gap_at for message in replica.messages] == [1000.0, 1010.0]


async def test_a_restarted_replica_relies_only_on_later_messages(
    replica: Replica, link: PeerLink
) -> None:
    await link.send()
    replica.now += 100.0
    replica.instance = "them-again"
    await link.send()
    replica.now += 3.0
    await link.send()

    assert [message.gap_at for message in replica.messages] == [1000.0, 1000.0, 1100.0]
    assert [message.to for message in replica.messages] == ["", "them", "them-again"]


async def test_the_own_address_receives_no_further_messages(
    replica: Replica, link: PeerLink
) -> None:
    replica.instance = OWN
    await link.send()
    link.add(answered("a"))
    await link.send()

    assert link.is_self
    assert replica.received() == [[], []]


async def test_burst_is_split_into_complete_messages(replica: Replica, link: PeerLink) -> None:
    await link.send()
    for number in range(_MAX_RECORDS + 2):
        link.add(answered(str(number)))
    await link.send()
    await link.send()

    assert [len(uids) for uids in replica.received()] == [0, _MAX_RECORDS, 2]
    assert [message.mark for message in replica.messages] == [None, None, 2.0]


async def test_only_so_much_is_kept_and_the_oldest_is_dropped(
    replica: Replica, link: PeerLink
) -> None:
    for number in range(_MAX_QUEUE + 3):
        replica.now = 1000.0 + number
        link.add(answered(str(number)))
    replica.now += 100.0
    await link.send()

    (message,) = replica.messages
    assert message.requests[0].uid == "3"
    assert message.gap_at == 1000.0 + _MAX_QUEUE + 2  # when the last of them was dropped


async def test_oversized_record_is_left_out(replica: Replica, link: PeerLink) -> None:
    replica.now += 5.0
    link.add(answered("u" * 1000))
    link.add(answered("a"))
    await link.send()

    assert replica.received() == [["a"]]
    assert replica.messages[0].gap_at == 1005.0


class Timed(PeerLink):
    """Link whose messages are delivered at once; records the times and requests of messages."""

    def __init__(self) -> None:
        self.delivered: list[tuple[float, list[str]]] = []
        self._now = asyncio.get_running_loop().time
        super().__init__(
            ("127.0.0.1", 1),
            None,  # type: ignore[arg-type] # nothing is sent over it
            instance=OWN,
            interval_seconds=INTERVAL_SECONDS,
            monotonic=self._now,
            count=lambda _: None,
        )

    @override
    async def _exchange(self, body: bytes) -> Receipt:
        self.delivered.append(
            (self._now(), [record.uid for record in decode_message(body).requests])
        )
        return decode_receipt(encode_receipt("them", self._now()))


@pytest.mark.looptime
async def test_a_record_is_sent_at_once_and_a_heartbeat_after_each_silence() -> None:
    link = Timed()
    task = asyncio.create_task(link.run())
    await asyncio.sleep(_HEARTBEAT_SECONDS / 2)
    link.add(answered("a"))
    await asyncio.sleep(2.5 * _HEARTBEAT_SECONDS)
    task.cancel()
    await asyncio.wait([task])

    silence = _HEARTBEAT_SECONDS + INTERVAL_SECONDS
    asked_at = _HEARTBEAT_SECONDS / 2
    assert [uids for _, uids in link.delivered] == [[], ["a"], [], []]
    assert [at for at, _ in link.delivered] == pytest.approx(
        [0.0, asked_at, asked_at + silence, asked_at + 2 * silence]
    )


async def test_only_lasting_failures_are_logged_and_their_end(
    replica: Replica, link: PeerLink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replica.answers = [(500, b"broken")] * (_WARN_AFTER + 3)
    for _ in range(_WARN_AFTER + 4):
        await link.send()

    lines: list[Any] = [
        each for each in caplog.records if each.name == "extender.effects.peer_link"
    ]
    assert [line.message for line in lines] == [
        "cannot send to a replica",
        "a replica answers again",
    ]
    assert "status 500: broken" in lines[0].cause


@pytest.mark.parametrize(
    ("host", "family"),
    [
        pytest.param("0.0.0.0", socket.AF_INET, id="ipv4"),
        pytest.param("::", socket.AF_INET6, id="ipv6"),
        pytest.param("idlegpu", socket.AF_UNSPEC, id="name"),
    ],
)
def test_names_stand_for_the_kind_of_address_that_replicas_listen_on(
    host: str, family: socket.AddressFamily
) -> None:
    assert _family(host) is family


async def test_service_without_an_address_of_that_kind_cannot_be_looked_up() -> None:
    of_the_other_kind = settings.PeersSettings(service="[::1]:8888")
    peers = Peers(of_the_other_kind, lambda _: None, Metrics(), listen="127.0.0.1")

    with pytest.raises(OSError, match=r"\[::1\]:8888: "):
        await peers._addresses()


class NoRoute:
    """Session of a host that reaches no other."""

    def post(self, *_: object, **__: object) -> NoReturn:
        raise OSError("no route to host")


@pytest.mark.looptime
async def test_pauses_after_failures_double_up_to_a_limit_and_vary_by_half() -> None:
    loop, failed_at = asyncio.get_running_loop(), list[float]()
    link = PeerLink(
        ("192.0.2.1", 8888),
        cast("aiohttp.ClientSession", NoRoute()),
        instance=OWN,
        interval_seconds=INTERVAL_SECONDS,
        monotonic=loop.time,
        count=lambda _: failed_at.append(loop.time()),
    )
    task = asyncio.create_task(link.run())
    await asyncio.sleep(100.0)
    task.cancel()

    longest = [min(0.1 * 2.0**failures, 5.0) for failures in range(1, len(failed_at))]
    pauses = [later - before for before, later in pairwise(failed_at)]
    shares = [pause / most for pause, most in zip(pauses, longest, strict=True)]
    assert all(0.499 < share < 1.001 for share in shares)
    assert max(shares) - min(shares) > 0.1
