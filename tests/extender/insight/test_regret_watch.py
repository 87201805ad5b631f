"""Outcomes of placements, compared with alternative nodes."""

from dataclasses import replace

import numpy as np
import pytest

from extender.core.nodes.inventory import PodRecord
from extender.insight.regret_watch import _MAX_WAITING, _PIECES, PlacementOutcome, RegretWatch
from testkit.builders import pod_ref
from testkit.world import BUSY, IDLE, World

AFTER = 3600.0


class Watched:
    """Small cluster whose placements are observed."""

    def __init__(self, nodes: int = 3, cards: int = 1, *, pods: int = 100) -> None:
        self.world = World()
        for index in range(nodes):
            self.world.add_node(f"node-{index}", cards)
        self.world.read()
        self.outcomes: list[PlacementOutcome] = []
        self.watch = RegretWatch(
            self.world.fleet,
            self.world.clock,
            pods=pods,
            after_seconds=AFTER,
            on_outcome=self.outcomes.append,
        )

    def place(self, name: str, node: str) -> PodRecord:
        """Decide about a pod, and bind it to a node, chosen or not."""
        self.world.place(name)
        for record in self.world.history:
            self.world.placer.detail(record)
        self.world.card(node).tenants = (f"ns/{name}",)
        bound = self.world.bind(name, node)
        decided = self.world.history.note_bound(bound.uid, node)
        assert decided is not None
        self.watch.note(decided)
        while self.watch.take_next():
            pass
        return bound

    def live(self, seconds: float, *, every: float = 60.0, reads: bool = True) -> None:
        until = self.world.clock.now + seconds
        while self.world.clock.now < until:
            if reads:
                self.world.read_after(every)
            else:
                self.world.clock.now += every
            self.watch.look()
            for _ in self.watch.judge_in_steps():
                pass

    def busy(self, node: str, share: float, index: int = 0) -> None:
        values = BUSY if share else IDLE
        card = self.world.card(node, index)
        card.values.update(values)
        for signal in list(values)[:2]:
            card.values[signal] = share


def test_a_placement_is_judged_once_its_time_is_up() -> None:
    part = Watched()
    part.place("a", "node-1")
    part.busy("node-1", 0.8)
    part.busy("node-2", 0.3)

    part.live(AFTER - 120)
    assert part.outcomes == []
    part.live(180)

    (outcome,) = part.outcomes
    assert (outcome.node, outcome.choice, outcome.best) == ("node-1", "node-0", "node-0")
    assert not outcome.is_followed
    assert outcome.is_known
    assert outcome.got == pytest.approx(0.8)
    assert (outcome.choice_since, outcome.best_since) == (0.0, 0.0)
    assert outcome.regret == outcome.hindsight == pytest.approx(0.8)
    assert (outcome.got_then, outcome.choice_then) == (0.0, 0.0)
    assert len(part.watch) == 0


def test_our_taken_choice_has_hindsight_but_no_regret() -> None:
    part = Watched()
    part.place("a", "node-0")
    part.busy("node-0", 0.5)
    part.busy("node-1", 0.4)
    part.live(AFTER + 120)

    (outcome,) = part.outcomes
    assert outcome.is_followed
    assert outcome.regret == 0
    assert outcome.best == "node-2"
    assert outcome.hindsight == pytest.approx(0.5)


def test_our_choice_can_turn_out_worse_than_the_taken_node() -> None:
    part = Watched()
    part.place("a", "node-2")
    part.busy("node-0", 0.9)
    part.live(AFTER + 120)

    (outcome,) = part.outcomes
    assert outcome.regret == pytest.approx(-0.9)
    assert outcome.hindsight == 0


def test_only_readings_after_the_binding_count() -> None:
    part = Watched()
    part.busy("node-1", 0.9)
    part.live(AFTER)
    part.busy("node-1", 0.1)
    part.live(600)
    part.place("a", "node-1")
    part.live(AFTER + 120)

    (outcome,) = part.outcomes
    assert outcome.got == pytest.approx(0.1)


def test_stale_gpu_counts_as_neither_busy_nor_idle() -> None:
    part = Watched()
    part.place("a", "node-1")
    part.busy("node-1", 0.8)
    part.live(AFTER / 4)
    part.live(AFTER / 2, reads=False)
    part.busy("node-1", 0.2)
    part.live(AFTER / 4 + 120)

    (outcome,) = part.outcomes
    assert outcome.got == pytest.approx(0.5, abs=0.05)


def test_the_figures_of_an_hour_are_means_over_it_of_whatever_happened() -> None:
    """Three nodes of two GPUs whose load changes each quarter of the hour."""
    part = Watched(cards=2)
    busy = {
        "node-0": [(0.0, 0.2), (0.4, 0.2), (0.0, 0.2), (0.0, 0.2)],
        "node-1": [(0.8, 0.4), (0.4, 0.4), (0.8, 0.0), (0.4, 0.4)],
        "node-2": [(0.0, 0.0), (0.0, 0.0), (0.2, 0.2), (0.0, 0.0)],
    }
    pod = part.place("a", "node-1")  # on its first GPU, and none beside it
    for quarter in range(4):
        for node, quarters in busy.items():
            for index, share in enumerate(quarters[quarter]):
                part.busy(node, share, index)
        part.live(AFTER / 4)
    part.live(120)

    (outcome,) = part.outcomes
    assert outcome.pod.uid == pod.uid
    assert outcome.seconds == pytest.approx(AFTER, abs=60)
    assert outcome.is_known
    # A pod with one GPU could have got either GPU of a node.
    mean = {name: np.mean(quarters) for name, quarters in busy.items()}
    assert outcome.got == pytest.approx(np.mean([first for first, _ in busy["node-1"]]), abs=0.01)
    assert (outcome.choice, outcome.best) == ("node-0", "node-2")
    assert outcome.choice_since == pytest.approx(mean["node-0"], abs=0.01)
    assert outcome.best_since == pytest.approx(mean["node-2"], abs=0.01)
    assert outcome.regret == pytest.approx(0.6 - 0.15, abs=0.01)
    assert outcome.hindsight == pytest.approx(0.6 - 0.05, abs=0.01)


def test_a_pod_that_ends_early_is_judged_by_the_time_that_it_ran() -> None:
    part = Watched()
    part.live(600)
    pod = part.place("a", "node-1")
    part.busy("node-1", 0.6)
    part.live(1200)
    part.world.card("node-1").tenants = ()
    part.world.fleet.remove_pod(pod.uid, part.world.clock.now)
    part.live(60)

    (outcome,) = part.outcomes
    assert outcome.seconds < AFTER
    assert outcome.got == pytest.approx(0.6)


def test_recreated_pod_is_judged_by_its_own_gpus() -> None:
    part = Watched(cards=2)
    part.place("a", "node-1")
    part.busy("node-1", 0.8, index=1)
    part.live(120)  # telemetry still shows the devices of the former pod of that name
    part.world.card("node-1").tenants = ()
    part.world.card("node-1", 1).tenants = ("ns/a",)
    part.live(AFTER)

    (outcome,) = part.outcomes
    assert outcome.is_known
    assert outcome.gpus == 1
    assert outcome.got == pytest.approx(0.8)


def test_the_gpus_of_a_pod_that_ended_soon_are_unknown() -> None:
    part = Watched(cards=2)
    part.live(AFTER / _PIECES - 60)
    pod = part.place("a", "node-1")
    part.busy("node-1", 0.8, index=1)
    part.live(AFTER / _PIECES - 60)
    part.world.fleet.remove_pod(pod.uid, part.world.clock.now)
    part.live(60)

    (outcome,) = part.outcomes
    assert not outcome.is_known
    assert outcome.gpus == 2


def test_pod_preempted_between_steps_is_not_judged() -> None:
    part = Watched(pods=2)
    part.place("a", "node-1")
    part.place("b", "node-2")
    part.live(AFTER - 120)
    part.world.read_after(240)
    part.watch.look()

    steps = part.watch.judge_in_steps()
    next(steps)
    part.place("c", "node-0")
    part.place("d", "node-0")
    assert not list(steps)

    assert [outcome.pod.name for outcome in part.outcomes] == ["a"]
    assert part.watch.left_out == 1


def test_pod_with_too_few_readings_is_left_out_and_counted() -> None:
    part = Watched()
    pod = part.place("a", "node-1")
    part.world.fleet.remove_pod(pod.uid, part.world.clock.now)

    part.live(60)

    assert (part.outcomes, part.watch.left_out, len(part.watch)) == ([], 1, 0)


def test_history_of_a_removed_gpu_does_not_count_for_its_successor() -> None:
    part = Watched()
    part.place("a", "node-1")
    part.live(AFTER / 2)
    part.world.fleet.remove_node("node-0")
    part.world.remove_card("node-0", 0)
    part.world.add_node("node-9", 1)
    part.busy("node-9", 0.9)
    part.live(AFTER / 2 + 120)

    (outcome,) = part.outcomes
    assert outcome.choice == "node-0"
    assert outcome.choice_since is None
    assert outcome.regret is None


def test_as_many_pods_are_watched_and_kept_as_are_set() -> None:
    part = Watched(nodes=8, pods=2)
    for index in range(5):
        part.place(f"pod-{index}", f"node-{index}")

    assert (len(part.watch), part.watch.left_out) == (2, 3)
    part.live(AFTER + 120)
    assert len(part.watch.outcomes) == 2


def test_only_the_first_pods_of_a_burst_are_watched() -> None:
    part = Watched(pods=2 * _MAX_WAITING)
    part.world.place("a")
    record = next(iter(part.world.history))

    part.world.placer.detail(record)
    bound = replace(record, bound_node="node-1", bound_at=part.world.clock.now)
    refs = [pod_ref(f"pod-{number}") for number in range(_MAX_WAITING + 3)]
    for ref in refs:
        part.watch.note(replace(bound, pod=ref))
    while part.watch.take_next():
        pass

    assert part.watch.left_out == 3
    assert list(part.watch._watched) == [ref.uid for ref in refs[:_MAX_WAITING]]


def test_among_equal_nodes_the_pods_own_counts_as_best_then_the_first() -> None:
    part = Watched()
    part.place("a", "node-1")
    part.place("b", "node-2")
    part.busy("node-2", 0.8)
    part.live(AFTER + 120)

    assert [(one.pod.name, one.best, one.hindsight) for one in part.outcomes] == [
        ("a", "node-1", 0.0),
        ("b", "node-0", pytest.approx(0.8)),
    ]


def test_the_activity_at_the_decision_is_unknown_without_a_fresh_reading() -> None:
    part = Watched()
    part.world.clock.now += 24 * AFTER
    part.place("a", "node-1")
    part.live(AFTER + 120)

    (outcome,) = part.outcomes
    assert outcome.got == 0.0
    assert (outcome.got_then, outcome.choice_then) == (None, None)


def test_a_pod_that_is_bound_again_is_the_last_to_make_room() -> None:
    part = Watched(pods=2)
    for name, node in (("a", "node-0"), ("b", "node-1")):
        part.place(name, node)
    part.place("a", "node-0")
    part.place("c", "node-2")

    assert list(part.watch._watched) == ["uid-a", "uid-c"]
    assert part.watch.left_out == 1


def test_none_is_watched_where_that_is_off() -> None:
    part = Watched(pods=0)

    part.place("a", "node-1")
    part.live(AFTER + 120)

    assert (len(part.watch), part.outcomes, part.watch.left_out) == (0, [], 0)
