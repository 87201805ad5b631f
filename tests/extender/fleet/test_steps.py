"""Test that bulk work runs in steps, updated snapshots are exact, and nothing grows."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.decision import evaluation
from extender.core.decision.scoring import PLACES, unknown_score
from extender.core.devices.readings import Readings, Signal
from extender.core.nodes.batches import current_batch
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.steps import finish
from extender.fleet import snapshots
from extender.fleet.allocation import _MAX_DEVICES
from extender.fleet.fleet import _PIECE_NODES, Fleet
from extender.fleet.snapshots import _NEW_READINGS_SECONDS, _OVERDUE_SECONDS, _REFRESH_SECONDS
from extender.placement.history import DecisionHistory
from extender.placement.placer import Placer
from testkit.builders import GPU, pod_ref, request
from testkit.world import World, one_node
from tests.extender.fleet.changes import CHANGES, bulk, change, columns, node_record


def answer(world: World, **values: float) -> Readings:
    """Return an answer about all devices of a world, without delivering it."""
    taken: list[Readings] = []
    fleet = world.fleet
    world.fleet = _Recorder(taken)  # type: ignore[assignment] # takes readings, and no more
    world.read(**values)
    world.fleet = fleet
    return taken[0]


class _Recorder:
    """Stands in for a fleet and records readings."""

    def __init__(self, taken: list[Readings]) -> None:
        self._taken = taken

    def apply_readings(self, readings: Readings) -> None:
        self._taken.append(readings)


# --- in steps -------------------------------------------------------------------------------------


def test_a_query_between_two_steps_gets_an_answer() -> None:
    world = one_node()
    world.clock.now += 30
    steps = world.fleet.readings_in_steps(answer(world, GRAPHICS_ACTIVE=0.9))

    for _ in steps:
        assert world.place("a") == "node"

    assert world.estimated(world.card(), "latest") == 0.9


def test_a_row_reused_between_two_steps_takes_no_value_of_the_answer() -> None:
    steps_taken = 0
    while True:
        world = World()
        for name in ("leaving", "staying"):
            world.add_node(name, 2)
        world.read()
        world.clock.now += 30
        steps = world.fleet.readings_in_steps(answer(world, GRAPHICS_ACTIVE=0.9))
        if sum(1 for _, _ in zip(range(steps_taken), steps, strict=False)) < steps_taken:
            break
        world.fleet.remove_node("leaving")
        world.fleet.apply_node(NodeRecord(name="new", allocatable={GPU: 2}, capacity={GPU: 2}))
        world.fleet.snapshot()

        for _ in steps:
            pass

        telemetry = world.fleet.snapshot().telemetry
        assert not telemetry.freshness[list(world.row("new").slots)].any(), steps_taken
        assert telemetry.latest[list(world.row("staying").slots)].tolist() == [0.9, 0.9]
        steps_taken += 1
    assert steps_taken > 5


def test_nodes_that_change_in_bulk_wait_for_the_steps_and_pods_count_at_once() -> None:
    world = World()
    fleet = world.fleet = Fleet(world.policy, world.clock, in_steps=True)
    bulk(world, 3 * _PIECE_NODES)
    assert not fleet.snapshot().pools

    for _ in fleet.settle_in_steps():
        fleet.snapshot()
    assert fleet.is_settled
    assert len(fleet.snapshot_of_all().pools[GPU].nodes) == 3 * _PIECE_NODES

    bulk(world, 3 * _PIECE_NODES, gpus=4)
    world.bind("a", "node-0", 2)
    assert world.row("node-0").held == 2
    assert (world.row("node-0").allocatable, world.row("node-1").allocatable) == (4, 8)


# --- updated snapshots ----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 20)), max_size=25))
def test_an_updated_snapshot_equals_one_from_scratch(changes: Iterable[tuple[str, int]]) -> None:
    world, pods = World(), list[PodRecord]()
    for number in range(4):
        world.add_node(f"node-{number}", 2)
    world.read()
    for what, number in changes:
        change(world, what, number, pods)
        world.fleet.snapshot()

    assert_equals_one_from_scratch(world)


def assert_equals_one_from_scratch(world: World) -> None:
    """Compare the snapshot and a ranking with ones built from scratch."""
    updated, ranked = world.fleet.snapshot(), world.rank(request(1))
    world.fleet._snapshots.current = None
    world.fleet._snapshots.discard_estimates()
    from_scratch = world.fleet.snapshot()
    again = Placer(world.fleet, DecisionHistory(1), world.clock).rank(
        request(1), tuple(world.fleet.nodes)
    )

    assert from_scratch is not updated
    assert updated.nodes == from_scratch.nodes
    names = updated.node_index.number(
        from_scratch.node_index.names
    )  # the index may still contain removed nodes
    for resource in from_scratch.pools:
        rows, others = (
            updated.node_index.rows(resource, names),
            from_scratch.node_index.rows(
                resource, from_scratch.node_index.number(from_scratch.node_index.names)
            ),
        )
        assert rows is not None
        assert others is not None
        assert rows.tolist() == others.tolist()
    assert set(updated.pools) == set(from_scratch.pools)
    devices = world.fleet.store.rows_on(world.fleet.store.nodes)  # without spare rows
    assert columns(updated.telemetry.take(devices)) == columns(from_scratch.telemetry.take(devices))
    for resource, pool in updated.pools.items():
        other = from_scratch.pools[resource]
        assert (pool.nodes, pool.rows, pool.row_of) == (other.nodes, other.rows, other.row_of)
        batch = current_batch(pool, updated.telemetry)
        assert columns(batch, batch.telemetry) == columns(other.batch, other.batch.telemetry)
    assert ranked.codes.tolist() == again.codes.tolist()
    assert ranked.scores.tolist() == again.scores.tolist()
    assert ranked.order.tolist() == again.order.tolist()


MEANWHILE = ("bind", "end", "add", "remove", "widen", "place", "rank")
"""Changes that count at once, even during a refresh."""


@given(
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 20)), max_size=15),
    st.lists(st.tuples(st.sampled_from(MEANWHILE), st.integers(0, 20)), max_size=6),
)
def test_a_snapshot_refreshed_in_steps_equals_one_from_scratch(
    changes: Iterable[tuple[str, int]], meanwhile: Iterable[tuple[str, int]]
) -> None:
    world, pods = World(in_steps=True), list[PodRecord]()
    for number in range(4):
        world.add_node(f"node-{number}", 2)
    world.read()
    for what, number in changes:
        change(world, what, number, pods)
        world.rank(request(1))
    world.clock.now += _REFRESH_SECONDS
    finish(world.fleet.settle_in_steps())

    left = list(meanwhile)
    for _ in world.fleet.refresh_in_steps(world.placer.evaluation_cache.prepare_in_steps):
        if left:
            change(world, *left.pop(0), pods)
            world.rank(request(1))
    finish(world.fleet.settle_in_steps())
    world.clock.now += _REFRESH_SECONDS
    finish(world.fleet.refresh_in_steps())

    assert_equals_one_from_scratch(world)


def test_no_query_waits_for_added_and_removed_nodes() -> None:
    world = World(in_steps=True)
    for name in ("leaving", "changing", "staying"):
        world.add_node(name, 2)
    world.read()
    finish(world.fleet.refresh_in_steps())
    world.fleet.snapshot_of_all()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "build_pools", None)  # any call fails
        patch.setattr(snapshots, "estimate", None)
        world.fleet.remove_node("leaving")
        world.fleet.apply_node(NodeRecord(name="new", allocatable={GPU: 2}, capacity={GPU: 2}))
        world.fleet.apply_node(NodeRecord(name="changing", allocatable={GPU: 9}, capacity={GPU: 9}))
        world.bind("a", "staying", 1)
        decision = world.rank(request(1), ("new", "changing", "staying"))
        assert decision.scores[0] == unknown_score(PLACES)
        assert world.row("staying").held == 1
        assert len(world.row("changing").slots) == 2

    world.clock.now += _NEW_READINGS_SECONDS
    finish(world.fleet.refresh_in_steps(world.placer.evaluation_cache.prepare_in_steps))

    assert world.fleet.node_index.names == ("changing", "leaving", "new", "staying")
    assert world.fleet.snapshot().pools[GPU].nodes == ("changing", "new", "staying")
    assert len(world.row("changing").slots) == 9
    assert world.row("staying").held == 1


def test_new_readings_and_time_cause_a_refresh() -> None:
    world = World(in_steps=True)
    world.add_node("node", 1)
    world.read()
    finish(world.fleet.refresh_in_steps())
    before = world.fleet.snapshot()

    finish(world.fleet.refresh_in_steps())
    assert world.fleet.snapshot() is before

    world.read(GRAPHICS_ACTIVE=0.9)
    finish(world.fleet.refresh_in_steps())
    assert world.estimated(world.card(), "latest") == 0.9

    version = world.fleet.snapshot().version
    world.clock.now += _REFRESH_SECONDS
    finish(world.fleet.refresh_in_steps())
    assert world.fleet.snapshot().version > version


def test_a_query_refreshes_an_overdue_snapshot() -> None:
    world = World(in_steps=True)
    world.add_node("node", 1)
    world.read()
    before = world.fleet.snapshot()

    world.clock.now += _OVERDUE_SECONDS / 2
    assert world.fleet.snapshot() is before
    world.clock.now += _OVERDUE_SECONDS
    assert world.fleet.snapshot() is not before


def test_a_clock_that_was_set_back_delays_no_refresh() -> None:
    world = World(in_steps=True)
    world.add_node("node-0", 2)
    world.read()
    finish(world.fleet.refresh_in_steps())
    before = world.fleet.snapshot()
    world.clock.now -= 600.0

    finish(world.fleet.refresh_in_steps())

    assert world.fleet.snapshot().pools[GPU].version > before.pools[GPU].version


def test_evaluations_prepared_during_a_refresh_are_used() -> None:
    world = World(in_steps=True)
    for number in range(3):
        world.add_node(f"node-{number}", 2)
    world.read()
    world.rank(request(1))
    world.clock.now += _REFRESH_SECONDS
    finish(world.fleet.refresh_in_steps(world.placer.evaluation_cache.prepare_in_steps))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "evaluate_batch_in_steps", None)  # any call fails
        world.rank(request(1))
        with pytest.raises(TypeError):
            world.rank(request(2))


def test_snapshots_share_unchanged_parts() -> None:
    world = one_node()
    before = world.fleet.snapshot()

    world.bind("a", on=[world.card()])

    after = world.fleet.snapshot()
    assert after.telemetry.memory_free_bytes is before.telemetry.memory_free_bytes
    assert after.pools[GPU].batch is before.pools[GPU].batch
    assert after.pools[GPU].unwritten == [0]


# --- bounded growth -------------------------------------------------------------------------------


def test_placeholders_are_dropped_once_their_devices_are_reported() -> None:
    world = World()
    world.add_node("node", 8)
    world.fleet.snapshot()

    world.read()

    world.fleet.snapshot()
    assert len(world.fleet.store) == 8


def test_placeholders_are_dropped_with_their_resource() -> None:
    world = World()
    world.fleet.apply_node(node_record(0))
    world.fleet.snapshot()

    world.fleet.apply_node(node_record(0, gpus=2))
    assert len(world.row("node-0").slots) == 2

    infos = [world.fleet.store.info(row) for row in range(len(world.fleet.store))]
    assert sum(info is not None for info in infos) == 2


def test_a_kubelet_that_reports_a_million_devices_costs_no_million_rows() -> None:
    world = World()
    world.fleet.apply_node(node_record(0, gpus=1_000_000))

    assert len(world.row("node-0").slots) == _MAX_DEVICES
    assert world.place("a") == "node-0"


def test_pods_that_have_ended_leave_nothing_at_their_node() -> None:
    world = one_node()
    world.end(world.bind("a"))
    world.fleet.remove_pod(world.bind("b").uid, world.clock.now)

    assert world.fleet._pods_of_node == {}


def test_placed_pods_count_despite_cached_evaluations() -> None:
    world = World()
    for number in range(2):
        world.add_node(f"node-{number}", 1)
    world.read()

    chosen = [world.place(pod_ref(name).name) for name in ("a", "b")]

    assert sorted(str(name) for name in chosen) == ["node-0", "node-1"]
    assert world.fleet.store.value(Signal.MEMORY_USED, 0) == 0.0
