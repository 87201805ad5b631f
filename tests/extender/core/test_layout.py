"""Which devices stand behind which resource, and which pods hold them."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.inventory import NodeRecord, PodRecord
from extender.core.layout import (
    Device,
    Expected,
    devices_behind,
    expected_devices,
)
from extender.core.policy import SharedPolicy
from tests.builders import GIB, GPU, NOW
from tests.extender.core.holding import TENANCY, WARM_UP, pod, row_of, young

UNMAPPED = replace(TENANCY, is_mapped=False)
MIB = 1 << 20


def offering(labels: dict[str, str] | None = None, **resources: int) -> NodeRecord:
    """Return a node with these GPU resources: `gpu=8`, `gpu_shared=20`, `mig_1g_10gb=7`."""
    offers = {}
    for name, count in resources.items():
        text = name.replace("mig_", "mig-").replace("_shared", ".shared").replace("_", ".")
        offers[f"nvidia.com/{text}"] = count
    return NodeRecord(name="node", allocatable=offers, capacity=offers, labels=labels or {})


def gpu_labels(**labels: str) -> dict[str, str]:
    return {f"nvidia.com/gpu.{name.replace('_', '-')}": value for name, value in labels.items()}


@pytest.mark.parametrize(
    ("node", "seen", "count", "replicas", "is_shared"),
    [
        pytest.param(offering(gpu=8), {"": 8}, 8, 1, False, id="whole"),
        pytest.param(offering(gpu=8), {}, 8, 1, False, id="without-telemetry"),
        pytest.param(offering(gpu=8), {"": 7}, 8, 1, False, id="one-is-not-seen"),
        pytest.param(offering(gpu=20), {"": 2}, 2, 10, True, id="replicas-over-distinct-uuids"),
        pytest.param(
            offering(gpu_labels(replicas="1"), gpu=8), {"": 4}, 8, 1, False, id="label-says-whole"
        ),
        pytest.param(
            offering(gpu_labels(replicas="10"), gpu=20), {}, 2, 10, True, id="replicas-by-label"
        ),
        pytest.param(
            offering(gpu_labels(replicas="10"), gpu=20),
            {"": 1},
            2,
            10,
            True,
            id="label-and-one-lost",
        ),
        pytest.param(
            offering(gpu_labels(replicas="10"), gpu=2),
            {"": 2},
            2,
            1,
            False,
            id="sharing-turned-off-before-the-label",
        ),
        pytest.param(
            offering(gpu_labels(replicas="0"), gpu=4), {"": 2}, 2, 2, True, id="label-says-nothing"
        ),
        pytest.param(
            offering(gpu_labels(replicas="many"), gpu=2), {"": 2}, 2, 1, False, id="no-number"
        ),
        pytest.param(offering(gpu_shared=2), {"": 2}, 2, 1, True, id="shared-by-name"),
    ],
)
def test_what_stands_behind_the_gpu_resource(
    node: NodeRecord, seen: dict[str, int], count: int, replicas: int, is_shared: bool
) -> None:
    (expected,) = expected_devices(node, seen)

    assert (expected.count, expected.replicas, expected.is_shared) == (count, replicas, is_shared)


def test_labels_tell_memory_and_the_strategy_of_sharing() -> None:
    labels = gpu_labels(replicas="4", sharing_strategy="mps", memory="81559")

    (expected,) = expected_devices(offering(labels, gpu=8), {})

    assert (expected.is_mps, expected.memory_bytes) == (True, 81559 * MIB)


def test_mixed_mig_profiles_on_one_card_are_resources_of_their_own() -> None:
    labels = {
        "nvidia.com/mig-1g.10gb.memory": "9728",
        "nvidia.com/mig-3g.40gb.memory": "40448",
        "nvidia.com/gpu.memory": "81559",
    }
    node = offering(labels, gpu=1, mig_1g_10gb=4, mig_3g_40gb=1)

    whole, small, large = expected_devices(node, {"": 1, "1g.10gb": 4, "3g.40gb": 1})

    assert (whole.mig_profile, whole.count, whole.memory_bytes) == ("", 1, 81559 * MIB)
    assert (small.mig_profile, small.count, small.memory_bytes) == ("1g.10gb", 4, 9728 * MIB)
    assert (large.mig_profile, large.count, large.memory_bytes) == ("3g.40gb", 1, 40448 * MIB)


def test_shared_mig_instances_have_replicas_of_their_own() -> None:
    labels = {"nvidia.com/mig-1g.10gb.replicas": "3", "nvidia.com/gpu.replicas": "10"}

    (expected,) = expected_devices(offering(labels, mig_1g_10gb_shared=21), {"1g.10gb": 7})

    assert expected.resource == "nvidia.com/mig-1g.10gb.shared"
    assert (expected.count, expected.replicas, expected.is_shared) == (7, 3, True)


def test_a_resource_of_which_nothing_is_left_has_no_devices() -> None:
    (expected,) = expected_devices(offering(gpu=8, gpu_shared=0), {"": 8})

    assert expected.resource == GPU


def test_a_node_whose_allocatable_names_no_gpus_has_what_telemetry_sees() -> None:
    expected = expected_devices(offering(), {"": 2, "1g.10gb.me": 1})

    assert [(each.resource, each.count) for each in expected] == [
        (GPU, 2),
        ("nvidia.com/mig-1g.10gb.me", 1),
    ]


INSTANCES = (
    Device(row=0),
    Device(row=1, mig_profile="1g.10gb"),
    Device(row=2, mig_profile="1g.10gb+me"),
    Device(row=3, mig_profile="3g.40gb"),
)


@pytest.mark.parametrize(
    ("profile", "rows"),
    [("", [0]), ("1g.10gb", [1]), ("1g.10gb.me", [2]), ("3g.40gb", [3]), ("7g.80gb", [])],
)
def test_a_resource_is_served_by_the_instances_of_its_profile(
    profile: str, rows: list[int]
) -> None:
    expected = Expected(resource="any", count=1, mig_profile=profile)

    behind = devices_behind(offering(), expected, INSTANCES)

    assert [device.row for device in behind] == rows


def test_under_the_single_strategy_the_gpu_resource_counts_instances() -> None:
    node = offering({"nvidia.com/mig.strategy": "single"}, gpu=7)
    instances = [Device(row=row, mig_profile="1g.10gb") for row in range(7)]

    (expected,) = expected_devices(node, {"1g.10gb": 7})

    assert (expected.count, expected.replicas) == (7, 1)
    assert len(devices_behind(node, expected, instances)) == 7


def test_under_the_single_strategy_whole_cards_stay_whole() -> None:
    node = offering({"nvidia.com/mig.strategy": "single"}, gpu=1)

    assert [
        each.row for each in devices_behind(node, Expected(resource=GPU, count=1), INSTANCES)
    ] == [0]


# --- who holds them -----------------------------------------------------------------------------


def test_mapped_pods_hold_their_devices() -> None:
    row = row_of([("a",), (), ("b",), ("b",)], pod("a"), pod("b", 2))

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0, 1, 1), 3, 0, True)


def test_a_young_pod_that_the_mapping_does_not_show_takes_one_of_the_free_devices() -> None:
    row = row_of([("a",), (), ()], pod("a"), young("b"))

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0, 0), 2, 1, True)


def test_devices_of_a_young_pod_that_the_mapping_shows_in_part_are_taken() -> None:
    row = row_of([("a",), (), ()], young("a", 2))

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0, 0), 2, 1, True)


@pytest.mark.parametrize(
    ("shown", "pods"),
    [
        pytest.param([(), ()], [pod("a")], id="an-old-pod-is-not-shown"),
        pytest.param([("a",), ("a",)], [pod("a")], id="on-more-devices-than-it-asked-for"),
        pytest.param([("a",), (), ()], [pod("a", 2)], id="on-fewer"),
        pytest.param([("a", "b"), ()], [pod("a"), pod("b")], id="two-pods-on-a-whole-device"),
    ],
)
def test_a_mapping_that_contradicts_the_counts_is_noticed(
    shown: list[tuple[str, ...]], pods: list[PodRecord]
) -> None:
    row = row_of(shown, *pods)

    assert not row.is_agreed
    assert row.held == sum(each.resources[GPU] for each in pods)


def test_without_any_mapping_nothing_is_agreed_where_pods_hold_devices() -> None:
    assert row_of(2, tenancy=UNMAPPED).is_agreed
    assert not row_of(2, young("a"), tenancy=UNMAPPED).is_agreed


def test_a_pod_that_has_ended_or_is_of_no_concern_is_not_counted() -> None:
    row = row_of([("gone",), ()], pod("other", 0))

    assert (row.used, row.held, row.is_agreed) == ((0, 0), 0, True)


def test_more_pods_by_the_mapping_than_there_are_replicas_are_a_contradiction() -> None:
    names = tuple("abcd")

    row = row_of([names], *(pod(name) for name in names), replicas=3)

    assert (row.used, row.held, row.is_agreed) == ((3,), 4, False)


@pytest.mark.parametrize(
    ("labels", "is_changing"),
    [
        ({}, False),
        ({"nvidia.com/mig.config.state": "success"}, False),
        ({"nvidia.com/mig.config.state": "failed"}, False),
        ({"nvidia.com/mig.config.state": "pending"}, True),
        ({"nvidia.com/mig.config.state": "rebooting"}, True),
        ({"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"}, False),
        ({"nvidia.com/gpu-driver-upgrade-state": "upgrade-required"}, False),
        ({"nvidia.com/gpu-driver-upgrade-state": "drain-required"}, True),
        ({"nvidia.com/gpu-driver-upgrade-state": "pod-restart-required"}, True),
        ({"nvidia.com/gpu-driver-upgrade-state": "upgrade-failed"}, True),
    ],
)
@pytest.mark.parametrize("offered", [{GPU: 2}, {}], ids=["offered", "by-claims"])
def test_a_node_whose_operator_changes_its_gpus_is_known(
    labels: dict[str, str], is_changing: bool, offered: dict[str, int]
) -> None:
    node = NodeRecord(name="node", allocatable=offered, capacity=offered, labels=labels)

    (expected,) = expected_devices(node, {"": 2})

    assert expected.is_reconfiguring is is_changing
    assert row_of(2, serving={"is_reconfiguring": is_changing}).is_reconfiguring is is_changing


def test_replicas_that_the_mapping_shows_on_fewer_devices_are_on_those() -> None:
    row = row_of([("a", "b"), ("a",)], pod("a", 3), pod("b"), replicas=10)

    assert (row.used, row.held, row.is_agreed) == ((3, 1), 4, True)


def test_unseen_pods_on_shared_devices_are_put_where_the_policy_puts_them_oldest_first() -> None:
    packed = replace(TENANCY, shared_policy=SharedPolicy.PACKED)
    pods = [young("b", memory_bytes=int(GIB)), young("a", bound_at=NOW - 9)]

    assert row_of(2, *pods, replicas=10).used == (1, 1)
    assert row_of(2, *pods, replicas=10, tenancy=packed).used == (2, 0)
    assert row_of(2, *pods, replicas=10).assumed_bytes == (0.0, GIB)


@pytest.mark.parametrize("shown", [[("a",)], [()]], ids=["mapped", "unmapped"])
def test_a_pods_load_is_assumed_until_readings_newer_than_its_warm_up_cover_it(
    shown: list[tuple[str, ...]],
) -> None:
    started = pod("a", started_at=NOW, memory_bytes=int(20 * GIB))

    late = row_of(shown, started, replicas=10, measured_at=NOW + WARM_UP - 1)
    covered = row_of(shown, started, replicas=10, measured_at=NOW + WARM_UP)

    assert (late.used, late.assumed, late.assumed_bytes) == ((1,), (1,), (20 * GIB,))
    assert (covered.used, covered.assumed, covered.assumed_bytes) == ((1,), (0,), (0.0,))


@pytest.mark.parametrize(
    ("changes", "measured_at"), [({"started_at": None}, NOW), ({}, None)], ids=["waits", "unread"]
)
def test_a_pod_that_has_not_started_or_a_device_that_is_not_read_stays_assumed(
    changes: dict[str, Any], measured_at: float | None
) -> None:
    row = row_of([("a",)], pod("a", **changes), replicas=10, measured_at=measured_at)

    assert (row.assumed, row.assumed_shares) == ((1,), (1,))


def test_what_the_kubelet_does_not_offer_is_withdrawn() -> None:
    assert row_of(8, allocatable=7).withdrawn == 1
