"""History of the last decisions."""

from dataclasses import replace

import numpy as np
import pytest

from extender.core.decision.evaluation import EvaluationInputs
from extender.core.decision.verdicts import DeviceVerdict, ReportedSignal, gather
from extender.core.devices.readings import Signal
from extender.core.policy import Policy
from extender.core.steps import finish
from extender.fleet.columns import ReportedValues
from extender.fleet.latest_values import ReportedSignals
from extender.placement import history as module
from extender.placement.history import (
    _EXPLAINABLE,
    _EXPLAINABLE_SECONDS,
    _MAX_CHOICES,
    Choice,
    DecisionHistory,
    DecisionRecord,
    PackedEvidence,
    PlacedEvidence,
)
from testkit.agent.fleet_reports import NAN, Agents
from testkit.builders import (
    GPU,
    NOW,
    decide_on,
    device_request,
    node,
    pod_ref,
    request,
    snapshot_of,
)
from testkit.world import World


@pytest.fixture
def world() -> World:
    made = World()
    made.add_node("node", 2)
    return made


def decide(world: World, count: int = 1) -> DecisionRecord:
    record = world.placer.place("filter", pod_ref("p"), request(count), ["node"])
    world.placer.detail(record)
    return record


def devices(record: DecisionRecord) -> tuple[DeviceVerdict, ...]:
    (verdict,) = record.details
    return verdict.devices


def test_activity_and_memory_each_name_their_source_and_age(world: World) -> None:
    agents = Agents(world)
    world.read(measured_at=world.clock.now - 40.0)
    agents.report(age=2.0, MEMORY_USED=NAN, MEMORY_FREE=NAN)

    (first, _) = devices(decide(world))

    assert first.signals == {
        "utilization": ReportedSignal("agent", 2.0, "graphics_active_ratio"),
        "memory": ReportedSignal("prometheus", 40.0),
    }
    assert (first.source, first.age_seconds) == ("agent", 2.0)


@pytest.mark.parametrize(
    ("values", "signal"),
    [
        pytest.param({}, "graphics_active_ratio", id="the-first-of-those-that-say-the-same"),
        pytest.param({"SM_ACTIVE": 0.3}, "sm_active_ratio", id="the-busiest"),
        pytest.param(
            {"SM_ACTIVE": 0.3, "POWER": 560.0, "POWER_LIMIT": 700.0}, "power_watts", id="power"
        ),
        pytest.param({"POWER": 560.0, "POWER_LIMIT": NAN}, "graphics_active_ratio", id="no-limit"),
    ],
)
def test_the_signal_that_counted_as_activity_is_named(
    world: World, values: dict[str, float], signal: str
) -> None:
    world.read(**values)

    (first, _) = devices(decide(world))

    assert first.signals["utilization"] == ReportedSignal("prometheus", 0.0, signal)
    counted = {"POWER": (560.0 - 210.0) / 490.0}.get(
        Signal(signal).name, values.get(Signal(signal).name, 0.0)
    )
    assert first.utilization_ratio == pytest.approx(counted)


def test_heat_and_throttling_have_source_and_age(world: World) -> None:
    world.read(
        measured_at=world.clock.now - 5.0,
        TEMPERATURE=71.0,
        MEMORY_TEMPERATURE=80.0,
        CLOCK_EVENT_REASONS=float(0x44),
    )

    (first, _) = devices(decide(world))

    assert (first.temperature_celsius, first.memory_temperature_celsius) == (71.0, 80.0)
    assert first.throttling == "hardware thermal slowdown"
    assert (
        first.signals["temperature"]
        == first.signals["throttling"]
        == ReportedSignal("prometheus", 5.0)
    )


def test_heat_without_a_source_is_unknown(world: World) -> None:
    world.read()

    (first, _) = devices(decide(world))

    assert (first.temperature_celsius, first.throttling) == (None, None)
    assert "temperature" not in first.signals


def test_a_sign_of_ill_health_has_source_and_age(world: World) -> None:
    agents = Agents(world)
    world.card().values[Signal.ROW_REMAP_PENDING] = 1.0
    world.read(measured_at=world.clock.now - 40.0)
    agents.report(age=2.0)

    first, second = devices(decide(world))

    assert first.health == "counts less: a remapped row waits for a reset"
    assert first.signals["health"] == ReportedSignal("prometheus", 40.0)
    assert first.signals["memory"] == ReportedSignal("agent", 2.0)
    assert "health" not in second.signals


def test_a_sibling_that_is_to_blame_has_a_source(world: World) -> None:
    world.card(index=1).values[Signal.XID] = 79.0
    world.read(measured_at=world.clock.now - 10.0)
    record = decide(world)
    world.history.note_bound(record.pod.uid, "node")  # refused nodes are explained in full

    first, second = devices(record)

    assert "excluded with its node: another GPU has XID 79" in first.health
    assert [first.state, second.state] == ["excluded", "unhealthy"]
    assert first.signals["health"] == second.signals["health"] == ReportedSignal("prometheus", 10.0)


def test_a_sign_that_no_reading_shows_has_no_source(world: World) -> None:
    world.add_node("node", 2, allocatable={"nvidia.com/gpu": 1}, capacity={"nvidia.com/gpu": 2})
    world.read()

    (first, _) = devices(decide(world))

    assert "the kubelet offers fewer" in first.health
    assert set(first.signals) == {"utilization", "memory"}


def test_packed_evidence_gives_the_same_verdicts(world: World) -> None:
    world.card().values[Signal.ROW_REMAP_PENDING] = 1.0
    world.read(measured_at=world.clock.now - 40.0, TEMPERATURE=71.0)
    record = decide(world)
    assert record.gather is not None
    (gathered,) = record.gather(["node"])

    unpacked = PackedEvidence(gathered).unpack()

    assert unpacked.explain() == gathered.explain() == record.details
    assert unpacked.evidence.policy is gathered.evidence.policy
    assert unpacked.infos is gathered.infos


def test_evidence_is_shown_as_at_the_decision(world: World) -> None:
    world.read()
    record = decide(world)
    world.clock.now += 30.0
    world.read(MEMORY_USED=1.0)

    (first, _) = devices(record)

    assert first.signals["memory"] == ReportedSignal("prometheus", 0.0)


def test_a_device_without_measurements_has_no_source(world: World) -> None:
    assert [device.signals for device in devices(decide(world))] == [{}, {}]


NO_SIGNALS = ReportedSignals(times=(), origins=(), names=())


def evidence(name: str) -> PlacedEvidence:
    snapshot = snapshot_of({name: node()})
    inputs = EvaluationInputs(
        request=request(), devices=device_request(), policy=Policy(), overlay={}
    )
    return PlacedEvidence(
        evidence=gather(snapshot, snapshot.pools[GPU], inputs, [name]),
        infos=(None,),
        sources=("",),
        age_seconds=np.array([np.nan]),
        at=NOW,
        shown=ReportedValues(
            signals=(),
            values=np.zeros((0, 1), dtype=np.float32),
            limit_watts=np.full(1, np.nan, dtype=np.float32),
            rest_watts=np.full(1, np.nan, dtype=np.float32),
            memory=NO_SIGNALS,
            heat=NO_SIGNALS,
            clocks=NO_SIGNALS,
        ),
        health={},
    )


def remember(
    history: DecisionHistory,
    pod: str,
    *,
    best: str = "node-a",
    at: float = NOW,
    namespace: str = "",
) -> DecisionRecord:
    ref = pod_ref(pod)
    record = DecisionRecord(
        number=history.next_number(),
        at=at,
        verb="filter",
        pod=replace(ref, namespace=namespace or ref.namespace),
        request=request(),
        decision=decide_on({best: node()}),
        snapshot_version=1,
        seconds=0.001,
        packed=(PackedEvidence(evidence(best)),),
        gather=lambda names: tuple(map(evidence, names)),
        gather_late=lambda names: tuple(replace(evidence(name), is_late=True) for name in names),
    )
    history.add(record)
    return record


def test_decisions_are_listed_newest_first() -> None:
    history = DecisionHistory(10)
    for name in "abc":
        remember(history, name)

    assert [record.pod.name for record in history] == ["c", "b", "a"]


def test_only_the_last_ones_are_remembered() -> None:
    history = DecisionHistory(2)
    for name in "abca":
        remember(history, name)

    assert [record.number for record in history] == [4, 3]
    assert len(history) == 2
    assert history.last_of("uid-b") is None
    assert history.last_of("uid-a") is next(iter(history))


def test_decisions_with_more_names_than_the_limit_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_NAMES_BYTES", 500)
    history = DecisionHistory(10)

    def add(pod: str, node: str) -> list[str]:
        """Add a decision about an unknown node; return the pods of all decisions."""
        record = remember(DecisionHistory(1), pod)
        decision = replace(record.decision, candidates=(node,))
        history.add(replace(record, number=history.next_number(), decision=decision))
        return [record.pod.name for record in history]

    names = {"a": "n" * 200, "b": "n", "c": "n" * 150, "d": "n" * 900, "e": "n"}
    remembered = [add(pod, node) for pod, node in names.items()]

    assert remembered == [["a"], ["b", "a"], ["c", "b"], ["d"], ["e"]]


def test_the_nodes_of_remembered_pods_are_known() -> None:
    history = DecisionHistory(2)
    namespaces = []
    for namespace in ("one", "two", "two", "three"):
        remember(history, "a", namespace=namespace)
        namespaces.append(set(history.namespaces.names))

    assert namespaces == [{"one"}, {"one", "two"}, {"two"}, {"two", "three"}]
    finish(history.resize_in_steps(1))
    assert history.namespaces.names == {"three"}


def test_the_node_that_a_pod_was_bound_to_is_explained_once() -> None:
    history = DecisionHistory(10)
    record = remember(history, "a")

    assert history.note_bound("uid-a", "node-z") is record
    assert history.note_bound("uid-a", "node-y") is None

    assert record.bound_node == "node-z"
    assert [detail.node for detail in record.details] == ["node-a", "node-z"]
    assert record.gather is None


def test_a_node_that_is_explained_already_is_not_explained_again() -> None:
    history = DecisionHistory(10)
    record = remember(history, "a")

    history.note_bound("uid-a", "node-a")

    assert [detail.node for detail in record.details] == ["node-a"]


def test_pod_without_requests_has_no_record() -> None:
    assert DecisionHistory(10).note_bound("uid-a", "node-a") is None


def test_choice_is_returned_once_even_after_its_decision_was_dropped() -> None:
    history = DecisionHistory(1)
    first = remember(history, "a", best="node-a")
    remember(history, "b")

    assert history.note_bound("uid-a", "node-a") is None
    assert history.take_choice("uid-a") == Choice(
        number=first.number, at=NOW, verb="filter", best="node-a"
    )
    assert history.take_choice("uid-a") is None


def test_the_number_of_choices_for_unbound_pods_is_bounded() -> None:
    history = DecisionHistory(1)
    record = remember(history, "a")
    for number in range(_MAX_CHOICES + 1):
        history.add(replace(record, pod=pod_ref(f"more-{number}")))

    assert history.take_choice("uid-a") is None
    assert history.take_choice("uid-more-0") is None
    assert history.take_choice("uid-more-1") is not None


def test_old_decisions_release_their_snapshots() -> None:
    history = DecisionHistory(1000)
    records = [remember(history, str(number)) for number in range(_EXPLAINABLE + 5)]

    assert [record.gather is None for record in records] == [True] * 5 + [False] * _EXPLAINABLE
    history.note_bound("uid-0", "node-z")
    assert records[0].bound_node == "node-z"
    found = [(detail.node, detail.is_late) for detail in records[0].details]
    assert found == [("node-a", False), ("node-z", True)]


def test_decisions_release_their_snapshots_after_some_time() -> None:
    history = DecisionHistory(1000)
    old = remember(history, "a")
    remember(history, "b", at=NOW + _EXPLAINABLE_SECONDS)
    is_kept = [old.gather is not None]

    new = remember(history, "c", at=NOW + _EXPLAINABLE_SECONDS + 0.1)

    is_kept += [old.gather is not None, new.gather is not None]
    assert is_kept == [True, False, True]


@pytest.mark.parametrize(
    ("seconds", "is_late"),
    [(0.0, False), (_EXPLAINABLE_SECONDS, False), (_EXPLAINABLE_SECONDS + 0.1, True)],
)
def test_bound_node_is_explained_as_at_the_decision_unless_bound_late(
    seconds: float, *, is_late: bool
) -> None:
    history = DecisionHistory(10, clock=lambda: NOW + seconds)
    record = remember(history, "a")

    history.note_bound("uid-a", "node-z")

    assert record.bound_at == NOW + seconds
    assert [detail.is_late for detail in record.details] == [False, is_late]


@pytest.mark.parametrize("is_shadow", [False, True])
def test_answer_leaves_no_node_only_if_refused_outside_shadow_mode(*, is_shadow: bool) -> None:
    record = remember(DecisionHistory(10), "a")
    refused = replace(record, decision=decide_on({}), is_shadow=is_shadow)

    assert not replace(record, is_shadow=is_shadow).leaves_none
    assert refused.leaves_none is not is_shadow


def test_the_decision_before_is_bound_too_if_it_is_of_the_same_attempt() -> None:
    history = DecisionHistory(10)
    filtered, prioritized = remember(history, "a"), remember(history, "a")

    assert history.note_bound("uid-a", "node-z") is prioritized

    assert (filtered.bound_node, prioritized.bound_node) == ("node-z", "node-z")


def test_no_other_decision_is_bound() -> None:
    history = DecisionHistory(10)
    earlier, others, last = (remember(history, name) for name in "aba")

    history.note_bound("uid-a", "node-z")

    assert [one.bound_node for one in (earlier, others, last)] == ["", "", "node-z"]
