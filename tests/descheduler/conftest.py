"""Control plane with controllers that replace evicted pods and count disruption budgets."""

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
    """Yield services on a control plane of their own: the descheduler evaluates every pod."""
    with services_on(ControlPlane(tmp_path_factory.mktemp("plane"))) as running:
        yield running


@pytest.fixture(scope="package")
def controllers(services: Services) -> Iterator[ServerProcess]:
    """Run the controllers for ReplicaSets and disruption budgets."""
    process = kube_controller_manager(services.plane, CONTROLLERS)
    yield process
    process.kill()


@pytest_asyncio.fixture
async def world(services: Services, controllers: ServerProcess) -> AsyncIterator[World]:
    """Yield an empty cluster with new names of nodes and pods."""
    async with open_world(services, f"d{next(_numbers)}") as opened:
        if not controllers.is_running:
            await controllers.start()
        try:
            yield opened
        finally:
            await dissolve_all(opened.client)
