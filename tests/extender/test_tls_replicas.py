"""Replicas that serve over TLS tell each other over TLS."""

from pathlib import Path

import pytest

from extender import tls as tls_module
from simulation.objects import pod_object
from tests.extender.certificates import issue, reissue
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
