"""Source and age of each signal behind a decision."""

import pytest

from extender.core.decision.verdicts import DeviceVerdict, ReportedSignal
from extender.core.devices.readings import Signal
from extender.placement.history import DecisionRecord
from testkit.agent.fleet_reports import NAN, Agents
from testkit.builders import pod_ref, request
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


def test_evidence_is_shown_as_at_the_decision(world: World) -> None:
    world.read()
    record = decide(world)
    world.clock.now += 30.0
    world.read(MEMORY_USED=1.0)

    (first, _) = devices(record)

    assert first.signals["memory"] == ReportedSignal("prometheus", 0.0)


def test_a_device_without_measurements_has_no_source(world: World) -> None:
    assert [device.signals for device in devices(decide(world))] == [{}, {}]
