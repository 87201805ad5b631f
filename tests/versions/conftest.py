"""Control plane of the oldest supported Kubernetes."""

from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
import pytest_asyncio

from testkit.controlplane.apart import services_on
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.services import Services
from testkit.controlplane.tools import OLDEST
from testkit.controlplane.world import World, open_world

_numbers = count(1)


@pytest.fixture(scope="package")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Yield services with the oldest kube-scheduler."""
    with services_on(ControlPlane(tmp_path_factory.mktemp("oldest"), release=OLDEST)) as running:
        yield running


@pytest_asyncio.fixture
async def world(services: Services) -> AsyncIterator[World]:
    """Yield an empty cluster with new names of nodes and pods."""
    async with open_world(services, f"o{next(_numbers)}") as opened:
        yield opened
