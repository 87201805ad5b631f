"""Cluster for applied manifests, which are removed after each test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from testkit.controlplane.client import ApiClient
from testkit.controlplane.controllers import WORKLOADS, kube_controller_manager
from testkit.controlplane.deployed import grant_rights
from testkit.controlplane.installing import Installation
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.services import Services
from testkit.controlplane.world import World, open_world
from tests.manifests.releases import Release


@pytest_asyncio.fixture
async def installation(
    control_plane: ControlPlane, cluster: ApiClient
) -> AsyncIterator[Installation]:
    """Yield an installation, whose objects except namespaces are removed after the test."""
    opened = Installation(control_plane, cluster)
    yield opened
    await opened.remove()


@pytest_asyncio.fixture
async def controllers(
    control_plane: ControlPlane, installation: Installation
) -> AsyncIterator[ServerProcess]:
    """Run kube-controller-manager for one test, until the applied objects are removed."""
    process = kube_controller_manager(control_plane)
    try:
        await process.start()
        yield process
        await installation.remove()
    finally:
        await process.stop()


@pytest_asyncio.fixture
async def release(tmp_path: Path) -> AsyncIterator[Release]:
    """Yield a separate cluster with controllers that delete dependent objects."""
    plane = ControlPlane(tmp_path)
    process = kube_controller_manager(plane, (*WORKLOADS, "namespace-controller"))
    try:
        await plane.start()
        await process.start()
        async with plane.client() as admin:
            yield Release(plane, admin, tmp_path)
    finally:
        process.kill()
        plane.stop()


@pytest.fixture(scope="module")
def services(control_plane: ControlPlane) -> Iterator[Services]:
    """Yield extender, kube-scheduler, Prometheus and kwok for one module's tests."""
    running = Services(control_plane)
    yield running
    running.stop()


@pytest_asyncio.fixture
async def world(services: Services) -> AsyncIterator[World]:
    """Yield a simulated fleet in an empty cluster, with the real extender and its rights."""
    async with open_world(services, "m") as opened:
        await grant_rights(services.plane)
        yield opened
