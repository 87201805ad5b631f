"""The oldest Kubernetes, in place of the newest that all other tests run with."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
import pytest_asyncio

from tests.controlplane.deployed import grant_rights
from tests.controlplane.plane import ControlPlane
from tests.controlplane.tools import OLDEST
from tests.e2e.services import Services
from tests.e2e.world import World, open_world

_numbers = count(1)


@pytest.fixture(scope="package")
def oldest_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server of the oldest release, for this package's tests."""
    plane = ControlPlane(tmp_path_factory.mktemp("oldest"), release=OLDEST)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(plane.start())
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="package")
def services(oldest_plane: ControlPlane) -> Iterator[Services]:
    """The oldest kube-scheduler, with everything else as it always is."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(grant_rights(oldest_plane))
    running = Services(oldest_plane)
    yield running
    running.stop()


@pytest_asyncio.fixture
async def world(services: Services) -> AsyncIterator[World]:
    """An empty cluster, with nodes and pods that no case had before."""
    async with open_world(services, f"o{next(_numbers)}") as opened:
        yield opened
