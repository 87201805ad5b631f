"""The oldest Kubernetes, in place of the newest that all other tests run with."""

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
    """The oldest kube-scheduler, with everything else as it always is."""
    with services_on(ControlPlane(tmp_path_factory.mktemp("oldest"), release=OLDEST)) as running:
        yield running


@pytest_asyncio.fixture
async def world(services: Services) -> AsyncIterator[World]:
    """An empty cluster, with nodes and pods that no case had before."""
    async with open_world(services, f"o{next(_numbers)}") as opened:
        yield opened
