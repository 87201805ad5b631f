"""Test that replicas with TLS send each other messages over TLS."""

import ssl
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from extender.effects.peer_link import PeerLink
from extender.server import tls as tls_module
from extender.server.certificates.storing import read_folder
from extender.server.tls import Certificates
from simulation.objects import pod_object
from testkit.certificates import client_context, issue, reissue, settings_for
from testkit.fake_kube import eventually
from testkit.replicas import running


async def test_placed_pod_counts_at_the_other_replica_before_and_after_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_module, "_POLL_SECONDS", 0.05)
    caplog.set_level("INFO", logger="extender.server.tls")
    files = issue(tmp_path)
    async with running(2, tls=tmp_path) as (cluster, replicas):
        one, other = replicas

        first = cluster.control.create_pod(pod_object("a"))
        node = await one.choose(first)
        await other.until_assumed(first, node)

        reissue(tmp_path, files)
        before = [replica.extender.addresses for replica in replicas]
        await eventually(lambda: caplog.messages.count("using new certificates") == 2)
        second = cluster.control.create_pod(pod_object("b"))
        node = await other.choose(second)
        await one.until_assumed(second, node)

        assert [replica.extender.addresses for replica in replicas] == before
        assert all(urls[0].startswith("https://") for urls in before)


async def test_a_replica_whose_ca_was_dropped_gets_no_further_requests(tmp_path: Path) -> None:
    old, new, own = tmp_path / "old", tmp_path / "new", tmp_path / "own"
    issue(old)
    issue(new)
    issue(own, files=read_folder(old))
    certificates = Certificates(settings_for(own))

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="an answer")

    app = web.Application()
    app.add_routes([web.get("/v1/peers/any", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    served = ssl.SSLContext(
        ssl.PROTOCOL_TLS_SERVER
    )  # of the old CA, and without client certificates
    served.load_cert_chain(old / "extender" / "tls.crt", old / "extender" / "tls.key")
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=served).start()
    async with aiohttp.ClientSession() as session:
        link = PeerLink(
            ("127.0.0.1", runner.addresses[0][1]),
            session,
            instance="us",
            interval_seconds=1.0,
            monotonic=time.monotonic,
            count=lambda _: None,
            tls=lambda: certificates.client,
        )
        try:
            assert await link.query("/v1/peers/any") == b"an answer"

            issue(own, files=read_folder(new))
            certificates._server_context.reload()

            # Neither on a new connection nor on the existing one.
            assert await link.query("/v1/peers/any") is None
        finally:
            await runner.cleanup()


async def test_at_shutdown_a_refused_client_also_learns_that_its_connection_ends(
    tmp_path: Path,
) -> None:
    issue(tmp_path)
    # With the name of another client.
    context = client_context(tmp_path, shows=tmp_path, side="extender")
    connector = aiohttp.TCPConnector(ssl=context)
    async with (
        running(1, tls=tmp_path) as (_, replicas),
        aiohttp.ClientSession(connector=connector) as stranger,
    ):
        (replica,) = replicas
        replica.extender.request_tracker.is_draining = True

        async with stranger.post(f"{replica.url}/filter", data=b"{}") as answer:
            assert answer.status == 403
            assert answer.headers.get("Connection") == "close"
