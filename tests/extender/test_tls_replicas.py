"""Replicas that serve over TLS tell each other over TLS."""

from pathlib import Path

import aiohttp
import pytest

from extender import tls as tls_module
from simulation.objects import pod_object
from tests.extender.certificates import client_context, issue, reissue
from tests.extender.fake_kube import eventually
from tests.extender.replicas import running


async def test_a_pod_placed_by_one_replica_counts_at_the_other_before_and_after_a_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_module, "POLL_SECONDS", 0.05)
    caplog.set_level("INFO", logger="extender.tls")
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


async def test_who_may_not_ask_is_told_at_the_end_as_well_that_the_connection_ends(
    tmp_path: Path,
) -> None:
    issue(tmp_path)
    connector = aiohttp.TCPConnector(
        ssl=client_context(tmp_path, shows=tmp_path, side="extender")  # another's name
    )
    async with (
        running(1, tls=tmp_path) as (_, replicas),
        aiohttp.ClientSession(connector=connector) as stranger,
    ):
        (replica,) = replicas
        replica.extender.in_flight.is_draining = True

        async with stranger.post(f"{replica.url}/filter", data=b"{}") as answer:
            assert answer.status == 403
            assert answer.headers.get("Connection") == "close"
