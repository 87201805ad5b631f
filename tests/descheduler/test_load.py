"""The descheduler with GPU load from Prometheus: docs/beside.md."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from simulation.devices import Load
from simulation.kubelet import UTILIZATION_ANNOTATION
from simulation.models import GIB
from testkit.controlplane.client import address
from testkit.controlplane.descheduler import descheduler
from testkit.controlplane.objects import Object
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World
from tests.descheduler.policies import example
from tests.descheduler.replicas import Nodes, Replicas

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(180)]

INTERVAL_SECONDS: Final = 3.0
FOREIGN: Final = Load(utilization=0.85, memory_bytes=2 * GIB)
TOKEN: Final[Object] = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "prometheus-token", "namespace": "default"},
    "data": {"prometheusAuthToken": base64.b64encode(b"anything").decode()},
}
"""Token for Prometheus: in a cluster the descheduler uses its service account's, outside of one it
needs a Secret."""


@asynccontextmanager
async def descheduling(world: World, folder: Path) -> AsyncIterator[ServerProcess]:
    """Run the descheduler with the shipped load policy while the context is open."""
    policy = example("by-load")
    prometheus = policy["metricsProviders"][0]["prometheus"]
    prometheus["url"] = world.services.prometheus.url
    prometheus["authToken"] = {
        "secretReference": {k: TOKEN["metadata"][k] for k in ("namespace", "name")}
    }
    await world.client.create(TOKEN)
    running = descheduler(world.services.plane, folder, policy, interval_seconds=INTERVAL_SECONDS)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
        await world.client.request("DELETE", address(TOKEN))


async def pause_until_shown(
    process: ServerProcess, world: World, replicas: Replicas, before: Nodes
) -> None:
    """Pause the descheduler from an eviction until Prometheus shows the new pod.

    Its next run would otherwise read the load from before, and evict another pod.
    """

    async def is_evicted() -> bool:
        return (await replicas.nodes()).keys() != before.keys()

    async def is_placed() -> bool:
        return (await replicas.bound()).keys() <= world.fleet.placements.keys()

    await wait_for(is_evicted, "a pod is evicted")
    process.pause()
    try:
        await wait_for(is_placed, "the new pod holds a GPU")
        await world.settled()
    finally:
        process.resume()


async def nothing_to_do(process: ServerProcess) -> None:
    """Wait until it has read every node's load, and found no idle node."""

    async def has_logged() -> bool:
        return "No node is underutilized" in process.log.read_text()

    await wait_for(has_logged, "the descheduler says that there is nothing to do")


async def test_a_pod_of_a_busy_shared_gpu_is_moved_to_one_that_is_idle(
    world: World, tmp_path: Path
) -> None:
    busy = world.add_shared("busy")
    await world.start()
    replicas = Replicas(world, "sharing", 2)
    before = await replicas.start(annotations={UTILIZATION_ANNOTATION: "0.45"})
    assert set(before.values()) == {busy}
    quiet = world.add_shared("quiet")
    await world.register()
    await world.settled()
    await world.scheduler_synced(quiet)

    async with descheduling(world, tmp_path) as process:
        await pause_until_shown(process, world, replicas, before)
        await nothing_to_do(process)

    after = await replicas.bound()
    assert sorted(after.values()) == [busy, quiet]
    (moved,) = await replicas.new(before)
    assert (await world.decisions(moved))[0]["node"] == quiet


async def test_no_pod_is_evicted_towards_gpus_with_foreign_use(
    world: World, tmp_path: Path
) -> None:
    busy = world.add_shared("busy")
    await world.start()
    replicas = Replicas(world, "sharing", 2)
    before = await replicas.start(annotations={UTILIZATION_ANNOTATION: "0.45"})
    taken = world.add_shared("taken")
    world.fleet.set_foreign(taken, 0, FOREIGN)
    await world.register()
    await world.settled()
    assert busy in before.values()

    async with descheduling(world, tmp_path) as process:
        await nothing_to_do(process)

    assert await replicas.nodes() == before
