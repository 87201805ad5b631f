"""The exporter's server: one scrape for each node, and every way to fail at it."""

import aiohttp
import pytest

from simulation.dcgm import CONTENT_TYPE, render
from simulation.demo_fleet import demo_fleet
from simulation.exporter import run_exporter
from simulation.nodes import ExporterState
from tests.simulation.builders import Clock, fleet, spec


async def test_each_node_is_scraped_by_its_name() -> None:
    built = demo_fleet(Clock())

    async with run_exporter(built) as url, aiohttp.ClientSession() as session:
        for name in ("gpu-h100-01", "gpu-a100-mig-01"):
            async with session.get(f"{url}/metrics", params={"node": name}) as response:
                text = await response.text()

            assert response.headers["Content-Type"] == CONTENT_TYPE
            assert text == render(built.node(name).spec, built.views(name))


@pytest.mark.parametrize(
    ("state", "status", "body"),
    [
        (ExporterState.MISSING, 404, "this exporter is configured as missing"),
        (ExporterState.ERROR, 500, "this exporter is configured to fail"),
        (ExporterState.EMPTY, 200, ""),
    ],
)
async def test_an_exporter_fails_according_to_its_state(
    state: ExporterState, status: int, body: str
) -> None:
    built = fleet()
    built.node("node-a").exporter = state

    async with run_exporter(built) as url, aiohttp.ClientSession() as session:
        response = await session.get(f"{url}/metrics", params={"node": "node-a"})

        assert (response.status, await response.text()) == (status, body)


async def test_an_exporter_that_is_down_breaks_the_connection() -> None:
    built = fleet(spec(), spec("node-b"))
    built.node("node-a").exporter = ExporterState.DOWN

    async with run_exporter(built) as url, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{url}/metrics", params={"node": "node-a"})
        response = await session.get(f"{url}/metrics", params={"node": "node-b"})

        assert response.status == 200


async def test_an_unknown_node_is_named() -> None:
    async with run_exporter(fleet()) as url, aiohttp.ClientSession() as session:
        response = await session.get(f"{url}/metrics", params={"node": "nowhere"})

        assert response.status == 404
        assert await response.text() == "no such node in the simulated fleet: nowhere"
