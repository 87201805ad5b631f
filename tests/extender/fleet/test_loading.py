"""Test the assumed load of new tenants, also with wrong clocks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.core.decision.assessment import assess
from extender.core.decision.evaluation import estimates
from extender.core.devices.readings import Signal
from extender.core.nodes.batches import current_batch
from extender.core.nodes.inventory import PodPhase
from extender.core.policy import Assumed, Policy
from testkit.builders import GPU, device_request, ranking, request
from testkit.world import World, one_node, time_sliced

MINUTE = 60.0


def loading_beside_working(*, is_mapped: bool = True) -> World:
    """Return a card with eight tenants that load, and one with a tenant at 12 %."""
    world = time_sliced(2)
    world.is_mapped = is_mapped
    for number in range(8):
        world.bind(f"loads-{number}", "node-0", on=[world.card("node-0")])
    world.bind("works", "node-1", on=[world.card("node-1")])
    world.card("node-1").values |= {Signal.GRAPHICS_ACTIVE: 0.12, Signal.GPU_UTILIZATION: 0.12}
    return world


def counted(world: World) -> float:
    """Return the activity that the estimate of the node's first device uses."""
    snapshot = world.fleet.snapshot()
    batch = current_batch(snapshot.pools[GPU], snapshot.telemetry)
    return float(assess(batch, device_request().columns, estimates(world.policy)).utilization[0, 0])


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "unmapped"])
@pytest.mark.parametrize("minutes", [1, 4, 10])
def test_card_with_downloading_tenants_is_not_the_idlest(minutes: int, *, is_mapped: bool) -> None:
    world = loading_beside_working(is_mapped=is_mapped)

    world.read_after(30, minutes * 2)

    assert ranking(world.rank())[0] == "node-1"


def test_tenants_that_never_work_count_no_longer_than_the_limit() -> None:
    world = loading_beside_working()

    world.read_after(30, 31)

    assert world.row("node-0").loading == (0,)
    assert counted(world) == pytest.approx(world.card("node-0").values[Signal.GRAPHICS_ACTIVE])


def test_a_tenant_that_was_seen_at_work_counts_as_it_is_measured() -> None:
    world = one_node(1, replicas=4)
    world.bind("a", on=[world.card()])
    world.read_after(30, 6)
    assert counted(world) == pytest.approx(0.1)

    world.read_after(30, 6, GRAPHICS_ACTIVE=0.3)

    assert counted(world) == pytest.approx(0.15, abs=0.02)


@settings(max_examples=40, deadline=None)
@given(tenants=st.integers(1, 8), percent=st.integers(0, 100), each=st.sampled_from([0.05, 0.1]))
def test_a_card_counts_with_the_larger_of_measured_and_assumed_load(
    tenants: int, percent: int, each: float
) -> None:
    world = World(Policy(assumed=Assumed(utilization=each)))
    world.add_node("node", 1, replicas=10)
    world.read()
    for number in range(tenants):
        world.bind(f"p-{number}", on=[world.card()])
    world.read_after(30, 10, GRAPHICS_ACTIVE=percent / 100, GPU_UTILIZATION=0.0)

    assert counted(world) == pytest.approx(max(percent / 100, each * tenants), abs=1e-3)


def test_no_load_is_assumed_if_the_policy_assumes_none() -> None:
    world = World(Policy(assumed=Assumed(loading_seconds=0.0)))
    world.add_node("node", 1, replicas=10)
    world.read()
    world.bind("a", on=[world.card()])

    world.read_after(30, 4)

    assert counted(world) == 0.0


@pytest.mark.parametrize("clock", [-3600.0, 0.0, 3600.0])
def test_a_restarted_container_is_assumed_to_load_again(clock: float) -> None:
    world = time_sliced(2)
    day_ago = world.clock.now - 86400
    loads, _ = (
        world.bind(name, name, on=[world.card(name)], started_at=day_ago, bound_at=day_ago)
        for name in ("node-0", "node-1")
    )
    world.card("node-1").values |= {Signal.GRAPHICS_ACTIVE: 0.05, Signal.GPU_UTILIZATION: 0.05}
    world.read_after(30, 4)
    assert ranking(world.rank()) == ["node-0", "node-1"]

    world.fleet.apply_pod(replace(loads, last_started_at=world.clock.now + clock))
    world.read_after(30, 4)
    assert ranking(world.rank()) == ["node-1", "node-0"]
    assert world.row("node-0").assumed == (0,), "its activity is measured as before"
    world.read_after(30, 27)

    assert ranking(world.rank()) == ["node-0", "node-1"]


# --- clocks ---------------------------------------------------------------------------------------


def started(world: World, *, clock: float, waits: float = 0.0) -> None:
    """Bind a pod, and start it later, on a node whose clock is off by this much."""
    pod = world.bind("a", on=[world.card()], phase=PodPhase.PENDING, started_at=None)
    world.clock.now += waits
    running = replace(pod, phase=PodPhase.RUNNING, started_at=world.clock.now + clock)
    world.fleet.apply_pod(running)


@pytest.mark.parametrize("clock", [-3600.0, -300.0, 0.0, 300.0, 3600.0])
@pytest.mark.parametrize("waits", [0.0, 300.0])
def test_a_wrong_node_clock_does_not_change_a_pods_warm_up(clock: float, waits: float) -> None:
    world = World(Policy(assumed=Assumed(loading_seconds=0.0)))
    world.add_node("node", 1, replicas=4)
    world.read()
    started(world, clock=clock, waits=waits)

    world.read_after(119)
    assert world.row().assumed == (1,)

    world.read_after(1)
    assert world.row().assumed == (0,)


def test_pod_running_at_start_did_not_start_before_its_binding() -> None:
    world = World(Policy(assumed=Assumed(loading_seconds=0.0)))
    world.add_node("node", 1, replicas=4)
    world.bind("a", on=[world.card()], started_at=world.clock.now - 3600)

    world.read_after(119)

    assert world.row().assumed == (1,)


@pytest.mark.parametrize("clock", [-3600.0, 0.0, 3600.0])
def test_an_end_with_a_wrong_node_clock_counts_as_now(clock: float) -> None:
    world = one_node(1)
    pod = world.bind("a", on=[world.card()])
    world.read_after(30, 10, GRAPHICS_ACTIVE=0.9)
    world.clock.now += 5

    world.end(pod, ended_at=world.clock.now + clock)
    world.read(GRAPHICS_ACTIVE=0.9, measured_at=world.clock.now - 3)
    world.read(GRAPHICS_ACTIVE=0.9, measured_at=world.clock.now - 2)
    assert not world.estimated(world.card(), "is_foreign")

    world.read_after(30, GRAPHICS_ACTIVE=0.0)
    assert ranking(world.rank(request(requires_idle=True))) == ["node"]


@given(clock=st.floats(-1e9, 1e9), waits=st.floats(0, 1e5))
def test_a_start_is_never_in_the_future(clock: float, waits: float) -> None:
    world = World()
    world.add_node("node", 1, replicas=4)
    started(world, clock=clock, waits=waits)

    (pod,) = world.fleet.pods_on("node")

    at = world.fleet._clocks.started_at(pod)
    assert at is not None
    assert world.clock.now - 10 <= at <= world.clock.now
