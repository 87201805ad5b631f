"""Models of GPUs as users write them."""

import pytest

from extender.core.devices.gpu_models import (
    SharingWay,
    is_desktop,
    is_model,
    mig_layout,
    model_name,
    normalize_model,
    way_without_mig,
)
from extender.core.quantity import GIB

A100 = "NVIDIA A100-SXM4-80GB"
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (A100, "A100 (80GB)"),
        (A100, "A100/80GB"),
        (A100, "A100 SXM"),
        (A100, "a100sxm4"),
        (H100, "H100 SXM5"),
        (H100, "H100-SXM"),
        (H100, "nvidia-h100-mega-80gb"),
        ("NVIDIA H100 PCIe", "H100-80GB"),
        ("NVIDIA H200", "nvidia-h200-141gb"),
        ("Tesla T4", "T4-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090 24 GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
    ],
)
def test_a_model_is_recognized_in_the_spellings_of_users(model: str, wanted: str) -> None:
    assert is_model(normalize_model(model), wanted)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (A100, "A100-40GB"),
        (A100, "A100 PCIe"),
        (A100, "H100 SXM"),
        (H100, "H100 NVL"),
        ("NVIDIA H100 PCIe", "H100 SXM"),
        ("NVIDIA H200", "80GB"),
        ("NVIDIA L40S", "L40"),
    ],
)
def test_another_model_is_not_taken_for_the_named_one(model: str, wanted: str) -> None:
    assert not is_model(normalize_model(model), wanted)


@pytest.mark.parametrize(
    ("model", "name", "desktop", "way"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti", True, SharingWay.MPS),
        ("NVIDIA GeForce RTX 4080 SUPER", "GeForce RTX 4080 SUPER", True, SharingWay.MPS),
        ("NVIDIA TITAN V", "TITAN V", True, SharingWay.MPS),
        ("Quadro RTX 4000", "Quadro RTX 4000", True, SharingWay.MPS),
        ("NVIDIA RTX PRO 5000 Blackwell", "RTX PRO 5000 Blackwell", True, SharingWay.MPS),
        ("Quadro GV100", "Quadro GV100", True, SharingWay.MPS),
        ("NVIDIA GeForce GTX 1080 Ti", "GeForce GTX 1080 Ti", True, SharingWay.TIME_SLICING),
        ("NVIDIA A10M", "A10M", False, SharingWay.MPS),
        ("NVIDIA L40S", "L40S", False, SharingWay.MPS),
        ("NVIDIA H200 NVL", "H200 NVL", False, SharingWay.MPS),
        ("NVIDIA RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell", False, SharingWay.MPS),
        ("Tesla P4", "P4", False, SharingWay.TIME_SLICING),
        ("NVIDIA A40-48Q", "A40 48Q", False, SharingWay.TIME_SLICING),
        ("NVIDIA A40-4B4", "A40 4B4", False, SharingWay.TIME_SLICING),
        ("something else", "Something Else", False, SharingWay.TIME_SLICING),
    ],
)
def test_the_kind_of_a_card_decides_how_pods_can_share_it(
    model: str, name: str, desktop: bool, way: SharingWay
) -> None:
    assert (model_name(model), is_desktop(model), way_without_mig(model)) == (name, desktop, way)


@pytest.mark.parametrize(
    ("model", "gib", "layout"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.5, "1g.5gb"),
        (A100, 79.6, "1g.10gb"),
        ("NVIDIA A100-SXM-64GB", 64.0, None),
        ("NVIDIA H800", 79.6, "1g.10gb"),
        (H100, 79.6, "1g.10gb"),
        ("NVIDIA H100 NVL", 93.6, "1g.12gb"),
        ("NVIDIA H200", 140.4, "1g.18gb"),
    ],
)
def test_the_memory_of_a_card_decides_between_mig_profiles(
    model: str, gib: float, layout: str | None
) -> None:
    assert mig_layout(model, gib * GIB, 7, 0.0) == (None if layout is None else (7, layout))


def test_a_mig_instance_must_have_the_memory_that_each_pod_needs() -> None:
    """A profile's name rounds up: 35.2 GiB of `3g.40gb` count."""
    assert mig_layout(H100, 79.6 * GIB, 2, 35.2 * GIB) == (2, "3g.40gb")
    assert mig_layout(H100, 79.6 * GIB, 2, 35.3 * GIB) is None
    assert mig_layout(H100, 79.6 * GIB, 1, 0.0) is None
