"""Several extenders over one simulated cluster, as peers of each other."""

import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extender.app import Extender, start
from extender.effects import peers
from extender.settings.api import ApiSettings
from extender.settings.config import Settings
from extender.settings.service import PeersSettings
from simulation.cluster import SimulatedCluster, run_cluster
from simulation.fleet import SimulatedFleet
from simulation.models import A10
from simulation.nodes import EXPORTER_4_8, NodeSpec, Sharing
from simulation.objects import JsonObject
from testkit.certificates import client_context, settings_for
from testkit.controlplane.process import free_port
from testkit.fake_kube import eventually

DEADLINE_SECONDS = 20.0
ANY = "127.0.0.1:0"
"""Any free port."""

SECRET = "known to all replicas"
PROOF = {"Authorization": f"Bearer {SECRET}"}
"""Credentials of a replica without TLS."""

NODES = tuple(f"equal-{number}" for number in range(4))


def equal_nodes() -> SimulatedFleet:
    """Build a fleet of equal nodes with shared, idle GPUs."""
    fleet = SimulatedFleet()
    for name in NODES:
        fleet.add(
            NodeSpec(
                name=name,
                model=A10,
                cards=1,
                sharing=Sharing.TIME_SLICING,
                replicas=8,
                exporter=EXPORTER_4_8,
            )
        )
    return fleet


@dataclass(frozen=True)
class Replica:
    """One of the extenders."""

    extender: Extender
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.extender.addresses[0]

    async def call(self, pod: JsonObject, verb: str = "prioritize") -> Any:
        """Call a webhook for a pod with all nodes."""
        arguments = {"Pod": pod, "Nodes": None, "NodeNames": list(NODES)}
        async with self.session.post(f"{self.url}/{verb}", json=arguments) as answer:
            return await answer.json()

    async def choose(self, pod: JsonObject) -> str:
        """Return the first choice for a pod."""
        scores: Sequence[JsonObject] = await self.call(pod)
        return str(max(scores, key=lambda score: int(str(score["Score"])))["Host"])

    def assumed(self, pod: JsonObject) -> str:
        """Return the node on which a pod is assumed, "" for none."""
        known = self.extender.fleet.ledger.get(str(pod["metadata"]["uid"]))  # type: ignore[index] # an object
        return known.node if known else ""

    async def until_assumed(self, pod: JsonObject, node: str = "") -> None:
        """Wait until it assumes a pod: on `node`, if given."""
        await eventually(
            lambda: self.assumed(pod) == node if node else self.assumed(pod),
            deadline_seconds=DEADLINE_SECONDS,
        )

    def count(self, name: str, **labels: str) -> float:
        return self.extender.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def bypassed_count(self) -> float:
        return self.count(
            "idlegpu_pods_bypassed_total", scheduler="default-scheduler", reason="not-called"
        )

    def has_received_all(self, *, since: float, until: float) -> bool:
        """Return whether all requests of every other replica in a period were received."""
        peers = self.extender.peers
        return peers is not None and peers.since <= since and peers.until >= until

    async def receive_all(self) -> None:
        """Wait until the messages of every other replica are up to date."""
        began = time.monotonic()
        await eventually(
            lambda: self.has_received_all(since=time.monotonic(), until=began),
            deadline_seconds=DEADLINE_SECONDS,
        )


class Replicas:
    """Extenders whose addresses are peers of each other.

    Args:
        ports: ports of the extenders.
        session: HTTP session for requests.
        tls: folder of their certificates, None for plain HTTP.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        ports: Sequence[int],
        session: aiohttp.ClientSession,
        *,
        tls: Path | None = None,
    ) -> None:
        self.cluster = cluster
        # The API is not tested over TLS here.
        beside: dict[str, Any] = {"status_listen": ANY, "api": ApiSettings(allow_plain=True)}
        self._over_tls = {} if tls is None else {"tls": settings_for(tls), **beside}
        self.addresses = tuple(f"127.0.0.1:{port}" for port in ports)
        self._session = session
        self._secret = cluster.kubeconfig.with_name("peers-secret")
        self._secret.write_text(SECRET)

    def peers(self, addresses: Sequence[str] = (), **changes: Any) -> PeersSettings:
        """Return settings with these addresses as peers."""
        return PeersSettings(addresses=tuple(addresses), secret_file=self._secret, **changes)

    @asynccontextmanager
    async def start(
        self, number: int, peers: PeersSettings | None = None, **changes: Any
    ) -> AsyncIterator[Replica]:
        """Run one extender, and yield it once it is ready.

        Args:
            number: index of its port.
            peers: its peer settings, None for all extenders as peers.
            **changes: other settings.
        """
        values: dict[str, Any] = {
            "listen": self.addresses[number],
            "kubeconfig": self.cluster.kubeconfig,
            "peers": peers or self.peers(self.addresses),
            **self._over_tls,
            **changes,
        }
        async with start(Settings(**values)) as extender:
            await eventually(lambda: extender.is_ready, deadline_seconds=DEADLINE_SECONDS)
            yield Replica(extender, self._session)


@asynccontextmanager
async def described(count: int, *, tls: Path | None = None) -> AsyncIterator[Replicas]:
    """Prepare replicas over a fleet of equal nodes; start them as a test needs.

    Args:
        count: number of replicas.
        tls: folder with the certificates of the replicas and of kube-scheduler, as which requests
            are sent; None for plain HTTP.
    """
    context = True if tls is None else client_context(tls, shows=tls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_RESOLVE_SECONDS", 0.5)
        async with _described(count, context, tls) as replicas:
            yield replicas


@asynccontextmanager
async def _described(
    count: int, context: ssl.SSLContext | bool, tls: Path | None
) -> AsyncIterator[Replicas]:
    async with (
        run_cluster(equal_nodes(), interval_seconds=0.5) as cluster,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
    ):
        yield Replicas(cluster, [free_port() for _ in range(count)], session, tls=tls)


@asynccontextmanager
async def running(
    count: int, *, tls: Path | None = None
) -> AsyncIterator[tuple[SimulatedCluster, list[Replica]]]:
    """Run replicas, and yield them once they exchange messages; arguments as in `described`."""
    async with described(count, tls=tls) as replicas, AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(replicas.start(number)) for number in range(count)
        ]
        for replica in started:
            await replica.receive_all()
        yield replicas.cluster, started
