"""The agent's side of the connection, against a scripted extender."""

import asyncio
import logging
import math
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from agent.options import ReportOptions
from agent.push.handshake import Token, _expiry_of, read_token
from agent.push.pusher import Pusher, ReportLink, _TokenBucket
from agent.push.updates import Digest, DigestBuilder
from agent.report.contract import Farewell, Report, frame
from agent.sampler import LatestReport
from agent.tenants.foreign import Threshold
from extender.core.policy import Thresholds
from extender.runtime.supervision import keep
from simulation.devices import Load
from simulation.models import GIB
from testkit.agent.pushing import eventually, extender, reporting
from testkit.agent.reviews import token

START = 1_800_000_000.0


async def wait_connection_lost() -> None:
    """Wait until the agent knows that its connection broke."""
    await eventually(
        lambda: all(task.get_name() != "report listener" for task in asyncio.all_tasks())
    )


def counts(pusher: Pusher) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for family in pusher.collect()
        for sample in family.samples
        if "outcome" in sample.labels
    }


async def test_the_token_is_sent_and_the_first_report_follows(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path, text="abc.def.ghi\n") as running:
        await eventually(lambda: it.updates and it.updates[0])

        assert "Authorization: Bearer abc.def.ghi\r\n" in it.requests[0]
        assert it.updates[0][0].node == "gpu-1"
        assert it.updates[0][0].layout is not None
        assert counts(running.pusher) == {"sent": 1, "failed": 0, "refused": 0}


async def test_only_news_is_sent_between_heartbeats(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path) as running:
        await eventually(lambda: it.updates and it.updates[0])
        (link,) = running.pusher.links.values()
        for _ in range(5):
            await running.consider()
        assert link.sent == 1

        running.fleet.set_utilization("gpu-1", 0, 0.9)
        running.look()
        await eventually(lambda: len(it.updates[0]) == 2)
        assert it.updates[0][1].is_news
        for count in (3, 4):  # further readings of foreign use
            running.look()
            await eventually(partial(it.has_said, count))
        for _ in range(2):
            await running.consider()
        assert link.sent == 4


async def test_foreign_use_is_confirmed_when_it_begins_and_ends(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path) as running:
        running.agent.sees_holders = False
        running.look()
        await eventually(lambda: it.updates and it.updates[0])

        reported = len(it.updates[0])
        for use in (Load(utilization=0.8, memory_bytes=20 * GIB), None):
            running.fleet.set_foreign("gpu-1", 0, use)
            for _ in range(3):
                reported += 1
                running.look()
                await eventually(partial(it.has_said, reported))
                assert it.updates[0][-1].is_news


async def test_heartbeats_are_sent_without_changes(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path, heartbeat_seconds=0.05) as running:
        await eventually(lambda: it.updates and it.updates[0])
        async with asyncio.timeout(30):
            while len(it.updates[0]) < 2:
                await running.consider()
                await asyncio.sleep(0.005)

        assert not it.updates[0][1].is_news


async def test_after_a_blocked_send_only_the_latest_report_is_sent(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path, heartbeat_seconds=0.0) as running:
        await eventually(lambda: it.updates and it.updates[0])
        it.is_reading.clear()
        for _ in range(3000):
            running.look()
            await asyncio.sleep(0)
        (link,) = running.pusher.links.values()
        sent = link.sent
        it.is_reading.set()
        last = running.look().at
        await eventually(lambda: it.updates[0][-1].at >= last)

        assert sent < 2000  # most others were neither sent nor queued
        assert len(it.updates[0]) <= sent + 3


async def test_a_reopened_connection_starts_with_a_complete_update(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path) as running:
        await eventually(lambda: it.updates and it.updates[0])
        it.writers[0].transport.abort()
        await wait_connection_lost()
        running.look()
        await eventually(lambda: len(it.updates) > 1)
        running.look()
        await eventually(lambda: bool(it.updates[1]))

        assert it.updates[1][0].layout is not None
        assert counts(running.pusher)["failed"] >= 1


def test_reconnect_delays_are_spread_out() -> None:
    options = ReportOptions(reconnect_seconds=1.0, max_backoff_seconds=30.0)
    digest_builder = DigestBuilder(options, Thresholds(), Threshold())
    agents = [
        ReportLink(("127.0.0.1", 1), LatestReport(), digest_builder, options) for _ in range(500)
    ]

    for failures, longest in ((1, 1.0), (3, 4.0), (9, 30.0)):
        for agent in agents:
            agent._consecutive_failures = failures
        pauses = sorted(agent._backoff_seconds() for agent in agents)

        assert 0.1 * longest <= pauses[0] < 0.2 * longest
        assert 0.9 * longest < pauses[-1] <= longest
        assert max(b - a for a, b in pairwise(pauses)) < 0.1 * longest, "spread over the time"


def test_a_broken_connection_is_logged_from_the_third_failure_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ReportOptions()
    digest_builder = DigestBuilder(options, Thresholds(), Threshold())
    link = ReportLink(("127.0.0.1", 1), LatestReport(), digest_builder, options)
    link._record_success()
    problems = []
    for cause in ("reset", "reset", "reset", "reset", "no route"):
        link._record_failure(ConnectionError(cause))
        problems.append(link.problem)

    assert problems == ["the connection broke"] * 2 + ["reset"] * 2 + ["no route"]
    assert [vars(record)["cause"] for record in caplog.records] == ["reset", "no route"]
    assert (link.failures, link.refusals) == (5, 0)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("expires_at", "least", "most"), [(START + 600.0, 480, 540), (None, 3600, 3600)]
)
async def test_a_connection_is_reopened_before_its_token_expires(
    expires_at: float | None, least: float, most: float
) -> None:
    options = ReportOptions()
    builder = DigestBuilder(options, Thresholds(), Threshold())
    link = ReportLink(("127.0.0.1", 1), LatestReport(), builder, options, clock=lambda: START)
    token = Token(text="abc", expires_at=expires_at)

    now = asyncio.get_running_loop().time()
    after = [link._connection_deadline(token) - now for _ in range(100)]

    assert least <= min(after) <= max(after) <= most


async def test_the_token_is_read_for_each_connection(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path, text="one") as running:
        await eventually(lambda: it.updates and it.updates[0])
        (tmp_path / "token").write_text("two")
        it.writers[0].transport.abort()
        await wait_connection_lost()
        running.look()
        await eventually(lambda: len(it.requests) > 1)

        assert "Bearer two" in it.requests[1]


async def test_a_refusal_is_logged_with_the_extenders_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with extender() as it:
        it.answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 12\r\n\r\nnot you, pal"
        with caplog.at_level(logging.WARNING):
            async with reporting(it.port, tmp_path) as running:
                await eventually(lambda: len(it.requests) > 2)
                assert counts(running.pusher)["refused"] >= 2

    causes = [record.cause for record in caplog.records if hasattr(record, "cause")]
    assert causes == ["status 403: not you, pal"]  # logged once for all attempts


async def test_a_farewell_is_logged_as_the_reason(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path) as running:
        await eventually(lambda: it.updates and it.updates[0])
        (link,) = running.pusher.links.values()
        it.writers[0].write(frame(Farewell(reason="the token has expired")))
        await wait_connection_lost()
        running.look()
        await eventually(lambda: link.refusals)

        assert link.refusals == 1


async def test_no_token_is_sent_without_tls_unless_allowed(tmp_path: Path) -> None:
    async with reporting(9, tmp_path, host="192.0.2.1") as running:
        await eventually(lambda: running.pusher.links)
        (link,) = running.pusher.links.values()
        await eventually(lambda: link.failures)

        assert "set reports.ca_file, or reports.allow_plain" in link.problem


async def test_a_missing_token_names_the_file(tmp_path: Path) -> None:
    async with extender() as it, reporting(it.port, tmp_path, text="") as running:
        await eventually(lambda: running.pusher.links)
        (link,) = running.pusher.links.values()
        await eventually(lambda: str(tmp_path) in link.problem)

        assert it.requests == []


async def test_a_replica_removed_from_the_service_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with extender() as it, reporting(it.port, tmp_path) as running:
        await eventually(lambda: it.updates and it.updates[0])

        async def no_addresses() -> set[tuple[str, int]]:
            return set()

        monkeypatch.setattr(running.pusher, "_addresses", no_addresses)
        await eventually(lambda: not running.pusher.links)

        await wait_connection_lost()
        assert counts(running.pusher)["sent"] == 1  # counts of closed links remain


async def test_reports_go_to_so_many_replicas_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def addresses() -> set[tuple[str, int]]:
        return {("127.0.0.1", port) for port in range(1, 40)}

    monkeypatch.setattr(Pusher, "_addresses", lambda _: addresses())
    async with reporting(1, tmp_path) as running:
        await eventually(lambda: "too many replicas" in caplog.messages)

        assert len(running.pusher.links) == 32


async def test_a_link_that_fails_is_opened_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with extender() as it, reporting(it.port, tmp_path) as running:
        await eventually(lambda: it.updates and it.updates[0])
        (link,) = running.pusher.links.values()
        builder = running.pusher._digest_builder
        build = builder.build

        def fail(_: Report) -> Digest:
            monkeypatch.setattr(builder, "build", build)  # fail once
            raise LookupError("no error that a connection has")

        monkeypatch.setattr(builder, "build", fail)
        running.look()

        await eventually(lambda: len(it.updates) == 2 and it.updates[1])
        assert list(running.pusher.links.values()) == [link]


async def test_after_a_failure_every_replica_gets_reports_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with extender() as it, reporting(it.port, tmp_path) as running:
        await eventually(lambda: it.updates and it.updates[0])
        pusher, addresses = running.pusher, running.pusher._addresses

        async def fail() -> set[tuple[str, int]]:
            monkeypatch.setattr(pusher, "_addresses", addresses)  # fail once
            raise UnicodeError("label empty or too long")

        monkeypatch.setattr(pusher, "_addresses", fail)
        await wait_connection_lost()
        again = asyncio.create_task(keep("reports", pusher.run))

        await eventually(lambda: len(it.updates) == 2 and it.updates[1])
        assert counts(pusher)["sent"] == 2
        again.cancel()
        await asyncio.wait([again])


async def test_a_link_that_is_cancelled_while_its_connection_ends_does_not_reconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with extender() as it, reporting(it.port, tmp_path) as running:
        await eventually(lambda: it.updates and it.updates[0])
        (link,) = running.pusher.links.values()

        async def end(*_: object) -> None:
            asyncio.get_running_loop().call_soon(task.cancel)  # once the connection is being ended

        monkeypatch.setattr(link, "_send_updates", end)
        task = asyncio.create_task(link.run())
        await asyncio.wait([task], timeout=10)

        assert task.cancelled()


def test_the_expiry_is_read_from_the_token(tmp_path: Path) -> None:
    at = time.time() + 600
    path = tmp_path / "token"
    path.write_text(token("n", expires_at=at) + "\n")

    assert read_token(path).expires_at == at
    assert _expiry_of("no.jwt.atall") is None
    assert _expiry_of("opaque") is None


@pytest.mark.parametrize("expires_at", [math.nan, math.inf, -math.inf])
def test_an_expiry_that_is_no_finite_number_is_unknown(expires_at: float) -> None:
    assert _expiry_of(token("n", expires_at=expires_at)) is None


@pytest.mark.parametrize("content", ["", "two words", "x" * 20_000, "\x00", "\x7f"])
def test_an_invalid_token_is_not_sent(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)

    with pytest.raises(OSError, match="contains no token"):
        read_token(path)


def test_after_a_burst_updates_with_news_come_every_two_seconds() -> None:
    bucket = _TokenBucket()

    assert [bucket.take(100.0) for _ in range(11)] == [*[True] * 10, False]
    assert [bucket.take(at) for at in (101.0, 102.0, 102.0, 104.0)] == [False, True, False, True]
