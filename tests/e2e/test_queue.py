"""Pods that are refused repeatedly do not delay other pods.

From 1.37 on kube-scheduler retries every refused pod whenever any pod is bound, changed or deleted.
With the shipped configuration they wait behind all other pods.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Final

import pytest
from aiohttp import web

from testkit.controlplane.client import ApiClient
from testkit.controlplane.deployed import scheduler_config
from testkit.controlplane.objects import node, pod
from testkit.controlplane.plane import ControlPlane
from testkit.controlplane.scheduler import kube_scheduler
from testkit.controlplane.waiting import wait_for
from testkit.serving import serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

WAITING: Final = 30
ANSWER_SECONDS: Final = 0.4
"""Duration of an answer. With it, trying all pods takes longer than kube-scheduler's default
longest back-off, 10 s."""
STEADY_TRIES: Final = 3
"""Number of tries of each pod after which the back-off is longer than that."""
OTHERS: Final = 5
MOST_BEFORE: Final = WAITING // 3
"""Largest number of tries before another pod: those under way, and those until its binding."""


class Refusing:
    """Extender that refuses every node, slowly.

    Attributes:
        tries: number of filter calls by pod.
    """

    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()

    async def filter(self, request: web.Request) -> web.Response:
        """Refuse all nodes."""
        arguments = await request.json()
        self.tries[arguments["Pod"]["metadata"]["name"]] += 1
        await asyncio.sleep(ANSWER_SECONDS)
        refused = dict.fromkeys(arguments["NodeNames"], "GPUs are not idle")
        return web.json_response({"NodeNames": [], "FailedAndUnresolvableNodes": refused})

    def app(self) -> web.Application:
        """Build the application."""
        app = web.Application()
        app.router.add_post("/filter", self.filter)
        return app


@asynccontextmanager
async def busy_cluster(cluster: ApiClient) -> AsyncIterator[None]:
    """Change a running pod repeatedly while the context is open."""
    tenant = pod("tenant", 0, nodeName="node")
    await cluster.create(tenant)

    async def change() -> None:
        for number in count():
            await cluster.patch(tenant, {"metadata": {"annotations": {"n": str(number)}}})
            await asyncio.sleep(ANSWER_SECONDS)

    task = asyncio.create_task(change(), name="changes")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_others_are_bound_before_pods_that_are_tried_again_and_again(
    cluster: ApiClient, control_plane: ControlPlane
) -> None:
    refusing = Refusing()
    await cluster.create(node("node"))
    async with serve(refusing.app()) as url, busy_cluster(cluster):
        config = scheduler_config(url, {"httpTimeout": "5s"})
        # The default starts with 1 s and doubles it: soon this is the same.
        scheduler = kube_scheduler(control_plane, config | {"podInitialBackoffSeconds": 10})
        await scheduler.start()
        try:
            await cluster.create_all(pod(f"waiting-{number}") for number in range(WAITING))

            async def is_steady() -> bool:
                return (
                    len(refusing.tries) == WAITING and min(refusing.tries.values()) >= STEADY_TRIES
                )

            await wait_for(is_steady, "every pod was tried again", deadline_seconds=120)
            for number in range(OTHERS):
                before = refusing.tries.total()
                other = pod(f"other-{number}", 0)
                await cluster.create(other)
                await cluster.wait_bound(other)

                assert refusing.tries.total() - before <= MOST_BEFORE
        finally:
            scheduler.kill()
    assert refusing.tries.total() > WAITING * STEADY_TRIES
