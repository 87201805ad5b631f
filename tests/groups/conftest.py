"""Control plane with feature gates for pod groups."""

from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Final

import pytest
import pytest_asyncio

from testkit.controlplane.apart import services_on
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.services import Services
from testkit.controlplane.world import World, open_world

FEATURES: Final = ("GenericWorkload", "TopologyAwareWorkloadScheduling")
"""Beta and alpha features of the tested release, which are off by default."""
API: Final = "scheduling.k8s.io/v1beta1"

_numbers = count(1)


@pytest.fixture(scope="package")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Yield services with a kube-scheduler that places groups."""
    with services_on(
        ControlPlane(tmp_path_factory.mktemp("groups"), features=FEATURES, apis=[API])
    ) as running:
        yield running


@pytest_asyncio.fixture
async def world(services: Services) -> AsyncIterator[World]:
    """Yield an empty cluster with new names of nodes and pods."""
    async with open_world(services, f"g{next(_numbers)}") as opened:
        yield opened
