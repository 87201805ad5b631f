"""Test replicas that start, fall behind and catch up: real extenders with cut connections."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from extender.app import Extender, start
from extender.server import readiness as module
from extender.server.readiness import ReadyState
from extender.settings.config import Settings
from extender.settings.service import ClusterSettings, Ready
from extender.settings.sources import Agents, Prometheus
from simulation.cluster import SimulatedCluster, run_cluster
from testkit.controlplane.process import free_port
from testkit.fake_kube import eventually
from testkit.replicas import Replica, Replicas, described, equal_nodes


class Gate:
    """Proxy that forwards to a server while it is open.

    Args:
        url: URL of the server.

    Attributes:
        url: URL of the proxy.
    """

    def __init__(self, url: str) -> None:
        self.is_open = False
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._there = urlsplit(url)
        self._writers: set[asyncio.StreamWriter] = set()

    def open(self) -> None:
        """Forward from now on."""
        self.is_open = True

    def shut(self) -> None:
        """Refuse connections, and close the existing ones."""
        self.is_open = False
        for writer in self._writers:
            writer.close()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward or refuse a connection."""
        if not self.is_open:
            writer.close()
            return
        there, back = await asyncio.open_connection(self._there.hostname, self._there.port)
        both = {writer, back}
        self._writers |= both
        try:
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pass(reader, back))
                    group.create_task(_pass(there, writer))
        finally:
            self._writers -= both
            for one in both:
                one.close()


@asynccontextmanager
async def gate(url: str) -> AsyncIterator[Gate]:
    """Run a proxy, closed at first."""
    made = Gate(url)
    server = await asyncio.start_server(made.take, "127.0.0.1", made.port)
    try:
        yield made
    finally:
        made.shut()
        server.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
        await writer.drain()
    writer.close()


DEADLINE_SECONDS = 20.0
PATIENT = Ready(wait_seconds=300)
QUICK = ClusterSettings(max_backoff_seconds=1)


async def until_ready(extender: Extender) -> None:
    await eventually(lambda: extender.is_ready, deadline_seconds=DEADLINE_SECONDS)


async def until_allocated(extender: Extender) -> None:
    await eventually(lambda: extender.readiness.is_allocated, deadline_seconds=DEADLINE_SECONDS)


async def until_state(extender: Extender, state: ReadyState) -> None:
    await eventually(lambda: extender.readiness.state is state, deadline_seconds=DEADLINE_SECONDS)


@pytest.fixture(autouse=True)
def quickly_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEHIND_SECONDS", 1.0)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[SimulatedCluster]:
    async with run_cluster(equal_nodes(), interval_seconds=0.5) as running:
        yield running


async def test_a_replica_is_ready_after_first_readings(cluster: SimulatedCluster) -> None:
    async with gate(cluster.prometheus_url) as way:
        settings = Settings(
            listen="127.0.0.1:0",
            kubeconfig=cluster.kubeconfig,
            prometheus=Prometheus(url=way.url, interval_seconds=0.5),
            ready=PATIENT,
        )
        async with start(settings) as extender:
            await until_allocated(extender)
            prometheus = extender.source_manager.prometheus
            assert prometheus is not None
            await eventually(
                lambda: prometheus.status().failures > 1, deadline_seconds=DEADLINE_SECONDS
            )
            assert extender.readiness.state is ReadyState.STARTING

            way.open()

            await until_ready(extender)
            assert prometheus.status().last_success_at is not None
            store = extender.fleet.store
            seen = [store.info(row) for row in store.rows_on(store.nodes).tolist()]
            assert seen
            # The garbage collector skips these objects while requests are served.
            assert not {id(one) for one in gc.get_objects()}.intersection(map(id, seen))


async def test_a_replica_waits_for_agents_on_nodes_with_gpus(cluster: SimulatedCluster) -> None:
    settings = Settings(
        listen="127.0.0.1:0",
        kubeconfig=cluster.kubeconfig,
        agents=Agents(listen=f"127.0.0.1:{free_port()}"),
        ready=PATIENT,
    )
    async with start(settings) as extender:
        await until_allocated(extender)

        assert extender.readiness.causes() == {"start": "no first readings or peers yet: agents"}


async def test_a_replica_waits_for_a_peer_that_answers_but_does_not_know_it_yet() -> None:
    async with described(2) as replicas:
        alone = replicas.peers(replicas.addresses[:1])  # as before the next DNS look-up
        async with replicas.start(0, alone), AsyncExitStack() as stack:
            settings = Settings(
                listen=replicas.addresses[1],
                kubeconfig=replicas.cluster.kubeconfig,
                peers=replicas.peers(replicas.addresses),
                ready=PATIENT,
            )
            second = await stack.enter_async_context(start(settings))
            await until_allocated(second)
            peers = second.peers
            assert peers is not None
            await eventually(
                lambda: any(link.is_answering for link in peers._others()),
                deadline_seconds=DEADLINE_SECONDS,
            )

            assert second.readiness.causes() == {"start": "no first readings or peers yet: peers"}


async def test_a_replica_does_not_wait_for_a_peer_that_does_not_answer() -> None:
    async with described(2) as replicas, replicas.start(0, ready=PATIENT) as first:
        assert first.extender.is_ready


@dataclass(frozen=True)
class Pair:
    """Two replicas as peers, each with its own proxy to the API server.

    Attributes:
        replicas: the two replicas.
        ways: proxies to the API server.
        kubelets: tasks that probe them like kubelets.
    """

    replicas: tuple[Replica, ...]
    ways: tuple[Gate, ...]
    kubelets: tuple[asyncio.Task[None], ...]

    async def until(self, *states: ReadyState) -> None:
        """Wait until both replicas have these states."""
        await eventually(
            lambda: tuple(one.extender.readiness.state for one in self.replicas) == states,
            deadline_seconds=DEADLINE_SECONDS,
        )

    async def health(self, number: int) -> tuple[int, str]:
        """Return the answer to the kubelet's probe of a replica."""
        replica = self.replicas[number]
        async with replica.session.get(f"{replica.url}/readyz") as answer:
            return answer.status, (await answer.json())["status"]


@asynccontextmanager
async def pair(replicas: Replicas) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        ways = [
            await stack.enter_async_context(gate(replicas.cluster.apiserver_url)) for _ in range(2)
        ]
        started = []
        for number, way in enumerate(ways):
            way.open()
            kubeconfig = replicas.cluster.kubeconfig.with_name(f"kubeconfig-{number}")
            text = replicas.cluster.kubeconfig.read_text(encoding="utf-8")
            kubeconfig.write_text(text.replace(replicas.cluster.apiserver_url, way.url))
            changes: dict[str, Any] = {"kubeconfig": kubeconfig, "ready": PATIENT, "cluster": QUICK}
            started.append(await stack.enter_async_context(replicas.start(number, **changes)))
        for replica in started:
            await replica.receive_all()
        async with asyncio.TaskGroup() as group:
            kubelets = [group.create_task(probe(replica)) for replica in started]
            yield Pair(tuple(started), tuple(ways), tuple(kubelets))
            for kubelet in kubelets:
                kubelet.cancel()


async def probe(replica: Replica) -> None:
    """Probe like a kubelet until cancelled."""
    while True:
        async with replica.session.get(f"{replica.url}/readyz"):
            pass
        await asyncio.sleep(0.1)


async def test_a_replica_without_the_api_server_is_behind_one_with_it() -> None:
    ready, behind = ReadyState.READY, ReadyState.BEHIND
    async with described(2) as replicas, pair(replicas) as both:
        await both.until(ready, ready)

        both.ways[1].shut()
        await both.until(ready, behind)
        assert await both.health(0) == (200, "degraded")  # no telemetry is configured
        assert await both.health(1) == (503, "behind")

        both.ways[0].shut()  # all have the same fault: some replica must still answer
        await both.until(ready, ready)
        assert {await both.health(0), await both.health(1)} == {(200, "degraded")}

        both.ways[1].open()
        await both.until(behind, ready)

        both.ways[0].open()
        await both.until(ready, ready)


async def test_a_departed_replica_makes_no_other_unready() -> None:
    async with described(2) as replicas, pair(replicas) as both:
        both.ways[1].shut()
        await both.until(ReadyState.READY, ReadyState.BEHIND)

        both.replicas[0].extender.request_tracker.is_draining = True  # as at shutdown

        await both.until(ReadyState.ENDING, ReadyState.READY)
        both.replicas[0].extender.request_tracker.is_draining = False


async def test_a_replica_without_a_kubelet_makes_no_other_unready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PROBE_SECONDS", 1.0)
    async with described(2) as replicas, pair(replicas) as both:
        both.ways[1].shut()
        await both.until(ReadyState.READY, ReadyState.BEHIND)

        both.kubelets[0].cancel()  # Kubernetes will remove it from the Service

        await both.until(ReadyState.READY, ReadyState.READY)
