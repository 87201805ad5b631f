"""Pytest fixtures for the control plane and Prometheus; tests/conftest.py imports them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from testkit.controlplane.client import ApiClient
from testkit.controlplane.kubelets import kwok
from testkit.controlplane.objects import Object
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.scheduler import kube_scheduler
from testkit.controlplane.telemetry import PrometheusServer

StartScheduler = Callable[[Object], Awaitable[ServerProcess]]
StartPrometheus = Callable[..., Awaitable[PrometheusServer]]


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Start etcd and kube-apiserver for the session; `cluster` empties them for a test."""
    plane = ControlPlane(tmp_path_factory.mktemp("controlplane"))
    try:
        # A separate event loop, because each test has its own.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(plane.start())
        yield plane
    finally:
        plane.stop()


@pytest_asyncio.fixture
async def cluster(control_plane: ControlPlane) -> AsyncIterator[ApiClient]:
    """Yield an administrator's client of a cluster without nodes and pods."""
    await control_plane.reset()
    async with control_plane.client() as client:
        yield client


@pytest_asyncio.fixture
async def start_scheduler(
    control_plane: ControlPlane,
    cluster: ApiClient,  # noqa: ARG001 - empty before a scheduler looks at it
) -> AsyncIterator[StartScheduler]:
    """Yield a function that starts kube-scheduler with a configuration."""
    async with AsyncExitStack() as stack:

        async def start(config: Object) -> ServerProcess:
            scheduler = kube_scheduler(control_plane, config)
            stack.push_async_callback(scheduler.stop)
            await scheduler.start()
            return scheduler

        yield start


@pytest_asyncio.fixture
async def kubelets(
    control_plane: ControlPlane,
    cluster: ApiClient,  # noqa: ARG001 - empty before kwok looks at it
) -> AsyncIterator[ServerProcess]:
    """Start kwok for one test; it runs and ends bound pods."""
    process = kwok(control_plane)
    try:
        await process.start()
        yield process
    finally:
        await process.stop()


@pytest_asyncio.fixture
async def start_prometheus(tmp_path: Path) -> AsyncIterator[StartPrometheus]:
    """Yield a function that starts a Prometheus: arguments are the exporter's URL and its nodes."""
    async with AsyncExitStack() as stack:

        async def start(exporter_url: str, nodes: list[str]) -> PrometheusServer:
            prometheus = PrometheusServer(tmp_path, exporter_url)
            prometheus.set_targets(nodes)
            stack.push_async_callback(prometheus.process.stop)
            await prometheus.process.start()
            return prometheus

        yield start
