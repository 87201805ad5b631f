"""Test pods whose devices are known from ResourceClaims."""

from dataclasses import replace

import pytest

from extender.core.devices.readings import DeviceInfo
from extender.core.nodes.inventory import ClaimedDevice, PodRecord
from extender.fleet.device_holders import add_claimed
from testkit.builders import GPU
from testkit.world import World, one_node


def claimed(index: int, profile: str = "") -> ClaimedDevice:
    return ClaimedDevice(uuid=f"GPU-node-{index}", mig_profile=profile)


def test_claims_show_the_devices_of_a_pod_without_a_mapping() -> None:
    made = one_node(4, allocatable={}, capacity={})
    made.is_mapped = False

    made.bind("a", resources={}, has_claims=True, claimed=(claimed(2), claimed(0)))
    made.bind("nic", resources={}, has_claims=True, claimed=())
    made.bind("asked", has_claims=True, claimed=(claimed(3),))
    made.read_after(120)

    row = made.row()
    assert (row.used, row.taken, row.held, row.is_agreed) == ((1, 0, 1, 1), 0, 3, True)
    assert made.fleet.tenants_of(row.slots[2]) == ("ns/a",)


def test_a_pod_with_a_known_claim_may_hold_no_other_device() -> None:
    made = one_node(2, allocatable={}, capacity={})
    before = made.bind("a", resources={}, has_claims=True)
    made.read_after(120)
    assert not made.row().is_agreed

    made.fleet.apply_pod(replace(before, claimed=(claimed(1),)))

    assert (made.row().used, made.row().is_agreed) == ((0, 1), True)


def test_a_claimed_device_that_no_source_reports_may_be_any() -> None:
    made = one_node(2, allocatable={}, capacity={})

    made.bind("a", resources={}, has_claims=True, claimed=(claimed(7),))

    assert (made.row().used, made.row().is_agreed) == ((0, 0), False)


def test_claimed_device_history_restarts_with_each_pod() -> None:
    made = one_node(2, allocatable={}, capacity={})
    made.read_after(30)
    device = made.row().slots[1]
    came_at = made.clock.now

    record = made.bind("a", resources={}, has_claims=True, claimed=(claimed(1),))
    made.fleet.snapshot()
    assert made.fleet.store.tenants_since(device) == came_at
    made.clock.now += 60
    made.end(record)

    assert made.fleet.store.tenants_since(device) == made.clock.now
    assert made.row().used == (0, 0)


@pytest.mark.parametrize(("held", "used"), [(1, (0, 0)), (2, (1, 1))], ids=["one", "both"])
def test_claimed_instance_is_identified_if_its_profile_is_unique(
    held: int, used: tuple[int, ...]
) -> None:
    made = World()
    made.add_node("node", 0, allocatable={}, capacity={})
    made.add_instances("node", 0, ["1g.10gb", "1g.10gb", "3g.40gb"])
    made.read()

    small = (claimed(0, "1g.10gb"),) * held
    made.bind("a", resources={}, has_claims=True, claimed=(*small, claimed(0, "3g.40gb")))

    assert made.row(resource="nvidia.com/mig-3g.40gb").used == (1,)
    row = made.row(resource="nvidia.com/mig-1g.10gb")
    assert (row.used, row.is_agreed) == (used, held == 2)


@pytest.mark.parametrize(
    ("resources", "small"),
    [({}, (0,)), ({"b": 1}, (1,))],
    ids=["claims-alone", "something-else-besides"],
)
def test_claims_distinguish_instances_that_a_mapping_does_not(
    resources: dict[str, int], small: tuple[int, ...]
) -> None:
    made = World()
    made.add_node("node", 0, allocatable={}, capacity={})
    made.add_instances("node", 0, ["1g.10gb", "3g.40gb"])
    made.read()
    either = [made.card(instance="7"), made.card(instance="8")]

    large = (claimed(0, "3g.40gb"),)
    made.bind("a", resources=resources, has_claims=True, claimed=large, on=either)
    made.read_after(30)

    assert made.row(resource="nvidia.com/mig-3g.40gb").used == (1,)
    assert made.row(resource="nvidia.com/mig-1g.10gb").used == small


@pytest.mark.parametrize("is_known_late", [False, True], ids=["at-once", "later"])
def test_a_pod_with_admin_access_holds_no_device(is_known_late: bool) -> None:
    made = one_node(2, allocatable={}, capacity={})
    monitor = made.bind(
        "monitor",
        resources={},
        has_claims=True,
        claimed=None if is_known_late else (),
        on=[made.card(index=0), made.card(index=1)],
    )
    made.read_after(30)
    assert made.row().used == ((1, 1) if is_known_late else (0, 0))

    made.fleet.apply_pod(replace(monitor, claimed=()))

    assert (made.row().used, made.row().held, made.row().is_agreed) == ((0, 0), 0, True)


def test_the_mapping_counts_only_for_devices_outside_the_claims() -> None:
    made = World()
    made.add_node("node", 0, allocatable={}, capacity={})
    made.add_instances("node", 0, ["1g.10gb", "1g.10gb", "3g.40gb"])
    made.read()

    small = (claimed(0, "1g.10gb"),)
    shown = [made.card(instance=name) for name in ("7", "8", "9")]
    made.bind("a", resources={}, has_claims=True, claimed=small, on=shown)
    made.read_after(30)

    assert made.row(resource="nvidia.com/mig-1g.10gb").used == (1, 1)
    assert made.row(resource="nvidia.com/mig-3g.40gb").used == (0,)


@pytest.mark.parametrize("lost", [claimed(7), ClaimedDevice(uuid="")], ids=["unseen", "unreported"])
def test_the_mapping_counts_if_a_claimed_device_is_not_found(lost: ClaimedDevice) -> None:
    made = one_node(2, allocatable={}, capacity={})

    made.bind("a", resources={}, has_claims=True, claimed=(lost,), on=[made.card(index=1)])
    made.read_after(30)

    assert made.row().used == (0, 1)


def test_a_nodes_devices_are_looked_up_once_for_all_its_claims() -> None:
    tenants: dict[int, set[str]] = {row: set() for row in range(8)}
    infos = {row: DeviceInfo(node="node", uuid=f"GPU-node-{row}", index=row) for row in tenants}
    holding = PodRecord(uid="", namespace="ns", name="", has_claims=True)
    pods = [replace(holding, name=f"p{row}", claimed=(claimed(row),)) for row in tenants]
    requested: list[int] = []

    def info_of(row: int) -> DeviceInfo:
        requested.append(row)
        return infos[row]

    add_claimed(pods, tenants, info_of)

    assert tenants == {row: {f"ns/p{row}"} for row in infos}
    assert len(requested) == len(infos)


def test_busy_device_may_belong_to_a_claimants_unseen_plugin_device() -> None:
    made = one_node(2, allocatable={GPU: 1}, capacity={GPU: 1})
    made.is_mapped = False

    made.bind("a", has_claims=True, claimed=(claimed(0),))
    made.read_after(300, GPU_UTILIZATION=0.9)

    row = made.row()
    assert (row.used, row.taken, row.is_agreed) == ((1, 0), 1, False)
    assert not made.fleet.store.is_foreign(row.slots[1])


def test_a_missing_instance_is_expected_behind_the_plain_resource_too() -> None:
    made = World()
    made.add_node("node", 0, allocatable={GPU: 1}, labels={"nvidia.com/mig.strategy": "single"})
    made.add_instances("node", 0, ["1g.10gb", "1g.10gb"])
    made.read()

    made.bind("a", resources={}, has_claims=True, claimed=(claimed(0, "1g.10gb"),))

    assert (made.row().used, made.row().is_agreed) == ((0, 0), False)
