"""Replays of a log: exact without changes, and with changed settings."""

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.pod_groups import PodGroup
from extender.core.policy import Policy, Strategy
from extender.core.request.request import GpuRequest
from extender.insight.decision_log.lines import LineWriter
from extender.insight.replay import Changes, Replay, Replayed, ReplayReport, parse_changes, replay
from extender.placement.request_log import FILTER, PRIORITIZE
from extender.settings.config import load_settings
from testkit.builders import GIB, NOW, Node, busy, gpu, node, pod_ref, request, snapshot_of
from testkit.decision_logs import LoggedWorld, decisions_in, read, record_of, weighed, written
from testkit.strategies import MODELS, fleets, overlays, policies, requests
from testkit.world import BUSY, IDLE, World, time_sliced

CHOICE: dict[str, Node] = {
    "calm": node(*[gpu(utilization=0.02, memory_used=0.31)] * 2),
    "roomy": node(*[gpu(utilization=0.29, memory_used=0.0)] * 2),
    "nearly-full": node(gpu(utilization=0.25, memory_used=0.45), busy(used=1)),
}

SPREADING = request(strategy=Strategy.SPREAD)

RACK = "topology.kubernetes.io/rack"
GROUP = PodGroup("JobSet", "ns", "train", 3)

FLEET: dict[str, Node] = {
    "calm": node(*[gpu(utilization=0.02, memory_used=0.31)] * 2),
    "roomy": node(*[gpu(utilization=0.29, memory_used=0.0)] * 2),
    "nearly-full": node(gpu(utilization=0.25, memory_used=0.45), busy(used=1)),
}

LOADED: dict[str, Node] = {"calm": FLEET["calm"], "loaded": node(gpu(utilization=0.4))}

SHORTLIST = ("calm", "roomy")

FILTERING = replace(Policy(), load_filter=replace(Policy().load_filter, is_enabled=True))


def again(log: bytes, *changes: str) -> list[Replayed]:
    replay = Replay(parse_changes(changes))
    return [replay.again(line) for line in decisions_in(log)]


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", "pack"),
        ("thresholds.utilization", "20"),
        ("thresholds.memory", "40"),
        ("weights.utilization", "0.7"),
        ("weights.memory", "0.7"),
        ("weights.sharing", "0.7"),
        ("weights.bursts", "0.7"),
        ("weights.stress", "0.7"),
        ("load_filter.enabled", "true"),
        ("assumed.utilization", "33"),
        ("mps_share", "5Gi"),
    ],
)
def test_changed_setting_is_the_one_of_an_extender_that_is_started_with_it(
    name: str, value: str
) -> None:
    variable = f"IDLEGPU_{name.replace('.', '__').upper()}"

    policy = parse_changes([f" {name} = {value} "]).policy(Policy())

    assert policy == load_settings(None, {variable: value}).policy() != Policy()


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


class Log:
    """Decision log of a test."""

    def __init__(self, fleet: dict[str, Node], policy: Policy) -> None:
        self.snapshot, self.policy = snapshot_of(fleet), policy
        self.writer, self.lines = LineWriter(), b""
        self.number = 0

    def requested(self, verb: str, *names: str, at: float = NOW, **requested: int) -> int:
        """Log a call with these nodes, all if none are named; return the number that passed."""
        made = weighed(
            self.snapshot,
            request(strategy=Strategy.SPREAD, **requested),
            policy=self.policy,
            candidates=names or None,
            name="pod",
        )
        self.number += 1
        record = record_of(made, self.number, verb=verb, at=at)
        self.lines += b"".join(self.writer.decision(record, made))
        return made.decision.feasible

    def replayed(self, *changes: str) -> ReplayReport:
        report = replay(read(self.lines), parse_changes(changes), {})
        assert report.exact == report.decisions == self.number
        return report


@pytest.fixture
def log() -> Log:
    return Log(FLEET, Policy())


def test_other_settings_may_choose_a_node_that_was_not_on_the_shortlist(log: Log) -> None:
    log.requested(FILTER)
    log.requested(PRIORITIZE, *SHORTLIST, at=NOW + 0.01)

    report = log.replayed("strategy=pack")

    assert (report.pods, report.moved, report.narrowed) == (1, 1, 0)
    (move,) = report.moves
    assert (move.before, move.after) == ("calm", "nearly-full")


def test_by_the_same_settings_nothing_moves(log: Log) -> None:
    log.requested(FILTER)
    log.requested(PRIORITIZE, *SHORTLIST, at=NOW + 0.01)

    report = log.replayed()

    assert (report.moved, report.narrowed, report.before) == (0, 0, report.after)


def test_without_the_load_filter_the_nodes_that_it_refused_come_back() -> None:
    log = Log(LOADED, FILTERING)
    assert log.requested(FILTER) == 1
    log.requested(PRIORITIZE, "calm", at=NOW + 0.01)

    report = log.replayed("load_filter.enabled=false", "thresholds.utilization=50", "strategy=pack")

    assert [move.after for move in report.moves] == ["loaded"]


@pytest.mark.parametrize(
    "filtered_at",
    [
        pytest.param(None, id="another-replica-answered-filter"),
        pytest.param(NOW - 60, id="filter-was-of-an-attempt-before"),
    ],
)
def test_decision_of_prioritize_alone_counts_and_is_reported(
    log: Log, filtered_at: float | None
) -> None:
    if filtered_at is not None:
        log.requested(FILTER, at=filtered_at)
    log.requested(PRIORITIZE, *SHORTLIST)

    report = log.replayed("strategy=pack")

    assert (report.pods, report.moved, report.narrowed) == (1, 0, 1)


def test_filter_without_feasible_nodes_belongs_to_another_attempt() -> None:
    log = Log(FLEET | {"full": node(busy(memory_free_bytes=GIB))}, Policy())
    assert log.requested(FILTER, "full", memory_bytes=int(20 * GIB)) == 0
    log.requested(PRIORITIZE, at=NOW + 1, memory_bytes=int(20 * GIB))

    report = log.replayed()

    assert (report.before.placed, report.narrowed) == (1, 1)


def test_of_several_attempts_the_last_counts(log: Log) -> None:
    log.requested(FILTER)
    log.requested(PRIORITIZE, *SHORTLIST, at=NOW + 0.01)
    log.requested(FILTER, "roomy", at=NOW + 2)

    report = log.replayed("strategy=pack")

    assert (report.pods, report.moved, report.narrowed) == (1, 0, 0)
    assert report.before.activity == pytest.approx(0.29)


def test_report_compares_the_settings_with_each_other_and_with_kube_scheduler(log: Log) -> None:
    log.requested(FILTER)
    log.lines += b"".join(log.writer.bound("uid-pod", "roomy", NOW + 1))
    huge = weighed(log.snapshot, request(memory_bytes=1 << 50), policy=Policy(), name="huge")
    log.lines += b"".join(log.writer.decision(record_of(huge, 2), huge))
    log.number += 1

    report = log.replayed("weights.memory=0.9")

    calm, roomy = pytest.approx(0.02), pytest.approx(0.29)
    one = {"placed": 1, "idle_share": 1.0}
    assert asdict(report) == {
        "changes": {},
        "decisions": 2,
        "exact": 2,
        "inexact": [],
        "pods": 2,
        "narrowed": 0,
        "moved": 1,
        "bound": 1,
        "followed": 0,
        "would_be_followed": 1,
        "before": {**one, "waits": 1, "activity": calm},
        "after": {**one, "waits": 1, "activity": roomy},
        "actual": {**one, "waits": 0, "activity": roomy},
        "moves": [
            {
                "pod": "ns/pod",
                "before": "calm",
                "after": "roomy",
                "bound": "roomy",
                "activity_before": calm,
                "activity_after": roomy,
            }
        ],
        "activities": {
            "settings of the log": [calm],
            "changed settings": [roomy],
            "kube-scheduler": [roomy],
        },
    }


def test_decisions_that_the_settings_of_the_log_do_not_reproduce_are_named(log: Log) -> None:
    log.requested(FILTER)

    report = replay(
        read(log.lines.replace(b'"feasible":3', b'"feasible":2')), parse_changes([]), {"a": "b"}
    )

    assert (report.decisions, report.exact, report.inexact) == (1, 0, [1])
    assert report.changes == {"a": "b"}
    assert (report.actual.placed, report.actual.activity, report.actual.idle_share) == (
        0,
        None,
        None,
    )


@pytest.mark.parametrize(("seconds", "narrowed"), [(10.0, 0), (10.5, 1), (-0.5, 1)])
def test_prioritize_belongs_to_a_filter_at_most_ten_seconds_before(
    log: Log, seconds: float, narrowed: int
) -> None:
    log.requested(FILTER)
    log.requested(PRIORITIZE, *SHORTLIST, at=NOW + seconds)

    assert log.replayed().narrowed == narrowed
