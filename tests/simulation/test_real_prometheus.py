"""The simulation against a real Prometheus: it scrapes the exporter and gives equal answers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from extender.sources.prometheus import promql as product
from extender.sources.prometheus.dcgm import DEFAULT_METRICS, build_table
from simulation.demo_fleet import demo_fleet
from simulation.exporter import instance_of, run_exporter
from simulation.fleet import SimulatedFleet
from simulation.nodes import ExporterState
from simulation.prometheus import SimulatedPrometheus, build_app
from testkit.controlplane.telemetry import PrometheusServer
from testkit.controlplane.waiting import wait_for
from testkit.serving import serve

pytestmark = pytest.mark.prometheus

KNOWN_BY = ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_TEMP")

QUERIES = (
    *(product.metric_query(metric, "") for metric in build_table()),
    product.relabeled_pods_query(KNOWN_BY, ""),
    product.plain_pods_query(KNOWN_BY, 'job="dcgm-exporter"'),
    product.legacy_pods_query(KNOWN_BY, ""),
    product.exporter_pods_query(KNOWN_BY, ""),
    product.names_query([metric.name for metric in DEFAULT_METRICS], ""),
    "DCGM_FI_DEV_XID_ERRORS",
    'min by (Hostname, hostname) (DCGM_FI_DEV_FB_FREE{modelName!~"NVIDIA.*"})',
    "count(DCGM_FI_DEV_GPU_UTIL) by (pod, vgpu)",
    "avg by (GPU_I_PROFILE) (DCGM_FI_DEV_FB_USED)",
    "last_over_time(DCGM_FI_DEV_POWER_USAGE[2m])",
    product.max_query(DEFAULT_METRICS[0], "", 900.0),
    'up{instance="10.0.0.15:9400"} and on (job, instance) (DCGM_FI_DEV_GPU_TEMP)',
)

REFUSED = ("max by (UUID (up)", "", "{}", 'timestamp({__name__=~"DCGM_FI_DEV_(FB_USED|GPU_TEMP)"})')

NODES, DEVICES = 13, 60

Answer = dict[frozenset[tuple[str, str]], float]


@dataclass
class Pair:
    """The simulated and the real Prometheus, after a scrape of the same frozen fleet."""

    simulated_url: str
    real_url: str
    session: aiohttp.ClientSession

    async def fetch(self, base: str, query: str) -> tuple[int, Answer]:
        """Return status, and values by labels."""
        url = f"{base}/api/v1/query"
        async with self.session.get(url, params={"query": query}) as response:
            document = await response.json()
        elements = document.get("data", {}).get("result", [])
        return response.status, {
            frozenset(element["metric"].items()): float(element["value"][1]) for element in elements
        }


def frozen_fleet() -> SimulatedFleet:
    """Return the demo's fleet with all exporters up and all values frozen."""
    fleet = demo_fleet()
    for node in fleet.nodes.values():
        node.exporter, node.silent_since = ExporterState.UP, None
    fleet.freeze()
    return fleet


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    fleet = frozen_fleet()
    async with run_exporter(fleet) as exporter_url, aiohttp.ClientSession() as session:
        simulated = SimulatedPrometheus(fleet=fleet, exporter_url=exporter_url)
        await simulated.scrape(session)
        # A scrape that takes longer than the interval would end the series between two queries.
        real = PrometheusServer(tmp_path, f"{exporter_url}/metrics", interval_seconds=5.0)
        real.set_targets(
            fleet.nodes,
            {name: {"instance": instance_of(node)} for name, node in fleet.nodes.items()},
        )
        await real.process.start()
        async with serve(build_app(simulated)) as simulated_url:
            try:
                yield Pair(simulated_url, real.url, session)
            finally:
                await real.process.stop()


async def test_real_prometheus_answers_as_the_fake_does(pair: Pair) -> None:
    async def has_everything() -> bool:
        _, up = await pair.fetch(pair.real_url, "up == 1")
        return len(up) == NODES

    await wait_for(has_everything, "every node is up in Prometheus")

    for query in QUERIES:
        real, simulated = [
            await pair.fetch(url, query) for url in (pair.real_url, pair.simulated_url)
        ]
        assert simulated == real, query

    devices = product.devices_query(KNOWN_BY, ("Hostname", "hostname", "instance"), "")
    (_, real_times), (_, times) = [
        await pair.fetch(url, devices) for url in (pair.real_url, pair.simulated_url)
    ]
    assert times.keys() == real_times.keys()
    assert len(times) == DEVICES

    for query in REFUSED:
        real_status, _ = await pair.fetch(pair.real_url, query)
        status, _ = await pair.fetch(pair.simulated_url, query)
        assert status == real_status >= 400, query
