"""GPU memory limits in environment variables and arguments of a pod's frameworks."""

from dataclasses import replace
from typing import Any

import pytest

from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.core.request.memory_limits import read_limits
from extender.core.request.request import ParsedRequest, parse_request
from testkit.builders import GIB, assessment_of, device_request, gpu, shared

MIB = 1 << 20
READS = Policy(reads_memory_limits=True)


def container(*args: str, gpus: int = 1, **env: str) -> dict[str, Any]:
    return {
        "args": list(args),
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)} if gpus else {}},
    }


def parsed(
    *containers: dict[str, Any], policy: Policy = READS, **annotations: str
) -> ParsedRequest:
    own = {f"idlegpu.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    pod = {"metadata": {"annotations": own}, "spec": {"containers": list(containers)}}
    return parse_request(pod, resources=ResourceNames(), defaults=policy)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        pytest.param(container("--gpu-memory-utilization", "0.4"), 0.4, id="argument"),
        pytest.param(container("--gpu_memory_utilization=0.4"), 0.4, id="with-underscores"),
        pytest.param(
            container("-c", "exec vllm serve m --gpu-memory-utilization=0.4 --tp 2"),
            0.4,
            id="in-a-shell",
        ),
        pytest.param(
            container("--gpu-memory-utilization=0.4")
            | {"command": ["vllm", "serve", "m", "--gpu-memory-utilization", "0.9"]},
            0.4,
            id="the-last-of-a-repeated-argument",
        ),
        pytest.param(container("--cuda-memory-fraction", "0.3"), 0.3, id="tgi"),
        pytest.param(container(VLLM_GPU_MEMORY_UTILIZATION="0.4"), 0.4, id="vllm"),
        pytest.param(container(GPU_MEMORY_UTILIZATION="0.4"), 0.4, id="serverless-worker"),
        pytest.param(container(XLA_PYTHON_CLIENT_MEM_FRACTION=".25"), 0.25, id="jax"),
        pytest.param(container(TF_GPU_MEMORY_LIMIT="4096"), 4096 * MIB, id="tensorflow"),
        pytest.param(container(ORT_CUDA_GPU_MEM_LIMIT=str(2 * GIB)), 2 * GIB, id="onnx-bytes"),
        pytest.param(container(ORT_CUDA_GPU_MEM_LIMIT_MB="512"), 512 * MIB, id="onnx-mib"),
        pytest.param(container(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=4G,1=512M"), 4 * GIB, id="mps"),
        pytest.param(
            container("--gpu-memory-utilization", "0.4", VLLM_GPU_MEMORY_UTILIZATION="0.9"),
            0.4,
            id="an-argument-counts-first",
        ),
        pytest.param(
            container(
                "--gpu-memory-utilization=$(VLLM_GPU_MEMORY_UTILIZATION)",
                VLLM_GPU_MEMORY_UTILIZATION="0.7",
            ),
            0.7,
            id="an-argument-names-the-variable",
        ),
        pytest.param(container(gpus=0, TF_GPU_MEMORY_LIMIT="4096"), None, id="without-gpus"),
        pytest.param(container("--model", "m", BATCH="4"), None, id="nothing-said"),
    ],
)
def test_a_limit_is_read(item: dict[str, Any], expected: float | None) -> None:
    limit, problems = read_limits({"spec": {"containers": [item]}}, ResourceNames())

    assert (limit.memory_bytes or limit.share or None) == expected
    assert problems == ()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        pytest.param(
            container(VLLM_GPU_MEMORY_UTILIZATION="40"),
            'variable VLLM_GPU_MEMORY_UTILIZATION: "40" is not allowed: must be a share',
            id="a-percentage",
        ),
        pytest.param(
            container("--gpu-memory-utilization", "most"),
            'argument --gpu-memory-utilization: "most" is not allowed',
            id="a-word",
        ),
        pytest.param(
            container(TF_GPU_MEMORY_LIMIT="nan"), "variable TF_GPU_MEMORY_LIMIT", id="no-number"
        ),
        pytest.param(
            container(XLA_PYTHON_CLIENT_MEM_FRACTION="3.2"),
            "used instead: nothing, it is ignored",
            id="unified-memory",
        ),
        pytest.param(
            container(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="all"), "must be from 1 MiB", id="mps"
        ),
    ],
)
def test_an_invalid_limit_is_ignored_with_a_warning(item: dict[str, Any], message: str) -> None:
    found = parsed(item)

    assert found.request is not None
    assert (found.request.memory_bytes, found.request.memory_share) == (None, 0.0)
    assert message in found.problems[0].message


def test_limits_are_read_by_setting_alone_and_never_beside_the_annotation() -> None:
    item = container("--gpu-memory-utilization", "0.4")

    off = parsed(item, policy=Policy()).request
    own = parsed(item, gpu_memory="20Gi").request
    read = parsed(item).request

    assert off is not None
    assert own is not None
    assert read is not None
    assert (off.memory_share, own.memory_share, read.memory_share) == (0.0, 0.0, 0.4)
    assert (own.memory_bytes, own.memory_source) == (20 * GIB, "")
    assert read.memory_source == "argument --gpu-memory-utilization"


@pytest.mark.parametrize("mib", [("4096", "8192"), ("8192", "4096")])
def test_the_largest_limit_of_several_containers_counts(mib: tuple[str, ...]) -> None:
    found = parsed(*(container(TF_GPU_MEMORY_LIMIT=each) for each in mib)).request

    assert found is not None
    assert found.memory_bytes == 8 * GIB


def test_of_equal_limits_the_first_is_named() -> None:
    items = container("--gpu-memory-utilization=0.4"), container("--cuda-memory-fraction=0.4")

    limit, _ = read_limits({"spec": {"containers": list(items)}}, ResourceNames())

    assert (limit.share, limit.source) == (0.4, "argument --gpu-memory-utilization")


def test_limits_of_sidecars_count_and_those_of_other_init_containers_do_not() -> None:
    sidecar = {**container("--gpu-memory-utilization=0.5"), "restartPolicy": "Always"}
    first = container("--gpu-memory-utilization=0.9")
    spec = {"initContainers": [first, sidecar], "containers": [container(gpus=0)]}

    limit, _ = read_limits({"spec": spec}, ResourceNames())

    assert limit.share == 0.5


def test_a_share_is_a_share_of_the_nodes_card() -> None:
    full = shared(gpu(memory_free_bytes=30 * GIB))

    half = assessment_of(full, requested=replace(device_request(), memory_share=0.5))
    third = assessment_of(full, requested=replace(device_request(), memory_share=0.3))

    assert float(half.requested_bytes[0, 0]) == 40 * GIB
    assert not half.fits[0, 0]
    assert third.fits[0, 0]
