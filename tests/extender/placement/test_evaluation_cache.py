"""Cached evaluations equal evaluations from scratch, and only dirty rows are evaluated again."""

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extender.core.decision import dirty_rows
from extender.core.decision.evaluation import (
    Evaluation,
    EvaluationInputs,
    device_requests,
    evaluate_for,
    evaluate_for_in_steps,
    row_with_tenants,
)
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodRecord
from extender.core.nodes.snapshot import Pool, Snapshot, batch_rows
from extender.core.steps import Steps, finish
from extender.fleet.snapshots import _REFRESH_SECONDS
from extender.placement import evaluation_cache as placement_cache
from extender.placement.evaluation_cache import _EXPECTED_SECONDS, _MAX_EXPECTED
from testkit.builders import GPU, pod_ref, request
from testkit.world import World

COLUMNS = ("codes", "scores", "bands", "utilization")
REQUESTS = (
    request(1),
    request(2),
    request(1, requires_idle=True),
    request(1, memory_bytes=1 << 36),
    request(1, millicores=3000),
)


def columns(evaluation: Evaluation, rows: list[int]) -> list[list[object]]:
    """Return some rows of an evaluation."""
    return [getattr(evaluation, name)[rows].tolist() for name in COLUMNS]


def from_scratch(snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs) -> Evaluation:
    """Evaluate a pool from its rows, without any cache and without its arrays."""
    with_tenants = partial(
        row_with_tenants, overlay=inputs.overlay, is_out=snapshot.telemetry.is_out
    )
    rows = tuple(map(with_tenants, pool.rows, pool.nodes))
    batch = batch_rows(rows, snapshot.telemetry, pool.batch.suspicion)
    return evaluate_for(inputs, batch, snapshot.models, pool.seen)


class Histories(RuleBasedStateMachine):
    """Random histories of a small fleet; background work stops after any step."""

    @initialize(in_steps=st.booleans())
    def start(self, in_steps: bool) -> None:
        self.world = World(in_steps=in_steps)
        self.in_steps = in_steps
        self.pods: list[PodRecord] = []
        self.works: dict[str, Generator[None, None, object]] = {}
        self.number = 0
        for number in range(4):
            replicas, host = 4 if number == 3 else 1, HostResources(8000)
            self.world.add_node(f"node-{number}", 2, replicas=replicas, host=host)
        self.millicores = dict.fromkeys(self.world.fleet.nodes, 0)
        self.world.read()
        self.world.fleet.snapshot_of_all()

    def name(self) -> str:
        self.number += 1
        return f"pod-{self.number}"

    # --- changes of the fleet ---------------------------------------------------------------------

    @rule(node=st.integers(0, 3), card=st.integers(0, 1), is_mapped=st.booleans())
    def bind(self, node: int, card: int, is_mapped: bool) -> None:
        name = f"node-{node}"
        if name in self.world.fleet.nodes:
            devices = [self.world.card(name, card)] if is_mapped else []
            self.pods.append(self.world.bind(self.name(), name, on=devices))

    @precondition(lambda self: self.pods)
    @rule(at=st.integers(0, 20))
    def end(self, at: int) -> None:
        self.world.end(self.pods.pop(at % len(self.pods)))

    @rule(requested=st.sampled_from(REQUESTS), is_bound=st.booleans())
    def place(self, requested: Any, is_bound: bool) -> None:
        name = self.name()
        node = self.world.place(name, requested)
        if node is not None and is_bound:
            self.millicores[node] += requested.millicores
            self.world.fleet.apply_host_use(node, HostResources(self.millicores[node]))
            self.pods.append(self.world.bind(name, node, requested.count))

    @precondition(lambda self: "refresh" not in self.works)  # the sources alternate
    @rule(seconds=st.sampled_from([1, 30]), busy=st.sampled_from([0.0, 0.2, 0.9]))
    def read(self, seconds: int, busy: float) -> None:
        self.world.clock.now += seconds
        self.world.read(GRAPHICS_ACTIVE=busy)

    @rule(node=st.integers(0, 3))
    def read_one(self, node: int) -> None:
        self.world.fleet._snapshots.note_readings(
            [f"node-{node}"] if f"node-{node}" in self.world.fleet.nodes else []
        )

    @rule(seconds=st.sampled_from([1.0, _REFRESH_SECONDS, 60.0, -600.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @rule(node=st.integers(0, 6), gpus=st.integers(1, 4))
    def resize(self, node: int, gpus: int) -> None:
        offered = {GPU: gpus}
        known = self.world.fleet.nodes.get(f"node-{node}")
        if known is None:
            self.world.add_node(f"node-{node}", 2)
        else:
            self.world.fleet.apply_node(replace(known, allocatable=offered, capacity=offered))

    @rule(node=st.integers(0, 3))
    def remove(self, node: int) -> None:
        name = f"node-{node}"
        self.world.fleet.remove_node(name)
        self.pods = [pod for pod in self.pods if pod.node != name]

    @rule(node=st.integers(0, 3))
    def fail_early(self, node: int) -> None:
        if f"node-{node}" in self.world.fleet.nodes:
            self.world.bind(self.name(), f"node-{node}", is_failed_early=True)

    # --- work of the cache ------------------------------------------------------------------------

    def work(self, name: str, begin: Callable[[], Steps[None]], count: int) -> None:
        """Run some steps of a work item; start it if it is not in progress."""
        steps = self.works.setdefault(name, begin())
        for _ in range(count):
            if next(steps, self) is self:
                del self.works[name]
                return

    @rule(count=st.integers(1, 40))
    def refresh(self, count: int) -> None:
        if self.in_steps:
            prepare = self.world.placer.evaluation_cache.prepare_in_steps
            self.work("refresh", lambda: self.world.fleet.refresh_in_steps(prepare), count)

    @rule(count=st.integers(1, 6))
    def update(self, count: int) -> None:
        self.work("update", self.world.placer.evaluation_cache.update_in_steps, count)

    @rule(requested=st.sampled_from(REQUESTS), count=st.integers(1, 6))
    def expect(self, requested: Any, count: int) -> None:
        cache = self.world.placer.evaluation_cache
        self.work("expect", lambda: cache.expect_in_steps(requested), count)

    @precondition(lambda self: "refresh" not in self.works)
    @rule()
    def settle(self) -> None:
        finish(self.world.fleet.settle_in_steps())

    @invariant()
    def every_cached_evaluation_equals_one_from_scratch(self) -> None:
        if not hasattr(self, "world"):
            return
        fleet, cache = self.world.fleet, self.world.placer.evaluation_cache
        snapshot = fleet.snapshot()
        overlay = fleet.ledger.overlays(without="").get(GPU, {})
        pool = snapshot.pools.get(GPU)
        if pool is None:
            return
        for requested in REQUESTS:
            ((_, device_request),) = device_requests(requested)
            inputs = EvaluationInputs(
                request=requested, devices=device_request, policy=fleet.policy, overlay=overlay
            )
            cached = cache.evaluate(snapshot, pool, inputs)
            # Device rows of removed nodes may belong to other nodes by now.
            shown = [
                at
                for at, node in enumerate(pool.nodes)
                if set(pool.rows[at].slots) <= set(fleet.store.rows_on([node]).tolist())
            ]
            assert columns(cached, shown) == columns(from_scratch(snapshot, pool, inputs), shown)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.fixture
def world() -> World:
    world = World(in_steps=True)
    for number in range(3):
        world.add_node(f"node-{number}", 4)
    world.read()
    return world


@pytest.fixture
def pools_evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each whole pool that is evaluated."""
    counted: list[int] = []
    evaluate: Callable[..., Any] = evaluate_for_in_steps

    def count(inputs: Any, batch: Any, *rest: Any) -> Any:
        counted.append(len(batch))
        return evaluate(inputs, batch, *rest)

    monkeypatch.setattr(dirty_rows, "evaluate_for_in_steps", count)
    return counted


@pytest.fixture
def rows_evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the numbers of dirty rows that are evaluated together."""
    counted: list[int] = []
    batch_of: Callable[..., Any] = vars(dirty_rows)["batch_of"]

    def count(snapshot: Any, pool: Any, rows: Any) -> Any:
        counted.append(len(rows))
        return batch_of(snapshot, pool, rows)

    monkeypatch.setattr(dirty_rows, "batch_of", count)
    return counted


def most_at_once(steps: Steps[None], counted: list[int]) -> int:
    """Run a work item; return the largest number of pools that one step evaluated."""
    most = 0
    for _ in steps:
        most = max(most, len(counted))
        counted.clear()
    return most


def expect(world: World, *counts: int) -> None:
    """Evaluate requests of new pods for these numbers of devices."""
    for count in counts:
        finish(world.placer.evaluation_cache.expect_in_steps(request(count)))


def test_unprepared_requests_are_evaluated_one_per_step(
    world: World, pools_evaluated: list[int]
) -> None:
    for count in (1, 2, 3):
        world.rank(request(count))
    world.clock.now += _REFRESH_SECONDS
    finish(world.fleet.refresh_in_steps())
    pools_evaluated.clear()

    assert most_at_once(world.placer.evaluation_cache.update_in_steps(), pools_evaluated) == 1

    for count in (1, 2, 3):
        world.rank(request(count))
    assert not pools_evaluated


def test_dirty_rows_are_evaluated_together_before_the_next_pod(
    world: World, rows_evaluated: list[int]
) -> None:
    for count in (1, 2, 3):
        world.rank(request(count))
    world.place("another", request(1))
    rows_evaluated.clear()

    finish(world.placer.evaluation_cache.update_in_steps())
    assert rows_evaluated == [3]

    for count in (1, 2, 3):
        world.rank(request(count))
    assert rows_evaluated == [3]


def test_a_pod_that_is_bound_where_it_was_assumed_changes_no_row(
    world: World, rows_evaluated: list[int]
) -> None:
    for name in tuple(world.fleet.nodes):
        world.add_node(name, 4, host=HostResources(8000))
    world.rank(request(1))
    node = world.place("one", request(1, millicores=5000))
    assert node is not None
    world.rank(request(1))
    rows_evaluated.clear()

    world.fleet.apply_host_use(node, HostResources(5000))
    world.bind("one", node)

    world.rank(request(1))
    assert rows_evaluated == []


def test_prioritize_finds_the_entry_of_filter_after_another_pod(
    world: World, rows_evaluated: list[int]
) -> None:
    names = tuple(world.fleet.nodes)
    world.placer.place("filter", pod_ref("a"), request(1), names)
    world.rank(request(1))
    rows_evaluated.clear()

    world.placer.place("prioritize", pod_ref("a"), request(1), names)

    assert rows_evaluated == []


def test_an_expected_request_is_evaluated_before_it_comes(
    world: World, pools_evaluated: list[int]
) -> None:
    expect(world, 2)
    world.place("another", request(1))
    pools_evaluated.clear()

    world.rank(request(2))

    assert not pools_evaluated


def test_a_cached_request_is_not_evaluated_for_a_new_pod(
    world: World, pools_evaluated: list[int]
) -> None:
    world.rank(request(1))
    expect(world, 2)
    pools_evaluated.clear()

    expect(world, 1, 2)

    assert not pools_evaluated


def test_in_a_large_cluster_dirty_rows_of_a_cached_request_are_evaluated_for_a_new_pod(
    world: World, rows_evaluated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 2):
        world.rank(request(count))
    world.place("another", request(1))
    rows_evaluated.clear()

    monkeypatch.setattr(placement_cache, "_MANY_NODES", 4)
    expect(world, 2)
    assert rows_evaluated == []

    monkeypatch.setattr(placement_cache, "_MANY_NODES", 3)
    expect(world, 2)
    assert rows_evaluated == [1]

    world.rank(request(2))
    assert rows_evaluated == [1]


def test_requests_are_precomputed_up_to_a_limit_until_used_or_expired(
    world: World, pools_evaluated: list[int]
) -> None:
    expect(world, *range(1, _MAX_EXPECTED + 1))
    pools_evaluated.clear()

    expect(world, 100)
    assert not pools_evaluated

    world.rank(request(1))
    expect(world, 100)
    assert len(pools_evaluated) == 1

    world.clock.now += _EXPECTED_SECONDS
    expect(world, 101)
    assert len(pools_evaluated) == 2


def test_requests_that_never_came_are_not_updated(world: World, rows_evaluated: list[int]) -> None:
    world.rank(request(1))
    expect(world, 2)
    world.place("another", request(3))
    rows_evaluated.clear()

    finish(world.placer.evaluation_cache.update_in_steps())

    assert rows_evaluated == [2]  # one row for each of the two new pods


def test_a_nominated_pod_finds_the_entry_of_the_same_request(
    world: World, pools_evaluated: list[int]
) -> None:
    world.rank(request(1))
    pools_evaluated.clear()

    world.rank(replace(request(1), nominated_node="node-1"))

    assert not pools_evaluated


def test_an_evaluation_prepared_for_a_refresh_is_not_repeated(
    world: World, pools_evaluated: list[int]
) -> None:
    for count in (1, 2, 3):
        world.rank(request(count))
    world.clock.now += _REFRESH_SECONDS
    pools_evaluated.clear()

    finish(world.fleet.refresh_in_steps(world.placer.evaluation_cache.prepare_in_steps))

    assert len(pools_evaluated) == 3
    pools_evaluated.clear()
    for count in (1, 2, 3):
        world.rank(request(count))
    assert not pools_evaluated


def test_the_least_recently_used_request_is_evicted(
    world: World, pools_evaluated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_cache, "_MAX_REQUESTS", 2)
    for count in (1, 2, 1, 3):
        world.rank(request(count))
    pools_evaluated.clear()

    for count in (1, 3):
        world.rank(request(count))
    assert not pools_evaluated

    world.rank(request(2))
    assert len(pools_evaluated) == 1
