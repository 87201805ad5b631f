"""Test the fleet as nodes, pods and readings come and go."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.devices.readings import Signal
from extender.core.nodes.batches import current_batch
from extender.core.nodes.inventory import PodPhase, PodRecord
from extender.core.policy import EarlyFailures, Policy
from extender.fleet.snapshots import _REFRESH_SECONDS
from testkit.builders import GIB, GPU, NOW
from testkit.world import World, one_node

MIG = "nvidia.com/mig-1g.10gb"


# --- snapshots ------------------------------------------------------------------------------------


def test_a_snapshot_is_the_same_until_something_changes_or_time_has_passed() -> None:
    made = one_node()
    first = made.fleet.snapshot()

    assert made.fleet.snapshot() is first
    made.clock.now += _REFRESH_SECONDS
    second = made.fleet.snapshot()
    made.read()
    third = made.fleet.snapshot()
    made.bind("a")
    fourth = made.fleet.snapshot()

    assert [each.version for each in (first, second, third, fourth)] == [1, 2, 3, 4]


def test_an_unchanged_record_changes_nothing() -> None:
    made = one_node()
    node, pod = made.fleet.nodes["node"], made.bind("a")
    before = made.fleet.snapshot()

    made.fleet.apply_node(replace(node))
    made.fleet.apply_pod(replace(pod))

    assert made.fleet.snapshot() is before


def test_labels_that_only_pods_select_by_change_no_snapshot() -> None:
    world = one_node(2)
    record = world.fleet.nodes["node"]
    before = world.fleet.snapshot()

    world.fleet.apply_node(replace(record, other_labels={"disk": "ssd"}, hostname="host"))

    assert world.fleet.is_settled
    assert world.fleet.snapshot() is before
    assert world.fleet.nodes["node"].label("disk") == "ssd"
    world.fleet.apply_node(replace(record, other_labels={}, is_unschedulable=True))
    assert not world.fleet.is_settled


def test_a_snapshot_is_immutable() -> None:
    made = one_node()
    before = made.fleet.snapshot()
    used = before.pools[GPU].batch.used.copy()
    utilization = before.telemetry.utilization.copy()

    made.bind("a", on=[made.card()])
    made.read(GRAPHICS_ACTIVE=0.9)
    made.fleet.snapshot()

    assert before.pools[GPU].batch.used.tolist() == used.tolist()
    assert before.telemetry.utilization.tolist() == utilization.tolist()


def test_a_removed_node_is_in_no_pool() -> None:
    made = one_node()
    made.add_node("other")
    made.fleet.snapshot()

    made.fleet.remove_node("node")

    snapshot = made.fleet.snapshot()
    assert snapshot.nodes == {"other"}
    assert snapshot.pools[GPU].nodes == ("other",)


def test_list_of_nodes_replaces_earlier_nodes() -> None:
    made = one_node()
    other = replace(made.fleet.nodes["node"], name="other")

    made.fleet.replace_nodes([other])
    made.fleet.remove_node("node")

    assert set(made.fleet.snapshot().nodes) == set(made.fleet.nodes) == {"other"}


def test_a_node_that_comes_back_is_read_again() -> None:
    made = one_node()
    record = made.fleet.nodes["node"]
    made.fleet.remove_node("node")
    made.fleet.apply_node(record)
    assert made.row().slots

    made.read(GRAPHICS_ACTIVE=0.4)

    assert made.estimated(made.card(), "latest") == pytest.approx(0.4)


def test_patched_rows_equal_those_of_a_pool_built_from_scratch() -> None:
    patched, from_scratch = one_node(), World()
    patched.fleet.snapshot()
    for made in (patched, from_scratch):
        if made is from_scratch:
            made.add_node("node", 2)
        made.bind("a", on=[made.card()])
        made.read(GRAPHICS_ACTIVE=0.4)

    one, other = (
        current_batch(snapshot.pools[GPU], snapshot.telemetry)
        for snapshot in (patched.fleet.snapshot(), from_scratch.fleet.snapshot())
    )

    for column in ("used", "assumed", "held", "taken", "is_agreed", "allocatable"):
        assert getattr(one, column).tolist() == getattr(other, column).tolist()
    assert one.telemetry.utilization.tolist() == other.telemetry.utilization.tolist()


def test_early_failures_change_the_next_snapshot_and_fade() -> None:
    made = one_node(policy=Policy(early_failures=EarlyFailures(half_life_seconds=600, weight=0.5)))
    made.bind("a", is_failed_early=True, is_device_fault=True, failed_at=NOW)
    made.bind("b", is_failed_early=True, is_device_fault=True)

    def suspicion() -> float:
        return float(made.fleet.snapshot().pools[GPU].batch.suspicion[0])

    assert suspicion() == pytest.approx(0.75)
    made.clock.now += 600
    assert suspicion() == pytest.approx(0.5)
    assert made.fleet.early_failures("node") == 2
    made.clock.now += 600 * 7
    assert suspicion() == 0.0
    assert made.fleet.early_failures("node") == 0


def test_a_failure_in_the_future_counts_as_fresh() -> None:
    made = one_node()

    made.bind("a", is_failed_early=True, is_device_fault=True, failed_at=NOW + 1e9)

    assert made.fleet.snapshot().pools[GPU].batch.suspicion[0] == pytest.approx(0.5)


def test_a_failure_that_is_reported_late_has_faded_by_its_age() -> None:
    made = one_node()

    at = NOW - 86400
    made.bind("a", is_failed_early=True, is_device_fault=True, bound_at=at - 30, failed_at=at)

    assert made.fleet.snapshot().pools[GPU].batch.suspicion[0] == 0.0


def test_the_failures_of_a_node_go_with_it() -> None:
    made = one_node()
    made.bind("a", is_failed_early=True, is_device_fault=True)
    assert made.fleet.early_failures("node") == 1

    made.fleet.remove_node("node")

    assert made.fleet.early_failures("node") == 0


# --- devices --------------------------------------------------------------------------------------


def test_a_node_without_telemetry_has_unknown_devices() -> None:
    made = World()
    made.add_node("node", 4)
    made.devices.clear()

    row, telemetry = made.row(), made.fleet.snapshot().telemetry

    assert len(row.slots) == 4
    assert telemetry.freshness[list(row.slots)].tolist() == [0.0] * 4
    assert telemetry.penalty[list(row.slots)].tolist() == [0.0] * 4
    assert telemetry.memory_total_bytes[list(row.slots)].tolist() == [80 * GIB] * 4


def test_one_missing_gpu_of_eight_is_penalized_and_not_excluded() -> None:
    made = one_node(8)
    made.card(index=3).is_shown = False

    made.read_after(60, times=20)

    slots, telemetry = list(made.row().slots), made.fleet.snapshot().telemetry
    assert len(slots) == 8
    assert sorted(telemetry.penalty[slots].tolist()) == [0.0] * 7 + [0.5]
    assert not telemetry.is_excluded[slots].any()


def test_devices_fade_to_unknown_when_all_series_vanish() -> None:
    made = one_node(2)
    for device in made.devices.values():
        device.is_shown = False

    made.read_after(60, times=8)

    slots, telemetry = list(made.row().slots), made.fleet.snapshot().telemetry
    assert telemetry.freshness[slots].tolist() == [0.0, 0.0]
    assert telemetry.penalty[slots].tolist() == [0.0, 0.0]


def test_a_gpu_withdrawn_by_the_kubelet_is_known_as_withdrawn() -> None:
    made = one_node(8, allocatable={GPU: 7}, capacity={GPU: 8})
    made.card(index=3).values[Signal.XID] = 48.0
    made.read()

    assert (made.row().allocatable, made.row().withdrawn) == (7, 1)
    assert made.estimated(made.card(index=3), "is_excluded")


def test_a_node_without_allocatable_gpus_is_known_from_telemetry() -> None:
    made = one_node(4, allocatable={}, capacity={})

    assert (made.row().allocatable, len(made.row().slots)) == (4, 4)


def test_a_node_that_offers_millions_of_devices_has_only_some_rows() -> None:
    world = one_node(2)
    offered = {GPU: 2, **{f"nvidia.com/mig-{number}": 1_000_000 for number in range(9)}}
    world.fleet.apply_node(
        replace(world.fleet.nodes["node"], allocatable=offered, capacity=offered)
    )

    pools = world.fleet.snapshot().pools

    assert len(pools) == 10
    assert sum(len(pool.rows[0].slots) for pool in pools.values()) <= 256 + 10
    assert len(world.row("node").slots) == 2
    assert world.rank().best == "node"


def test_sharing_may_be_turned_on_and_off_while_a_node_is_up() -> None:
    made = one_node(2)
    plain = made.fleet.nodes["node"]
    assert not made.row().is_shared

    offered, labels = {GPU: 20}, {"nvidia.com/gpu.count": "2"}
    made.fleet.apply_node(replace(plain, allocatable=offered, capacity=offered, labels=labels))
    assert (made.row().is_shared, made.row().replicas, len(made.row().slots)) == (True, 10, 2)

    made.fleet.apply_node(plain)
    assert (made.row().is_shared, made.row().replicas, len(made.row().slots)) == (False, 1, 2)


def test_a_card_may_be_divided_and_united_while_a_node_is_up() -> None:
    made = one_node(1)
    offered = {MIG: 7}

    made.remove_card("node", 0)
    made.add_instances("node", 0, ["1g.10gb"] * 7)
    plain = made.fleet.nodes["node"]
    made.fleet.apply_node(replace(plain, allocatable=offered, capacity=offered))
    made.read_after(30)

    assert list(made.fleet.snapshot().pools) == [MIG]
    assert len(made.row(resource=MIG).slots) == 7

    made.remove_card("node", 0)
    made.add_cards("node", 1)
    made.fleet.apply_node(plain)
    made.read_after(30)

    assert list(made.fleet.snapshot().pools) == [GPU]
    assert len(made.row().slots) == 1


def test_the_history_of_instances_that_reuse_numbers_restarts() -> None:
    made = World()
    made.add_node("node", 0, resource=MIG, allocatable={MIG: 2}, capacity={MIG: 2})
    made.add_instances("node", 0, ["1g.10gb", "1g.10gb"])
    instance = made.card(instance="7")
    made.bind("a", resources={MIG: 1}, on=[instance])
    made.read_after(30, times=3, GRAPHICS_ACTIVE=0.9)
    assert made.estimated(instance, "utilization") == pytest.approx(0.9)

    made.remove_card("node", 0)
    made.add_instances("node", 0, ["3g.40gb"])
    large = "nvidia.com/mig-3g.40gb"
    record = made.fleet.nodes["node"]
    made.fleet.apply_node(replace(record, allocatable={large: 1}, capacity={large: 1}))
    made.read_after(30)

    assert list(made.fleet.snapshot().pools) == [large]
    assert made.estimated(made.card(instance="7"), "utilization") == 0.0


# --- assumed pods ---------------------------------------------------------------------------------


def pending(name: str = "a", **changes: Any) -> PodRecord:
    described = PodRecord(uid=f"uid-{name}", namespace="ns", name=name, resources={GPU: 1})
    return replace(described, **changes)


def assumed(made: World) -> dict[str, list[str]]:
    overlay = made.fleet.ledger.overlays(without="").get(GPU, {})
    return {node: [tenant.uid for tenant in tenants] for node, tenants in overlay.items()}


def test_a_nominated_pod_is_firm_until_it_is_bound() -> None:
    made = one_node()
    made.fleet.apply_pod(pending(nominated_node="node"))
    made.clock.now += 1e6
    made.fleet.snapshot()
    assert assumed(made) == {"node": ["uid-a"]}

    made.bind("a")

    assert (assumed(made), made.row().held) == ({}, 1)


@pytest.mark.parametrize(
    "changes",
    [{}, {"phase": PodPhase.FAILED}, {"node": "other"}, {"is_unscheduled": True}],
    ids=["nomination-cleared", "ended", "bound-elsewhere", "unschedulable"],
)
def test_a_pod_no_longer_counts_without_its_nomination(changes: dict[str, Any]) -> None:
    made = one_node()
    made.fleet.apply_pod(pending(nominated_node="node"))

    made.fleet.apply_pod(pending(**changes))

    assert assumed(made) == {}


def test_a_deleted_nominated_pod_no_longer_counts() -> None:
    made = one_node()
    made.fleet.apply_pod(pending(nominated_node="node"))

    made.fleet.remove_pod("uid-a", NOW)

    assert assumed(made) == {}


def test_after_a_restart_everything_is_known_again_from_the_api_alone() -> None:
    before = one_node(2, replicas=10)
    pods = [before.bind(name, memory_bytes=int(4 * GIB)) for name in "abc"]
    nominated = pending("d", nominated_node="node")
    before.fleet.apply_pod(nominated)

    after = World()
    after.clock.now = before.clock.now
    after.add_node("node", 2, replicas=10)
    after.fleet.replace_pods([*pods, nominated])
    after.read()

    assert after.row() == before.row()
    assert assumed(after) == assumed(before)


def test_requests_are_forgotten_with_the_last_node() -> None:
    world = World()
    world.register_node("first")
    world.register_node("second")
    for number in range(20):
        world.bind(f"waits-{number}", "", phase=PodPhase.PENDING, bound_at=None, started_at=None)
    assert world.fleet.snapshot().pools[GPU].seen

    world.fleet.remove_node("first")
    assert world.fleet.snapshot().pools[GPU].seen

    world.fleet.remove_node("second")
    world.register_node("third")
    assert not world.fleet.snapshot().pools[GPU].seen
