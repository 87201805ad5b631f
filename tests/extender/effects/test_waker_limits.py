"""Waker that is refused, fails, does not lead, or has much work."""

import time
from functools import partial
from typing import Any

import pytest

from extender.core.nodes.node_selection import read_selection
from extender.effects.wake_plan import MAX_NEEDS
from extender.effects.waker import _LOOKED_AT, _REST, _run_and_rest
from extender.kube.client import KubeClient
from extender.settings.service import WakeTarget
from testkit.fake_kube import FakeKube, eventually, refusal
from testkit.world import World
from tests.extender.effects.waking import (
    EAGER,
    IDLE_ONLY,
    Clock,
    Leading,
    count_ranks,
    running,
    turn_idle,
    waits,
    waker,
)


async def test_a_missing_right_is_logged_once_and_named(
    kube: FakeKube, client: KubeClient, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    kube.faults["write"].extend([refusal(403, "forbidden")] * 5)
    waits(world)
    turn_idle(world, "y")
    clock = Clock()
    waking = waker(client, world, clock=clock)

    for _ in range(6):
        await waking.look()
        clock.now += 60

    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.message == "cannot wake waiting pods"
    assert (
        "RBAC must allow this identity to patch csistoragecapacities.storage.k8s.io"
        in warning.__dict__["cause"]
    )
    assert (waking.counts.failed, waking.counts.wakes) == (5, 1)
    assert "waiting pods can be woken again" in caplog.messages


async def test_a_missing_right_on_nodes_is_logged_once_whichever_node_is_refused(
    kube: FakeKube, client: KubeClient, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    said = 'nodes "{}" is forbidden: User "us" cannot patch resource "nodes" in API group ""'
    kube.faults["write"].extend(refusal(403, said.format(name)) for name in "yx")
    waits(world)
    clock = Clock()
    waking = waker(client, world, EAGER.model_copy(update={"target": WakeTarget.NODE}), clock=clock)

    for node in "yx":
        turn_idle(world, node)
        await waking.look()
        clock.now += 60

    assert waking.counts.failed == 2
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "RBAC must allow this identity to patch nodes" in warning.__dict__["cause"]


async def test_the_right_to_create_is_named_where_that_one_is_missing(
    kube: FakeKube, client: KubeClient, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    kube.faults["write"].extend([refusal(404, "not found"), refusal(403, "forbidden")])
    waits(world)
    turn_idle(world, "y")

    await waker(client, world).look()

    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "to create csistoragecapacities.storage.k8s.io" in warning.__dict__["cause"]


async def test_internal_fault_is_counted_and_the_waker_continues(
    kube: FakeKube,
    client: KubeClient,
    world: World,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits(world)
    turn_idle(world, "y")
    waking = waker(client, world)
    rank, faults = world.placer.rank, [ZeroDivisionError("oops")]

    def fail_once(*args: Any, **named: Any) -> object:
        if faults:
            raise faults.pop()
        return rank(*args, **named)

    monkeypatch.setattr(world.placer, "rank", fail_once)
    async with running(waking):
        await eventually(lambda: kube.writes)

    assert waking.counts.faults == 1
    assert any(record.exc_info for record in caplog.records)


async def test_a_replica_that_is_not_elected_sends_no_requests(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    waits(world)
    turn_idle(world, "y")
    leading = Leading(leads=False)
    waking = waker(client, world, leading=leading)
    looks = count_ranks(world)

    async with running(waking):
        await eventually(lambda: leading.requested >= 3)
        assert (kube.writes, looks) == ([], [])

        leading.leads = True
        await eventually(lambda: kube.writes)


async def test_a_replica_that_loses_the_lease_during_a_check_writes_nothing(
    kube: FakeKube, client: KubeClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(world)
    turn_idle(world, "y")
    leading = Leading()
    waking = waker(client, world, leading=leading)
    rank = world.placer.rank

    def rank_and_lose(*args: Any, **named: Any) -> object:
        leading.leads = False
        return rank(*args, **named)

    monkeypatch.setattr(world.placer, "rank", rank_and_lose)
    await waking.look()

    assert kube.writes == []


async def test_each_distinct_request_is_examined_once(client: KubeClient, world: World) -> None:
    turn_idle(world, "y")
    for number in range(50):
        waits(world, f"p{number}")
    requested = count_ranks(world)

    await waker(client, world).look()
    assert len(requested) == 1

    selection = read_selection({"spec": {"tolerations": [{"operator": "Exists"}]}})
    for number in range(25):
        waits(world, f"p{number}", selection=selection)
    requested.clear()
    await waker(client, world).look()
    assert len(requested) == 2


async def test_one_check_is_bounded_and_the_next_continues(
    client: KubeClient, world: World
) -> None:
    turn_idle(world, "y")
    for number in range(2 * MAX_NEEDS):
        wish = ("idlegpu.io/max-utilization", str(20 + number))
        waits(world, f"p{number}", wishes=(*IDLE_ONLY, wish))
    requested = count_ranks(world)
    waking = waker(client, world)

    await waking.look()
    assert len(requested) == MAX_NEEDS
    await waking.look()

    assert len(set(requested)) == 2 * MAX_NEEDS


async def test_very_many_equal_pods_are_examined_in_rotation(
    client: KubeClient, world: World
) -> None:
    for number in range(_LOOKED_AT + 10):
        waits(world, f"p{number:05}")
    waking = waker(client, world)
    waiting = await waking._waiting()

    first, second = (
        [pod.name for _, pods in waking._next_batch(waiting) for pod in pods] for _ in range(2)
    )

    assert len(first) == len(second) == _LOOKED_AT
    assert second[0] == f"p{_LOOKED_AT:05}"
    assert len({*first, *second}) == _LOOKED_AT + 10


async def test_a_step_that_waits_for_a_cpu_makes_no_check_longer() -> None:
    started = time.monotonic()

    await _run_and_rest(partial(time.sleep, 0.1))

    assert time.monotonic() - started < 0.1 * _REST
