from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from extender.core.nodes.inventory import Taint
from extender.core.nodes.node_selection import ANYWHERE, Operator, Requirement, Selection, Term
from extender.core.request.request import GpuRequest, PodRef
from extender.effects.wake_plan import (
    _MAX_REPEAT_SECONDS,
    Hope,
    Prospect,
    WakePace,
    WakePlan,
    nodes_with_room,
    open_to,
)
from testkit.builders import GPU, pod_ref, request
from testkit.world import World

NO_DISK = Requirement(key="disk", operator=Operator.DOES_NOT_EXIST)
PACE = WakePace(confirmations=1, min_interval_seconds=2, max_interval_seconds=30, repeat_seconds=10)
A, B = pod_ref("a"), pod_ref("b")


def prospect(*nodes: str, pods: tuple[PodRef, ...] = (A,), **changes: Any) -> Prospect:
    return Prospect(request=request(**changes), pods=pods, nodes=nodes)


class Planned:
    """Plan with waiting pods, and a clock."""

    def __init__(self, pace: WakePace = PACE, *waiting: PodRef) -> None:
        self.plan = WakePlan(pace)
        self.waiting = {pod.uid for pod in waiting or (A, B)}
        self.now = 1000.0

    def look(self, *prospects: Prospect) -> list[str]:
        """Run one pass and wake at once; return the woken pods with their nodes."""
        hopes = self.plan.next_wake(prospects, self.waiting, self.now)
        if hopes:
            self.plan.note_woken(hopes, self.now)
        return [f"{hope.pod.name} on {hope.node}" for hope in hopes]

    def wakes(self, seconds: float, *prospects: Prospect, step: float = 0.5) -> list[float]:
        """Run a pass every half second; return the seconds at which there was a wake."""
        start, found = self.now, []
        while self.now < start + seconds:
            if self.look(*prospects):
                found.append(self.now - start)
            self.now += step
        return found

    def gone(self, *pods: PodRef) -> None:
        self.waiting -= {pod.uid for pod in pods}


def test_a_pod_with_suitable_nodes_is_woken_for_the_best_one() -> None:
    assert Planned().look(prospect("good", "fair")) == ["a on good"]


def test_pods_without_a_suitable_node_cause_no_wake() -> None:
    assert Planned().look(prospect()) == []


def test_pods_alike_are_not_all_promised_the_same_node() -> None:
    assert Planned().look(prospect("x", "y", pods=(A, B))) == ["a on x", "b on y"]


def test_a_pod_is_woken_only_after_several_checks_in_a_row() -> None:
    planned = Planned(replace(PACE, confirmations=3))

    looks = [planned.look(prospect(*nodes)) for nodes in (["x"], ["x"], [], ["x"], ["x"], ["x"])]

    assert looks == [[], [], [], [], [], ["a on x"]]


def test_pause_before_the_same_pod_is_woken_again_grows() -> None:
    woken = Planned().wakes(1000, prospect("x"))

    assert woken[:6] == [0, 10, 30, 70, 150, 310]
    assert woken[6:] == [610, 910]  # no later than kube-scheduler would retry by itself
    assert _MAX_REPEAT_SECONDS == 300


def test_node_that_flaps_between_readings_wakes_no_pod_again() -> None:
    planned, woken = Planned(), 0
    for number in range(3600):
        nodes = ("x",) if number % 2 else ()
        woken += len(planned.wakes(1, prospect(*nodes)))

    assert woken <= 3600 / _MAX_REPEAT_SECONDS + 6


def test_another_node_is_news_at_once() -> None:
    planned = Planned()
    planned.look(prospect("x"))
    planned.now += 2

    assert planned.look(prospect("x", "y")) == ["a on y"]


def test_useless_wakes_of_long_ago_are_forgotten() -> None:
    planned = Planned()
    planned.wakes(100, prospect("x"))
    planned.now += 1000

    assert planned.wakes(60, prospect("x")) == [0, 10, 30]


def test_wakes_keep_their_distance() -> None:
    planned = Planned()
    planned.look(prospect("x"))
    planned.now += 1.9
    assert planned.look(prospect("y", pods=(B,))) == []

    planned.now += 0.1
    assert planned.look(prospect("y", pods=(B,))) == ["b on y"]


def test_wakes_that_help_no_pod_become_rare_for_all_pods() -> None:
    pods = [pod_ref(f"p{number}") for number in range(200)]
    planned = Planned(PACE, *pods)
    woken: list[float] = []
    for number, pod in enumerate(pods):  # one pod after another is found to fit
        if planned.look(prospect(f"node-{number}", pods=(pod,))):
            woken.append(planned.now - 1000)
        planned.now += 1

    assert woken[:5] == [0, 4, 8, 16, 32]
    # 200 waiting pods keep wakes 4 s apart, and the distance doubles up to 30 s.
    assert [after - before for before, after in pairwise(woken[4:])] == [30] * 5


def test_successful_wake_ends_every_back_off() -> None:
    c = pod_ref("c")
    planned = Planned(PACE, A, B, c)
    odd = prospect("x", pods=(c,), count=4)
    planned.wakes(40, prospect("x", pods=(A, B)), odd)
    planned.gone(A)

    assert planned.look(prospect("x", pods=(B,)), odd) == ["b on x"]
    assert planned.plan.helped == 1
    planned.now += 2
    assert planned.look(prospect("y", pods=(B,)), odd) == ["b on y"]


def test_a_deleted_pod_was_not_helped_and_delays_no_other_pod() -> None:
    planned = Planned()
    planned.look(prospect("x"))
    planned.gone(A)
    planned.now += 2

    hopes = planned.plan.next_wake(
        [prospect("x", pods=(B,))], planned.waiting, planned.now, is_placed=lambda _: False
    )

    assert [hope.pod for hope in hopes] == [B]
    assert planned.plan.helped == 0


def test_pods_that_are_deleted_and_created_again_keep_wakes_rare() -> None:
    planned, woken = Planned(), list[float]()
    for number in range(100):  # each waits a second, under its own UID
        pod = pod_ref(f"p{number}")
        planned.waiting = {pod.uid, B.uid}
        prospects = [prospect("x", pods=(pod,)), prospect("y", pods=(B,))]
        found = planned.plan.next_wake(
            prospects, planned.waiting, planned.now, is_placed=lambda _: False
        )
        if found:
            planned.plan.note_woken(found, planned.now)
            woken.append(planned.now - 1000)
        planned.now += 1

    assert woken[:5] == [0, 2, 6, 14, 30]


def test_many_waiting_pods_make_wakes_rarer() -> None:
    planned = Planned(PACE, *(pod_ref(str(number)) for number in range(500)))
    planned.look(prospect("x", pods=(pod_ref("0"),)))

    # Until it is measured, a try counts 5 ms; all tries may take a quarter of the time.
    assert planned.wakes(60, prospect("y", pods=(pod_ref("1"),)))[0] == 10


@pytest.mark.parametrize(
    ("try_seconds", "apart_seconds"), [(0.0005, 2.0), (0.02, 40.0), (3.0, _MAX_REPEAT_SECONDS)]
)
def test_the_slower_kube_scheduler_tries_pods_the_rarer_wakes_are(
    try_seconds: float, apart_seconds: float
) -> None:
    planned = Planned(PACE, *(pod_ref(str(number)) for number in range(500)))
    planned.look(prospect("x", pods=(pod_ref("0"),)))
    tried = [7.0 + number * try_seconds for number in range(400)]

    # Some were tried before by chance, and some after a pause.
    planned.plan.note_retries([*tried[200:], 1.0, *tried[:200], 9999.0])

    assert planned.wakes(600, prospect("y", pods=(pod_ref("1"),)))[0] == apart_seconds


def test_a_few_tries_say_nothing_of_the_pace() -> None:
    planned = Planned(PACE, *(pod_ref(str(number)) for number in range(500)))
    planned.look(prospect("x", pods=(pod_ref("0"),)))

    planned.plan.note_retries([float(number) for number in range(10)])

    assert planned.wakes(60, prospect("y", pods=(pod_ref("1"),)))[0] == 10


def test_failed_wake_is_retried_with_growing_pauses() -> None:
    planned = Planned()
    failures: list[float] = []
    while planned.now < 1200:
        if planned.plan.next_wake([prospect("x")], planned.waiting, planned.now):
            failures.append(planned.now - 1000)
            planned.plan.note_failed(planned.now)
        planned.now += 0.5

    assert failures == [0, 2, 6, 14, 30, 60, 90, 120, 150, 180]


def test_the_history_of_a_pod_is_removed_with_the_pod() -> None:
    planned = Planned(PACE, *(pod_ref(str(number)) for number in range(100)))
    planned.look(prospect("x", pods=tuple(pod_ref(str(number)) for number in range(100))))
    assert planned.plan._pods
    assert planned.plan._hoping
    planned.waiting.clear()

    planned.look()

    assert not planned.plan._pods
    assert not planned.plan._hoping


def test_a_woken_pod_that_is_already_gone_is_ignored() -> None:
    WakePlan(PACE).note_woken([Hope(pod=A, node="x", nodes=frozenset({"x"}))], 0.0)


# --- waiting pods, and nodes with room ------------------------------------------------------------


def room(world: World, requested: GpuRequest, selection: Selection = ANYWHERE) -> tuple[str, ...]:
    roomy = nodes_with_room(world.fleet.snapshot(), world.fleet.nodes, requested)
    return open_to(selection, roomy, world.fleet.nodes)


def test_room_is_where_enough_devices_are_left() -> None:
    world = World()
    for name in ("empty", "full", "half"):
        world.add_node(name, 2)
    world.bind("a", "full", 2)
    world.bind("b", "half", 1)

    assert room(world, request(1)) == ("empty", "half")
    assert room(world, request(2)) == ("empty",)
    assert room(world, request(3)) == ()


def test_no_room_is_where_kube_scheduler_does_not_look() -> None:
    world = World()
    world.add_node("ready")
    world.add_node("cordoned", is_unschedulable=True)
    world.add_node("tainted", taints=(Taint(key="team"),))
    world.add_node("other", labels={"disk": "hdd"})
    world.add_node("lost", is_ready=False)
    selection = Selection(terms=(Term(labels=(NO_DISK,)),))

    assert room(world, request(), selection) == ("ready",)
    assert set(room(world, request())) == {"ready", "cordoned", "tainted", "other"}


def test_room_must_be_there_for_every_resource() -> None:
    world = World()
    for name, resources in (("both", {GPU: 1, "nvidia.com/mig-1g.5gb": 7}), ("one", {GPU: 1})):
        world.add_node(name, allocatable=resources, capacity=resources)
    requested = request(resources=((GPU, 1), ("nvidia.com/mig-1g.5gb", 1)))

    assert room(world, requested) == ("both",)
    assert room(world, GpuRequest(resource="nvidia.com/unknown", count=1)) == ()
