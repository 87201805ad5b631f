"""Two replicas behind a Service, one of which ends under load."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit.controlplane.objects import pod
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.service import Service, serving
from testkit.controlplane.services import HTTP_TIMEOUT
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World, spread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

BETWEEN_PODS_SECONDS = 0.05
MOST_WAITING = 20
"""Number of waiting pods at which no more are created, because a busy machine binds them slowly."""
LAG_SECONDS = 1.0
"""Delay until every node knows that a replica is not ready any more."""
DRAIN_SECONDS = 3
GRACE_SECONDS = 40.0


@asynccontextmanager
async def two_replicas(world: World) -> AsyncIterator[Service]:
    """Run kube-scheduler with two replicas that know each other, and wait for an answer."""
    services = world.services
    second = services.replica("e2e-replica-2")
    replicas = (services.extender, second)
    service = Service(replicas, lag_seconds=LAG_SECONDS)
    scheme = urlsplit(second.webhooks).scheme
    settings = {
        "peers": {"addresses": [urlsplit(one.webhooks).netloc for one in replicas]},
        "drain_seconds": DRAIN_SECONDS,
    }
    requested = {
        "urlPrefix": f"{scheme}://{service.address}",
        "ignorable": False,
        "httpTimeout": HTTP_TIMEOUT,
    }
    try:
        async with serving(service):
            await world.start(settings, extender=requested)
            await second.ensure(services.extender.settings)

            async def are_ready() -> bool:
                return all(endpoint.is_ready for endpoint in service.endpoints)

            await wait_for(are_ready, "both replicas are ready")
            yield service
    finally:
        # A drain would only delay the end: the next test restarts them.
        services.extender.process.kill()
        second.process.kill()


async def attempts(scheduler: ServerProcess, result: str) -> float:
    """Return the number of kube-scheduler's scheduling attempts with a result."""
    url = scheduler.ready_url.replace("/readyz", "/metrics")
    async with aiohttp.ClientSession() as session, session.get(url, ssl=False) as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "scheduler_schedule_attempts_total" and sample.labels["result"] == result
    )


async def placed_while(
    world: World, disturb: Callable[[], Awaitable[None]], *, after: int = 10, beyond: int = 10
) -> list[str]:
    """Create pods one after another until some more are bound after a disturbance.

    Args:
        world: the cluster.
        disturb: ends a replica, and returns when it has ended.
        after: number of bound pods before the disturbance.
        beyond: number of pods after it.
    """
    pods: list[dict[str, Any]] = []
    disturbing: asyncio.Task[None] | None = None

    async def enough_bound() -> bool:
        return await world.count_bound(pods) >= after

    async def has_room() -> bool:
        return len(pods) - await world.count_bound(pods) < MOST_WAITING

    async def disturb_after_some() -> None:
        await wait_for(enough_bound, f"{after} pods are bound")
        await disturb()

    async with asyncio.TaskGroup() as group:
        disturbing = group.create_task(disturb_after_some())
        while not disturbing.done() or beyond:
            beyond -= disturbing.done()
            pods.append(pod(f"under-load-{len(pods)}"))
            await world.client.create(pods[-1])
            await asyncio.sleep(BETWEEN_PODS_SECONDS)
            if len(pods) % MOST_WAITING == 0:
                await wait_for(has_room, "some pods are bound")
    return await world.bound(pods, deadline_seconds=60.0)


def add_equal_nodes(world: World) -> list[str]:
    return [world.add_shared(f"equal-{number}", cards=2, replicas=40) for number in range(4)]


async def test_a_replica_that_is_ended_in_good_order_costs_no_call(world: World) -> None:
    nodes = add_equal_nodes(world)
    async with two_replicas(world) as service:
        scheduler = world.services.scheduler
        ended = list[str]()

        async def node_index() -> None:
            endpoint = service.requested  # the replica to which kube-scheduler has a connection
            await service.delete(endpoint, GRACE_SECONDS)
            ended.append(endpoint.server.process.describe())

        placed = await placed_while(world, node_index)

        (description,) = ended
        assert description.startswith("exit status 0")
        assert (service.broken, service.refused) == (0, 0)
        assert await attempts(scheduler, "error") == 0
    assert spread(placed).keys() == set(nodes)


async def test_killed_replica_loses_only_calls_in_flight(world: World) -> None:
    nodes = add_equal_nodes(world)
    async with two_replicas(world) as service:
        scheduler = world.services.scheduler
        request_tracker = list[int]()

        async def die() -> None:
            endpoint = service.requested
            process = endpoint.server.process
            process.pause()

            async def is_asked() -> bool:
                return endpoint.waiting > 0

            await wait_for(is_asked, "a call is in flight")
            request_tracker.append(endpoint.waiting)
            # On a busy machine the kernel needs seconds to end the process, and the Service in this
            # process must go on meanwhile.
            await asyncio.to_thread(process.kill)

            async def is_withdrawn() -> bool:
                return not endpoint.is_ready

            await wait_for(is_withdrawn, "the Service has withdrawn it")

        placed = await placed_while(world, die)
        errors = await attempts(scheduler, "error")

        # The call in flight. If the kernel needs longer than its timeout to end the replica,
        # kube-scheduler gives it up before, and so it does with its calls until then.
        assert request_tracker[0] == 1
        assert service.broken == 1 or (service.broken == 0 and service.given_up)
        # Until every node knows, the Service forwards new connections to it.
        assert errors <= service.failed
    assert spread(placed).keys() == set(nodes)


async def test_pods_are_bound_while_a_replica_hangs_and_once_it_answers_it_is_ready(
    world: World,
) -> None:
    nodes = add_equal_nodes(world)
    async with two_replicas(world) as service:
        hung = service.endpoints[1]
        process = hung.server.process

        async def hang() -> None:
            process.pause()

            async def is_withdrawn() -> bool:
                return not hung.is_ready

            await wait_for(is_withdrawn, "the Service has withdrawn it")

        try:
            placed = await placed_while(world, hang)
        finally:
            process.resume()

        async def is_back() -> bool:
            return hung.is_ready

        await wait_for(is_back, "the replica is ready again")
    assert spread(placed).keys() == set(nodes)
