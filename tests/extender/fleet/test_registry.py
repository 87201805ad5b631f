"""Test which devices a store knows, and the reuse of their rows."""

from dataclasses import replace

import numpy as np
import pytest

from extender.core.devices.readings import DeviceInfo, Signal
from extender.core.devices.topology import Place
from extender.core.policy import Policy
from extender.fleet.store import DeviceStore
from testkit.builders import GIB, NOW
from tests.extender.fleet.stores import (
    CARD,
    INSTANCE,
    estimated,
    hold,
    infos,
    readings,
    row_of,
    store_of,
)


def test_devices_of_a_node_come_in_its_own_order() -> None:
    cards = [DeviceInfo(node="node", uuid=f"GPU-{uuid}", index=uuid) for uuid in (10, 2, 1)]
    unnumbered = DeviceInfo(node="node", uuid="GPU-a")
    instances = [replace(INSTANCE, gpu_instance_id=number) for number in ("11", "9")]

    store = store_of(unnumbered, *cards, *instances)

    shown = [(info.uuid, info.gpu_instance_id) for info in infos(store) if info]
    assert shown == [
        ("GPU-0", "9"),
        ("GPU-0", "11"),
        ("GPU-1", ""),
        ("GPU-2", ""),
        ("GPU-10", ""),
        ("GPU-a", ""),
    ]


def test_an_instance_with_an_impossible_id_leaves_the_others_in_order() -> None:
    impossible = replace(INSTANCE, gpu_instance_id="9" * 5000)

    store = store_of(INSTANCE, impossible, replace(CARD, uuid="GPU-7", index=7))

    assert [info.uuid for info in infos(store) if info] == ["GPU-0", "GPU-0", "GPU-7"]


PLACE = Place(uuid="GPU-0", numa_node=1, nvlink_peers=(), alignment=None)
BARE = DeviceInfo(node="node", uuid="GPU-0", gpu_instance_id="7")
FULL = replace(
    INSTANCE, index=3, model="H100", mig_profile="1g.10gb", driver_version="580", place=PLACE
)
OTHER = replace(
    FULL, index=0, model="H200", mig_profile="1g.18gb", driver_version="535", place=replace(PLACE)
)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (FULL, BARE, FULL),
        (BARE, FULL, FULL),
        (FULL, OTHER, OTHER),
        (OTHER, FULL, FULL),
        (FULL, replace(BARE, index=0), replace(FULL, index=0)),
        (FULL, replace(BARE, model="H200"), replace(FULL, model="H200")),
    ],
    ids=["bare", "full", "other", "first", "index", "model"],
)
def test_missing_parts_of_a_description_come_from_the_other_source(
    first: DeviceInfo, second: DeviceInfo, expected: DeviceInfo
) -> None:
    store = DeviceStore(Policy())
    store.apply(readings(first), NOW)

    for at in (NOW + 1, NOW + 2):
        store.apply(replace(readings(second, at=at), source="agent"), at)

    assert infos(store) == [expected]


def test_the_same_devices_change_no_node() -> None:
    store = DeviceStore(Policy())
    devices = (CARD,)

    first = store.apply(readings(*devices), NOW)
    same = store.apply(
        replace(readings(), devices=devices, columns={}, measured_at=np.full(1, NOW)), NOW
    )
    equal = store.apply(readings(replace(CARD)), NOW)

    assert [each.changed_nodes for each in (first, same, equal)] == [{"node"}, set(), set()]


def test_an_empty_answer_keeps_the_readings() -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.5)

    changed = store.apply(readings(), NOW + 30)

    assert (changed.changed_nodes, len(changed.disagree)) == (frozenset(), 0)
    assert store.value(Signal.GRAPHICS_ACTIVE, 0) == 0.5


def test_a_card_that_moved_belongs_to_its_new_node() -> None:
    store = store_of(CARD, GRAPHICS_ACTIVE=0.5)
    moved = replace(CARD, node="other")

    changed = store.apply(readings(moved, at=NOW + 30), NOW + 30)

    assert changed.changed_nodes == {"node", "other"}
    assert (infos(store), infos(store, "other")) == ([], [moved])


def test_a_card_whose_model_becomes_known_stays_the_same_device() -> None:
    store = store_of(replace(CARD, model=""), GRAPHICS_ACTIVE=0.5, POWER=700.0)
    assert estimated(store).latest[0] == 0.5

    store.apply(readings(CARD, at=NOW + 30, GRAPHICS_ACTIVE=0.5, POWER=700.0), NOW + 30)

    assert estimated(store, NOW + 30).latest[0] == 1.0


def test_long_unreported_device_is_dropped_and_its_row_reused() -> None:
    store = store_of(CARD, XID=79.0)
    other = DeviceInfo(node="node", uuid="GPU-1", index=1)
    store.apply(readings(other, at=NOW + 900), NOW + 900)

    assert store.forget(NOW + 900) == set()
    assert store.forget(NOW + 901) == {"node"}
    assert infos(store) == [other]
    assert not estimated(store, NOW + 901).is_excluded.any()

    third = DeviceInfo(node="node", uuid="GPU-2", index=2)
    store.apply(readings(other, third, at=NOW + 902), NOW + 902)
    assert (row_of(store, third), len(store)) == (0, 2)


def test_the_devices_of_a_removed_node_are_dropped() -> None:
    store = store_of(CARD, replace(CARD, uuid="GPU-1", node="other"))
    store.placeholders("node", "gpu", 1, None)

    store.forget_node("node")

    assert [store.info(row) for row in range(3)].count(None) == 2
    assert store.row_of(CARD.key) is None


def test_a_placeholder_is_the_same_each_time_and_never_dropped() -> None:
    store = store_of(CARD)

    (row,) = store.placeholders("node", "gpu", 1, int(80 * GIB))

    again, other = store.placeholders("node", "gpu", 2, int(80 * GIB))
    assert again == row != other
    store.forget(NOW + 1e6)
    assert store.info(row) is not None
    assert estimated(store).memory_total_bytes[row] == 80 * GIB
    assert store.measured_at(row) is None


def test_a_card_divided_into_instances_is_no_longer_a_whole_card() -> None:
    store = store_of(CARD)

    changed = store.apply(readings(INSTANCE, at=NOW + 30), NOW + 30)

    assert changed.changed_nodes == {"node"}
    assert infos(store) == [INSTANCE]


def test_of_two_reported_mig_layouts_the_one_measured_last_counts() -> None:
    store = store_of(CARD)
    both = replace(readings(CARD, INSTANCE), measured_at=np.array([NOW - 60, NOW]))
    store.apply(replace(both, at=NOW + 1), NOW + 1)

    assert infos(store) == [INSTANCE]

    whole_again = replace(both, measured_at=np.array([NOW + 60, NOW]))
    store.apply(whole_again, NOW + 60)

    assert infos(store) == [CARD]


def test_instances_missing_from_a_new_layout_are_dropped_at_once() -> None:
    seven = [replace(INSTANCE, gpu_instance_id=str(number)) for number in range(7, 14)]
    store = store_of(*seven)

    store.apply(readings(*seven[:3], replace(INSTANCE, gpu_instance_id="1")), NOW + 30)

    assert [info.gpu_instance_id for info in infos(store) if info] == ["1", "7", "8", "9"]


def test_a_reused_instance_number_is_another_device() -> None:
    store = store_of(INSTANCE, GRAPHICS_ACTIVE=0.9)
    hold(store, 0)
    larger = replace(INSTANCE, mig_profile="3g.40gb")

    for step in (1, 2):
        store.apply(readings(larger, at=NOW + step, GRAPHICS_ACTIVE=0.1), NOW + step)
        hold(store, 0)

    assert estimated(store).utilization[0] == pytest.approx(0.1)


def test_a_non_numeric_instance_id_is_accepted() -> None:
    odd = [replace(INSTANCE, gpu_instance_id=text) for text in ("\u00b2", "7", "\u0663")]

    store = store_of(*odd)

    assert {info.gpu_instance_id for info in infos(store) if info} == {"\u00b2", "7", "\u0663"}


def test_no_reported_device_has_the_key_of_a_placeholder() -> None:
    store = DeviceStore(Policy())
    (row,) = store.placeholders("other", "gpu", 1, None)
    numbers = [f"{name}{number}" for name in ("", "other/") for number in range(5)]
    odd = [
        replace(CARD, uuid=uuid, gpu_instance_id=instance)
        for number in numbers
        for uuid, instance in ((number, "unseen"), (number, ""), ("GPU-0", number))
    ]

    store.apply(readings(*odd), NOW)

    assert row not in store.rows_of_node("node")
    info = store.info(row)
    assert info is not None
    assert info.node == "other"


def test_a_device_takes_the_row_of_its_placeholder() -> None:
    store = DeviceStore(Policy())
    placeholders = store.placeholders("node", "gpu", 2, None)

    store.apply(readings(CARD, replace(CARD, uuid="GPU-1", index=1)), NOW)

    assert store.rows_of_node("node") == placeholders
    assert len(store) == 2


def test_added_and_removed_nodes_leave_nothing_behind() -> None:
    store = store_of(CARD)
    for number in range(100):
        store.placeholders(f"spot-{number}", "gpu", 4, None)
        store.apply(readings(CARD, DeviceInfo(node=f"spot-{number}", uuid=f"u{number}")), NOW)
        store.forget_node(f"spot-{number}")

    assert len(store) <= 5
    assert store.evidence().node_row.max() <= 2
