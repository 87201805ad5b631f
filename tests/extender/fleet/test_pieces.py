"""Test that changes of many nodes are handled in cooperative steps."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from extender.core.decision import dirty_rows
from extender.core.nodes import batches
from extender.core.nodes.snapshot import PoolRow, Rows, Telemetry
from extender.core.steps import finish
from extender.fleet import pools, snapshots
from extender.fleet.allocation import NodeAllocations
from extender.fleet.fleet import _PIECE_NODES
from extender.fleet.snapshots import _REFRESH_SECONDS
from testkit.builders import GPU, request
from testkit.cards import IDLE
from testkit.world import World
from tests.extender.fleet.changes import bulk, columns, node_record


def test_pods_that_end_in_bulk_wait_for_the_steps_and_a_new_pod_does_not() -> None:
    world = World(in_steps=True)
    bulk(world, 3 * _PIECE_NODES)
    pods = [world.bind(f"pod-{number}", f"node-{number}") for number in range(3 * _PIECE_NODES)]
    world.fleet.snapshot_of_all()

    for pod in pods:
        world.end(pod)
    world.bind("new", "node-3", 2)

    assert world.row("node-3").held == 2
    assert [row.held for row in world.fleet.snapshot().pools[GPU].rows].count(1) == len(pods) - 1
    finish(world.fleet.settle_in_steps())
    assert [row.held for row in world.fleet.snapshot().pools[GPU].rows].count(1) == 0


def test_a_few_pods_that_end_free_their_devices_at_once() -> None:
    world = World(in_steps=True)
    bulk(world, 3 * _PIECE_NODES)
    pods = [world.bind(f"pod-{number}", f"node-{number}") for number in range(_PIECE_NODES)]
    world.fleet.snapshot_of_all()

    for pod in pods:
        world.end(pod)

    assert not any(row.held for row in world.fleet.snapshot().pools[GPU].rows)


def test_new_pods_of_many_nodes_count_at_once_between_the_steps() -> None:
    world = World(in_steps=True)
    bulk(world, 3 * _PIECE_NODES)
    world.fleet.snapshot_of_all()
    for number in range(3 * _PIECE_NODES):
        world.bind(f"pod-{number}", f"node-{number}")

    next(world.fleet.settle_in_steps())

    assert {row.held for row in world.fleet.snapshot().pools[GPU].rows} == {1}


@pytest.fixture
def dirty_nodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of nodes that became dirty rows, per snapshot; many are more than 16."""
    counts: list[int] = []

    def update_pools(pools: Any, changed: Mapping[str, Any], *rest: Any) -> object:
        counts.append(len(changed))
        return pools_updated(pools, changed, *rest)

    pools_updated: Callable[..., object] = vars(snapshots)["update_pools"]
    monkeypatch.setattr(snapshots, "update_pools", update_pools)
    monkeypatch.setattr(snapshots, "_PIECE_NODES", 16)
    return counts


def test_nodes_that_all_change_become_dirty_rows_some_at_a_time(dirty_nodes: list[int]) -> None:
    world = World(in_steps=True)
    bulk(world, 100)
    world.fleet.snapshot_of_all()

    bulk(world, 100, gpus=4)
    finish(world.fleet.settle_in_steps())
    pool = world.fleet.snapshot().pools[GPU]

    assert {row.allocatable for row in pool.rows} == {4}
    assert sum(dirty_nodes) == 100
    assert max(dirty_nodes) < 16 + _PIECE_NODES
    assert len(dirty_nodes) < 100 / _PIECE_NODES


def test_no_step_allocates_many_nodes_though_pods_came_to_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "_PIECE_NODES", 16)
    world = World(in_steps=True)
    world.fleet.snapshot()
    bulk(world, 100)
    for number in range(100):
        world.bind(f"pod-{number}", f"node-{number}")
    allocated: list[object] = []
    settle = NodeAllocations.settle

    def note(*args: Any) -> Any:
        allocated.append(args)
        return settle(*args)

    monkeypatch.setattr(NodeAllocations, "settle", note)
    counts = []
    for _ in world.fleet.settle_in_steps():
        counts.append(len(allocated))
        allocated.clear()

    assert sum(counts) == 100
    assert max(counts) == _PIECE_NODES


def test_nodes_that_change_during_a_refresh_are_estimated_again_in_pieces(
    dirty_nodes: list[int],
) -> None:
    world = World(in_steps=True)
    for number in range(100):
        world.add_node(f"node-{number}", 1)
    pods = [world.bind(f"pod-{number}", f"node-{number}") for number in range(100)]
    world.read()
    world.fleet.snapshot_of_all()
    world.clock.now += _REFRESH_SECONDS
    steps = world.fleet.refresh_in_steps()
    next(steps)
    for pod in pods:
        world.end(pod)
    finish(world.fleet.settle_in_steps())
    world.fleet.snapshot()
    dirty_nodes.clear()

    finish(steps)
    world.fleet.snapshot()

    assert sum(dirty_nodes) == 100
    assert max(dirty_nodes) <= 16
    refreshed = world.fleet.snapshot()
    assert not any(row.held for row in refreshed.pools[GPU].rows)
    assert refreshed.telemetry.presumed[:100].all()
    assert columns(world.fleet.snapshot_of_all().telemetry) == columns(refreshed.telemetry)


def test_pools_are_rebuilt_some_nodes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_PIECE_NODES", 10)
    monkeypatch.setattr(batches, "_PIECE_ROWS", 10)
    world = World(in_steps=True)
    bulk(world, 100)
    world.fleet.snapshot_of_all()
    world.fleet.remove_node("node-7")
    for number in range(20, 40):
        world.fleet.apply_node(node_record(number, gpus=4))
    finish(world.fleet.settle_in_steps())
    world.clock.now += _REFRESH_SECONDS
    compared, taken = [0], [0]
    is_same, take = pools._is_same, Telemetry.take

    def compare(one: PoolRow, other: PoolRow) -> bool:
        compared[-1] += 1
        return is_same(one, other)

    def take_some(self: Telemetry, slots: Rows) -> Telemetry:
        taken[-1] += len(slots)
        return take(self, slots)

    monkeypatch.setattr(pools, "_is_same", compare)
    monkeypatch.setattr(Telemetry, "take", take_some)
    for _ in world.fleet.refresh_in_steps():
        compared.append(0)
        taken.append(0)

    assert len(world.fleet.snapshot().pools[GPU].nodes) == 99
    assert sum(compared) == 79
    assert max(compared) <= 10
    assert sum(taken) == 20
    assert max(taken) <= 10


def test_a_pool_with_many_dirty_rows_is_evaluated_from_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dirty_rows, "_MAX_DIRTY_ROWS", 4)
    world = World(in_steps=True)
    bulk(world, 10)
    world.fleet.snapshot_of_all()
    world.rank(request(1))
    for number in range(5):
        world.bind(f"pod-{number}", f"node-{number}")
    updated: list[int] = []
    update = dirty_rows._update

    def note(*args: Any, **how: Any) -> Any:
        updated.extend(len(rows) for _, rows in args[3])
        return update(*args, **how)

    monkeypatch.setattr(dirty_rows, "_update", note)
    monkeypatch.setattr(dirty_rows, "_changed", None)  # comparing rows one by one would fail
    world.rank(request(1))

    assert updated == [5]  # the arrays do not include these yet


def test_a_node_has_only_its_own_devices_beside_a_node_with_more() -> None:
    made = World()
    made.add({"wide": [IDLE] * 4})
    made.fleet.snapshot()
    made.add({"narrow": [IDLE] * 2})

    batch = made.fleet.snapshot().pools[GPU].batch

    assert sorted(batch.present.sum(axis=1).tolist()) == [2, 4]
