"""Who told what a decision rests on, and how old it was: by signal."""

import pytest

from extender.core.explain import DeviceVerdict, Told
from extender.core.readings import Signal
from extender.placement.history import DecisionRecord
from tests.builders import pod_ref, request
from tests.extender.fleet.agents import NAN, Agents
from tests.worlds import World


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


def test_activity_and_memory_each_name_who_told_them_and_when(world: World) -> None:
    agents = Agents(world)
    world.read(measured_at=world.clock.now - 40.0)
    agents.report(age=2.0, MEMORY_USED=NAN, MEMORY_FREE=NAN)

    (first, _) = devices(decide(world))

    assert first.signals == {
        "utilization": Told("agent", 2.0),
        "memory": Told("prometheus", 40.0),
    }
    assert (first.source, first.age_seconds) == ("agent", 2.0)


def test_what_speaks_against_a_devices_health_names_who_told_it_and_when(world: World) -> None:
    agents = Agents(world)
    world.card().values[Signal.ROW_REMAP_PENDING] = 1.0
    world.read(measured_at=world.clock.now - 40.0)
    agents.report(age=2.0)

    first, second = devices(decide(world))

    assert first.health == "counts less: a remapped row waits for a reset"
    assert first.signals["health"] == Told("prometheus", 40.0)
    assert first.signals["memory"] == Told("agent", 2.0)
    assert "health" not in second.signals


def test_a_sibling_that_is_to_blame_says_who_told_of_it(world: World) -> None:
    world.card(index=1).values[Signal.XID] = 79.0
    world.read(measured_at=world.clock.now - 10.0)
    record = decide(world)
    world.history.note_bound(record.pod.uid, "node")  # although we refused it: it is explained then

    first, second = devices(record)

    assert "another GPU of its node has XID 79" in first.health
    assert first.signals["health"] == second.signals["health"] == Told("prometheus", 10.0)


def test_what_no_reading_shows_has_no_source(world: World) -> None:
    world.add_node("node", 2, allocatable={"nvidia.com/gpu": 1}, capacity={"nvidia.com/gpu": 2})
    world.read()

    (first, _) = devices(decide(world))

    assert "the kubelet offers fewer" in first.health
    assert set(first.signals) == {"utilization", "memory"}


def test_it_is_told_as_it_was_when_the_decision_was_made(world: World) -> None:
    world.read()
    record = decide(world)
    world.clock.now += 30.0
    world.read(MEMORY_USED=1.0)

    (first, _) = devices(record)

    assert first.signals["memory"] == Told("prometheus", 0.0)


def test_of_a_device_that_nobody_measured_nobody_is_named(world: World) -> None:
    assert [device.signals for device in devices(decide(world))] == [{}, {}]
