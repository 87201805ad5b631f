"""Replays of a log: exact without changes, and with changed settings."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.core.nodes.pod_groups import PodGroup
from extender.core.policy import Policy, Strategy
from extender.core.request.request import GpuRequest
from extender.insight.replay import Changes, Replay, Replayed, parse_changes
from testkit.builders import Node, busy, gpu, node, pod_ref, request, snapshot_of
from testkit.decision_logs import (
    LoggedWorld,
    decisions_in,
    weighed,
    written,
)
from testkit.strategies import MODELS, fleets, overlays, policies, requests
from testkit.world import BUSY, IDLE, World, time_sliced


def again(log: bytes, *changes: str) -> list[Replayed]:
    replay = Replay(parse_changes(changes))
    return [replay.again(line) for line in decisions_in(log)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_without_changes_every_decision_comes_out_as_it_was_logged(data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    snapshot = snapshot_of(fleet, models=MODELS)
    made = [
        weighed(
            snapshot,
            replace(data.draw(requests()), nominated_node=data.draw(st.sampled_from(["", *fleet]))),
            policy=data.draw(policies),
            overlay=data.draw(overlays(list(fleet))),
            candidates=tuple(data.draw(st.permutations([*fleet, "unknown"]))),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]

    replayed = again(written(made))

    assert len(replayed) == len(made)
    for one, was in zip(replayed, made, strict=True):
        assert one.is_exact
        assert one.after.node == (was.decision.best or "")


def live(world: World, pods: int, step: Callable[[int], None] = lambda _: None) -> LoggedWorld:
    """Place pods one after another, half of them not on the extender's choice; return the log."""
    logged = LoggedWorld(world)
    for number in range(pods):
        chosen = world.place(f"pod-{number}", request(1 + number % 2))
        world.clock.now += 0.3
        if chosen:
            logged.bind(f"pod-{number}", chosen if number % 3 else "node-1", started_at=None)
        step(number)
    return logged


def test_so_it_is_while_pods_come_and_go_and_readings_change() -> None:
    world = World(in_steps=True)
    for index in range(12):
        world.add_node(f"node-{index}", 4)
    world.read()
    world.fleet.snapshot_of_all()

    def step(number: int) -> None:
        if number % 7 == 3:
            loads = BUSY if number % 2 else IDLE
            world.card(f"node-{number % 12}", number % 4).values.update(loads)
            world.read()
        if number % 5 == 4:
            world.fleet.remove_pod(f"uid-pod-{number - 2}", world.clock.now)
        if number == 20:
            world.add_node("node-late", 8)
            world.read()
            world.fleet.snapshot_of_all()

    logged = live(world, 40, step)

    replayed = again(logged.log)
    assert len(replayed) == 2 * 40
    assert [one.logged.number for one in replayed if not one.is_exact] == []


def test_so_it_is_on_shared_gpus_in_a_burst() -> None:
    logged = live(time_sliced(4, 2, 5), 30)

    assert all(one.is_exact for one in again(logged.log))


def test_a_log_that_was_tampered_with_is_not_exact() -> None:
    log = written([weighed(snapshot_of(CHOICE), request(), policy=Policy())])

    (one,) = again(log.replace(b'"feasible":3', b'"feasible":2'))

    assert not one.is_exact


# --- other settings -----------------------------------------------------------------------------

CHOICE: dict[str, Node] = {
    "calm": node(*[gpu(utilization=0.02, memory_used=0.31)] * 2),
    "roomy": node(*[gpu(utilization=0.29, memory_used=0.0)] * 2),
    "nearly-full": node(gpu(utilization=0.25, memory_used=0.45), busy(used=1)),
}


SPREADING = request(strategy=Strategy.SPREAD)


def first_choice(requested: GpuRequest, *changes: str) -> str:
    (one,) = again(written([weighed(snapshot_of(CHOICE), requested, policy=Policy())]), *changes)
    assert one.is_exact
    assert one.before.node == "calm"
    return one.after.node


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(("weights.memory=0.9",), "roomy", id="memory-weighs-more"),
        pytest.param(("weights.memory=0.0",), "calm", id="memory-weighs-nothing"),
        pytest.param(("strategy=pack",), "nearly-full", id="packed"),
        pytest.param(("thresholds.memory=30",), "roomy", id="what-holds-much-memory-is-not-idle"),
        pytest.param(("thresholds.utilization=10",), "calm", id="less-activity-is-idle"),
    ],
)
def test_changed_setting_changes_the_replayed_decision(
    changes: tuple[str, ...], expected: str
) -> None:
    assert first_choice(SPREADING, *changes) == expected


def test_a_pods_own_annotation_overrides_a_changed_setting() -> None:
    requested = replace(SPREADING, own=frozenset({"strategy"}))

    assert first_choice(requested, "strategy=pack") == "calm"


def test_landings_are_reported_by_the_settings_of_the_log() -> None:
    log = written([weighed(snapshot_of(CHOICE), SPREADING, policy=Policy())])

    (one,) = again(log, "weights.memory=0.9")

    assert (one.before.activity, one.after.activity) == pytest.approx((0.02, 0.29))
    assert (one.before.is_idle, one.after.is_idle) == (True, True)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("weights.memory", "must be NAME=VALUE"),
        ("window_seconds=60", "NAME one of strategy, thresholds.utilization"),
        ("weights.memory=lots", "weights.memory"),
        ("strategy=best", "strategy"),
        ("thresholds.utilization=0.3", "thresholds.utilization"),
    ],
)
def test_bad_change_is_reported_with_allowed_values(text: str, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        parse_changes([text])


def test_changes_that_leave_no_weight_are_refused() -> None:
    zeros = {f"weights.{name}": 0.0 for name in Policy().weights.__slots__}

    with pytest.raises(ValueError, match="one of them must be more than 0"):
        Changes(zeros).policy(Policy())


def test_several_changes_hold_together() -> None:
    changes = parse_changes(["strategy=pack", "weights.memory=0.4", "load_filter.enabled=true"])

    policy = changes.policy(Policy())

    assert (policy.strategy, policy.weights.memory) == (Strategy.PACK, 0.4)
    assert policy == replace(
        Policy(), strategy=policy.strategy, weights=policy.weights, load_filter=policy.load_filter
    )


RACK = "topology.kubernetes.io/rack"
GROUP = PodGroup("JobSet", "ns", "train", 3)


@pytest.mark.parametrize("more", [(), ("unknown",)], ids=["all", "with a node that is unknown"])
def test_a_pod_of_a_group_goes_near_it_again(more: tuple[str, ...]) -> None:
    world = World()
    for name, rack in {"c": "2", "a": "1", "b": "2"}.items():
        world.add_node(name, 2 if rack == "2" else 1, other_labels={RACK: rack})
    world.read()
    logged = LoggedWorld(world)
    for size in (3, 9):
        wanted = request(group=replace(GROUP, size=size))
        names = ("b", *more, "c", "a")
        decided = world.placer.place("filter", pod_ref(f"p-{size}"), wanted, names).decision
        assert (decided.best is None) == (size == 9 and not more)

    first, second = again(logged.log)

    assert first.is_exact
    assert first.after.node == "b"  # alone it would be placed on a
    assert second.is_exact
