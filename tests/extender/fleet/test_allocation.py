"""Test the holders of devices, and the state of devices that change hands."""

from typing import Any

import numpy as np
import pytest

from extender.core.decision.filtering import Code
from extender.core.devices.readings import DeviceKey, History, Signal
from extender.core.nodes.inventory import PodPhase
from extender.core.policy import Policy, SharedPolicy
from extender.core.steps import finish
from testkit.builders import GIB, NOW, rejected
from testkit.world import BUSY, IDLE, World, one_node

# --- tenants --------------------------------------------------------------------------------------


def test_mapping_and_counts_together_show_the_free_devices() -> None:
    made = one_node(4)
    made.bind("a", count=2, on=[made.card(index=1), made.card(index=3)])
    assert (made.row().taken, made.row().used) == (2, (0, 0, 0, 0))

    made.read_after(30)

    assert (made.row().taken, made.row().used) == (0, (0, 1, 0, 1))
    row = made.row()
    assert made.fleet.tenants_of(row.slots[1]) == ("ns/a",)
    assert made.fleet.tenants_of(row.slots[0]) == ()


def test_a_row_is_not_agreed_if_the_mapping_lacks_an_old_pod() -> None:
    made = one_node(4)
    made.bind("a")
    assert made.row().is_agreed

    made.read_after(120)

    assert not made.row().is_agreed


def test_a_row_is_not_agreed_without_a_mapping() -> None:
    made = one_node(4)
    made.is_mapped = False
    made.bind("a", on=[made.card()])
    made.read_after(150)

    assert not made.row().is_agreed
    made.is_mapped = True
    made.read_after(30)
    assert made.row().is_agreed


def test_a_mapping_missing_from_one_or_two_answers_stays_valid() -> None:
    made = one_node(4)
    made.bind("a", on=[made.card()])
    made.read_after(30)

    made.is_mapped = False
    made.read_after(60, times=2)
    assert (made.row().used, made.row().is_agreed) == ((1, 0, 0, 0), True)

    made.bind("b", on=[made.card(index=1)])
    made.read_after(600)
    assert not made.row().is_agreed


def recreated(made: World, *, card: int) -> None:
    """Delete a pod on the first card, and create one of the same name on another card."""
    old = made.bind("web-0", on=[made.card()])
    made.read_after(30)
    made.clock.now += 10.0
    made.fleet.remove_pod(old.uid, made.clock.now)
    made.clock.now += 1.0
    made.bind("web-0", uid="uid-new")
    made.clock.now += 1.0
    made.read(measured_at=made.clock.now - 5.0)  # older than the new pod
    assert (made.row().used, made.row().taken, made.row().is_agreed) == ((0, 0), 1, True)
    made.card().tenants = ()
    made.card(index=card).tenants = ("ns/web-0",)


@pytest.mark.parametrize("card", [0, 1], ids=["on-the-same-card", "on-another-card"])
def test_a_recreated_pod_does_not_hold_the_devices_of_the_former_one(card: int) -> None:
    made = one_node(2)
    recreated(made, card=card)

    made.read_after(20)

    assert made.row().used == (int(card == 0), int(card == 1))
    assert (made.row().taken, made.row().is_agreed) == (0, True)


def test_ended_pods_are_forgotten_soon() -> None:
    made = one_node(2)
    for number in range(100):
        pod = made.bind(f"p{number}")
        made.clock.now += 1.0
        made.fleet.remove_pod(pod.uid, made.clock.now)
    made.clock.now += 10_000.0
    made.bind("last")
    made.read_after(10.0)

    assert made.fleet._allocations._ended["node"] == {}


@pytest.mark.parametrize("how", ["its-label-is-lost", "no-mapping-at-all"])
def test_a_pod_that_was_reported_once_stays_on_its_device(how: str) -> None:
    made = one_node(2)
    pod = made.bind("a", on=[made.card()])
    made.read_after(60, times=4, GRAPHICS_ACTIVE=0.5)

    made.card().tenants = ()
    made.is_mapped = how != "no-mapping-at-all"
    made.read_after(60, times=2, GRAPHICS_ACTIVE=0.5)

    assert (made.row().used, made.row().is_agreed) == ((1, 0), True)
    assert made.estimated(made.card(), "utilization") == 0.5
    made.end(pod)
    assert made.row().used == (0, 0)


def test_pods_reported_one_at_a_time_on_a_shared_device_all_count() -> None:
    made = one_node(2, replicas=10)
    for name in "abc":
        made.bind(name)
    for name in "abc":
        made.card().tenants = (f"ns/{name}",)
        made.read_after(60)

    assert (made.row().used, made.row().is_agreed) == ((3, 0), True)


def test_a_pod_of_the_same_name_as_one_that_ended_is_another_pod() -> None:
    made = one_node(2)
    first = made.bind("a", on=[made.card()])
    made.read_after(60)
    made.clock.now += 1
    made.end(first)

    made.bind("a", uid="second")

    assert (made.row().used, made.row().taken) == ((0, 0), 1)


def test_a_pod_bound_during_a_round_is_found_by_name_in_the_mapping() -> None:
    made = one_node(2)
    began_at = made.clock.now
    made.clock.now += 0.4
    made.bind("a", on=[made.card()])
    made.clock.now += 0.4

    made.read(began_at=began_at)

    assert (made.row().used, made.row().taken) == ((1, 0), 0)


def test_pods_that_hold_devices_through_claims_are_tenants() -> None:
    made = one_node(4, allocatable={}, capacity={})
    made.bind("a", resources={}, has_claims=True, on=[made.card(index=2)])
    assert not made.row().is_agreed

    made.read_after(30)

    assert (made.row().used, made.row().held, made.row().is_agreed) == ((0, 0, 1, 0), 1, True)


def test_a_claim_without_gpus_leaves_the_row_agreed() -> None:
    made = one_node(2)
    made.read_after(30)

    claims = made.bind("nic", resources={}, has_claims=True)
    assert made.row().is_agreed
    before = made.fleet.snapshot().telemetry.freshness.copy()
    made.clock.now += 1
    made.end(claims)

    assert made.fleet.snapshot().telemetry.freshness.tolist() == before.tolist()


def test_ended_pods_hold_nothing() -> None:
    made = one_node(2)
    made.bind("a", phase=PodPhase.SUCCEEDED)
    ended = made.bind("b")

    made.end(ended)

    assert (made.row().held, made.fleet.pods_on("node")) == (0, ())
    assert set(made.fleet.pods) == {"uid-a", "uid-b"}


def test_list_of_pods_replaces_earlier_pods() -> None:
    made = one_node(2)
    made.bind("gone")
    kept = made.bind("kept")

    made.fleet.replace_pods([kept])
    made.fleet.remove_pod("never-known", NOW)

    assert made.fleet.pods_on("node") == (kept,)
    assert set(made.fleet.pods) == {kept.uid}
    assert made.row().held == 1


def test_pods_of_an_unknown_node_count_once_the_node_is_known() -> None:
    made = World()
    made.bind("a", node="late")
    made.fleet.snapshot()

    made.add_node("late", 2)

    assert made.row("late").held == 1


def test_a_share_of_the_cards_memory_is_declared_in_bytes() -> None:
    made = one_node(1, replicas=10)
    made.bind("a", on=[made.card()], memory_share=0.25)

    made.read_after(120)

    assert made.row().declared_bytes == (20 * GIB,)


def test_a_share_of_an_instances_memory_is_not_one_of_the_nodes_largest_device() -> None:
    small, large = "nvidia.com/mig-1g.10gb.shared", "nvidia.com/mig-3g.40gb"
    made, offered = World(), {small: 2, large: 1}
    made.add_node(cards=0, allocatable=offered, capacity=offered, labels={})
    made.add_instances("node", 0, ["1g.10gb", "3g.40gb"])
    for number, gib in (("7", 10), ("8", 40)):
        made.card(instance=number).values[Signal.MEMORY_FREE] = gib * GIB
    made.read()

    made.bind("a", on=[made.card(instance="7")], resources={small: 1}, memory_share=0.5)
    made.read_after(120)

    assert made.row(resource=small).declared_bytes == (5 * GIB,)


def test_a_pods_load_on_a_shared_device_is_assumed_until_readings_cover_it() -> None:
    made = one_node(1, replicas=10)
    made.bind("a", on=[made.card()], memory_bytes=int(20 * GIB))

    made.read_after(119)
    assert (made.row().assumed, made.row().declared_bytes) == ((1,), (20 * GIB,))
    made.read_after(1)
    assert (made.row().assumed, made.row().used) == ((0,), (1,))


def test_the_policy_of_the_device_plugin_is_a_setting() -> None:
    made = one_node(2, replicas=10, policy=Policy(shared_policy=SharedPolicy.PACKED))
    for name in "abc":
        made.bind(name)

    assert made.row().used == (3, 0)


# --- devices that change hands --------------------------------------------------------------------


def test_a_device_that_was_just_freed_is_unknown_until_it_is_measured_again() -> None:
    made = one_node(1)
    pod = made.bind("a", on=[made.card()])
    made.read_after(60, times=5, **{signal.name: value for signal, value in BUSY.items()})
    assert made.estimated(made.card(), "utilization") == pytest.approx(0.9)

    made.clock.now += 10
    made.end(pod)
    assert made.estimated(made.card(), "freshness") == 0.0
    made.clock.now += 5
    made.read(measured_at=made.clock.now - 6)
    assert made.estimated(made.card(), "freshness") == 0.0

    idle: dict[str, Any] = {signal.name: value for signal, value in IDLE.items()}
    made.read_after(10, **idle)
    assert made.estimated(made.card(), "freshness") == 1.0
    assert made.estimated(made.card(), "utilization") == 0.0


def test_the_next_tenant_starts_with_an_empty_window() -> None:
    made = one_node(1)
    first = made.bind("a", on=[made.card()])
    made.read_after(60, times=5, GRAPHICS_ACTIVE=0.9)
    made.end(first)
    made.bind("b", on=[made.card()])

    made.read_after(60, times=3, GRAPHICS_ACTIVE=0.2)

    assert made.estimated(made.card(), "utilization") == pytest.approx(0.2)


def test_without_a_mapping_all_free_devices_become_unknown_when_a_pod_ends() -> None:
    made = one_node(3)
    made.bind("a", on=[made.card()])
    made.read_after(60)
    short_lived = made.bind("b")

    made.clock.now += 1
    made.end(short_lived)

    freshness = [made.estimated(made.card(index=index), "freshness") for index in range(3)]
    assert freshness == [1.0, 0.0, 0.0]


def test_a_shared_device_becomes_unknown_only_when_its_last_tenant_ends() -> None:
    made = one_node(1, replicas=10)
    pods = [made.bind(name, on=[made.card()]) for name in "ab"]
    made.read_after(60, times=3, GRAPHICS_ACTIVE=0.5)

    made.clock.now += 1
    made.end(pods[0])
    assert made.estimated(made.card(), "freshness") == 1.0
    made.end(pods[1])
    assert made.estimated(made.card(), "freshness") == 0.0


def read_use(made: World, seconds: float = 30.0) -> bool:
    """Read use of the first card; return whether it counts as foreign."""
    made.clock.now += seconds
    made.card().values[Signal.MEMORY_USED] = 9 * GIB
    made.read()
    return bool(made.estimated(made.card(), "is_foreign"))


def test_use_without_a_pod_is_foreign_after_two_measurements() -> None:
    made = one_node(2)

    assert [read_use(made), read_use(made), read_use(made)] == [False, True, True]


@pytest.mark.parametrize("is_mapped", [True, False])
def test_use_of_a_new_device_is_foreign_after_its_first_two_measurements(
    *, is_mapped: bool
) -> None:
    made = World()
    made.is_mapped = is_mapped
    made.add_node("node", 2)

    assert [read_use(made), read_use(made)] == [False, True]


@pytest.mark.parametrize("is_mapped", [True, False])
def test_use_of_a_new_device_by_a_pod_known_before_is_not_foreign(*, is_mapped: bool) -> None:
    made = World()
    made.is_mapped = is_mapped
    made.add_node("node", 2)
    made.bind("a", on=[made.card()])

    assert not any(read_use(made) for _ in range(4))


def test_use_after_a_tenants_end_is_foreign_only_after_two_measurements() -> None:
    made = one_node(1)
    pod = made.bind("a", on=[made.card()])
    assert not any(read_use(made) for _ in range(5))

    made.end(pod)

    assert [read_use(made), read_use(made)] == [False, True]


def test_use_by_a_new_pod_is_not_foreign_without_a_snapshot_either() -> None:
    made = one_node(2)
    made.bind("a")

    assert [read_use(made) for _ in range(3)] == [False] * 3


def test_a_new_pod_does_not_clear_earlier_foreign_use() -> None:
    made = one_node(2)
    read_use(made)
    assert read_use(made)

    pod = made.bind("a")
    assert made.estimated(made.card(), "is_foreign")
    assert read_use(made)
    made.end(pod)
    assert made.estimated(made.card(), "is_foreign")


def test_without_a_mapping_a_pods_end_makes_no_use_foreign_at_once() -> None:
    made = one_node(2)
    made.is_mapped = False
    made.clock.now += 600
    pods = [made.bind(name) for name in "ab"]
    made.read_after(30, 3, MEMORY_USED=9 * GIB)
    assert made.estimated(made.card(), "is_in_use")

    made.end(pods[0])

    assert made.estimated(made.card(), "freshness") == 1.0
    for _ in range(2):
        assert rejected(made.rank()) == {}
        made.read_after(30)
    assert rejected(made.rank()) == {"node": Code.FOREIGN_USE}


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_pods_that_no_source_shows_stay_where_they_are_when_another_ends(
    *, is_mapped: bool, is_silent: bool
) -> None:
    made = one_node(2, replicas=4)
    made.is_mapped = is_mapped
    made.card(index=1).is_shown = not is_silent
    pods = []
    for name, gib in (("a", 5), ("b", 60), ("c", 5)):
        made.now += 1
        pods.append(made.bind(name, memory_bytes=int(gib * GIB)))
    made.read_after(300)
    assert made.row().declared_bytes == (10 * GIB, 60 * GIB)

    made.end(pods[0])

    assert made.row().declared_bytes == (5 * GIB, 60 * GIB)


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("names", ["abcdefgh", "hgfedcba", "dbhfaceg"])
def test_pods_bound_in_the_same_second_are_assumed_on_different_devices(
    names: str, *, is_mapped: bool
) -> None:
    made = one_node(4, replicas=8)
    made.is_mapped = is_mapped

    for count, name in enumerate(names, start=1):
        made.bind(name)
        used = made.row().used
        assert (sum(used), max(used) - min(used)) == (count, int(count % 4 != 0))


def test_new_pods_are_assumed_on_other_devices_than_those_that_a_source_shows() -> None:
    made = one_node(2, replicas=4)
    pods = [made.bind("a", memory_bytes=5 * GIB), made.bind("b", memory_bytes=60 * GIB)]
    assert made.row().declared_bytes == (5 * GIB, 60 * GIB)

    made.card(index=1).tenants = (pods[0].key,)
    made.read_after(1)

    assert made.row().declared_bytes == (60 * GIB, 5 * GIB)


def test_shared_cards_of_an_unmapped_new_pod_are_not_foreign() -> None:
    made = one_node(2, replicas=10)
    made.bind("a")

    for index in (0, 1):
        made.card(index=index).values[Signal.MEMORY_USED] = 9 * GIB
    made.read_after(30, times=3)

    assert not any(made.estimated(device, "is_foreign") for device in made.devices.values())


def test_history_fills_the_windows_of_devices_and_their_tenants() -> None:
    made = one_node(1)
    made.bind("a", on=[made.card()], bound_at=NOW - 150, started_at=NOW - 150)
    made.read()
    times = NOW - 60.0 * np.arange(31, dtype=np.float64)[::-1]
    load = np.where(times < NOW - 150, 0.9, 0.2)[:, None]

    finish(
        made.fleet.history_in_steps(
            History(times=times, devices=(DeviceKey(("GPU-node-0", "")),), utilization=load)
        )
    )

    assert 0.1 < made.estimated(made.card(), "utilization") < 0.5


def test_the_state_of_a_source_is_recorded() -> None:
    made = one_node(2)
    made.card().values[Signal.POWER] = 690.0
    made.card().values[Signal.POWER_LIMIT] = 700.0
    made.read()

    state = made.fleet.sources["prometheus"]

    assert (state.at, state.devices, state.disagreements) == (NOW, 2, 1)
