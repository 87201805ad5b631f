"""Shadow mode, decision log and regret follow the settings of a running extender."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from extender.core.nodes.inventory import PodRecord
from extender.core.steps import finish
from extender.insight.decision_log.reader import LoggedBinding, LoggedDecision, read_log
from extender.insight.shadow_mode import SAMPLE_SECONDS, ShadowMode
from extender.placement.binding_attribution import BindingAttribution, InventoryTap
from extender.placement.bypassed_pods import MAX_WAIT_SECONDS, BypassedPods
from extender.placement.history import DecisionRecord
from extender.placement.request_log import FILTER, PRIORITIZE, AnsweredRequest
from extender.runtime.metrics import Metrics
from extender.server.request_tracker import RequestTracker
from extender.settings.config import Settings
from extender.settings.service import BypassSettings, DecisionLog, Mode, RegretSettings
from testkit.builders import GPU
from testkit.cards import IDLE
from testkit.judging import ReceivedPeriod
from testkit.webhook_requests import Client, MakeClient, names_request, pod
from testkit.world import World

HOUR = 3600.0

CARDS = {"node-0": [IDLE], "node-1": [IDLE]}

WAITING = PodRecord(uid="uid-p", namespace="team", name="p", resources={GPU: 1})

NEAR, FAR = 0, 1


def small() -> World:
    world = World()
    for index in range(2):
        world.add_node(f"node-{index}", 1)
    world.read()
    return world


def bind(world: World, shadow_mode: ShadowMode, name: str) -> None:
    """Place a pod, and bind it to node-1."""
    world.place(name)
    for record in world.history:
        world.placer.detail(record)
    bound = world.bind(name, "node-1")
    decided = world.history.note_bound(bound.uid, "node-1")
    assert decided is not None
    shadow_mode.note_bound(decided)
    shadow_mode.note_own(decided)


async def test_the_mode_may_be_changed_while_it_runs() -> None:
    world, metrics = small(), Metrics()
    ShadowMode(Settings(), world.placer, metrics, world.clock, RequestTracker())
    assert metrics.registry.get_sample_value("idlegpu_shadow_mode") == 0

    world.placer.adopt(Settings(mode=Mode.SHADOW))
    world.place("a")

    assert len(world.fleet.ledger) == 0
    assert metrics.registry.get_sample_value("idlegpu_shadow_mode") == 1
    world.placer.adopt(Settings())
    world.place("b")
    assert len(world.fleet.ledger) == 1


async def test_a_log_may_be_begun_moved_and_ended_while_it_runs(tmp_path: Path) -> None:
    world, metrics = small(), Metrics()
    shadow_mode = ShadowMode(Settings(), world.placer, metrics, world.clock, RequestTracker())
    world.place("unlogged")
    first, second = tmp_path / "first", tmp_path / "second"

    await shadow_mode.adopt(Settings(decision_log=DecisionLog(path=str(first))))
    bind(world, shadow_mode, "a")
    await shadow_mode.adopt(Settings(decision_log=DecisionLog(path=str(second))))
    world.place("b")
    await shadow_mode.adopt(Settings())
    world.place("c")

    reported = [
        (line.uid if isinstance(line, LoggedBinding) else line.pod.uid)
        for line in read_log([first, second])
    ]
    assert reported == ["uid-a", "uid-a", "uid-a", "uid-b", "uid-b"]
    assert [type(line) for line in read_log([first])] == [
        LoggedDecision,
        LoggedDecision,
        LoggedBinding,
    ]
    assert shadow_mode.log is None


async def test_log_problems_degrade_shadow_mode(tmp_path: Path) -> None:
    world = small()
    settings = Settings(decision_log=DecisionLog(path=str(tmp_path / "none" / "log")))
    shadow_mode = ShadowMode(settings, world.placer, Metrics(), world.clock, RequestTracker())
    assert shadow_mode.degraded() == {}

    world.place("a")
    assert shadow_mode.log is not None
    await asyncio.to_thread(shadow_mode.log.close)

    assert shadow_mode.degraded() == {
        "decision_log": "cannot be written: No such file or directory"
    }


async def test_bound_pods_are_watched() -> None:
    world = small()
    settings = Settings(regret=RegretSettings(pods=5))
    shadow_mode = ShadowMode(settings, world.placer, Metrics(), world.clock, RequestTracker())

    bind(world, shadow_mode, "a")

    assert shadow_mode.regret.take_next()
    assert len(shadow_mode.regret) == 1
    await shadow_mode.adopt(Settings(regret=RegretSettings(pods=0)))
    bind(world, shadow_mode, "b")
    assert not shadow_mode.regret.take_next()


@pytest.mark.looptime
async def test_bound_pods_are_judged_and_the_log_is_completed_while_it_runs(tmp_path: Path) -> None:
    world, metrics, path = small(), Metrics(), tmp_path / "log"
    settings = Settings(
        regret=RegretSettings(pods=5, after_seconds=60.0), decision_log=DecisionLog(path=str(path))
    )
    shadow_mode = ShadowMode(settings, world.placer, metrics, world.clock, RequestTracker())
    running = asyncio.create_task(shadow_mode.run())
    bind(world, shadow_mode, "a")
    await asyncio.sleep(3.0)  # longer than it waits for the end of a burst
    assert (shadow_mode.regret.waiting, len(shadow_mode.regret)) == (0, 1)

    for _ in range(3):
        world.read_after(SAMPLE_SECONDS)
        await asyncio.sleep(SAMPLE_SECONDS)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running

    value = metrics.registry.get_sample_value
    assert value("idlegpu_placement_activity_count", {"gpus": "got"}) == 1
    assert [type(line) for line in read_log([path])] == [
        LoggedDecision,
        LoggedDecision,
        LoggedBinding,
    ]
    for outcome, count in (("written", 2), ("dropped", 0)):
        labels = {"outcome": outcome}
        assert value("idlegpu_decision_log_decisions_total", labels) == count


@pytest.mark.looptime
async def test_a_fault_of_the_watch_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world, faults = small(), iter([True, False, False, False])
    settings = Settings(regret=RegretSettings(pods=5))
    shadow_mode = ShadowMode(settings, world.placer, Metrics(), world.clock, RequestTracker())
    looks: list[float] = []

    def look() -> None:
        looks.append(world.now)
        if next(faults):
            raise RuntimeError("a fault")

    monkeypatch.setattr(shadow_mode.regret, "look", look)
    monkeypatch.setattr(shadow_mode.regret, "take_next", look)
    running = asyncio.create_task(shadow_mode.run())
    await asyncio.sleep(2 * SAMPLE_SECONDS + 1)
    assert len(looks) == 2  # nothing waits to be taken

    await shadow_mode.adopt(Settings(regret=RegretSettings(pods=0)))
    await asyncio.sleep(SAMPLE_SECONDS)
    running.cancel()

    assert len(looks) == 2


class Replica(World):
    """Replica that observes the outcomes of placements."""

    def __init__(self) -> None:
        super().__init__()
        self.untold: list[AnsweredRequest] = []
        self.own: list[DecisionRecord] = []
        self.shadow_mode = ShadowMode(
            Settings(), self.placer, self.metrics, lambda: self.now, RequestTracker()
        )
        self.request_log.answered.subscribe(self.untold.append)
        self.received = ReceivedPeriod(until=self.now)
        self.bypassed_pods = BypassedPods(
            self.request_log, self.metrics, BypassSettings(), peers=self.received, grace_seconds=1.0
        )
        self.binding_attribution = BindingAttribution(
            self.request_log,
            self.history,
            self.metrics,
            peers=self.received,
            on_own=(self.own.append, self.shadow_mode.note_own),
        )
        self.tap = InventoryTap(
            self.fleet,
            self.history,
            self.binding_attribution,
            self.bypassed_pods,
            self.shadow_mode.note_bound,
        )
        self.add(CARDS)
        self.tap.apply_pod(WAITING)

    def sweep(self) -> None:
        self.bypassed_pods.sweep()
        finish(self.binding_attribution._sweep_in_steps())
        self.shadow_mode.regret.take_next()

    @property
    def judged(self) -> float:
        """Return the number of outcomes that it has counted."""
        return self.count("idlegpu_placement_activity_count", gpus="got")

    @property
    def bound(self) -> float:
        """Return the number of pods that it has counted as bound after an answer."""
        return sum(self.count("idlegpu_bound_pods_total", choice=it) for it in ("first", "other"))


@dataclass
class Pair:
    """Two replicas on one cluster, called by one kube-scheduler."""

    replicas: Sequence[Replica]
    clients: Sequence[Client]
    is_cut: bool = False

    async def call(self, at: int, verb: str) -> None:
        """Call one replica for the pod; the other gets a report unless they are disconnected."""
        request = names_request("node-0", "node-1", requester=pod("p"))
        assert (await self.clients[at].post(f"/{verb}", json=request)).status == 200
        self.exchange()

    def exchange(self) -> None:
        """Let each replica report its requests to the other."""
        for one, other in (self.replicas, self.replicas[::-1]):
            while one.untold and not self.is_cut:
                other.request_log.take(one.untold.pop(0))
            if not self.is_cut:
                other.received.until = other.now

    def wait(self, seconds: float) -> None:
        for replica in self.replicas:
            replica.now += seconds

    def bind(self) -> None:
        """Report the pod as bound to both."""
        self.wait(0.1)
        for replica in self.replicas:
            replica.tap.apply_pod(replace(WAITING, node="node-1", bound_at=replica.now))

    def sweep_after(self, seconds: float) -> None:
        self.wait(seconds)
        self.exchange()
        for replica in self.replicas:
            replica.sweep()

    def live(self, seconds: float = HOUR + 300.0) -> list[float]:
        """Let time pass; return the number of outcomes that each has counted."""
        for _ in range(int(seconds / 60)):
            self.sweep_after(60.0)
            for replica in self.replicas:
                replica.report(CARDS)
                replica.shadow_mode.regret.look()
                for _ in replica.shadow_mode.regret.judge_in_steps():
                    pass
        return [replica.judged for replica in self.replicas]

    @property
    def bound(self) -> list[float]:
        return [replica.bound for replica in self.replicas]

    @property
    def own(self) -> list[int]:
        return [len(replica.own) for replica in self.replicas]


@pytest.fixture
async def pair(aiohttp_client: MakeClient) -> Pair:
    replicas = Replica(), Replica()
    return Pair(replicas, [await aiohttp_client(one.build_app()) for one in replicas])


async def test_a_pod_that_one_replica_filtered_and_the_other_scored_counts_once(pair: Pair) -> None:
    await pair.call(NEAR, FILTER)
    pair.wait(0.005)
    await pair.call(FAR, PRIORITIZE)
    pair.bind()

    assert pair.live() == [0, 1]
    assert pair.bound == [0, 1]


async def test_a_pod_that_is_tried_again_at_another_replica_counts_there(pair: Pair) -> None:
    for at in (FAR, NEAR):
        await pair.call(at, FILTER)
        await pair.call(at, PRIORITIZE)
        pair.wait(2.0)
    pair.bind()

    assert pair.live() == [1, 0]
    assert pair.bound == [1, 0]
    assert pair.own == [1, 0]


async def test_a_message_after_the_binding_still_makes_it_one_decision(pair: Pair) -> None:
    await pair.call(NEAR, FILTER)
    pair.is_cut = True
    await pair.call(FAR, PRIORITIZE)
    pair.bind()
    pair.live(120.0)
    assert [len(replica.shadow_mode.regret) for replica in pair.replicas] == [0, 0]

    pair.is_cut = False

    assert pair.live() == [0, 1]


async def test_a_pod_tried_at_both_replicas_counts_once_despite_late_messages(pair: Pair) -> None:
    pair.is_cut = True
    for at in (NEAR, FAR):
        await pair.call(at, FILTER)
        await pair.call(at, PRIORITIZE)
        pair.wait(2.0)
    pair.bind()
    pair.sweep_after(MAX_WAIT_SECONDS - 10.0)
    assert (pair.bound, pair.own) == ([0, 0], [0, 0])

    pair.is_cut = False
    pair.sweep_after(1.0)

    assert (pair.bound, pair.own) == ([0, 1], [0, 1])


async def test_replicas_that_never_reach_each_other_leave_the_pod_out(pair: Pair) -> None:
    pair.is_cut = True
    for at in (NEAR, FAR):
        await pair.call(at, FILTER)
        await pair.call(at, PRIORITIZE)
    pair.bind()

    assert pair.live() == [0, 0]
    assert (pair.bound, pair.own) == ([0, 0], [0, 0])
    assert [len(replica.binding_attribution) for replica in pair.replicas] == [0, 0]


async def test_pod_of_a_lost_replica_is_left_out(pair: Pair) -> None:
    await pair.call(NEAR, FILTER)
    await pair.call(NEAR, PRIORITIZE)
    pair.bind()
    pair.replicas[NEAR].received.since = pair.replicas[NEAR].now

    assert pair.live() == [0, 0]
    assert pair.bound == [0, 0]


async def test_a_late_message_about_an_earlier_answer_changes_nothing(pair: Pair) -> None:
    pair.is_cut = True
    for at in (NEAR, FAR):
        await pair.call(at, FILTER)
        await pair.call(at, PRIORITIZE)
        pair.wait(2.0)
    pair.bind()
    pair.live(120.0)  # by now both have processed its request, and dropped it

    pair.is_cut = False

    assert pair.live() == [0, 1]


async def test_in_one_attempt_prioritize_is_last_even_if_filter_seems_newer(pair: Pair) -> None:
    pair.is_cut = True
    await pair.call(NEAR, FILTER)
    await pair.call(FAR, PRIORITIZE)
    (late,) = pair.replicas[NEAR].untold
    pair.replicas[NEAR].untold[:] = [replace(late, at=late.at + 0.02)]  # delayed for so long
    pair.is_cut = False
    pair.exchange()
    pair.bind()

    assert pair.live() == [0, 1]
    assert pair.bound == [0, 1]


async def test_pod_without_requests_at_other_replicas_counts(pair: Pair) -> None:
    await pair.call(NEAR, FILTER)
    await pair.call(NEAR, PRIORITIZE)
    pair.bind()

    assert pair.live() == [1, 0]
    assert pair.bound == [1, 0]
