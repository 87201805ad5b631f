"""Pods that have a node but are not bound yet, as the coscheduling plugin holds them (Permit).

The plugin does not run here. A binder extender delays the bindings instead. For kube-scheduler,
which has assumed the pods, and for the extender, which has answered, the effect is the same.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
from aiohttp import web

from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

HELD: Final = "held-"
"""Prefix of the names of delayed pods."""


class Binder:
    """Extender that binds pods in kube-scheduler's place; those of a group when it is released.

    Attributes:
        held: names of pods that are assigned and not bound.
        is_whole: event that releases them.
    """

    def __init__(self, world: World) -> None:
        self.held: set[str] = set()
        self.is_whole = asyncio.Event()
        self._world = world

    async def bind(self, request: web.Request) -> web.Response:
        """Answer kube-scheduler after the pod is bound."""
        arguments = await request.json()
        name, namespace = arguments["PodName"], arguments["PodNamespace"]
        if name.startswith(HELD):
            self.held.add(name)
            await self.is_whole.wait()
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": arguments["Node"]},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
        await self._world.client.request("POST", path, binding)
        return web.json_response({"Error": ""})

    async def holds(self, pods: list[Object]) -> None:
        """Wait until it delays the bindings of these pods."""
        names = {item["metadata"]["name"] for item in pods}

        async def are_held() -> bool:
            return names <= self.held

        await wait_for(are_held, f"{sorted(names)} have a node and are held")


@asynccontextmanager
async def holding(world: World) -> AsyncIterator[Binder]:
    """Run kube-scheduler of a started world with a binder."""
    binder = Binder(world)
    app = web.Application()
    app.router.add_post("/bind", binder.bind)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    config = world.services.scheduler_config()
    entry = {
        "urlPrefix": f"http://{host}:{port}",
        "bindVerb": "bind",
        "nodeCacheCapable": True,
        "httpTimeout": "100s",
    }
    try:
        await world.services.ensure_scheduler(
            {**config, "extenders": [*config["extenders"], entry]}
        )
        yield binder
    finally:
        binder.is_whole.set()
        await runner.cleanup()


def group(node: str, count: int = 2) -> list[Object]:
    """Build pods of a group for one node."""
    where = {"kubernetes.io/hostname": node}
    return [pod(f"{HELD}{number}", nodeSelector=where) for number in range(count)]


async def assumed_on(world: World, node: str) -> int:
    """Return the number of a node's GPUs that assumed pods take."""
    shown = await world.services.extender.get(f"/v1/nodes/{node}")
    return int(shown["resources"][GPU]["assumed"])


async def wait_nothing_assumed(world: World, node: str) -> None:
    """Wait until no pod is assumed on a node."""

    async def is_so() -> bool:
        return await assumed_on(world, node) == 0

    await wait_for(is_so, f"nothing is assumed on {node}")


async def test_others_keep_off_the_gpus_of_pods_that_are_held(world: World) -> None:
    left, right = world.add_shared("left"), world.add_shared("right")
    await world.start({"assumed": {"tentative_seconds": 600}})
    await world.fill_host(right)  # without the extender kube-scheduler prefers the other one
    pods = group(left)
    async with holding(world) as binder:
        await world.client.create_all(pods)
        await binder.holds(pods)

        assert await assumed_on(world, left) == 2
        assert await world.place(pod("other")) == right

        binder.is_whole.set()
        assert await world.bound(pods) == [left, left]


async def test_pods_that_are_held_for_longer_than_they_count_may_get_company(world: World) -> None:
    left, right = world.add_shared("left"), world.add_shared("right")
    await world.start({"assumed": {"tentative_seconds": 1}})
    await world.fill_host(right)
    pods = group(left)
    async with holding(world) as binder:
        await world.client.create_all(pods)
        await binder.holds(pods)
        await wait_nothing_assumed(world, left)

        assert await world.place(pod("other")) == left

        binder.is_whole.set()
        assert await world.bound(pods) == [left, left]
