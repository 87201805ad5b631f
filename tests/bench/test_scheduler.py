"""Simulated Prometheus of the benchmark with kube-scheduler, compared with its cluster."""

from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from bench.backend_prometheus import METRICS, Prometheus
from bench.scheduler_cluster import gpu_node
from bench.scheduler_names import GPUS, HELD, gpu_uuid, node_name, tenant_name
from bench.scheduler_prometheus import SCRAPE_SECONDS, SchedulerFleet, build_app
from extender.core.devices.readings import DeviceKey
from extender.settings.sources import Prometheus as PrometheusSettings
from extender.sources.prometheus import promql
from extender.sources.prometheus.dcgm_devices import _parse_devices, device_key
from extender.sources.prometheus.node_identity import NodeIdentity

NODES = 60
UTILIZATION = ["DCGM_FI_DEV_GPU_UTIL"]


async def fetch(query: str) -> tuple[float, list[dict[str, Any]]]:
    """Return the server's time and the rows of an answer."""
    app = build_app(Prometheus(SchedulerFleet(NODES), scrape_seconds=SCRAPE_SECONDS))
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/prometheus/api/v1/query", params={"query": query})
        rows: list[dict[str, Any]] = (await response.json())["data"]["result"]
    return rows[0]["value"][0], rows


async def test_the_extender_finds_every_gpu_on_its_node_and_fresh() -> None:
    names = [node_name(number) for number in range(NODES)]
    identity = NodeIdentity(names=frozenset(names))
    labels = PrometheusSettings().node_labels

    now, rows = await fetch(promql.devices_query(UTILIZATION, labels, ""))
    found = _parse_devices(rows, identity, labels)

    assert found.unmatched_series == 0
    assert len(found.devices) == NODES * GPUS
    row = found.devices[DeviceKey((gpu_uuid(3, 5), ""))]
    assert (row.node, row.card_index) == (names[3], 5)
    assert all(-0.001 <= now - at <= SCRAPE_SECONDS for at in found.scraped.values())


async def test_the_tenants_of_the_api_server_hold_the_first_gpus() -> None:
    _, rows = await fetch(promql.relabeled_pods_query(UTILIZATION, ""))

    held = {device_key(row["metric"]): row["metric"]["exported_pod"] for row in rows}
    expected = {
        (gpu_uuid(node, gpu), ""): tenant_name(node) for node in range(NODES) for gpu in range(HELD)
    }
    assert held == expected
    assert set(UTILIZATION) <= METRICS.keys()


def test_nodes_are_as_many_gpus_as_telemetry_shows() -> None:
    assert gpu_node(0)["status"]["allocatable"]["nvidia.com/gpu"] == str(GPUS)
