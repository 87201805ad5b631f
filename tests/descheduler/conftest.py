"""A control plane where ReplicaSets replace the pods that are evicted, and budgets are counted."""

from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Final

import pytest
import pytest_asyncio

from testkit.controlplane.apart import services_on
from testkit.controlplane.controllers import kube_controller_manager
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.services import Services
from testkit.controlplane.world import World, open_world
from tests.descheduler.replicas import dissolve_all

CONTROLLERS: Final = ("replicaset-controller", "disruption-controller")

_numbers = count(1)


@pytest.fixture(scope="package")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A control plane of its own: the descheduler looks at every pod of a cluster."""
    with services_on(ControlPlane(tmp_path_factory.mktemp("plane"))) as running:
        yield running


@pytest.fixture(scope="package")
def controllers(services: Services) -> Iterator[ServerProcess]:
    """Who makes pods anew and counts budgets; the first case starts it."""
    process = kube_controller_manager(services.plane, CONTROLLERS)
    yield process
    process.kill()


@pytest_asyncio.fixture
async def world(services: Services, controllers: ServerProcess) -> AsyncIterator[World]:
    """An empty cluster, with nodes and pods that no case had before."""
    async with open_world(services, f"d{next(_numbers)}") as opened:
        if not controllers.is_running:
            await controllers.start()
        try:
            yield opened
        finally:
            await dissolve_all(opened.client)
