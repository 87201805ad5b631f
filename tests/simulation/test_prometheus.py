"""The simulated Prometheus over HTTP, as prometheus-api-client and the extender ask it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException

from simulation.exporter import run_exporter
from simulation.fleet import SimulatedFleet
from simulation.nodes import ExporterState
from simulation.prometheus import (
    SimulatedPrometheus,
    TargetLabels,
    build_app,
    plain_labels,
    run_prometheus,
    service_monitor_labels,
)
from simulation.serving import serve
from tests.simulation.builders import NOW, Clock, fleet, pod, spec


@dataclass
class Setup:
    """A fleet, its Prometheus, and its HTTP API."""

    fleet: SimulatedFleet
    clock: Clock
    prometheus: SimulatedPrometheus
    session: aiohttp.ClientSession
    url: str

    async def scrape(self, at: float) -> None:
        self.clock.now = at
        await self.prometheus.scrape(self.session)

    async def query(self, text: str, **parameters: str) -> list[dict[str, Any]]:
        url = f"{self.url}/api/v1/query"
        async with self.session.get(url, params={"query": text, **parameters}) as response:
            answer = await response.json()
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@pytest.fixture(params=[plain_labels], ids=["plain"])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    clock = Clock()
    built = fleet(spec(cards=2), spec("node-b", cards=1), clock=clock)
    target_labels: TargetLabels = request.param
    async with run_exporter(built) as exporter_url, aiohttp.ClientSession() as session:
        prometheus = SimulatedPrometheus(
            fleet=built, exporter_url=exporter_url, target_labels=target_labels
        )
        async with serve(build_app(prometheus)) as url:
            yield Setup(built, clock, prometheus, session, url)


async def test_a_scraped_value_has_the_exporters_labels_and_the_targets(setup: Setup) -> None:
    setup.fleet.set_utilization("node-b", 0, 0.4)
    await setup.scrape(NOW)

    (element,) = await setup.query('DCGM_FI_DEV_GPU_UTIL{Hostname="node-b"}')

    assert element["value"] == [NOW, "40"]
    assert element["metric"] == {
        "__name__": "DCGM_FI_DEV_GPU_UTIL",
        "gpu": "0",
        "UUID": setup.fleet.card("node-b", 0).uuid,
        "pci_bus_id": "00000000:1A:00.0",
        "device": "nvidia0",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": "node-b",
        "DCGM_FI_DRIVER_VERSION": "580.95.05",
        "instance": "10.0.0.98:9400",
        "job": "dcgm-exporter",
    }


@pytest.mark.parametrize("setup", [service_monitor_labels], indirect=True, ids=["monitor"])
async def test_a_service_monitor_renames_the_workloads_labels(setup: Setup) -> None:
    setup.fleet.place(pod("a"), "node-a", "nvidia.com/gpu")
    await setup.scrape(NOW)

    held, idle = await setup.query('DCGM_FI_DEV_FB_USED{Hostname="node-a"}')

    assert held["metric"]["exported_pod"] == "a"
    assert held["metric"]["pod"] == idle["metric"]["pod"] == "nvidia-dcgm-exporter-node-a"
    assert "exported_pod" not in idle["metric"]


@pytest.mark.parametrize("state", [ExporterState.DOWN, ExporterState.ERROR, ExporterState.MISSING])
async def test_a_failed_scrape_ends_the_nodes_series_and_is_not_up(
    setup: Setup, state: ExporterState
) -> None:
    await setup.scrape(NOW)
    setup.fleet.node("node-a").exporter = state
    await setup.scrape(NOW + 5)

    alive = await setup.query("group by (Hostname) (DCGM_FI_DEV_GPU_TEMP)")
    up = await setup.query("up")

    assert [element["metric"] for element in alive] == [{"Hostname": "node-b"}]
    assert sorted(element["value"][1] for element in up) == ["0", "1"]


async def test_an_empty_scrape_ends_the_series_while_the_target_is_up(setup: Setup) -> None:
    await setup.scrape(NOW)
    setup.fleet.node("node-a").exporter = ExporterState.EMPTY
    await setup.scrape(NOW + 5)

    assert len(await setup.query("DCGM_FI_DEV_GPU_TEMP")) == 1
    assert [element["value"][1] for element in await setup.query("up")] == ["1", "1"]


async def test_a_silent_nodes_last_sample_stays_for_the_lookback(setup: Setup) -> None:
    setup.fleet.silence("node-a", age_seconds=240)
    setup.prometheus.backfill(600)
    await setup.scrape(NOW + 1)

    times = await setup.query("max by (Hostname) (timestamp(DCGM_FI_DEV_GPU_TEMP))")
    later = await setup.query("max by (Hostname) (DCGM_FI_DEV_GPU_TEMP)", time=str(NOW + 61))

    assert {element["metric"]["Hostname"]: float(element["value"][1]) for element in times} == {
        "node-a": NOW - 240,
        "node-b": NOW + 1,
    }
    assert [element["metric"]["Hostname"] for element in later] == ["node-b"]


async def test_the_past_is_filled_before_the_first_scrape(setup: Setup) -> None:
    setup.fleet.set_utilization("node-a", 1, 0.25)
    setup.prometheus.backfill(3600)
    parameters = {
        "query": "max by (UUID) (DCGM_FI_DEV_GPU_UTIL)",
        "start": str(NOW - 3600),
        "end": datetime.fromtimestamp(NOW, UTC).isoformat(),
        "step": "60s",
    }

    async with setup.session.post(f"{setup.url}/api/v1/query_range", data=parameters) as response:
        answer = await response.json()

    rows = {row["metric"]["UUID"]: row["values"] for row in answer["data"]["result"]}
    values = rows[setup.fleet.card("node-a", 1).uuid]
    assert answer["data"]["resultType"] == "matrix"
    assert len(rows) == 3
    assert [value for _, value in values] == ["25"] * 61
    assert values[0][0] == NOW - 3600


@pytest.mark.parametrize(
    ("path", "parameters", "status", "kind", "text"),
    [
        pytest.param(
            "query", {"query": "irate(x[5m])"}, 400, "bad_data", "does not understand", id="beyond"
        ),
        pytest.param(
            "query", {"query": "x[5m]"}, 422, "execution", "range vector", id="unexecutable"
        ),
        pytest.param("query", {"query": "x", "time": "noon"}, 400, "bad_data", "noon", id="time"),
        pytest.param(
            "query_range",
            {"query": "x", "start": "10", "end": "0", "step": "1"},
            400,
            "bad_data",
            "end timestamp",
            id="backwards",
        ),
        pytest.param(
            "query_range",
            {"query": "x", "start": "0", "end": "20000", "step": "1"},
            400,
            "bad_data",
            "11000 points",
            id="too-fine",
        ),
    ],
)
async def test_errors_have_the_form_of_prometheus(
    setup: Setup, path: str, parameters: dict[str, str], status: int, kind: str, text: str
) -> None:
    async with setup.session.get(f"{setup.url}/api/v1/{path}", params=parameters) as response:
        answer = await response.json()

    assert response.status == status
    assert (answer["status"], answer["errorType"]) == ("error", kind)
    assert text in answer["error"]


async def ask(
    setup: Setup, call: Callable[[PrometheusConnect], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Run a blocking call of prometheus-api-client in a thread."""

    def run() -> list[dict[str, Any]]:
        with PrometheusConnect(url=setup.url, timeout=5) as connect:
            return call(connect)

    return await asyncio.to_thread(run)


async def test_prometheus_api_client_reads_instants_and_ranges(setup: Setup) -> None:
    setup.prometheus.backfill(300)
    await setup.scrape(NOW + 1)
    query = "max by (Hostname) (DCGM_FI_DEV_GPU_UTIL)"
    start, end = (datetime.fromtimestamp(at, UTC) for at in (NOW - 300, NOW))

    instant = await ask(setup, lambda connect: connect.custom_query(query))
    past = await ask(setup, lambda connect: connect.custom_query_range(query, start, end, "60"))

    assert [element["value"][1] for element in instant] == ["0", "0"]
    assert [len(row["values"]) for row in past] == [6, 6]


async def test_the_names_of_metrics_are_listed(setup: Setup) -> None:
    await setup.scrape(NOW)

    response = await setup.session.get(f"{setup.url}/api/v1/label/__name__/values")

    assert {"DCGM_FI_DEV_GPU_UTIL", "up"} <= set((await response.json())["data"])


async def test_prometheus_api_client_gets_an_error_for_an_unsupported_query(setup: Setup) -> None:
    with pytest.raises(PrometheusApiClientException, match="does not understand"):
        await ask(setup, lambda connect: connect.custom_query("irate(x[5m])"))


async def test_health_and_build_are_answered(setup: Setup) -> None:
    healthy = await setup.session.get(f"{setup.url}/-/healthy")
    build = await setup.session.get(f"{setup.url}/api/v1/status/buildinfo")

    assert healthy.status == 200
    assert "simulated" in (await build.json())["data"]["version"]


async def test_it_scrapes_by_itself_while_it_runs() -> None:
    built = fleet()
    async with run_exporter(built) as exporter_url:
        prometheus = SimulatedPrometheus(
            fleet=built, exporter_url=exporter_url, interval_seconds=0.01
        )
        async with run_prometheus(prometheus), asyncio.timeout(30):
            while not list(prometheus.store.select("DCGM_FI_DEV_GPU_TEMP")):
                await asyncio.sleep(0.01)  # nothing tells of a scrape
