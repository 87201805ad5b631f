"""Pods are woken one by one: only as many as have room, in kube-scheduler's order."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.pod_groups import PodGroup
from extender.effects import waker as waker_module
from extender.effects.wake_plan import PodWakes
from extender.effects.waker import _POD_ANNOTATION, Waker
from extender.kube.client import KubeClient
from extender.settings.service import WakeTarget
from testkit.builders import GPU
from testkit.fake_kube import FakeKube, refusal
from testkit.world import World
from tests.extender.effects.waking import EAGER, QUICK, Clock, Leading, turn_idle, waits, waker

EACH = EAGER.model_copy(update={"target": WakeTarget.POD})
PODS = "/api/v1/namespaces/ns/pods"


def each(client: KubeClient, world: World, **named: Any) -> Waker:
    return waker(client, world, EACH, **named)


def woken(kube: FakeKube) -> list[str]:
    """Return the names of the changed pods, in the order of the changes."""
    return [path.removeprefix(f"{PODS}/") for _, path, _ in kube.writes]


def gated(world: World, name: str = "p", **changes: Any) -> PodRecord:
    """Report a pod that only idlegpu's gate keeps from being scheduled, as the watch would."""
    ours = {"is_unscheduled": False, "is_refused": False, "is_gated": True, "awaits_room": True}
    return waits(world, name, **{**ours, **changes})


def bound(world: World, record: PodRecord, node: str) -> None:
    """Report a pod as bound, as the watch would."""
    world.fleet.apply_pod(
        replace(record, node=node, bound_at=world.clock.now, is_unscheduled=False, is_refused=False)
    )


async def test_only_the_pod_that_there_is_room_for_is_changed(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    for number in range(5):
        waits(world, f"p{number}", created_at=float(number))
    waking = each(client, world)
    await waking.look()
    assert kube.writes == []
    turn_idle(world, "y")

    for _ in range(3):
        await waking.look()

    ((method, path, body),) = kube.writes
    assert (method, path) == ("PATCH", f"{PODS}/p0")
    assert set(body) == {"metadata"}
    text = body["metadata"]["annotations"][_POD_ANNOTATION]
    assert text.startswith("1 waiting pod may fit: ns/p0 on y; ")
    assert (waking.counts.waiting, waking.counts.wakes) == (5, 1)


async def test_our_gate_is_taken_from_the_pod_that_there_is_room_for(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    gated(world)
    turn_idle(world, "y")

    await each(client, world).look()

    ((_, path, body),) = kube.writes
    assert path == f"{PODS}/p"
    assert body["spec"] == {"schedulingGates": []}


async def test_gate_stays_without_the_setting_and_is_logged_once(
    kube: FakeKube, client: KubeClient, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    gated(world, "p0")
    gated(world, "p1")
    turn_idle(world, "y")
    waking = waker(client, world)

    await waking.look()
    await waking.look()

    assert kube.writes == []
    (warning,) = caplog.records
    assert (warning.levelname, vars(warning)["remedy"]) == ("WARNING", "wake.target: pod")
    assert waking.counts.waiting == 0


async def test_priority_comes_before_age(kube: FakeKube, client: KubeClient, world: World) -> None:
    waits(world, "young", created_at=30.0)
    waits(world, "old", created_at=10.0)
    waits(world, "urgent", created_at=40.0, priority=100)
    gated(world, "gated", created_at=20.0)
    waking = each(client, world)
    for node in ("x", "y"):
        turn_idle(world, node)
    await waking.look()
    assert woken(kube) == ["urgent", "old"]

    world.add_node("z")
    world.read_after(10)
    await waking.look()

    assert woken(kube)[2:] == ["gated"]


async def test_a_check_wakes_a_limited_number_of_pods(
    kube: FakeKube, client: KubeClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waker_module, "_MOST_WOKEN", 2)
    world.add_node("wide", 4)
    for number in range(5):
        waits(world, f"p{number}", created_at=float(number))
    world.read_after(10)
    waking = each(client, world)

    await waking.look()
    assert woken(kube) == ["p0", "p1"]

    await waking.look()
    assert woken(kube) == ["p0", "p1", "p2", "p3"]


async def test_a_pod_for_which_there_is_no_room_keeps_no_other_behind_it(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    waits(world, "large", priority=100, resources={GPU: 8})
    waits(world, "small")
    turn_idle(world, "y")

    await each(client, world).look()

    assert woken(kube) == ["small"]


async def test_devices_of_a_node_are_counted_one_by_one(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    world.add_node("wide", 4)
    world.bind("tenant", "wide", on=[world.card("wide")])
    for number in range(6):
        waits(world, f"p{number}", created_at=float(number))
    world.read_after(10)

    await each(client, world).look()

    assert woken(kube) == ["p0", "p1", "p2"]


async def test_no_pod_is_woken_that_may_get_a_busy_gpu_beside_an_idle_one(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    world.add_node("half", 2, replicas=2)
    world.bind("tenant", "half", on=[world.card("half")])
    world.card("half").values |= world.card("x").values
    for number in range(9):
        waits(world, f"p{number}", created_at=float(number))
    world.read_after(200, times=2)

    await each(client, world).look()

    # With it both cards hold one pod: the kubelet may assign the busy card to the next one.
    assert woken(kube) == ["p0"]


async def test_a_pod_that_came_makes_room_for_no_other_and_helped(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    first = waits(world, "p0", created_at=0.0)
    waits(world, "p1", created_at=1.0)
    waking = each(client, world)
    turn_idle(world, "y")
    await waking.look()

    bound(world, first, "y")
    await waking.look()

    assert woken(kube) == ["p0"]
    assert waking.plan.helped + waking.pods.helped == 1


async def test_a_woken_pod_that_waits_for_something_else_was_not_helped(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    waits(world)
    waking = each(client, world)
    turn_idle(world, "y")
    await waking.look()

    waits(world, is_refused=False)
    await waking.look()

    assert (woken(kube), waking.plan.helped + waking.pods.helped) == (["p"], 0)


def test_pause_before_waking_for_the_same_node_grows() -> None:
    plan, at = PodWakes(replace(QUICK, repeat_seconds=9.0)), list[int]()
    for now in range(4 * 3600):
        plan.note_waiting(["uid"], now, is_placed=lambda _: False, is_assumed=lambda _: False)
        if plan.may_try("uid", "node", now):
            plan.note_woken("uid", "node")
            at.append(now)

    apart = [after - before for before, after in pairwise(at)]
    assert apart == [10, 19, 37, 73, 145, 289, 577, 1153, 2305, 3601, 3601]


def test_failed_wake_is_retried_with_growing_pauses_until_success() -> None:
    plan = PodWakes(replace(QUICK, min_interval_seconds=2.0, max_interval_seconds=30.0))
    failed_at = list[int]()
    for now in range(200):
        if plan.is_free(now):
            plan.note_failed(now)
            failed_at.append(now)
    assert failed_at == [0, 2, 6, 14, 30, 60, 90, 120, 150, 180]

    plan.note_woken("uid", "node")
    plan.note_failed(210)

    assert [plan.is_free(now) for now in (211, 212)] == [False, True]


def test_a_node_to_which_no_pod_comes_is_tried_less_and_less_often() -> None:
    plan = PodWakes(replace(QUICK, min_interval_seconds=2.0, max_interval_seconds=30.0))
    uids = [f"uid-{number}" for number in range(20)]
    at, tried = list[float](), list[str]()
    for tick in range(4 * 3600):
        now = tick / 2
        # kube-scheduler's result by now: the node has too little CPU.
        plan.note_waiting(uids, now, is_placed=lambda _: False, is_assumed=lambda _: False)
        for node in plan.confirm("need", ["node"], now):
            due = [uid for uid in uids if plan.may_try(uid, node, now)]
            for uid in due[:1]:
                plan.note_woken(uid, node)
                at.append(now)
                tried.append(uid)

    apart = [after - before for before, after in pairwise(at)]
    assert apart[:6] == [2.5, 4.5, 8.5, 16.5, 30.5, 30.5]
    assert set(tried) == set(uids)


def test_a_nodes_failed_wakes_are_forgotten_once_no_pod_tries_it_any_more() -> None:
    plan = PodWakes(replace(QUICK, min_interval_seconds=2.0, max_interval_seconds=30.0))

    def fail(uid: str, now: float) -> None:
        plan.note_woken(uid, "node")
        plan.note_waiting([uid], now, is_placed=lambda _: False, is_assumed=lambda _: False)

    fail("first", 0.0)
    plan.note_waiting([], 123.0, is_placed=lambda _: False, is_assumed=lambda _: False)
    fail("second", 124.0)

    assert [plan.open_nodes(["node"], 124.0 + wait) for wait in (1.0, 2.0)] == [[], ["node"]]


async def test_node_unused_by_urgent_pods_is_offered_to_others_first(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    count = 70
    for number in range(count):
        gated(world, f"p{number:02}", created_at=float(number))
    gated(world, "last", created_at=1e3)
    turn_idle(world, "y")
    clock = Clock()
    waking = each(client, world, clock=clock)

    while "last" not in woken(kube):
        await waking.look()
        for pod in woken(kube):  # kube-scheduler's result by now: too little CPU
            world.fleet.ledger.drop(f"uid-{pod}")
        clock.now += QUICK.max_interval_seconds
        assert len(woken(kube)) <= count + 1

    assert woken(kube) == [*(f"p{number:02}" for number in range(count)), "last"]


def test_once_a_pod_came_to_a_node_all_count_as_untried_there_again() -> None:
    plan = PodWakes(QUICK)
    now = 0.0

    def wait(*waiting: str) -> None:
        plan.note_waiting(waiting, now, is_placed=lambda _: True, is_assumed=lambda _: False)

    plan.note_woken("first", "node")
    wait("first", "second")
    assert [plan.is_untried(uid, "node") for uid in ("first", "second")] == [False, True]

    plan.note_woken("second", "node")
    wait("first")

    assert plan.is_untried("first", "node")


async def test_a_pod_that_went_meanwhile_is_no_failure_and_frees_its_room(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    waits(world, "p0", created_at=0.0)
    waits(world, "p1", created_at=1.0)
    kube.faults["write"].append(refusal(404, "not found"))
    turn_idle(world, "y")
    waking = each(client, world)

    await waking.look()
    world.fleet.remove_pod("uid-p0", world.clock.now)
    await waking.look()

    assert woken(kube) == ["p0", "p1"]
    assert waking.counts.failed == 0


async def test_without_the_right_the_log_says_so_and_the_room_stays_free(
    kube: FakeKube, client: KubeClient, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    waits(world)
    kube.faults["write"].append(refusal(403, "forbidden"))
    turn_idle(world, "y")
    clock = Clock()
    waking = each(client, world, clock=clock)

    await waking.look()
    assert waking.counts.failed == 1
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "RBAC must allow this identity to patch pods" in vars(warning)["cause"]
    assert len(world.fleet.ledger) == 0
    await waking.look()
    assert len(kube.writes) == 1

    clock.now += QUICK.min_interval_seconds
    await waking.look()
    assert woken(kube) == ["p", "p"]


async def test_a_replica_that_is_no_longer_elected_wakes_no_pod(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    waits(world)
    turn_idle(world, "y")

    await each(client, world, leading=Leading(leads=False)).look()

    assert kube.writes == []
    assert len(world.fleet.ledger) == 0


def test_a_pod_is_woken_only_after_several_checks_in_a_row() -> None:
    plan = PodWakes(replace(QUICK, confirmations=2))

    looks = [plan.confirm("need", nodes, 0.0) for nodes in (["x"], ["x", "y"], ["y"], ["x", "y"])]

    assert looks == [[], ["x"], ["y"], ["y"]]


def test_a_replica_that_wakes_again_starts_without_former_wakes() -> None:
    plan = PodWakes(replace(QUICK, confirmations=2))
    plan.note_woken("uid", "x")
    plan.note_waiting(["uid"], 0.0, is_placed=lambda _: False, is_assumed=lambda _: False)
    plan.confirm("need", ["x"], 0.0)

    plan.forget()

    assert plan.may_try("uid", "x", 0.0)
    assert plan.is_untried("uid", "x")
    assert plan.open_nodes(["x"], 0.0) == ["x"]
    assert plan.confirm("need", ["x"], 0.0) == []


def test_requirements_without_a_waiting_pod_are_forgotten() -> None:
    plan = PodWakes(replace(QUICK, confirmations=2))
    plan.confirm("need", ["x"], 0.0)

    plan.keep_needs(set())

    assert plan.confirm("need", ["x"], 0.0) == []


async def test_group_too_large_by_its_object_takes_no_room(
    kube: FakeKube, client: KubeClient, world: World
) -> None:
    large, other = PodGroup("JobSet", "ns", "large"), PodGroup("JobSet", "ns", "other")
    world.fleet.apply_group_size(large.key, 1000)
    waits(world, "p0", created_at=0.0, group=large)
    waits(world, "p1", created_at=1.0, group=other)
    turn_idle(world, "y")
    waking = each(client, world)

    for _ in range(4):
        await waking.look()

    assert woken(kube) == ["p1"]


async def test_many_waiting_pods_are_looked_at_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waker_module, "_SCANNED", 2)
    world = World()
    for number in range(5):
        waits(world, f"p-{number}")
    steps: list[int] = []
    refused = Waker._refused_request

    def looked_at(self: Waker, record: PodRecord) -> object:
        steps[-1] += 1
        return refused(self, record)

    async def sleep(_: float) -> None:
        steps.append(0)

    monkeypatch.setattr(Waker, "_refused_request", looked_at)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    steps.append(0)

    found = await waker(KubeClient.__new__(KubeClient), world)._waiting()

    assert (len(found), steps) == (5, [1, 2, 2])
