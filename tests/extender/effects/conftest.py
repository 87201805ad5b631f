"""API server without rules, and a world with two busy nodes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extender.kube.client import KubeClient
from testkit.fake_kube import FakeKube, running_kube
from testkit.world import BUSY, World


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    async with running_kube() as server:
        yield server


@pytest.fixture
async def client(kube: FakeKube, tmp_path: Path) -> AsyncIterator[KubeClient]:
    connected = await KubeClient.connect(kube.write_kubeconfig(tmp_path / "kubeconfig"))
    yield connected
    await connected.close()


@pytest.fixture
def world() -> World:
    """Return a world with two nodes of one busy GPU each, and no waiting pod."""
    cluster = World()
    for name in ("x", "y"):
        cluster.add_node(name)
        cluster.card(name).values = dict(BUSY)
    cluster.read()
    return cluster
