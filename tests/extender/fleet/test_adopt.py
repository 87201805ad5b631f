"""Test that a new policy has the same result as one from the start."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.batches import current_batch
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Snapshot
from extender.core.policy import (
    Assumed,
    EarlyFailures,
    Foreign,
    Freshness,
    Health,
    HealthAction,
    LoadFilter,
    Policy,
    PriceMode,
    Prices,
    SharedPolicy,
    Strategy,
    Thresholds,
)
from extender.core.steps import finish
from extender.fleet import fleet as fleets
from testkit.builders import GIB, GPU, request
from testkit.world import BUSY, World, one_node, time_sliced
from tests.extender.fleet.changes import CHANGES, change, columns

DEFAULT = Policy()
SHAPING_LAYOUTS = (
    replace(DEFAULT, shared_policy=SharedPolicy.PACKED),
    replace(DEFAULT, assumed=Assumed(warm_up_seconds=1.0)),
    replace(DEFAULT, shared_policy=SharedPolicy.PACKED, assumed=Assumed(warm_up_seconds=500.0)),
)
OTHERS = (
    *SHAPING_LAYOUTS,
    replace(DEFAULT, freshness=Freshness(max_age_seconds=120.0, fade_seconds=10.0)),
    replace(DEFAULT, health=Health(xid={79: HealthAction.IGNORE}, penalty=0.9)),
    replace(DEFAULT, early_failures=EarlyFailures(weight=0.1, half_life_seconds=5.0)),
    replace(DEFAULT, thresholds=Thresholds(utilization=0.9, memory=0.9)),
    replace(DEFAULT, prices=Prices(mode=PriceMode.STRICT, entries={"node/node-0": 2.0})),
)


def contents_of(snapshot: Snapshot) -> dict[str, object]:
    """Return the contents of a snapshot without version and time."""
    pools: dict[str, object] = {}
    for resource, pool in snapshot.pools.items():
        batch = current_batch(pool, snapshot.telemetry)
        pools[resource] = (pool.nodes, pool.rows, columns(batch, batch.telemetry))
    return {"nodes": snapshot.nodes, "pools": pools, "devices": columns(snapshot.telemetry)}


def made(policy: Policy) -> World:
    """Return a world with whole and with shared devices."""
    world = World(policy)
    for number in range(2):
        world.add_node(f"node-{number}", 2)
    for number in range(2, 4):
        world.add_node(f"node-{number}", 2, replicas=3)
    world.read()
    return world


CHANGE = st.tuples(
    st.sampled_from([name for name in CHANGES if name != "place"]), st.integers(0, 20)
)


@given(st.sampled_from(OTHERS), st.lists(CHANGE, max_size=15), st.lists(CHANGE, max_size=10))
def test_an_adopted_policy_gives_the_same_state_as_one_from_the_start(
    policy: Policy, before: list[tuple[str, int]], meanwhile: Iterable[tuple[str, int]]
) -> None:
    worlds = [made(DEFAULT), made(policy)]
    pods: list[list[PodRecord]] = [[], []]

    def happen(what: str, number: int) -> None:
        for world, own in zip(worlds, pods, strict=True):
            change(world, what, number, own)
            world.fleet.snapshot()

    adopting, new = worlds
    for what, number in before:
        happen(what, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleets, "_PIECE_NODES", 1)
        rest = iter(meanwhile)
        for _ in adopting.fleet.adopt_in_steps(policy):
            for what, number in rest:
                happen(what, number)
                break

    assert adopting.fleet.policy is policy
    assert contents_of(adopting.fleet.snapshot()) == contents_of(new.fleet.snapshot())


def test_pods_bound_between_the_steps_are_counted_before_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleets, "_PIECE_NODES", 1)
    world = time_sliced(6)
    world.fleet.snapshot()

    for number, _ in enumerate(world.fleet.adopt_in_steps(SHAPING_LAYOUTS[0])):
        node = f"node-{number % 6}"
        world.bind(f"pod-{number}", node)
        assert world.row(node).held == 1 + number // 6

    rows = [world.row(f"node-{number}") for number in range(6)]
    assert sum(row.held for row in rows) == number + 1
    assert all(row.is_packed for row in rows)


def test_nodes_changed_between_steps_follow_the_new_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "_PIECE_NODES", 1)
    world = time_sliced(4)
    world.fleet.snapshot()

    for number, _ in enumerate(world.fleet.adopt_in_steps(SHAPING_LAYOUTS[0])):
        if number == 2:
            world.fleet.remove_node("node-0")
            world.add_node("late", replicas=4)
            world.read()

    pool = world.fleet.snapshot().pools[GPU]
    assert pool.nodes == ("late", "node-1", "node-2", "node-3")
    assert all(row.is_packed for row in pool.rows)


def test_readings_and_assumptions_stay() -> None:
    world = one_node()
    world.bind("a", on=[world.card()])
    world.card().values.update(BUSY)
    world.read_after(30, times=3)
    assert world.place("tentative") == "node"
    estimated = world.estimated(world.card(), "utilization")

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, thresholds=Thresholds(utilization=0.9))))

    assert world.estimated(world.card(), "utilization") == estimated
    assert len(world.fleet.ledger) == 1
    assert world.fleet.tenants_of(0) == ("ns/a",)


# --- decisions ------------------------------------------------------------------------------------


def test_an_evaluation_under_the_former_policy_is_not_reused() -> None:
    world = World()
    for name in ("half", "idle"):
        world.add_node(name, 1)
    world.card("half").values.update(dict.fromkeys(list(BUSY)[:2], 0.45))
    world.read()
    # It has its own thresholds: only the estimates by the policy may change.
    requested = replace(request(1), strategy=Strategy.SPREAD)
    assert world.rank(requested).codes.tolist() == [0, 0]

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, load_filter=LoadFilter(is_enabled=True))))

    assert [bool(code) for code in world.rank(requested).codes] == [True, False]


def test_evaluation_under_another_policy_is_not_reused_in_a_snapshot() -> None:
    world = time_sliced(2)
    world.bind("unsettled", "node-0")
    requested = request(1)
    before = world.rank(requested).scores.tolist()

    world.fleet.policy = replace(DEFAULT, assumed=Assumed(utilization=0.9))

    assert world.rank(requested).scores.tolist() != before


def test_a_decision_is_explained_under_the_policy_it_was_made_with() -> None:
    world = time_sliced(2)
    world.bind("unsettled", "node-0")
    world.place("a")
    record = next(iter(world.history))
    best = record.decision.best
    assert best is not None
    explained = record.gather
    assert explained is not None
    before = [part.explain() for part in explained([best])]

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, assumed=Assumed(utilization=0.9))))

    assert [part.explain() for part in explained([best])] == before


# --- settings that affect readings ----------------------------------------------------------------


def test_higher_foreign_thresholds_clear_foreign_use_at_once() -> None:
    world = one_node(1)
    world.read_after(30, times=3, MEMORY_USED=3 * GIB, MEMORY_FREE=77 * GIB)
    assert world.estimated(world.card(), "is_foreign")

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, foreign=Foreign(memory_bytes=4 << 30))))
    assert not world.estimated(world.card(), "is_foreign")

    world.read_after(30, times=3)
    assert not world.estimated(world.card(), "is_foreign")


def test_foreign_use_above_the_new_thresholds_stays() -> None:
    world = one_node(1)
    world.read_after(30, times=3, MEMORY_USED=6 * GIB, MEMORY_FREE=74 * GIB)

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, foreign=Foreign(memory_bytes=4 << 30))))

    assert world.estimated(world.card(), "is_foreign")


def test_lower_foreign_thresholds_need_the_usual_number_of_readings() -> None:
    world = one_node(1)
    world.read_after(30, times=3, MEMORY_USED=0.5 * GIB, MEMORY_FREE=79 * GIB)

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, foreign=Foreign(memory_bytes=1 << 28))))
    assert not world.estimated(world.card(), "is_foreign")

    world.read_after(30, times=2)
    assert world.estimated(world.card(), "is_foreign")


def test_longer_window_keeps_earlier_values() -> None:
    world = one_node(1)
    world.bind("a", on=[world.card()])
    for number in range(10):
        world.read_after(30, GRAPHICS_ACTIVE=number / 10)
    before = world.estimated(world.card(), "utilization")

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, window_seconds=7200.0)))

    assert world.estimated(world.card(), "utilization") == pytest.approx(before)


def test_shorter_window_drops_older_readings() -> None:
    world = one_node(1)
    world.bind("a", on=[world.card()])
    world.read_after(60, times=30, GRAPHICS_ACTIVE=1.0)
    world.read_after(60, times=10, GRAPHICS_ACTIVE=0.0)
    assert world.estimated(world.card(), "utilization") > 0.5

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, window_seconds=300.0)))

    assert world.estimated(world.card(), "utilization") == 0.0


def test_values_are_kept_as_long_as_the_new_policy_says() -> None:
    world = one_node(2)
    world.read_after(30)
    world.card(index=1).is_shown = False

    finish(
        world.fleet.adopt_in_steps(
            replace(DEFAULT, freshness=Freshness(max_age_seconds=10, forget_seconds=60))
        )
    )
    world.read_after(61)

    assert world.fleet.store.row_of(world.card(index=1).info.key) is None


def test_every_step_is_short_and_a_fleet_without_nodes_adopts_too() -> None:
    world = World()

    finish(world.fleet.adopt_in_steps(SHAPING_LAYOUTS[0]))
    world.add_node("first", replicas=4)
    world.read()

    assert world.row("first").is_packed
    assert np.isfinite(world.estimated(world.card("first"), "utilization"))


def test_device_use_is_recomputed_under_the_new_policy() -> None:
    world = one_node(2)
    world.read_after(30, times=3, MEMORY_USED=3 * GIB, MEMORY_FREE=77 * GIB)
    world.bind("unseen")
    world.read_after(100)
    assert world.estimated(world.card(), "is_foreign"), "it may be too young to be seen"

    finish(world.fleet.adopt_in_steps(replace(DEFAULT, assumed=Assumed(warm_up_seconds=1.0))))

    assert not world.row().is_agreed
    assert not world.estimated(world.card(), "is_foreign"), "the strange memory may be its own"
