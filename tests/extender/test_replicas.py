"""Several real extenders that report their requests to each other over HTTP."""

import asyncio
import time
from collections import Counter
from io import BytesIO
from itertools import cycle
from typing import Any

import pytest
from aiohttp import web

from extender.effects import peers as module
from extender.effects.peer_link import MAX_BYTES, PATH
from extender.effects.peers import Peers as PeerDirectory
from extender.placement.bypassed_pods import _WATCH_SECONDS
from extender.settings.service import Ready
from simulation.objects import pod_object
from testkit.fake_kube import eventually
from testkit.replicas import DEADLINE_SECONDS, NODES, PROOF, Replica, described, running


async def until_judged(*replicas: Replica, count: int = 1) -> None:
    """Wait until each replica has classified `count` pods."""

    def are_judged() -> bool:
        reports = [replica.extender.bypassed_pods.report() for replica in replicas]
        return all(
            sum(group.count for group in report.pods) + report.unjudged >= count
            for report in reports
        )

    await eventually(are_judged, deadline_seconds=DEADLINE_SECONDS)


async def until_received_for(seconds: float, *replicas: Replica) -> None:
    """Wait until each replica has received the others' requests for a period.

    Before that, a request for a pod that is created now may be unknown.
    """

    def have_received() -> bool:
        now = time.monotonic()
        return all(
            replica.has_received_all(since=now - seconds, until=now - seconds)
            for replica in replicas
        )

    await eventually(have_received, deadline_seconds=DEADLINE_SECONDS)


async def test_pod_placed_by_one_replica_counts_at_all_others() -> None:
    async with running(3) as (cluster, (requested, *others)):
        pod = cluster.control.create_pod(pod_object("a"))
        node = await requested.choose(pod)

        for other in others:
            await other.until_assumed(pod, node)

        assert [each.count("idlegpu_peers", state="known") for each in others] == [2, 2]


async def test_pods_with_requests_at_one_replica_are_counted_by_none() -> None:
    async with running(2) as (cluster, replicas):
        for number, replica in zip(range(6), cycle(replicas), strict=False):
            pod = cluster.control.create_pod(pod_object(f"p{number}"))
            await replica.call(pod, "filter")
            cluster.control.bind("default", f"p{number}", await replica.choose(pod))
        await until_judged(*replicas, count=6)

        assert [replica.bypassed_count for replica in replicas] == [0, 0]
        reports = [replica.extender.bypassed_pods.report() for replica in replicas]
        assert [report.unjudged for report in reports] == [0, 0]


async def test_pod_without_requests_is_counted_by_each_replica(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(2) as (cluster, replicas):
        await until_received_for(_WATCH_SECONDS, *replicas)
        cluster.control.create_pod(pod_object("silent"))
        one, _ = replicas
        for each in replicas:  # a replica that never saw it waiting does not classify it
            await eventually(
                lambda: any(it.name == "silent" for it in each.extender.fleet.pods.values()),  # noqa: B023 - waited for
                deadline_seconds=DEADLINE_SECONDS,
            )
        cluster.control.bind("default", "silent", NODES[0])
        await until_judged(*replicas)

        assert [replica.bypassed_count for replica in replicas] == [1, 1]
        async with one.session.get(f"{one.url}/v1/bypassed") as answer:
            body = await answer.json()
    assert [(it["example"], it["verdict"]) for it in body["bound"]] == [
        ("default/silent", "not-called")
    ]
    assert body["likely_causes"][0]["field"] == "extenders"
    assert "pods bound without idlegpu's answer" in caplog.messages


async def test_burst_with_alternating_replicas_is_spread() -> None:
    async with running(2) as (cluster, replicas):
        chosen: list[str] = []
        for number, (one, other) in zip(range(6), cycle((replicas, replicas[::-1])), strict=False):
            pod = cluster.control.create_pod(pod_object(f"p{number}"))
            chosen.append(await one.choose(pod))
            await other.until_assumed(pod)

    # Each alone would have chosen the same three nodes.
    assert sorted(Counter(chosen).values()) == [1, 1, 2, 2]


async def test_a_binding_ends_an_assumption_from_another_replicas_report() -> None:
    async with running(2) as (cluster, (requested, other)):
        pod = cluster.control.create_pod(pod_object("a"))
        node = await requested.choose(pod)
        await other.until_assumed(pod)
        cluster.control.bind("default", "a", node)

        await eventually(lambda: not other.assumed(pod))


async def test_a_replica_that_starts_later_receives_earlier_requests() -> None:
    async with described(2) as replicas, replicas.start(0) as first:
        pod = replicas.cluster.control.create_pod(pod_object("a"))
        node = await first.choose(pod)
        async with replicas.start(1) as second:
            await second.until_assumed(pod, node)


async def test_a_replica_that_ends_sends_its_last_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    # With so long an interval only the shutdown triggers a message.
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 10.0)
    async with described(2) as replicas, replicas.start(0) as first:
        async with replicas.start(1) as second:
            pods = [replicas.cluster.control.create_pod(pod_object(name)) for name in "ab"]
            await eventually(lambda: second.count("idlegpu_peers", state="known"))
            for pod in pods:
                await second.call(pod)
            known = [first.assumed(pod) for pod in pods]

        assert known == ["", ""]
        assert all(first.assumed(pod) for pod in pods)


async def test_restarted_replica_receives_all_records_again() -> None:
    async with described(2) as replicas, replicas.start(0) as first:
        async with replicas.start(1):
            await first.receive_all()
        ended_at = time.monotonic()
        async with replicas.start(1) as second:
            await first.receive_all()
            assert not first.has_received_all(since=ended_at, until=ended_at)
            pod = replicas.cluster.control.create_pod(pod_object("a"))
            node = await first.choose(pod)
            await second.until_assumed(pod, node)


async def test_replica_that_hangs_delays_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 60.0)
    requested, given_up = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        requested.set()
        try:
            await asyncio.sleep(3600)
        finally:
            given_up.set()
        return web.Response()

    app = web.Application()
    app.add_routes([web.post(PATH, hang)])
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    async with described(2) as replicas:
        host, port = replicas.addresses[1].split(":")
        await web.TCPSite(runner, host, int(port)).start()
        async with replicas.start(0) as first:
            await requested.wait()
            pods = [replicas.cluster.control.create_pod(pod_object(f"p{n}")) for n in range(20)]
            async with asyncio.timeout(DEADLINE_SECONDS):
                for pod in pods:
                    await first.call(pod)
            assert not given_up.is_set()  # all were answered while one message was under way
            now = time.monotonic()
            assert not first.has_received_all(since=now, until=now - 1)
        await runner.cleanup()


async def test_replicas_are_found_by_the_name_of_their_service() -> None:
    async with described(2) as replicas, replicas.start(1) as second:
        port = replicas.addresses[1].rpartition(":")[2]
        found = replicas.peers(service=f"localhost:{port}")
        async with replicas.start(0, found) as first:
            await first.receive_all()
            pod = replicas.cluster.control.create_pod(pod_object("a"))
            node = await first.choose(pod)

            await second.until_assumed(pod, node)


async def test_name_without_addresses_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = 0

    async def nowhere(*_: object, **__: object) -> Any:
        nonlocal lookups
        lookups += 1
        raise OSError("Name or service not known")

    monkeypatch.setattr(PeerDirectory, "_addresses", nowhere)
    ready = Ready(wait_seconds=0)
    async with described(1) as replicas:
        peers = replicas.peers(service="peers.invalid:8888")
        async with replicas.start(0, peers, ready=ready) as first:
            await eventually(lambda: lookups >= 5, deadline_seconds=DEADLINE_SECONDS)

            assert caplog.messages.count("cannot look up the replicas") == 1
            assert not first.has_received_all(since=time.monotonic(), until=0.0)


async def test_own_message_is_answered_and_not_taken() -> None:
    async with described(1) as replicas, replicas.start(0) as first:
        assert first.extender.peers is not None
        own = first.extender.peers.instance
        requested = {"verb": "filter", "uid": "u", "age_seconds": 0.0}
        message = {"version": 1, "instance": own, "requests": [requested]}
        async with first.session.post(f"{first.url}{PATH}", json=message, headers=PROOF) as answer:
            body = await answer.json()

        assert (answer.status, body["instance"]) == (200, own)
        assert len(first.extender.request_log) == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(b"{", "cannot read a message between replicas", id="not-json"),
        pytest.param(b'{"version":9}', "$.version is 9, must be 1", id="other-version"),
        pytest.param(b" " * (MAX_BYTES + 1), f"longer than {MAX_BYTES} bytes", id="too-long"),
    ],
)
async def test_bad_message_gets_an_error_that_names_the_field(body: bytes, words: str) -> None:
    async with described(2) as replicas, replicas.start(0) as first:
        async with first.session.post(
            f"{first.url}{PATH}", data=BytesIO(body), headers=PROOF
        ) as answer:
            reply = await answer.json()

        assert answer.status == 400
        assert words in reply["error"]
        refused = first.count(
            "idlegpu_peer_messages_total", direction="received", outcome="refused"
        )
        assert refused == 1
