"""Replicas that serve over TLS tell each other over TLS."""

from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from extender import tls as tls_module
from extender.app import start
from extender.config import Settings
from extender.settings.peers import Peers
from simulation.cluster import run_cluster
from simulation.objects import JsonObject, pod_object
from tests.controlplane.process import free_port
from tests.extender.certificates import client_context, issue, reissue, settings_for
from tests.extender.fake_kube import eventually
from tests.extender.replicas import DEADLINE_SECONDS, Replica, equal_nodes


def uid_of(pod: JsonObject) -> str:
    return str(pod["metadata"]["uid"])  # type: ignore[index] # an object


async def test_a_pod_placed_by_one_replica_counts_at_the_other_before_and_after_a_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_module, "POLL_SECONDS", 0.05)
    caplog.set_level("INFO", logger="extender.tls")
    files = issue(tmp_path)
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))
    connector = aiohttp.TCPConnector(ssl=client_context(tmp_path, shows=tmp_path))
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(run_cluster(equal_nodes(), interval_seconds=0.5))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        settings = Settings(
            listen=addresses[0],
            status_listen="127.0.0.1:0",
            tls=settings_for(tmp_path),
            kubeconfig=cluster.kubeconfig,
            peers=Peers(addresses=addresses),
        )
        replicas = []
        for address in addresses:
            extender = await stack.enter_async_context(
                start(settings.model_copy(update={"listen": address}))
            )
            replicas.append(Replica(extender, session))
        one, other = replicas
        for replica in replicas:
            await eventually(
                lambda: replica.extender.is_ready,  # noqa: B023 - waited for
                deadline_seconds=DEADLINE_SECONDS,
            )
            await replica.hear_all()

        first = cluster.control.create_pod(pod_object("a"))
        node = await one.choose(first)
        await eventually(lambda: other.assumed(uid_of(first)) == node)

        reissue(tmp_path, files)
        before = [replica.extender.addresses for replica in replicas]
        await eventually(lambda: caplog.messages.count("using new certificates") == 2)
        second = cluster.control.create_pod(pod_object("b"))
        node = await other.choose(second)
        await eventually(lambda: one.assumed(uid_of(second)) == node)

        assert [replica.extender.addresses for replica in replicas] == before
        assert all(urls[0].startswith("https://") for urls in before)
