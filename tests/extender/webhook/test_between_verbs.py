"""Test prioritize after changes since filter, and the measured time between both."""

import asyncio
from collections.abc import Callable

import orjson
import pytest

from extender.webhook.handlers import _BETWEEN_VERBS_SECONDS
from testkit.cards import BUSY, IDLE
from testkit.webhook_requests import Client, call, pod, scores_of
from testkit.world import World

NODES = ["idle-b", "busy", "idle-a"]


async def place(client: Client, between: Callable[[], None]) -> str:
    """Send filter and prioritize; return the best node."""
    answer = await call(client, "filter", {"Pod": pod(), "NodeNames": NODES})
    between()
    request = {"Pod": pod(), "NodeNames": answer["NodeNames"]}
    scores = scores_of(await call(client, "prioritize", request))
    return max(scores, key=scores.__getitem__)


async def test_readings_between_the_verbs_count(client: Client, world: World) -> None:
    def turn_busy() -> None:
        world.now += 10
        world.report({"idle-a": [BUSY, BUSY], "idle-b": [IDLE, IDLE], "busy": [BUSY, BUSY]})

    assert await place(client, turn_busy) == "idle-b"


async def test_a_pod_bound_between_the_verbs_counts(client: Client, world: World) -> None:
    def bind_another() -> None:
        world.add_pod("another", "idle-a", gpus=2)

    assert await place(client, bind_another) == "idle-b"


async def test_the_time_between_the_verbs_of_one_pod_is_measured(
    client: Client, world: World
) -> None:
    await place(client, lambda: None)
    await call(client, "prioritize", {"Pod": pod("other"), "NodeNames": NODES})

    assert world.count("idlegpu_between_verbs_seconds_count") == 1
    assert world.expected == 1


@pytest.mark.looptime
async def test_filter_details_are_recorded_after_or_with_prioritize(world: World) -> None:
    webhooks = world.webhooks()
    request = orjson.dumps({"Pod": pod(), "NodeNames": NODES})
    await webhooks.filter(request)
    (first,) = world.history
    await asyncio.sleep(0.9 * _BETWEEN_VERBS_SECONDS)
    assert not first.packed
    await asyncio.sleep(0.2 * _BETWEEN_VERBS_SECONDS)
    assert first.packed

    await webhooks.filter(request)
    await webhooks.prioritize(request)
    await asyncio.sleep(0.01 * _BETWEEN_VERBS_SECONDS)

    assert all(record.packed for record in world.history)
