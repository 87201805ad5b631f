"""Test that a clock that was set back changes no age and blocks no reading."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import Signal
from extender.core.devices.window import Windows
from extender.core.nodes.assumed_pods import Assumption, Ledger
from extender.core.policy import EarlyFailures
from extender.fleet.failures import FailureLog
from testkit.builders import GPU, NOW, ranking, request
from testkit.windows import summarize
from testkit.world import BUSY, IDLE, World
from tests.extender.fleet.stores import CARD, estimated, readings, row_of, store_of

STEP = 600.0
SILENT = 450.0
"""Longer than any value of a silent source is valid."""


def a_world() -> World:
    world = World()
    world.add_node("node", 2)
    world.read()
    return world


def age(world: World) -> float:
    """Return the age of the first card's readings in the fleet."""
    row = world.fleet.store.row_of(world.card().info.key)
    assert row is not None
    at = world.fleet.store.measured_at(row)
    assert at is not None
    return world.clock.now - at


def test_readings_keep_their_age_over_the_step() -> None:
    world = a_world()
    world.clock.now += 90.0
    world.fleet.snapshot()

    world.clock.now -= STEP
    world.fleet.snapshot()

    assert age(world) == 90.0


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, -1.0), (1.5, 0.0)])
def test_a_small_step_shifts_nothing(seconds: float, expected: float) -> None:
    world = a_world()
    world.clock.now -= seconds

    world.fleet.snapshot()

    assert age(world) == expected


def test_a_source_that_falls_silent_at_the_step_fades_as_usual() -> None:
    world = a_world()
    world.clock.now -= STEP

    world.fleet.snapshot()
    world.clock.now += SILENT

    assert world.fleet.snapshot().telemetry.freshness.max() == 0.0


def test_windows_and_streaks_count_readings_after_the_step() -> None:
    world = a_world()
    world.read_after(15, times=2)
    world.clock.now -= STEP
    for card in (world.card(), world.card(index=1)):
        card.values |= BUSY

    world.read_after(15, times=40)

    telemetry = world.fleet.snapshot().telemetry
    row = world.fleet.store.row_of(world.card().info.key)
    assert row is not None
    assert telemetry.utilization[row] == pytest.approx(0.9, abs=0.05)
    assert world.fleet.store.is_in_use(row)


def test_load_of_the_last_minutes_is_the_same_after_the_step() -> None:
    peaks: dict[float, list[float]] = {}
    means: dict[float, list[float]] = {}
    for step in (0.0, STEP):
        world = World()
        world.add_node("node", 1, replicas=4)
        world.read()
        world.bind("tenant", on=[world.card()])
        world.card().values |= BUSY
        world.read_after(15, times=60)
        world.clock.now -= step
        world.card().values |= IDLE
        peaks[step], means[step] = [], []
        for _ in range(40):
            world.read_after(15)
            peaks[step].append(world.estimated(world.card(), "peak"))
            means[step].append(world.estimated(world.card(), "utilization"))

    assert peaks[STEP] == pytest.approx(peaks[0.0], abs=0.2)  # one part of the window
    assert means[STEP] == pytest.approx(means[0.0], abs=0.05)
    assert peaks[0.0][0] > 0.5
    assert peaks[0.0][-1] == peaks[STEP][-1] == 0.0


def test_a_device_that_no_source_reports_is_forgotten_in_time() -> None:
    world = a_world()
    world.clock.now -= STEP
    world.fleet.expire_silent()

    world.clock.now += world.policy.freshness.forget_seconds + 1.0
    world.fleet.expire_silent()

    assert world.fleet.store.rows_of_node("node") == []


def test_an_answer_that_is_measured_ahead_of_now_counts_as_measured_now() -> None:
    store = store_of(CARD)

    store.apply(readings(CARD, at=NOW + 1, measured_at=NOW + STEP), NOW + 1)

    assert store.measured_at(row_of(store)) == NOW + 1
    assert estimated(store, NOW + 1 + SILENT).freshness[0] == 0.0


def test_an_answer_in_progress_at_the_step_leaves_no_time_in_the_future() -> None:
    world = a_world()
    world.clock.now += 15.0
    answer = replace(
        readings(world.card().info, at=world.clock.now), tenants={}, tenants_at=world.clock.now
    )
    steps = world.fleet.readings_in_steps(answer)
    next(steps)
    world.clock.now -= STEP
    world.fleet.snapshot()

    for _ in steps:
        pass

    row = world.fleet.store.row_of(world.card().info.key)
    assert row is not None
    found = world.fleet.store.reported([Signal.GRAPHICS_ACTIVE], row)
    assert found is not None
    assert max(found[1], world.clock.now - age(world)) <= world.clock.now


def test_readings_after_the_step_exclude_an_ended_pod() -> None:
    world = a_world()
    pod = world.bind("p", on=[world.card()])
    world.card().values |= BUSY
    world.read_after(30, times=4)
    world.fleet.remove_pod(pod.uid, world.clock.now)
    world.card().tenants = ()
    world.clock.now -= STEP
    world.devices[world.card().info.key] = replace(
        world.card(), values=dict(world.card(index=1).values)
    )

    world.read_after(15, times=2)

    assert ranking(world.rank(request(2, requires_idle=True))) == ["node"]


def test_a_step_does_not_extend_a_tentative_pod() -> None:
    ledger = Ledger()
    ledger.assume(
        Assumption(
            uid="p",
            key="ns/p",
            node="node",
            resources=((GPU, 1),),
            memory_bytes=None,
            expires_at=NOW + 30.0,
        )
    )
    ledger.end("q", NOW + 30.0)

    ledger.shift_back(STEP)
    ledger.expire(NOW + 31.0 - STEP)

    assert (ledger.get("p"), ledger._gone) == (None, {})


def test_a_failure_fades_as_usual_after_a_step() -> None:
    world = a_world()
    log = FailureLog(EarlyFailures())
    pod = replace(world.bind("p"), is_device_fault=True)
    log.note(pod, NOW)
    before = log.suspicion(NOW + 60.0)

    log.shift_back(STEP)

    assert log.suspicion(NOW + 60.0 - STEP) == before


@given(
    seconds=st.floats(0.0, 1000.0),
    at=st.lists(st.floats(0.0, 590.0), max_size=20),
    later=st.floats(0.0, 700.0),
)
def test_windows_keep_their_values_over_the_step(
    seconds: float, at: list[float], later: float
) -> None:
    steps = round(seconds / 15.0)
    moved, same = Windows(600.0, 40), Windows(600.0, 40)
    for windows in (moved, same):
        windows.grow(1)
        for offset in sorted(at):
            windows.add(NOW + offset, np.array([0]), np.array([offset / 600.0]))

    moved.shift_back(seconds)
    for windows, end in ((moved, NOW + later - steps * 15.0), (same, NOW + later)):
        windows.add(end, np.array([0]), np.array([0.5]))

    for one, other in zip(summarize(moved), summarize(same), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
