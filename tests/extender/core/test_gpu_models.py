"""Models of GPUs as users write them."""

import pytest

from extender.core.devices.gpu_models import is_model, normalize_model

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
