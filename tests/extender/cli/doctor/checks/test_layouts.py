"""Check that nodes offer the MIG instances that they have."""

from typing import Any

import pytest

from tests.extender.cli.doctor.described import MIG, REPLICAS, SHARED, at, bare
from tests.extender.cli.doctor.things import (
    GPU,
    device,
    evidence,
    found,
    node,
    severities,
)


def cut(count: str, capacity: str, **labels: str) -> dict[str, Any]:
    reported = {f"{MIG}.count": count, f"{MIG}.replicas": "1", REPLICAS: "0", **labels}
    return node(labels=reported, capacity={MIG: capacity})


def test_instances_that_differ_from_the_offer_are_reported() -> None:
    facts = at(cut("7", "4"))

    assert severities("IG205", facts) == ["error"]
    assert f"{MIG}.count=7 with 1 replicas, capacity {MIG}: 4" in evidence("IG205", facts)


def test_instances_that_differ_from_telemetry_are_reported() -> None:
    seen = tuple(device(0, gpu_instance_id=str(n), mig_profile="1g.10gb") for n in range(5))

    facts = at(cut("7", "7"), devices=seen)

    assert "telemetry shows 5 instances" in evidence("IG205", facts)


def test_a_layout_that_failed_is_reported() -> None:
    failed = cut("7", "7", **{"nvidia.com/mig.config.state": "failed"})
    invalid = node(labels={"nvidia.com/gpu.product": "NVIDIA-A100-MIG-INVALID"})

    assert severities("IG205", at(failed)) == ["error"]
    assert severities("IG205", at(invalid)) == ["error"]


def test_layouts_that_are_alike_or_being_made_are_well() -> None:
    seen = tuple(device(0, gpu_instance_id=str(n), mig_profile="1g.10gb") for n in range(7))
    shares = cut("7", "14", **{f"{MIG}.replicas": "2"})

    assert found("IG205", at(cut("7", "7"), devices=seen)) == []
    assert found("IG205", at(shares)) == []
    assert found("IG205", at(cut("7", "4", **{"nvidia.com/mig.config.state": "pending"}))) == []
    assert found("IG205", at(node())) == []


# --- MIG's strategy `single`: instances are called GPUs -------------------------------------------


def single(count: str, capacity: dict[str, str], **labels: str) -> dict[str, Any]:
    reported = {
        "nvidia.com/gpu.count": count,
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
        "nvidia.com/mig.strategy": "single",
        **labels,
    }
    return node(labels=reported, capacity=capacity)


def instances(count: int, cards: int = 1) -> tuple[dict[str, object], ...]:
    return tuple(
        device(0, uuid=f"GPU-{n % cards}", gpu_instance_id=str(n), mig_profile="1g.10gb")
        for n in range(count)
    )


def test_instances_named_gpus_that_differ_from_the_offer_are_reported() -> None:
    facts = at(single("7", {GPU: "4"}))

    assert severities("IG205", facts) == ["error"]
    assert "nvidia.com/gpu.count=7 instances with 1 replicas, capacity nvidia.com/gpu: 4" in (
        evidence("IG205", facts)
    )


def test_instances_named_gpus_that_differ_from_telemetry_are_reported() -> None:
    facts = at(single("7", {GPU: "7"}), devices=instances(5))

    assert "nvidia.com/gpu.count=7, telemetry shows 5 instances" in evidence("IG205", facts)


def test_without_labels_the_capacity_has_to_be_that_of_the_instances() -> None:
    facts = at(bare({GPU: "4"}), devices=instances(7))

    assert severities("IG205", facts) == ["error"]
    assert "capacity nvidia.com/gpu: 4, telemetry shows 7 instances" in evidence("IG205", facts)


@pytest.mark.parametrize(
    ("one", "shown"),
    [
        pytest.param(single("7", {GPU: "7"}), instances(7), id="single"),
        pytest.param(single("7", {GPU: "7"}), (), id="single-nothing-shown"),
        pytest.param(single("7", {SHARED: "14"}, **{REPLICAS: "2"}), instances(7), id="shared"),
        pytest.param(bare({GPU: "7"}), instances(7), id="no-labels"),
        pytest.param(bare({GPU: "14"}), instances(7), id="no-labels-replicas"),
        pytest.param(bare({GPU: "2"}), instances(14, cards=2), id="strategy-none"),
        pytest.param(bare({GPU: "1", MIG: "7"}), (*instances(7), device(1)), id="mixed"),
        pytest.param(bare({GPU: "8"}), tuple(map(device, range(8))), id="whole"),
    ],
)
def test_instances_called_gpus_that_are_alike_are_well(
    one: dict[str, Any], shown: tuple[Any, ...]
) -> None:
    assert found("IG205", at(one, devices=shown)) == []
    assert found("IG107", at(one, devices=shown)) == []
    assert found("IG202", at(one, devices=shown)) == []
