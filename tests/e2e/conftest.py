"""Fixtures of the scenarios.

`E2E_WAY` selects the configuration of extender and kube-scheduler: see `testkit.controlplane.ways`.
With `E2E_WITHOUT_EXTENDER=1` most scenarios must fail: see `testkit.controlplane.services`.
"""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from itertools import count
from typing import Final

import pytest
import pytest_asyncio

from testkit.controlplane.client import ApiClient
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.services import Services
from testkit.controlplane.ways import chosen_way, set_up, take_down
from testkit.controlplane.world import World, open_world

LOG_CHARACTERS: Final = 4_000

_numbers = count(1)


@pytest.fixture(scope="package")
def services(control_plane: ControlPlane) -> Iterator[Services]:
    """Yield all processes but the control plane, and stop them after this package's tests."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        setup = runner.run(set_up(control_plane, chosen_way()))
        running = Services(control_plane, setup)
        yield running
        running.stop()
        runner.run(running.ensure_plane())  # a failed scenario may have left it stopped
        runner.run(take_down(control_plane, setup))


@pytest_asyncio.fixture
async def world(services: Services) -> AsyncIterator[World]:
    """Yield an empty cluster with new names of nodes and pods."""
    async with open_world(services, f"s{next(_numbers)}") as opened:
        yield opened


@pytest_asyncio.fixture
async def cluster(services: Services) -> AsyncIterator[ApiClient]:
    """Yield an empty cluster for tests with their own kube-scheduler: the shared one is stopped."""
    services.stop()
    await services.ensure_plane()
    await services.plane.reset()
    async with services.plane.client() as client:
        yield client


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of the logs to a failed scenario's report."""
    report = yield
    services = getattr(item, "funcargs", {}).get("services") if report.failed else None
    if isinstance(services, Services):
        for process in services.started:
            text = process.log.read_text(errors="replace") if process.log.exists() else ""
            report.sections.append((f"the end of {process.log}", text[-LOG_CHARACTERS:]))
    return report
