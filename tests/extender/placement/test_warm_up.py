"""Precomputed requests of new pods, also after changes."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from extender.core.nodes.inventory import PodRecord
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.request import WaitingRequests
from extender.placement.evaluation_cache import _GATHER_SECONDS, _MAX_EXPECTED, WarmUp
from extender.runtime.cooperative import yield_to_loop
from extender.sources.kubernetes.records import reduce_pod
from testkit.fake_kube import eventually
from testkit.kube_objects import pod
from testkit.world import World

ALLOCATED = SimpleNamespace(is_allocated=True)


@pytest.fixture
def world() -> World:
    world = World(in_steps=True)
    world.add_node("node", 4)
    world.read()
    return world


@pytest.fixture
def evaluated(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of devices of each request evaluated for new pods."""
    counts: list[int] = []
    expect = world.placer.evaluation_cache.expect_in_steps

    def note(requested: Any) -> Any:
        counts.append(requested.count)
        return expect(requested)

    monkeypatch.setattr(world.placer.evaluation_cache, "expect_in_steps", note)
    return counts


def warm_up(world: World, readiness: SimpleNamespace) -> WarmUp:
    return WarmUp(
        world.fleet,
        world.placer.evaluation_cache,
        is_synced=lambda: True,
        refresh=cast(Any, None),
        requests=WaitingRequests(),
        readiness=cast(Any, readiness),
        gc_control=cast(Any, None),
        yield_control=yield_to_loop,
    )


def waiting(name: str, gpus: int = 1, **status: Any) -> PodRecord:
    record = reduce_pod(pod(name, gpus, **status), ResourceNames(), early_seconds=60)
    assert record is not None
    return record


async def test_the_request_of_a_new_pod_is_evaluated_once(
    world: World, evaluated: list[int]
) -> None:
    task = asyncio.create_task(warm_up(world, ALLOCATED).evaluate_new_pods())

    world.fleet.apply_pod(waiting("one", 3))
    await eventually(lambda: evaluated == [3])
    world.fleet.apply_pod(waiting("one", 3, reason="changed"))
    world.fleet.apply_pod(waiting("two", 2))
    await eventually(lambda: len(evaluated) > 1)

    assert evaluated == [3, 2]
    task.cancel()


async def test_of_many_new_pods_only_the_first_are_evaluated(
    world: World, evaluated: list[int]
) -> None:
    task = asyncio.create_task(warm_up(world, ALLOCATED).evaluate_new_pods())
    for number in range(3 * _MAX_EXPECTED):
        world.fleet.apply_pod(waiting(f"pod-{number}", 1 + number))

    await eventually(lambda: len(evaluated) >= _MAX_EXPECTED)
    await yield_to_loop()

    assert evaluated == list(range(1, _MAX_EXPECTED + 1))
    task.cancel()


async def test_a_change_is_evaluated_at_once_and_those_soon_after_it_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []
    sleep, slept = asyncio.sleep, asyncio.Event()

    async def rest(seconds: float) -> None:
        if seconds == _GATHER_SECONDS:
            await slept.wait()
        else:
            await sleep(seconds)

    def warm() -> Any:
        looks.append(None)
        yield

    monkeypatch.setattr("extender.placement.evaluation_cache._LOOK_SECONDS", 60.0)
    monkeypatch.setattr("extender.placement.evaluation_cache.asyncio.sleep", rest)
    monkeypatch.setattr(world.placer.evaluation_cache, "update_in_steps", warm)
    task = asyncio.create_task(warm_up(world, ALLOCATED).evaluate())
    await eventually(lambda: len(looks) == 1)

    slept.set()  # it has paused since the first pass: the next change is processed at once
    await yield_to_loop()
    slept.clear()
    world.fleet.changed.publish()
    await eventually(lambda: len(looks) == 2)
    for _ in range(3):
        world.fleet.changed.publish()
        await yield_to_loop()
    assert len(looks) == 2
    slept.set()
    await eventually(lambda: len(looks) == 3)
    task.cancel()


async def test_before_the_first_allocation_no_request_is_evaluated(
    world: World, evaluated: list[int]
) -> None:
    readiness = SimpleNamespace(is_allocated=False)
    task = asyncio.create_task(warm_up(world, readiness).evaluate_new_pods())

    world.fleet.apply_pod(waiting("one", 1))
    readiness.is_allocated = True
    world.fleet.apply_pod(waiting("two", 2))

    await eventually(lambda: evaluated)
    assert evaluated == [2]
    task.cancel()
