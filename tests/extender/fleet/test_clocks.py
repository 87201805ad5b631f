"""Test corrected times of pods if a node's or the API server's clock is wrong."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import PodPhase, PodRecord
from extender.fleet.pods import _AGREE_SECONDS, PodClocks
from testkit.builders import GIB, GPU, NOW, ranking, rejected, request
from testkit.world import BUSY, World, time_sliced

OFF = [-3600.0, -300.0, 0.0, 300.0, 3600.0]
CONTAINED_MEMORY_ERROR = 94.0


def running(world: World) -> PodRecord:
    return world.bind("p", "node-0", owner="Job train")


def fails(world: World, record: PodRecord, clock: float, *, is_device_fault: bool = False) -> None:
    """Report a pod that failed just now, with the time of a clock that is off by this much."""
    failed = replace(
        record,
        phase=PodPhase.FAILED,
        is_failed_early=True,
        is_device_fault=is_device_fault,
        failed_at=world.clock.now + clock,
    )
    world.fleet.apply_pod(failed)
    world.fleet.remove_pod(record.uid, world.clock.now)


@pytest.mark.parametrize("clock", OFF)
def test_an_xid_at_the_time_counts_with_a_wrong_node_clock(clock: float) -> None:
    world = time_sliced(2, 1, 4)
    fails(world, running(world), clock)
    world.card("node-0").values[Signal.XID] = CONTAINED_MEMORY_ERROR
    world.read_after(15)
    world.fleet.snapshot()

    assert world.fleet.early_failures("node-0") == 1


@pytest.mark.parametrize("clock", OFF)
def test_a_device_failure_with_a_wrong_node_clock_fades_from_now_on(clock: float) -> None:
    world = time_sliced(2, 1, 4)
    fails(world, running(world), clock, is_device_fault=True)

    world.read_after(15)
    assert ranking(world.rank())[0] == "node-1"

    world.read_after(60, times=80)
    assert ranking(world.rank())[0] == "node-0"
    assert world.fleet.early_failures("node-0") == 0


def test_a_failure_from_before_our_start_has_its_reported_time() -> None:
    clocks = PodClocks()
    pod = PodRecord(
        uid="p", namespace="ns", name="p", node="node", bound_at=NOW - 900, failed_at=NOW - 600
    )

    assert clocks.correct(None, pod, NOW) is pod


def test_a_failure_from_before_our_start_is_not_before_the_binding() -> None:
    clocks = PodClocks()
    pod = PodRecord(
        uid="p", namespace="ns", name="p", node="node", bound_at=NOW - 60, failed_at=NOW - 3600
    )

    assert clocks.correct(None, pod, NOW).failed_at == NOW - 60


def test_a_pod_that_had_ended_before_keeps_its_reported_failure_time() -> None:
    # Under another policy, an old end may be an early failure.
    clocks = PodClocks()
    ended = PodRecord(uid="p", namespace="ns", name="p", node="node", phase=PodPhase.FAILED)

    late = replace(ended, is_failed_early=True, failed_at=NOW - 7200)

    assert clocks.correct(ended, late, NOW).failed_at == NOW - 7200


@given(clock=st.floats(-1e9, 1e9), api_clock=st.floats(-1e9, 1e9), is_seen=st.booleans())
def test_corrected_times_are_stable_and_never_in_the_future(
    clock: float, api_clock: float, is_seen: bool
) -> None:
    clocks = PodClocks()
    pod = PodRecord(uid="p", namespace="ns", name="p", node="node", bound_at=NOW + api_clock - 30)
    before = clocks.correct(None, pod, NOW - 30) if is_seen else None
    failed = replace(pod, is_failed_early=True, failed_at=NOW + clock)

    once = clocks.correct(before, failed, NOW)
    again = clocks.correct(once, failed, NOW + 1e6)

    assert once == again
    assert once.bound_at is not None
    assert once.failed_at is not None
    assert max(once.bound_at, once.failed_at) <= NOW
    assert once.failed_at >= (NOW - _AGREE_SECONDS if is_seen else once.bound_at)


@pytest.mark.parametrize("ahead", [0.0, 30.0, 600.0])
def test_device_holders_show_a_pod_bound_by_a_fast_clock(ahead: float) -> None:
    world = World()
    world.add_node("node", 4)
    world.read()
    pod = world.bind("p", on=[world.card()], bound_at=NOW + ahead)
    world.card().values |= BUSY
    world.read_after(30, times=2)
    world.fleet.apply_pod(replace(pod, is_deleting=True))
    world.read_after(30, times=2)

    row = world.fleet.store.row_of(world.card().info.key)
    assert row is not None
    assert world.fleet.tenants_of(row) == ("ns/p",)
    assert ranking(world.rank(request(3, requires_idle=True))) == ["node"]


def test_device_holders_of_a_namesake_do_not_count_for_a_new_pod() -> None:
    world = World()
    world.add_node("node", 4)
    old = world.bind("p", on=[world.card()])
    world.read_after(30)
    world.fleet.remove_pod(old.uid, world.clock.now)
    world.clock.now += 1.0
    world.bind("p", uid="uid-next", bound_at=world.clock.now + 600)

    row = world.fleet.store.row_of(world.card().info.key)
    assert row is not None
    world.fleet.snapshot()
    assert world.fleet.tenants_of(row) == ()


@pytest.mark.parametrize(
    ("bound_at", "started_at", "expected"),
    [
        (None, 0.5, 0.5),
        (NOW - 60, NOW - 30, NOW - 30),
        (NOW - 30, NOW - 60, NOW - 30),
        (NOW + 30, NOW - 60, NOW),
        (NOW - 60, NOW + 30, NOW),
        (NOW - 60, None, None),
    ],
    ids=["unbound", "after", "before", "bound in the future", "in the future", "not started"],
)
def test_a_pod_starts_after_its_binding_and_not_in_the_future(
    bound_at: float | None, started_at: float | None, expected: float | None
) -> None:
    clocks = PodClocks()
    pod = PodRecord(
        uid="p",
        namespace="ns",
        name="p",
        node="node",
        resources={GPU: 1},
        phase=PodPhase.RUNNING,
        bound_at=bound_at,
        started_at=started_at,
    )

    clocks.note(None, pod, NOW)

    assert clocks.started_at(pod) == expected
    clocks.shift_back(10.0)
    if expected is not None and expected != started_at:
        assert clocks.started_at(pod) == expected - 10.0, "a corrected time"
    else:
        assert clocks.started_at(pod) == started_at


def test_corrected_times_of_binding_and_failure_shift_with_the_clock() -> None:
    clocks = PodClocks()
    pod = PodRecord(
        uid="p", namespace="ns", name="p", node="node", bound_at=NOW + 60, failed_at=NOW + 90
    )
    assert clocks.correct(None, pod, NOW).bound_at == NOW

    clocks.shift_back(600.0)

    corrected = clocks.correct(None, pod, NOW - 590.0)
    assert (corrected.bound_at, corrected.failed_at) == (NOW - 600.0, NOW - 600.0)
    clocks.forget("p")
    assert clocks.correct(None, pod, NOW + 100.0) is pod


def test_a_reading_in_the_second_of_a_pods_end_may_still_show_the_pod() -> None:
    world = time_sliced(1, 1, 4)
    pod = world.bind("pod", "node-0", on=[world.card("node-0")], memory_bytes=int(30 * GIB))
    world.read_after(300.4, MEMORY_USED=30 * GIB, MEMORY_FREE=50 * GIB)

    world.now += 0.2
    world.end(pod, ended_at=world.now - 0.6)  # the API drops fractions of a second

    assert rejected(world.rank(request(memory_bytes=int(70 * GIB)))) == {}
