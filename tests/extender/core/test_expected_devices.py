"""Expected devices behind each resource."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.expected_devices import (
    Expected,
    ExpectedDevice,
    devices_behind,
    expected_devices,
)
from extender.core.devices.readings import NO_INSTANCES
from extender.core.devices.topology import Alignment
from extender.core.nodes.inventory import NodeRecord
from testkit.builders import GPU
from tests.extender.core.holding import row_of

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


def test_a_resource_of_which_a_node_offers_none_has_no_devices() -> None:
    assert expected_devices(NodeRecord(name="node", allocatable={GPU: 0}), {}) == ()


@pytest.mark.parametrize(
    ("node", "seen", "count", "replicas", "is_shared"),
    [
        pytest.param(offering(gpu=8), {"": 8}, 8, 1, False, id="whole"),
        pytest.param(offering(gpu=8), {}, 8, 1, False, id="without-telemetry"),
        pytest.param(offering(gpu=8), {"": 7}, 8, 1, False, id="one-is-not-seen"),
        pytest.param(offering(gpu=8), {"": 4}, 8, 1, False, id="four-are-not-seen"),
        pytest.param(offering(gpu=20), {"": 2}, 20, 1, False, id="no-evidence-of-shares"),
        pytest.param(
            offering(gpu_labels(count="2"), gpu=20), {}, 2, 10, True, id="cards-by-a-label"
        ),
        pytest.param(
            offering({"karpenter.k8s.aws/instance-gpu-count": "4"}, gpu=8),
            {"": 3},
            4,
            2,
            True,
            id="cards-by-karpenters-label",
        ),
        pytest.param(
            offering(gpu_labels(sharing_strategy="time-slicing"), gpu=20),
            {"": 2},
            2,
            10,
            True,
            id="shared-by-a-label",
        ),
        pytest.param(
            offering(gpu_labels(product="Tesla-T4-SHARED"), gpu=20),
            {"": 2},
            2,
            10,
            True,
            id="shared-by-the-name-of-the-product",
        ),
        pytest.param(
            offering({"cloud.google.com/gke-max-shared-clients-per-gpu": "4"}, gpu=8),
            {},
            2,
            4,
            True,
            id="gke-clients",
        ),
        pytest.param(
            offering({"cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"}, gpu=8),
            {"": 2},
            2,
            4,
            True,
            id="gke-strategy",
        ),
        pytest.param(
            offering(gpu_labels(replicas="4"), gpu=8),
            {"": 8},
            8,
            1,
            False,
            id="sharing-turned-off-and-the-label-divides",
        ),
        pytest.param(
            offering(gpu_labels(replicas="4", count="8"), gpu=8),
            {},
            8,
            1,
            False,
            id="sharing-turned-off-by-the-count",
        ),
        pytest.param(
            offering(gpu_labels(replicas="1", count="8"), gpu=32),
            {"": 8},
            8,
            4,
            True,
            id="sharing-turned-on-before-the-label",
        ),
        pytest.param(
            offering(gpu_labels(replicas="2", count="8"), gpu=8),
            {"": 4},
            4,
            2,
            True,
            id="fewer-cards-before-the-count",
        ),
        pytest.param(
            offering(gpu_labels(replicas="4", count="8"), gpu=28),
            {"": 8},
            7,
            4,
            True,
            id="one-card-is-not-offered",
        ),
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
            offering(gpu_labels(replicas="0"), gpu=4), {"": 2}, 4, 1, False, id="label-says-nothing"
        ),
        pytest.param(
            offering(gpu_labels(replicas="many"), gpu=2), {"": 2}, 2, 1, False, id="no-number"
        ),
        pytest.param(offering(gpu_shared=2), {"": 2}, 2, 1, True, id="shared-by-name"),
        pytest.param(offering(vgpu=20), {"": 2}, 2, 10, True, id="virtual-by-name"),
    ],
)
def test_the_devices_behind_the_gpu_resource(
    node: NodeRecord, seen: dict[str, int], count: int, replicas: int, is_shared: bool
) -> None:
    (expected,) = expected_devices(node, seen)

    assert (expected.count, expected.replicas, expected.is_shared) == (count, replicas, is_shared)


@pytest.mark.parametrize(
    ("offered", "seen", "count", "replicas"),
    [(8, 4, 4, 2), (20, 2, 2, 10), (8, 8, 8, 1), (8, 3, 8, 1), (8, 0, 8, 1), (4, 8, 4, 1)],
)
def test_with_evidence_of_shares_the_devices_that_are_seen_are_all(
    offered: int, seen: int, count: int, replicas: int
) -> None:
    (expected,) = expected_devices(offering(gpu=offered), {"": seen}, is_divided=True)

    assert (expected.count, expected.replicas) == (count, replicas)


@given(
    labels=st.fixed_dictionaries(
        {}, optional={"replicas": st.integers(0, 8), "count": st.integers(0, 8)}
    ),
    offered=st.integers(1, 64),
    seen=st.integers(0, 16),
    is_divided=st.booleans(),
)
def test_shares_of_devices_sum_to_allocatable(
    labels: dict[str, int], offered: int, seen: int, *, is_divided: bool
) -> None:
    node = offering(
        gpu_labels(**{name: str(number) for name, number in labels.items()}), gpu=offered
    )

    (expected,) = expected_devices(node, {"": seen}, is_divided=is_divided)

    assert expected.count * expected.replicas == offered
    if not (is_divided or any(labels.values())):
        assert expected.replicas == 1


@pytest.mark.parametrize("strategy", ["time-slicing", "time-sharing", "mps"])
def test_devices_without_telemetry_are_whole_until_a_label_gives_their_shares(
    strategy: str,
) -> None:
    node = offering({"nvidia.com/gpu.sharing-strategy": strategy}, gpu=4)

    (unseen,), (seen,) = expected_devices(node, {}), expected_devices(node, {"": 2})

    assert (unseen.count, unseen.replicas) == (4, 1)
    assert (seen.count, seen.replicas) == (2, 2)


def test_a_label_gives_the_shares_while_no_instance_is_seen() -> None:
    labels = {"nvidia.com/mig.strategy": "single", "nvidia.com/gpu.replicas": "2"}

    (expected,) = expected_devices(offering(labels, gpu=4), {NO_INSTANCES: 1})

    assert (expected.count, expected.replicas) == (2, 2)


def test_gke_labels_mark_mps() -> None:
    labels = {
        "cloud.google.com/gke-gpu-sharing-strategy": "mps",
        "cloud.google.com/gke-max-shared-clients-per-gpu": "4",
    }

    (expected,) = expected_devices(offering(labels, gpu=8), {})

    assert (expected.is_mps, expected.count) == (True, 2)


def test_on_gke_the_gpu_resource_of_a_partitioned_node_counts_instances() -> None:
    labels = {
        "cloud.google.com/gke-gpu-partition-size": "1g.5gb",
        "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
        "cloud.google.com/gke-max-shared-clients-per-gpu": "3",
    }
    node = offering(labels, gpu=21)
    devices = tuple(ExpectedDevice(row=row, mig_profile="1g.5gb") for row in range(7))

    (expected,) = expected_devices(node, {"1g.5gb": 7})

    assert (expected.count, expected.replicas) == (7, 3)
    assert devices_behind(node, expected, devices) == devices


def test_karpenters_label_gives_the_memory_of_whole_cards() -> None:
    labels = {"karpenter.k8s.aws/instance-gpu-memory": "16384"}
    node = offering(labels, gpu=1, mig_1g_10gb=7)

    found = {one.resource: one.memory_bytes for one in expected_devices(node, {})}

    assert found == {GPU: 16384 * MIB, "nvidia.com/mig-1g.10gb": None}
    gfd = offering(labels | gpu_labels(memory="15360"), gpu=1)
    assert expected_devices(gfd, {})[0].memory_bytes == 15360 * MIB


def test_labels_give_memory_and_sharing_strategy() -> None:
    labels = gpu_labels(replicas="4", sharing_strategy="mps", memory="81559")

    (expected,) = expected_devices(offering(labels, gpu=8), {})

    assert (expected.is_mps, expected.memory_bytes) == (True, 81559 * MIB)


def test_a_label_with_more_memory_than_any_device_has_is_ignored() -> None:
    (expected,) = expected_devices(offering(gpu_labels(memory="9" * 13), gpu=8), {})

    assert expected.memory_bytes is None


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


def test_resource_without_allocatable_has_no_devices() -> None:
    (expected,) = expected_devices(offering(gpu=8, gpu_shared=0), {"": 8})

    assert expected.resource == GPU


def test_node_without_allocatable_gpus_has_devices_of_telemetry() -> None:
    expected = expected_devices(offering(), {"": 2, "1g.10gb.me": 1})

    assert [(each.resource, each.count) for each in expected] == [
        (GPU, 2),
        ("nvidia.com/mig-1g.10gb.me", 1),
    ]
    assert all(each.is_by_claims for each in expected)
    assert {each.alignment for each in expected} == {Alignment.NONE}
    (offered,) = expected_devices(offering(gpu=2), {"": 2})
    assert not offered.is_by_claims


@pytest.mark.parametrize("labels", [{}, {"nvidia.com/mig.strategy": "single"}])
@pytest.mark.parametrize("offered", [{}, {"gpu": 2}])
def test_nothing_is_expected_of_a_card_with_mig_and_no_instances(
    labels: dict[str, str], offered: dict[str, int]
) -> None:
    node = offering(labels, **offered)
    devices = (
        ExpectedDevice(row=0, mig_profile="1g.10gb"),
        ExpectedDevice(row=1, mig_profile=NO_INSTANCES),
    )

    for expected in expected_devices(node, {"1g.10gb": 1, NO_INSTANCES: 1}):
        assert NO_INSTANCES not in expected.resource
        assert devices[1] not in devices_behind(node, expected, devices)


INSTANCES = (
    ExpectedDevice(row=0),
    ExpectedDevice(row=1, mig_profile="1g.10gb"),
    ExpectedDevice(row=2, mig_profile="1g.10gb+me"),
    ExpectedDevice(row=3, mig_profile="3g.40gb"),
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
    instances = [ExpectedDevice(row=row, mig_profile="1g.10gb") for row in range(7)]

    (expected,) = expected_devices(node, {"1g.10gb": 7})

    assert (expected.count, expected.replicas) == (7, 1)
    assert len(devices_behind(node, expected, instances)) == 7


def test_under_the_single_strategy_whole_cards_stay_whole() -> None:
    node = offering({"nvidia.com/mig.strategy": "single"}, gpu=1)

    assert [
        each.row for each in devices_behind(node, Expected(resource=GPU, count=1), INSTANCES)
    ] == [0]


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
        ({"nvidia.com/gpu-driver-upgrade-state": "uncordon-required"}, False),
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
